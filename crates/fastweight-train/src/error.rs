//! What can go wrong while training, comparing or loading.

use std::io;
use std::path::{Path, PathBuf};

use fastweight_memory::MemoryError;
use fastweight_models::ModelError;
use fastweight_tasks::TaskError;

use crate::checkpoint::CheckpointError;
use crate::recipe::RecipeError;

/// Any failure of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A recipe is malformed or does not make sense.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A file or folder could not be read or written.
    #[error("could not {action} {}: {source}{}", path.display(), io_advice(source))]
    Io {
        /// What was attempted, as in "read the recipe".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The task's options or data do not fit.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// The model's options or input do not fit.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A memory's state does not fit.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A checkpoint is missing, broken, or of another model.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Training diverged, or a model that diverged was scored.
    #[error("{}: {what} is not finite (first seen in {place}); {}", stopped(*.step), advice(*.step))]
    NonFinite {
        /// The step, counted from 1, that was being taken, saved or scored; absent for a model that is not in training.
        step: Option<usize>,
        /// The loss, the gradient, a weight or a score.
        what: &'static str,
        /// The layer or parameter nearest the cause.
        place: String,
    },
    /// A text is too short to score a model on.
    #[error(
        "the text is too short to score this model: it has {tokens} tokens, expected at least the model's context of \
         {context}; give a longer text"
    )]
    ShortText {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens the model reads at once.
        context: usize,
    },
    /// An argument is outside its range.
    #[error("{name} is {found}, expected {expected}")]
    Argument {
        /// The argument.
        name: &'static str,
        /// The value that came.
        found: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The folder belongs to something else.
    #[error("{} {reason}; choose another folder, or start over in this one with --fresh if its results may go", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The folder holds something of another kind than what is to be written there.
    #[error("{} {reason}; choose another folder", path.display())]
    ForeignFolder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Another process is at work in the folder.
    #[error("{} is in use by another process that writes to it; wait for it to end or choose another folder", path.display())]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// A tensor could not be read back from the device.
    #[error("the values of {name} could not be read from the device: {reason}")]
    Device {
        /// The tensor.
        name: String,
        /// The device's reason.
        reason: String,
    },
    /// A plot could not be drawn.
    #[error("the plot {plot:?} could not be drawn: {reason}")]
    Plot {
        /// The plot's title.
        plot: &'static str,
        /// Why.
        reason: String,
    },
}

impl TrainError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        TrainError::Io { action, path: path.to_path_buf(), source }
    }

    pub(crate) fn device(name: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        TrainError::Device { name: name.into(), reason: reason.to_string() }
    }

    /// Whether the request itself is at fault (a recipe, an argument, an input file), rather than the work.
    pub fn is_input(&self) -> bool {
        match self {
            TrainError::Io { action, .. } => action.starts_with("read"),
            TrainError::NonFinite { .. }
            | TrainError::Busy { .. }
            | TrainError::Device { .. }
            | TrainError::Plot { .. } => false,
            TrainError::Recipe(_)
            | TrainError::Task(_)
            | TrainError::Model(_)
            | TrainError::Memory(_)
            | TrainError::Checkpoint(_)
            | TrainError::ShortText { .. }
            | TrainError::Argument { .. }
            | TrainError::Folder { .. }
            | TrainError::ForeignFolder { .. } => true,
        }
    }
}

fn stopped(step: Option<usize>) -> String {
    match step {
        Some(step) => format!("training stopped at step {step}"),
        None => "the model has diverged and cannot be scored".into(),
    }
}

fn advice(step: Option<usize>) -> &'static str {
    match step {
        Some(_) => {
            "lower the learning rate, lengthen the warm-up or lower the clipping norm. Checkpoints and results from \
             before this step are kept"
        }
        None => "use an earlier checkpoint, or train again with a lower learning rate",
    }
}

fn io_advice(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "; check the path",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; choose a folder that may be written, or change its permissions"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space and run the same command again, it continues from the newest checkpoint"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
            "; a file was expected where a folder is, or the reverse"
        }
        _ => "",
    }
}
