//! Reading recipes, and errors that point at the line.

use std::fmt;
use std::path::{Path, PathBuf};

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

/// A fault found after parsing, by the section and key it belongs to.
#[derive(Debug)]
pub(super) struct Fault {
    pub section: String,
    pub key: String,
    pub message: String,
    pub help: Option<String>,
    /// The task it was found with, counted from 0, whose own sections come before the shared ones.
    pub task: Option<usize>,
    /// Key that holds the offending one when no line has it, as `mixers` does.
    pub inside: Option<&'static str>,
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
            inside: None,
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

/// Byte offset of the key at fault: in its own section, else in the sections that it may come from as well; else that
/// of the key it stands inside; else that of the first such section's header.
fn find(text: &str, fault: &Fault) -> Option<usize> {
    let mut places: Vec<Section> = sections(text, fault).iter().map(|name| Section::of(text, name)).collect();
    // `train = { .. }` within a task comes before the shared section.
    if matches!(fault.section.as_str(), "train" | "model") {
        let mut lines = Section::of(text, &task_section(text, fault));
        lines.lines.retain(|(_, line)| within(line, &fault.section).is_some());
        lines.header = None;
        places.insert(1, lines);
    }
    let keys = [Some(fault.key.as_str()).filter(|key| !key.is_empty()), fault.inside];
    let found = keys.into_iter().flatten().find_map(|key| places.iter().find_map(|place| place.key(key)));
    found.or_else(|| places.iter().find_map(|place| place.header))
}

/// The section of the task that a fault was found with.
fn task_section(text: &str, fault: &Fault) -> String {
    let several = text.lines().any(|line| title(line.trim_start()) == Some("tasks"));
    match fault.task {
        Some(index) if several => format!("tasks.{index}"),
        _ => "task".to_string(),
    }
}

/// The sections that a key may come from, the first one that of the fault.
fn sections(text: &str, fault: &Fault) -> Vec<String> {
    let task = task_section(text, fault);
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

/// The lines of a section, with the offset of each.
struct Section<'t> {
    header: Option<usize>,
    lines: Vec<(usize, &'t str)>,
}

impl<'t> Section<'t> {
    /// The section `[name]` with those below it; `models.1` is the second `[[models]]`, `tasks.1.train` the
    /// `[tasks.train]` after the second `[[tasks]]`, an empty name the top.
    fn of(text: &'t str, section: &str) -> Self {
        let mut parts = section.splitn(3, '.');
        let numbered = (parts.next(), parts.next().and_then(|index| index.parse().ok()), parts.next());
        let (list, index, name) = match numbered {
            (Some(list), Some(index), Some(below)) => (Some(list), index, format!("{list}.{below}")),
            (Some(list), Some(index), None) => (Some(list), index, list.to_string()),
            _ => (None, 0usize, section.to_string()),
        };
        let name = name.as_str();
        let mut inside = name.is_empty();
        // Entries of the list that have begun.
        let mut entries = 0;
        let mut found = Section { header: None, lines: Vec::new() };
        let mut offset = 0;
        for line in text.split_inclusive('\n') {
            let trimmed = line.trim_start();
            if let Some(title) = title(trimmed) {
                let below = title.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
                inside = inside && below && !name.is_empty();
                entries += usize::from(Some(title) == list);
                if title == name && list.is_none_or(|_| entries == index + 1) && found.header.is_none() {
                    inside = true;
                    found.header = Some(offset + line.len() - trimmed.len());
                }
            } else if inside {
                found.lines.push((offset, line));
            }
            offset += line.len();
        }
        found
    }

    /// Offset of `key = ...`: at the start of a line, else within one.
    fn key(&self, key: &str) -> Option<usize> {
        let starts = self.lines.iter().find_map(|(offset, line)| {
            let trimmed = line.trim_start();
            let name = trimmed.split(['=', '.']).next()?.trim().trim_matches(['"', '\'']);
            (name == key).then_some(offset + line.len() - trimmed.len())
        });
        starts.or_else(|| self.lines.iter().find_map(|(offset, line)| Some(offset + within(line, key)?)))
    }
}

/// The name in a line `[name]` or `[[name]]`.
fn title(line: &str) -> Option<&str> {
    let rest = line.strip_prefix('[')?;
    let name = rest.strip_prefix('[').unwrap_or(rest).split(']').next()?.trim();
    let plain = |c: char| c.is_alphanumeric() || "._- \"".contains(c);
    (!name.is_empty() && name.chars().all(plain) && line.contains(']')).then_some(name)
}

/// Offset of `key =` in `line`, as in `{ key = 1 }`, before any comment.
fn within(line: &str, key: &str) -> Option<usize> {
    let code = line.split('#').next().unwrap_or(line);
    let word = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    code.match_indices(key)
        .map(|(at, _)| at)
        .find(|&at| !code[..at].ends_with(word) && code[at + key.len()..].trim_start().starts_with('='))
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
