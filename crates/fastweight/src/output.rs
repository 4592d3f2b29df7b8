//! Standard output: results only, written whole lines at a time. Progress, notes and errors go to
//! standard error (`progress.rs`, `main.rs`).

use std::fmt::Display;
use std::io::{self, Write};

use comfy_table::{Cell, CellAlignment, Table, TableComponent, presets};
use serde::Serialize;

use crate::error::CommandError;

/// Writes `text` and a line break.
///
/// # Errors
/// [`CommandError::Output`] when standard output cannot be written.
pub fn line(text: impl Display) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(CommandError::Output)
}

/// Writes `text` as it is, without a line break, and flushes: for text that streams.
///
/// # Errors
/// [`CommandError::Output`] when standard output cannot be written.
pub fn stream(text: &str) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(CommandError::Output)
}

/// Writes `value` as one JSON object on one line.
///
/// # Errors
/// [`CommandError::Output`] when standard output cannot be written, [`CommandError::Failure`] when
/// `value` has no JSON form.
pub fn json(value: &impl Serialize) -> Result<(), CommandError> {
    let text = serde_json::to_string(value)
        .map_err(|cause| CommandError::failure(format_args!("a result has no JSON form: {cause}")))?;
    line(text)
}

/// A count with its noun, as in "1 head" and "2 heads".
pub fn count(number: impl Display, noun: &str) -> String {
    let number = number.to_string();
    let plural = if number == "1" { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// An empty table: the first column is text, the others are numbers.
pub fn table(header: impl IntoIterator<Item = impl Into<Cell>>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    table.remove_style(TableComponent::HorizontalLines).remove_style(TableComponent::MiddleIntersections);
    table.set_header(header.into_iter().map(Into::into).collect::<Vec<Cell>>());
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
