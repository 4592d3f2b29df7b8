//! Reading recipes, and errors that point at the line.

use std::fmt;
use std::path::{Path, PathBuf};

use fastweight_memory::names;

use super::place::{Fault, located};
use super::{Recipe, RecipeFile};
use crate::error::TrainError;

/// A fault in a recipe, with its place.
#[derive(Debug, Clone, PartialEq)]
pub struct RecipeError {
    /// The file, when it came from one.
    pub path: Option<PathBuf>,
    /// Line and column, from 1, when known.
    pub place: Option<(usize, usize)>,
    /// The offending line.
    pub line: Option<String>,
    /// What is wrong, and what was expected.
    pub message: String,
    /// What to do, when there is a near miss.
    pub help: Option<String>,
}

impl std::error::Error for RecipeError {}

impl fmt::Display for RecipeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "recipe {}", path.display())?,
            None => write!(f, "recipe")?,
        }
        if let Some((line, column)) = self.place {
            write!(f, ", line {line}, column {column}")?;
        }
        write!(f, ": {}", self.message)?;
        if let Some(help) = &self.help {
            write!(f, "; {help}")?;
        }
        if let (Some((number, column)), Some(line)) = (self.place, &self.line) {
            let margin = number.to_string().len();
            let (line, column) = clipped(line, column);
            write!(f, "\n{number} | {line}\n{:margin$} | {:>column$}", "", "^")?;
        }
        Ok(())
    }
}

/// Characters of a line that are shown.
const SHOWN: usize = 120;

/// The part of `line` around `column`, with control characters as spaces, and the column in that part.
fn clipped(line: &str, column: usize) -> (String, usize) {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let count = line.chars().count();
    if count <= SHOWN {
        return (line.chars().map(plain).collect(), column);
    }
    let start = column.saturating_sub(SHOWN / 2).min(count - SHOWN);
    let part: String = line.chars().skip(start).take(SHOWN).map(plain).collect();
    let before = if start > 0 { "..." } else { "" };
    let after = if start + SHOWN < count { "..." } else { "" };
    (format!("{before}{part}{after}"), column - start + before.len())
}

impl Recipe {
    /// Reads and validates the recipe at `path`. A missing `name` becomes the file's name.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, or is not a valid recipe.
    pub fn load(path: &Path) -> Result<Recipe, TrainError> {
        let bytes = std::fs::read(path).map_err(|source| TrainError::io("read the recipe", path, source))?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let offset = error.utf8_error().valid_up_to();
            let bytes = error.as_bytes();
            let line = bytes[..offset].iter().filter(|&&b| b == b'\n').count() + 1;
            let byte = bytes.get(offset).copied().unwrap_or_default();
            RecipeError {
                path: Some(path.to_path_buf()),
                place: None,
                line: None,
                message: format!(
                    "the file is not UTF-8 text: byte 0x{byte:02x} at offset {offset} (line {line}) begins no valid \
                     character; a recipe is a TOML file"
                ),
                help: None,
            }
        })?;
        let mut recipe = Recipe::parse(&text).map_err(|mut error| {
            error.path = Some(path.to_path_buf());
            error
        })?;
        if recipe.name.is_empty() {
            recipe.name =
                path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        }
        Ok(recipe)
    }

    /// Reads and validates a recipe from TOML text.
    ///
    /// # Errors
    /// The text is not TOML or not a valid recipe; the error holds line and column.
    pub fn parse(text: &str) -> Result<Recipe, RecipeError> {
        let file: RecipeFile = toml::from_str(text).map_err(|error| {
            let message = names::types_in_words(error.message());
            let help = suggestion(&message);
            located(text, error.span().map(|span| span.start), message, help)
        })?;
        let recipe = file.recipe(text).map_err(|fault| fault.at(text))?;
        recipe.validate_all().map_err(|fault| fault.at(text))?;
        Ok(recipe)
    }
}

impl RecipeFile {
    /// The recipe that `text` holds.
    fn recipe(self, text: &str) -> Result<Recipe, Fault> {
        let mut tasks = self.tasks.into_iter();
        let task = match (self.task, tasks.next()) {
            (Some(_), Some(_)) => {
                let message = "both [task] and [[tasks]] are given; describe every task as one of [[tasks]]";
                return Err(Fault::new("task", "", message));
            }
            (None, None) => {
                let message = "no task: give [task], or a [[tasks]] section for each of several";
                return Err(Fault::new("", "task", message));
            }
            (Some(task), None) | (None, Some(task)) => task,
        };
        let Some(train) = self.train else {
            let message =
                "no [train] section: say there how long and with what batch and learning rate to train";
            return Err(Fault::new("", "train", message));
        };
        Ok(Recipe {
            name: self.name,
            task,
            further: tasks.collect(),
            train,
            model: self.model,
            models: self.models,
            compare: self.compare,
            source: text.to_string(),
            changes: Vec::new(),
        })
    }
}

/// "did you mean" for messages of the form ``unknown key `x`, expected one of `a`, `b` ``.
fn suggestion(message: &str) -> Option<String> {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let unknown = message.starts_with("unknown").then(|| quoted.next()).flatten()?;
    closest(unknown, quoted).map(|name| format!("did you mean `{name}`?"))
}

/// The candidate most like `word`, when it is like enough to be a typo.
pub(super) fn closest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| (strsim::normalized_damerau_levenshtein(word, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= 0.5)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}
