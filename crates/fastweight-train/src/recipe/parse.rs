//! Reading recipes, and errors that point at the line.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

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
            let message = error.message().to_string();
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
        Ok(Recipe {
            name: self.name,
            task,
            further: tasks.collect(),
            train: self.train,
            model: self.model,
            models: self.models,
            compare: self.compare,
            source: text.to_string(),
            changes: Vec::new(),
        })
    }
}

/// A fault found after parsing, by the section and key it belongs to.
#[derive(Debug)]
pub(super) struct Fault {
    pub section: String,
    pub key: String,
    pub message: String,
    pub help: Option<String>,
    /// The task it was found with, counted from 0, whose own sections come before the shared ones.
    pub task: Option<usize>,
    /// The mixer it belongs to, by its place in `mixers`.
    pub mixer: Option<usize>,
}

impl Fault {
    /// The fault with its place in `text`.
    pub fn at(self, text: &str) -> RecipeError {
        let offset = find(text, &self);
        located(text, offset, self.message, self.help)
    }

    pub fn new(section: &str, key: &str, message: impl Into<String>) -> Self {
        Fault {
            section: section.into(),
            key: key.into(),
            message: message.into(),
            help: None,
            task: None,
            mixer: None,
        }
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

/// Byte offset of the key at fault: in the mixer it belongs to, else in its own section, else in the sections that it may
/// come from as well; else that of the mixer; else that of the first such section's header.
fn find(text: &str, fault: &Fault) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let root = document.get_ref();
    let sections: Vec<(&DeTable, Option<usize>)> =
        sections(root, fault).iter().filter_map(|name| section(root, name)).collect();
    let mixer = fault.mixer.and_then(|index| {
        let mixers = sections.iter().find_map(|(table, _)| entry(table, "mixers"))?.1;
        mixers.get_ref().as_array()?.iter().nth(index)
    });
    let tables = mixer.and_then(|mixer| mixer.get_ref().as_table()).into_iter();
    let mut tables = tables.chain(sections.iter().map(|(table, _)| *table));
    let key = tables.find_map(|table| entry(table, &fault.key)).map(|(key, _)| key.span().start);
    let header = || sections.iter().find_map(|(_, header)| *header);
    key.or_else(|| mixer.map(|mixer| mixer.span().start)).or_else(header)
}

/// The sections that a key may come from, the first one that of the fault.
fn sections(root: &DeTable, fault: &Fault) -> Vec<String> {
    let task = match fault.task {
        Some(index) if entry(root, "tasks").is_some() => format!("tasks.{index}"),
        _ => "task".to_string(),
    };
    let shared = |own: &str| vec![format!("{task}.{own}"), own.to_string()];
    match fault.section.as_str() {
        "task" => vec![task],
        "train" => shared("train"),
        "model" => shared("model"),
        "quick" => vec![format!("{task}.quick"), task],
        "compare.quick" => vec!["compare.quick".into(), "compare".into()],
        model if model.starts_with("models.") => [vec![model.to_string()], shared("model")].concat(),
        other => vec![other.to_string()],
    }
}

/// The table of a section and the offset of its header; `models.1` is the second `[[models]]`, `tasks.1.train` the
/// `[tasks.train]` after the second `[[tasks]]`, an empty name the top.
fn section<'t, 'i>(root: &'t DeTable<'i>, name: &str) -> Option<(&'t DeTable<'i>, Option<usize>)> {
    let mut found = (root, None);
    let mut parts = name.split('.').filter(|part| !part.is_empty());
    while let Some(part) = parts.next() {
        let mut value = entry(found.0, part)?.1;
        if let Some(items) = value.get_ref().as_array() {
            value = items.iter().nth(parts.next()?.parse().ok()?)?;
        }
        found = (value.get_ref().as_table()?, Some(value.span().start));
    }
    Some(found)
}

/// A key of a table and its value.
fn entry<'t, 'i>(
    table: &'t DeTable<'i>,
    key: &str,
) -> Option<(&'t Spanned<Cow<'i, str>>, &'t Spanned<DeValue<'i>>)> {
    table.iter().find(|(name, _)| name.get_ref() == key)
}

/// "did you mean" for messages of the form ``unknown field `x`, expected one of `a`, `b` ``.
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
