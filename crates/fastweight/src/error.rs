//! The one error type of the command, and the exit code it stands for.

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

use fastweight::train::TrainError;

/// Why a subcommand stopped. The text is one paragraph for a person: what was expected, what came
/// and what to do.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The request cannot be carried out as given: an argument, a recipe, an input file or a
    /// run folder is missing, malformed or does not fit. Exit code 2.
    #[error("{0}")]
    Input(String),
    /// The request was understood, the work failed: a full disk, a folder in use or
    /// not writable, a training that diverged. Exit code 1.
    #[error("{0}")]
    Failure(String),
    /// Standard output could not be written. A reader that went away (a broken pipe) is not an
    /// error: the command stops quietly with exit code 0. Anything else has exit code 1.
    #[error("standard output could not be written ({0}); free space there or send the output elsewhere")]
    Output(#[source] io::Error),
}

impl CommandError {
    /// An [`CommandError::Input`] with the text of `cause`.
    pub fn input(cause: impl Display) -> Self {
        Self::Input(cause.to_string())
    }

    /// The kind that fits a failure of training, comparing or loading, with the text of `cause`.
    pub fn train(cause: TrainError) -> Self {
        if cause.is_input() { Self::input(cause) } else { Self::failure(cause) }
    }

    /// A [`CommandError::Failure`] with the text of `cause`.
    pub fn failure(cause: impl Display) -> Self {
        Self::Failure(cause.to_string())
    }

    /// Whether the reader of standard output went away.
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Output(cause) if cause.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The exit code of the process, as documented in `fastweight --help`.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Input(_) => ExitCode::from(2),
            Self::Output(_) if self.is_broken_pipe() => ExitCode::SUCCESS,
            Self::Failure(_) | Self::Output(_) => ExitCode::from(1),
        }
    }
}
