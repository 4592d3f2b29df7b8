//! What can be wrong with a task's settings or with data on disk.

use std::io;
use std::path::PathBuf;

/// A task or data set cannot be made as asked.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// A number is out of its range.
    #[error("{task}: {setting} is {found}, expected {expected}; {advice}")]
    Setting {
        /// The task that was asked for.
        task: &'static str,
        /// The setting at fault.
        setting: &'static str,
        /// The value that came.
        found: String,
        /// The range that was expected.
        expected: String,
        /// What to do.
        advice: String,
    },
    /// No preset has this name.
    #[error("no task preset is called {name:?}{}; the presets are {}", suggest(.suggestion), .known.join(", "))]
    UnknownPreset {
        /// The name that came.
        name: String,
        /// The nearest known name.
        suggestion: Option<String>,
        /// All known names.
        known: Vec<String>,
    },
    /// No formal language has this name.
    #[error("no formal language is called {name:?}{}; the languages are {}", suggest(.suggestion), .known.join(", "))]
    UnknownLanguage {
        /// The name that came.
        name: String,
        /// The nearest known name.
        suggestion: Option<String>,
        /// All known names.
        known: Vec<String>,
    },
    /// The number of predictions is not the number of positions.
    #[error(
        "{found} predictions came for a batch of {batch} x {time} positions; give one token id per position"
    )]
    Predictions {
        /// Predictions that came.
        found: usize,
        /// Rows of the batch.
        batch: usize,
        /// Tokens in a row.
        time: usize,
    },
    /// A file or folder cannot be read.
    #[error("cannot read {path}: {source}; check that it exists and may be read")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The path is a device, a pipe or a socket.
    #[error("{path} is neither a file nor a folder; give a text file, or a folder of text files")]
    NotAFile {
        /// The path that came.
        path: PathBuf,
    },
    /// There is no text.
    #[error("{path} holds no text; give a UTF-8 text file, or a folder with at least one that is not empty")]
    Empty {
        /// The file or folder.
        path: PathBuf,
    },
    /// The file is not UTF-8 text.
    #[error(
        "{path} is not UTF-8 text: byte 0x{byte:02x} at offset {offset} (line {line}) begins no valid character; \
         convert it, for example with `iconv -f LATIN1 -t UTF-8`, or leave it out of the folder"
    )]
    NotUtf8 {
        /// The file at fault.
        path: PathBuf,
        /// Offset of the first byte that is not part of a valid character.
        offset: usize,
        /// Its line, counted from 1.
        line: usize,
        /// The byte itself.
        byte: u8,
    },
    /// A split of the text is shorter than one context.
    #[error(
        "the {split} part of the text has {tokens} tokens, fewer than the {needed} that a context of {context} \
         needs; give a longer text or a smaller context"
    )]
    TooShort {
        /// `training` or `held-out`.
        split: &'static str,
        /// Tokens in it.
        tokens: usize,
        /// Tokens needed.
        needed: usize,
        /// The context that was asked for.
        context: usize,
    },
    /// The tokenizer file cannot be used.
    #[error("{path} is not a Hugging Face tokenizer.json: {reason}")]
    Tokenizer {
        /// The tokenizer file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The tokenizer fails on a text.
    #[error(
        "the tokenizer cannot encode the text: {reason}; its pre-tokenizer or model settings do not fit the text"
    )]
    Encode {
        /// Why.
        reason: String,
    },
    /// The tokenizer fails on token ids.
    #[error(
        "the tokenizer cannot decode the tokens: {reason}; its decoder settings do not fit its vocabulary"
    )]
    Decode {
        /// Why.
        reason: String,
    },
    /// A token id that the tokenizer does not have.
    #[error(
        "token {id} is not in the tokenizer's vocabulary of {vocab}; use the tokenizer that the model was trained with"
    )]
    UnknownToken {
        /// The id that came.
        id: u32,
        /// Ids below this may exist.
        vocab: usize,
    },
}

fn suggest(suggestion: &Option<String>) -> String {
    suggestion.as_ref().map_or(String::new(), |name| format!(", did you mean {name:?}?"))
}
