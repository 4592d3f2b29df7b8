//! Reading recipes, and errors that point at the line.

use std::fmt;
use std::path::{Path, PathBuf};

use super::Recipe;
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
            write!(f, "\n{number} | {line}\n{:margin$} | {:>column$}", "", "^")?;
        }
        Ok(())
    }
}

impl Recipe {
    /// Reads and validates the recipe at `path`. A missing `name` becomes the file's name.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, or is not a valid recipe.
    pub fn load(path: &Path) -> Result<Recipe, TrainError> {
        let bytes = std::fs::read(path).map_err(|source| TrainError::io("read the recipe", path, source))?;
        let text = String::from_utf8(bytes).map_err(|_| RecipeError {
            path: Some(path.to_path_buf()),
            place: None,
            line: None,
            message: "the file is not UTF-8 text; a recipe is a TOML file".into(),
            help: None,
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
        let mut recipe: Recipe = toml::from_str(text).map_err(|error| {
            let message = error.message().to_string();
            let help = suggestion(&message);
            located(text, error.span().map(|span| span.start), message, help)
        })?;
        recipe.source = text.to_string();
        recipe.validate().map_err(|fault| {
            located(text, find_key(text, &fault.section, &fault.key), fault.message, fault.help)
        })?;
        Ok(recipe)
    }
}

/// A fault found after parsing, by the section and key it belongs to.
#[derive(Debug)]
pub(super) struct Fault {
    pub section: String,
    pub key: String,
    pub message: String,
    pub help: Option<String>,
}

impl Fault {
    pub fn new(section: &str, key: &str, message: impl Into<String>) -> Self {
        Fault { section: section.into(), key: key.into(), message: message.into(), help: None }
    }
}

fn located(text: &str, offset: Option<usize>, message: String, help: Option<String>) -> RecipeError {
    let place = offset.map(|offset| {
        let before = &text.as_bytes()[..offset.min(text.len())];
        let start = before.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
        let line = before.iter().filter(|&&b| b == b'\n').count() + 1;
        (line, String::from_utf8_lossy(&before[start..]).chars().count() + 1)
    });
    let line = place.and_then(|(line, _)| text.lines().nth(line - 1)).map(str::to_string);
    RecipeError { path: None, place, line, message, help }
}

/// Byte offset of `key = ...` inside `[section]` (`models.1` is the second `[[models]]`), else of the
/// section's header, else none. Sees one key a line, which is how recipes are written.
fn find_key(text: &str, section: &str, key: &str) -> Option<usize> {
    let (name, mut skip) = match section.split_once('.') {
        Some((name, index)) => (name, index.parse().unwrap_or(0)),
        None => (section, 0usize),
    };
    let mut inside = name.is_empty();
    let mut header = None;
    let mut offset = 0;
    for line in text.split_inclusive('\n') {
        let indent = line.len() - line.trim_start().len();
        let trimmed = line.trim();
        if trimmed.starts_with('[') {
            if header.is_some() {
                return header;
            }
            inside = trimmed.trim_matches(['[', ']']).trim() == name;
            if inside && skip > 0 {
                skip -= 1;
                inside = false;
            } else if inside {
                header = Some(offset + indent);
            }
        } else if inside && trimmed.split(['=', '.']).next().is_some_and(|k| k.trim() == key) {
            return Some(offset + indent);
        }
        offset += line.len();
    }
    header
}

/// "did you mean" for messages of the form ``unknown field `x`, expected one of `a`, `b` ``.
fn suggestion(message: &str) -> Option<String> {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let unknown = message.starts_with("unknown").then(|| quoted.next()).flatten()?;
    closest(unknown, quoted).map(|name| format!("did you mean `{name}`?"))
}

/// The candidate most like `word`, when it is like enough to be a typo.
fn closest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| (strsim::normalized_damerau_levenshtein(word, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= 0.5)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}
