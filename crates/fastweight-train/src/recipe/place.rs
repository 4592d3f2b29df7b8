//! Where in its text a recipe is at fault.

use std::borrow::Cow;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::RecipeError;

/// A fault found after parsing, by the section and key it belongs to.
#[derive(Debug)]
pub(super) struct Fault {
    pub section: String,
    pub key: String,
    pub message: String,
    /// The task it was found with, counted from 0, whose own sections come before the shared ones.
    pub task: Option<usize>,
    /// The mixer it belongs to, by its list (`mixers` or `channel_mixers`) and its place there.
    pub mixer: Option<(&'static str, usize)>,
}

impl Fault {
    /// The fault with its place in `text`.
    pub fn at(self, text: &str) -> RecipeError {
        let offset = find(text, &self);
        located(text, offset, self.message, None)
    }

    pub fn new(section: &str, key: &str, message: impl Into<String>) -> Self {
        Fault { section: section.into(), key: key.into(), message: message.into(), task: None, mixer: None }
    }
}

pub(super) fn located(
    text: &str,
    offset: Option<usize>,
    message: String,
    help: Option<String>,
) -> RecipeError {
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
    let mixer = fault.mixer.and_then(|(list, index)| {
        let mixers = sections.iter().find_map(|(table, _)| entry(table, list))?.1;
        mixers.get_ref().as_array()?.get(index)
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
            value = items.get(parts.next()?.parse::<usize>().ok()?)?;
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
