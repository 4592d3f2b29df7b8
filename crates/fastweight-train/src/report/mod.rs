//! A comparison as one HTML page that needs nothing else.

mod charts;
mod html;
mod plot;
mod tables;

use std::path::Path;

use charts::Chart;

use crate::compare::Comparison;
use crate::error::TrainError;
use crate::files;

/// burn's version, which the workspace pins.
pub const BURN_VERSION: &str = "0.22.1";

/// The report of `comparison` as HTML: table, plots as inline SVG, recipe and versions.
///
/// # Errors
/// A plot cannot be drawn.
pub fn render(comparison: &Comparison) -> Result<String, TrainError> {
    let charts: Vec<Vec<Chart>> = comparison.tasks.iter().map(charts::all).collect::<Result<_, _>>()?;
    let states = comparison.tasks.first().map(charts::state_by_length).transpose()?;
    Ok(html::page(comparison, &charts, states.as_ref()))
}

/// Writes the report to `path`, whole or not at all.
///
/// # Errors
/// A plot cannot be drawn or the file cannot be written.
pub fn write(comparison: &Comparison, path: &Path) -> Result<(), TrainError> {
    files::write_whole(path, render(comparison)?.as_bytes())
}
