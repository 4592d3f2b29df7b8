//! Where in its text a recipe is at fault.

use super::RecipeError;

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
