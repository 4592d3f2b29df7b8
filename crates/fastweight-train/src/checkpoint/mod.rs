//! Checkpoints: folders written whole or not at all.
//!
//! ```text
//! RUN/checkpoints/step-00001200/weights.safetensors     trained parameters by name
//!                               optimizer.safetensors   both moments of each
//!                               state.json              position, scores, model, length and CRC-32 of each file
//! ```
//! A checkpoint is written to `.step-00001200.partial`, every file and the folder synced, then renamed, so that a
//! folder without a dot is complete. A kill leaves at most a `.partial` folder, which the next save removes.

mod load;
mod state;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use safetensors::tensor::{Dtype, TensorView};

pub use load::{Checkpoint, load, newest};
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
    /// The folder holds none.
    #[error("{} holds no checkpoint (looked for {CHECKPOINTS}/step-*); give the folder of a training run", folder.display())]
    None {
        /// The folder that was searched.
        folder: PathBuf,
    },
    /// Every checkpoint of the run is broken.
    #[error("no checkpoint of {} can be used; the newest one: {newest}", folder.display())]
    AllBroken {
        /// The run folder.
        folder: PathBuf,
        /// What is wrong with the newest.
        newest: String,
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
        /// Its version.
        found: u32,
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

/// Writes a checkpoint into `run`'s folder of checkpoints and removes all but the newest `keep`.
///
/// `state.files` is filled in here. Older checkpoints are removed only after the new one is complete.
///
/// # Errors
/// The folder cannot be written; earlier checkpoints stay as they are.
pub fn save(
    run: &Path,
    state: RunState,
    weights: &[(String, TensorData)],
    moments: &[(String, TensorData)],
    keep: usize,
) -> Result<PathBuf, TrainError> {
    let all = run.join(CHECKPOINTS);
    files::create_folder(&all)?;
    remove_partial(&all);
    let target = all.join(format!("step-{:08}", state.step));
    let partial = files::hidden(&target);
    let write = || -> io::Result<()> {
        fs::create_dir(&partial)?;
        let mut state = state;
        for (name, tensors) in [(WEIGHTS, weights), (OPTIMIZER, moments)] {
            let bytes = encode(tensors)?;
            state.files.insert(name.to_string(), FileEntry::of(&bytes));
            files::write_synced(&partial.join(name), &bytes)?;
        }
        files::write_synced(&partial.join(STATE), state.to_text()?.as_bytes())?;
        files::sync_folder(&partial)?;
        if target.exists() {
            fs::remove_dir_all(&target)?;
        }
        fs::rename(&partial, &target)?;
        files::sync_folder(&all)
    };
    if let Err(source) = write() {
        let _ = fs::remove_dir_all(&partial);
        return Err(TrainError::io("write the checkpoint", &target, source));
    }
    for old in list(run).into_iter().rev().skip(keep.max(1)) {
        let _ = fs::remove_dir_all(old);
    }
    Ok(target)
}

/// The complete checkpoints of a run, oldest first.
pub fn list(run: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(run.join(CHECKPOINTS)).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().strip_prefix("step-").is_some_and(is_number))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn remove_partial(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with(".step-") {
            let _ = fs::remove_dir_all(entry.path());
        }
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
