//! A trained model in the form it is used in: lookup experts as tables.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use fastweight_memory::parameters;
use fastweight_models::LayerExperts;

use crate::checkpoint::{self, CHECKPOINTS, RunState, STATE};
use crate::error::TrainError;
use crate::files::{self, FolderLock};
use crate::run::{self, TOKENIZER};

/// What an export wrote.
#[derive(Debug)]
pub struct Exported {
    /// The checkpoint that was read.
    pub source: PathBuf,
    /// The checkpoint that was written.
    pub checkpoint: PathBuf,
    /// Where the training stood, with the exported model's description.
    pub state: RunState,
    /// The layers whose experts are tables now.
    pub experts: Vec<LayerExperts>,
    /// A sentence for each newer checkpoint that could not be used.
    pub notes: Vec<String>,
}

/// Writes the model of a run folder, or of one checkpoint, with its lookup experts as tables into `out`, a run folder
/// of its own whose one checkpoint has no optimizer moments. It is written whole or not at all, as any checkpoint; an
/// earlier export of the same training there is replaced when the new one is complete.
///
/// # Errors
/// A run that cannot be loaded or has no lookup experts as networks; a folder that holds another training or other files,
/// lies inside a run, is in use, or cannot be written.
pub fn export(run: &Path, out: &Path, device: &Device) -> Result<Exported, TrainError> {
    let run::Loaded { model, state, folder: source, notes } = run::load(run, device)?;
    let state = RunState { version: checkpoint::VERSION, model: state.model.with_tables()?, ..state };
    if out.join(STATE).is_file() {
        return Err(refused(out, "is a checkpoint"));
    }
    refuse_foreign(out)?;
    files::create_folder(out)?;
    let _lock = FolderLock::take(out)?;
    refuse_other(out, &state)?;
    let tables = model.export_tables()?;
    drop(model);
    let experts = tables.config().experts()?;
    if state.task.tokenizer.as_ref().is_some_and(|path| path.is_file()) {
        run::keep_tokenizer(&state.task, out)?;
    }
    let checkpoint = checkpoint::save(out, state.clone(), &parameters::export(&tables), &[], 1)?;
    Ok(Exported { source, checkpoint, state, experts, notes })
}

/// Refuses a folder inside a run, and one with anything in it but what a run has.
fn refuse_foreign(out: &Path) -> Result<(), TrainError> {
    let whole = std::path::absolute(out).unwrap_or_else(|_| out.to_path_buf());
    if whole.ancestors().skip(1).any(|folder| !checkpoint::list(folder).is_empty()) {
        return Err(refused(out, "lies inside a run"));
    }
    let own = [CHECKPOINTS, files::LOCK, TOKENIZER];
    let foreign = std::fs::read_dir(out).into_iter().flatten().flatten();
    match foreign.map(|entry| entry.file_name()).find(|name| own.iter().all(|own| name != own)) {
        Some(name) if checkpoint::list(out).is_empty() => {
            Err(refused(out, &format!("holds {}, which is no part of an export", name.display())))
        }
        _ => Ok(()),
    }
}

/// Refuses a folder with a checkpoint of anything but the training that is exported, in the form of an export.
fn refuse_other(out: &Path, state: &RunState) -> Result<(), TrainError> {
    let origin = |of: &RunState| (of.recipe.clone(), of.data.clone(), of.seed);
    for folder in checkpoint::list(out) {
        match checkpoint::peek(&folder) {
            None => return Err(refused(out, "holds a checkpoint that cannot be read")),
            Some(known) if known.model != state.model || origin(&known) != origin(state) => {
                return Err(refused(out, "holds a training, or an export of another one"));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

fn refused(out: &Path, reason: &str) -> TrainError {
    TrainError::ForeignFolder { path: out.to_path_buf(), reason: reason.into() }
}
