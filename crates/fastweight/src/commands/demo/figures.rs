//! The two figures of the demo, as SVG.

use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use fastweight::train::TrainError;
use fastweight::train::files::write_whole;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::memory::crosstalk_readings;
use super::sequence::{Precision, Rule};
use crate::commands::ledger::example;
use crate::error::CommandError;

const SIZE: (u32, u32) = (800, 500);
pub(super) const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 90, 181), RGBColor(220, 50, 32), RGBColor(0, 140, 105), RGBColor(120, 60, 160)];

/// A named line.
type Line = (&'static str, Vec<(f64, f64)>);

/// The figures `memory` and `crosstalk`.
///
/// # Errors
/// [`CommandError::Failure`] when one cannot be drawn.
pub fn draw() -> Result<[(&'static str, String); 2], CommandError> {
    Ok([("memory", memory()?), ("crosstalk", crosstalk()?)])
}

/// Writes figures as `NAME.svg` into `folder`, which is made if needed; returns name and path of each.
///
/// # Errors
/// [`CommandError::Failure`] when a file cannot be written.
pub fn write(
    folder: &Path,
    figures: Vec<(&'static str, String)>,
) -> Result<Vec<(&'static str, PathBuf)>, CommandError> {
    fs::create_dir_all(folder).map_err(|cause| unwritable(folder, &cause))?;
    let mut written = Vec::with_capacity(figures.len());
    for (name, svg) in figures {
        let path = folder.join(format!("{name}.svg"));
        write_whole(&path, svg.as_bytes()).map_err(|error| match error {
            TrainError::Io { source, .. } => unwritable(&path, &source),
            other => CommandError::train(other),
        })?;
        written.push((name, path));
    }
    Ok(written)
}

fn unwritable(path: &Path, cause: &io::Error) -> CommandError {
    CommandError::failure(format_args!(
        "{} cannot be written: {cause}; free space there, or choose another folder with --out",
        path.display()
    ))
}

pub(super) fn undrawn(cause: impl Display) -> CommandError {
    CommandError::failure(format_args!("a figure could not be drawn: {cause}"))
}

/// Bytes of a KV cache and of a fixed state against the number of tokens.
fn memory() -> Result<String, CommandError> {
    let tokens = (0..=20).map(|power| 1usize << power);
    let (mut cache, mut state) = (Vec::new(), Vec::new());
    for tokens in tokens {
        let example = example(tokens);
        cache.push((tokens as f64, example.kv_cache as f64));
        state.push((tokens as f64, example.state as f64));
    }
    let lines = [
        ("KV cache: keys and values of every token", cache),
        ("fixed state: 64 x 64 memory and normaliser", state),
    ];
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(undrawn)?;
        let mut chart = builder(&area, "Bytes a sequence holds (one head, 64 wide, float32)")
            .build_cartesian_2d((1f64..2f64.powi(20)).log_scale(), (1e2..1e9f64).log_scale())
            .map_err(undrawn)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("tokens read")
            .y_desc("bytes")
            .x_label_formatter(&|tokens| format!("{tokens:.0}"))
            .y_label_formatter(&|bytes| readable(*bytes))
            .draw()
            .map_err(undrawn)?;
        for ((name, points), colour) in lines.into_iter().zip(COLOURS) {
            let series =
                chart.draw_series(LineSeries::new(points, colour.stroke_width(2))).map_err(undrawn)?;
            series
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
        }
        legend(&mut chart, SeriesLabelPosition::UpperLeft)?;
        area.present().map_err(undrawn)?;
    }
    Ok(svg)
}

/// Distance between reading and stored value against the inner product of two keys.
fn crosstalk_lines() -> Result<[Line; 4], CommandError> {
    let mut lines: [Line; 4] = [
        ("delta rule, key written first", Vec::new()),
        ("delta rule, key written last", Vec::new()),
        ("additive, key written first", Vec::new()),
        ("additive, key written last", Vec::new()),
    ];
    for step in 0..=50 {
        let rho = f64::from(step) / 50.0;
        for (rule, lines) in [Rule::Delta, Rule::Additive].into_iter().zip(lines.chunks_mut(2)) {
            let readings = crosstalk_readings(rho, rule, Precision::Float64)?;
            for (((_, points), reading), stored) in
                lines.iter_mut().zip(readings).zip([[1.0, 0.0], [0.0, 1.0]])
            {
                points.push((rho, (reading[0] - stored[0]).hypot(reading[1] - stored[1])));
            }
        }
    }
    Ok(lines)
}

fn crosstalk() -> Result<String, CommandError> {
    let lines = crosstalk_lines()?;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(undrawn)?;
        let mut chart = builder(&area, "Crosstalk: error of a reading after two writes")
            .build_cartesian_2d(0.0..1.0f64, 0.0..1.5f64)
            .map_err(undrawn)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("inner product of the two unit keys")
            .y_desc("distance from the stored value")
            .draw()
            .map_err(undrawn)?;
        for (i, ((name, points), colour)) in lines.into_iter().zip(COLOURS).enumerate() {
            // The two additive lines lie on each other: points on the second.
            if i == 3 {
                let points =
                    points.into_iter().step_by(5).map(|point| Circle::new(point, 4, colour.stroke_width(2)));
                let series = chart.draw_series(points).map_err(undrawn)?;
                series.label(name).legend(move |(x, y)| Circle::new((x + 10, y), 4, colour.stroke_width(2)));
            } else {
                let series =
                    chart.draw_series(LineSeries::new(points, colour.stroke_width(2))).map_err(undrawn)?;
                series
                    .label(name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
            }
        }
        legend(&mut chart, SeriesLabelPosition::UpperLeft)?;
        area.present().map_err(undrawn)?;
    }
    Ok(svg)
}

fn builder<'a, 'b>(
    area: &'a DrawingArea<SVGBackend<'b>, Shift>,
    caption: &str,
) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.caption(caption, ("sans-serif", 20)).margin(15).x_label_area_size(45).y_label_area_size(70);
    builder
}

fn legend<'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, C>,
    position: SeriesLabelPosition,
) -> Result<(), CommandError> {
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE)
        .border_style(BLACK.mix(0.3))
        .draw()
        .map_err(undrawn)
}

/// Bytes with a decimal prefix.
fn readable(bytes: f64) -> String {
    match bytes {
        b if b >= 1e9 => format!("{:.0} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.0} MB", b / 1e6),
        b if b >= 1e3 => format!("{:.0} kB", b / 1e3),
        b => format!("{b:.0} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Old key: rho sqrt(1 + rho^2) for the delta rule, rho for adding. New key: 0 and rho.
    #[test]
    fn the_crosstalk_lines_are_those_of_the_formulas() {
        let formulas: [fn(f64) -> f64; 4] = [|rho| rho * rho.hypot(1.0), |_| 0.0, |rho| rho, |rho| rho];
        for ((name, points), formula) in crosstalk_lines().unwrap().into_iter().zip(formulas) {
            assert_eq!(points.len(), 51, "{name}");
            for (rho, error) in points {
                assert!((error - formula(rho)).abs() < 1e-12, "{name} at {rho}: {error}");
            }
        }
    }
}
