//! Checkpoints: folders written whole or not at all.
//!
//! ```text
//! RUN/checkpoints/step-00001200/weights.safetensors     trained parameters by name
//!                               optimizer.safetensors   both moments of each
//!                               state.json              position, scores, model, length and CRC-32 of each file
//! ```
//! A checkpoint is written to `.step-00001200.partial`, every file and the folder synced, then renamed, so that a
//! folder without a dot is complete. When a step is saved again, its older checkpoint waits as `.step-00001200.old` until
//! the new one stands. A kill leaves at most a `.partial` folder, which the next save removes, and an `.old` one, which
//! is read in the place of the missing one and gets its name back when the training continues.

mod load;
mod state;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use safetensors::tensor::{Dtype, TensorView};

pub(crate) use load::is_export;
pub use load::{Checkpoint, load, newest, peek};
pub(crate) use state::crc32;
pub use state::{FileEntry, RunState, VERSION};

use crate::error::TrainError;
use crate::files;

/// File of the trained parameters.
pub const WEIGHTS: &str = "weights.safetensors";
/// File of the optimizer's moments.
pub const OPTIMIZER: &str = "optimizer.safetensors";
/// File of everything else.
pub const STATE: &str = "state.json";
/// Folder of a run that holds its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";

/// A checkpoint that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Nothing is at the path.
    #[error("{} does not exist; check the path, or train a model into it first", folder.display())]
    Missing {
        /// The path that was given.
        folder: PathBuf,
    },
    /// A file is at the path.
    #[error("{} is a file, expected the folder of a training run or one of its checkpoints", folder.display())]
    NotAFolder {
        /// The path that was given.
        folder: PathBuf,
    },
    /// The folder belongs to no training.
    #[error("{} is not the folder of a training run: it holds no checkpoint (looked for {CHECKPOINTS}/step-*); give the folder of a training run", folder.display())]
    NotARun {
        /// The folder that was searched.
        folder: PathBuf,
    },
    /// The folder of a training that has saved none.
    #[error("{} holds no checkpoint yet: its training has not saved one; continue it with the same command, or give another run", folder.display())]
    None {
        /// The folder that was searched.
        folder: PathBuf,
    },
    /// Every checkpoint of the run is broken.
    #[error("no checkpoint of {} can be used; the newest one: {newest}. To start over in this folder, train with --fresh", folder.display())]
    AllBroken {
        /// The run folder.
        folder: PathBuf,
        /// What is wrong with the newest.
        newest: String,
    },
    /// The checkpoint of an export is broken.
    #[error("the export in {} cannot be used: {broken}; write it again with `fastweight export`", folder.display())]
    BrokenExport {
        /// The folder of the export.
        folder: PathBuf,
        /// What is wrong with it.
        broken: String,
    },
    /// A file is missing, cut short or changed.
    #[error("the checkpoint file {} {reason}; use an older checkpoint of the run, or train again", file.display())]
    Broken {
        /// The file at fault.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Written by a newer version of this software.
    #[error("{} has format version {found}, this program reads up to version {VERSION}; use a newer program", file.display())]
    Newer {
        /// The file that says so.
        file: PathBuf,
        /// Its version, a whole number of any size.
        found: String,
    },
    /// The checkpoint belongs to another model.
    #[error("the checkpoint {} is of another model: {difference}; give the recipe it was trained with", folder.display())]
    OtherModel {
        /// The checkpoint.
        folder: PathBuf,
        /// The first differences in names or shapes.
        difference: String,
    },
}

/// Writes a checkpoint into `run`'s folder of checkpoints and removes all but the newest `keep` usable ones.
///
/// `state.files` is filled in here. A checkpoint of the same step with the same content stays as it is. Older
/// checkpoints, also one of the same step, are removed only after the new one is complete, and the new one never is;
/// folders that hold no `state.json` are left alone.
///
/// # Errors
/// A weight, a moment or a score is not finite, or the folder cannot be written; earlier checkpoints stay as they are.
pub fn save(
    run: &Path,
    mut state: RunState,
    weights: &[(String, TensorData)],
    moments: &[(String, TensorData)],
    keep: usize,
) -> Result<PathBuf, TrainError> {
    state.require_finite()?;
    require_finite(state.step, "a weight", weights)?;
    require_finite(state.step, "an optimizer moment", moments)?;
    let all = run.join(CHECKPOINTS);
    files::create_folder(&all)?;
    recover(run)?;
    let target = all.join(format!("step-{:08}", state.step));
    let failed = |source: io::Error| TrainError::io("write the checkpoint", &target, source);
    let mut contents = Vec::new();
    state.files.clear();
    for (name, tensors) in [(WEIGHTS, weights), (OPTIMIZER, moments)] {
        let bytes = encode(tensors).map_err(failed)?;
        state.files.insert(name.to_string(), FileEntry::of(&bytes));
        contents.push((name, bytes));
    }
    let text = state.to_text().map_err(failed)?;
    if !holds(&target, &text) {
        contents.push((STATE, text.into_bytes()));
        write(&all, &target, &contents).map_err(failed)?;
    }
    prune(run, &target, keep);
    Ok(target)
}

/// Whether `target` is a valid checkpoint whose state reads `text`.
fn holds(target: &Path, text: &str) -> bool {
    fs::read_to_string(target.join(STATE)).is_ok_and(|known| known == text) && load(target).is_ok()
}

/// Writes a folder of files beside `target` and gives it that name.
fn write(all: &Path, target: &Path, contents: &[(&str, Vec<u8>)]) -> io::Result<()> {
    let (partial, old) = (files::hidden(target), aside(target));
    fs::create_dir(&partial)?;
    let fill = || -> io::Result<bool> {
        for (name, bytes) in contents {
            files::write_synced(&partial.join(name), bytes)?;
        }
        files::sync_folder(&partial)?;
        let replaces = target.exists();
        if replaces {
            fs::rename(target, &old)?;
        }
        if let Err(error) = fs::rename(&partial, target) {
            if replaces {
                fs::rename(&old, target)?;
            }
            return Err(error);
        }
        files::sync_folder(all)?;
        Ok(replaces)
    };
    match fill() {
        Ok(replaced) => {
            if replaced {
                remove(&old);
            }
            Ok(())
        }
        Err(error) => {
            let _ = fs::remove_dir_all(&partial);
            Err(error)
        }
    }
}

/// Removes the checkpoints below the newest `keep` usable ones, of which `written` is one.
fn prune(run: &Path, written: &Path, keep: usize) {
    let mut kept = 1;
    for folder in list(run).into_iter().rev().filter(|folder| folder != written) {
        if kept >= keep {
            if folder.join(STATE).is_file() {
                let _ = fs::remove_dir_all(folder);
            }
        } else if load(&folder).is_ok() {
            kept += 1;
        }
    }
}

/// The checkpoint folders of a run, oldest first; whether they are whole is seen by [`load`].
///
/// One that a kill left set aside is listed when nothing has its place.
pub fn list(run: &Path) -> Vec<PathBuf> {
    let mut found: Vec<(u64, PathBuf)> = Vec::new();
    for path in folders(&run.join(CHECKPOINTS)) {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let listed = match in_place_of(&path) {
            Some(place) => !place.exists(),
            None => true,
        };
        let number = name.strip_prefix('.').and_then(|name| name.strip_suffix(".old")).unwrap_or(&name);
        match number.strip_prefix("step-").filter(|digits| is_number(digits)).map(str::parse) {
            Some(Ok(step)) if listed => found.push((step, path)),
            _ => {}
        }
    }
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

fn folders(all: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(all).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir())
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Where the checkpoint `target` waits while it is replaced.
fn aside(target: &Path) -> PathBuf {
    let name = target.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    target.with_file_name(format!(".{name}.old"))
}

/// The place of a checkpoint that was set aside; absent for other paths.
fn in_place_of(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?.strip_prefix('.')?.strip_suffix(".old")?;
    name.starts_with("step-").then(|| path.with_file_name(name))
}

/// Clears what a kill left: checkpoints set aside take their place again or go, unfinished ones go.
///
/// Only for the process that holds the run's lock.
pub(crate) fn recover(run: &Path) -> Result<(), TrainError> {
    let all = run.join(CHECKPOINTS);
    for path in folders(&all) {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if let Some(place) = in_place_of(&path) {
            if place.exists() && (load(&place).is_ok() || load(&path).is_err()) {
                remove(&path);
                continue;
            }
            remove(&place);
            fs::rename(&path, &place).map_err(|source| TrainError::io("restore", &place, source))?;
        } else if name.starts_with(".step-") && name.ends_with(".partial") {
            let _ = fs::remove_dir_all(path);
        }
    }
    Ok(())
}

fn remove(path: &Path) {
    let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

/// Checks that every value is finite.
fn require_finite(
    step: usize,
    what: &'static str,
    tensors: &[(String, TensorData)],
) -> Result<(), TrainError> {
    let broken = |data: &TensorData| data.iter::<f32>().any(|value| !value.is_finite());
    match tensors.iter().find(|(_, data)| broken(data)) {
        Some((name, _)) => {
            Err(TrainError::NonFinite { step: Some(step), what, place: format!("the parameter {name}") })
        }
        None => Ok(()),
    }
}

/// Tensors in safetensors form.
fn encode(tensors: &[(String, TensorData)]) -> io::Result<Vec<u8>> {
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .map(|(name, data)| {
            TensorView::new(Dtype::F32, data.shape().to_vec(), data.as_bytes())
                .map(|view| (name.as_str(), view))
        })
        .collect();
    views.and_then(|views| safetensors::serialize(views, None)).map_err(io::Error::other)
}
