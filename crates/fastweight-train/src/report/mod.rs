//! A comparison as one HTML page that needs nothing else.

mod charts;
mod html;
mod plot;

use std::path::Path;

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
    let charts = charts::all(comparison)?;
    Ok(html::page(comparison, &charts))
}

/// Writes the report to `path`, whole or not at all.
///
/// # Errors
/// A plot cannot be drawn or the file cannot be written.
pub fn write(comparison: &Comparison, path: &Path) -> Result<(), TrainError> {
    files::write_whole(path, render(comparison)?.as_bytes())
}
