//! Line plots as SVG that follows the page's light or dark colours.

use std::ops::Range;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::error::TrainError;

const SIZE: (u32, u32) = (680, 360);
/// Colours that plotters writes and the page replaces by its own.
const TEXT: RGBColor = RGBColor(1, 2, 3);
const GRID: RGBColor = RGBColor(4, 5, 6);

/// Series colours, the last one for references, that differ for colour-blind readers too and show on light and dark (Okabe and Ito 2008).
const PALETTE: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(136, 136, 136),
];

/// How numbers lie on an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// As they are.
    Linear,
    /// By their base-2 logarithm; only whole powers are labelled.
    Log2,
}

impl Scale {
    fn place(self, value: f64) -> f64 {
        match self {
            Scale::Linear => value,
            Scale::Log2 => value.max(f64::MIN_POSITIVE).log2(),
        }
    }

    fn label(self, place: f64, format: fn(f64) -> String) -> String {
        match self {
            Scale::Linear => format(place),
            Scale::Log2 if (place - place.round()).abs() < 1e-9 => format(place.exp2()),
            Scale::Log2 => String::new(),
        }
    }
}

/// One axis of a plot.
#[derive(Debug, Clone)]
pub struct Axis {
    /// What it shows, with its unit.
    pub label: &'static str,
    /// How numbers lie on it.
    pub scale: Scale,
    /// How numbers are written.
    pub format: fn(f64) -> String,
    /// Its ends; those of the data when absent.
    pub range: Option<Range<f64>>,
}

/// One line of a plot.
#[derive(Debug, Clone)]
pub struct Series {
    /// Number of the model, from 0, which decides colour and marker.
    pub model: usize,
    /// The main line, with markers.
    pub line: Vec<(f64, f64)>,
    /// Fainter lines behind it, one per seed.
    pub seeds: Vec<Vec<(f64, f64)>>,
    /// A reference, drawn dashed, grey and without markers.
    pub dashed: bool,
}

impl Series {
    /// A line to compare with that is no model's.
    pub fn reference(line: Vec<(f64, f64)>) -> Self {
        Series { model: 0, line, seeds: Vec::new(), dashed: true }
    }
}

/// Colour of a reference.
pub const REFERENCE: RGBColor = PALETTE[PALETTE.len() - 1];

/// Colour of model number `model`.
pub fn colour(model: usize) -> RGBColor {
    PALETTE[model % (PALETTE.len() - 1)]
}

/// Marker of model number `model`, which tells models of one colour apart.
pub fn marker(model: usize) -> Marker {
    [Marker::Circle, Marker::Triangle, Marker::Cross][model / (PALETTE.len() - 1) % 3]
}

/// What marks the points of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marker {
    /// A disc.
    Circle,
    /// A triangle.
    Triangle,
    /// A cross.
    Cross,
}

/// Draws `series` as an SVG element.
pub fn draw(title: &'static str, x: &Axis, y: &Axis, series: &[Series]) -> Result<String, TrainError> {
    let mut svg = String::new();
    draw_into(&mut svg, x, y, series)
        .map_err(|error| TrainError::Plot { plot: title, reason: error.to_string() })?;
    let label = format!("<svg role=\"img\" aria-label=\"{title}\" ");
    Ok(svg.replacen("<svg ", &label, 1).replace("#010203", "currentColor").replace("#040506", "var(--grid)"))
}

fn draw_into(
    svg: &mut String,
    x: &Axis,
    y: &Axis,
    series: &[Series],
) -> Result<(), DrawingAreaErrorKind<std::convert::Infallible>> {
    let points = || series.iter().flat_map(|s| s.line.iter().chain(s.seeds.iter().flatten()));
    let x_range = ends(x, points().map(|p| p.0));
    let y_range = ends(y, points().map(|p| p.1));
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let label = ("sans-serif", 13).into_font().color(&TEXT);
    let mut chart = ChartBuilder::on(&root)
        .margin(8)
        .margin_right(24)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x_range.clone(), y_range.clone())
        .map_err(infallible)?;
    let labels = |range: &Range<f64>, scale: Scale| match scale {
        // About one label per power, every second or fourth when there are many.
        Scale::Log2 => (range.end - range.start).round().clamp(2.0, 10.0) as usize + 1,
        Scale::Linear => 6,
    };
    chart
        .configure_mesh()
        .x_desc(x.label)
        .y_desc(y.label)
        .axis_desc_style(label.clone())
        .label_style(label.pos(Pos::new(HPos::Center, VPos::Center)))
        .x_labels(labels(&x_range, x.scale))
        .y_labels(labels(&y_range, y.scale))
        .x_label_formatter(&|v| x.scale.label(*v, x.format))
        .y_label_formatter(&|v| y.scale.label(*v, y.format))
        .axis_style(TEXT)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(infallible)?;
    let place = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
        points.iter().map(|p| (x.scale.place(p.0), y.scale.place(p.1))).collect()
    };
    for s in series {
        let colour = if s.dashed { REFERENCE } else { colour(s.model) };
        for seed in &s.seeds {
            chart
                .draw_series(LineSeries::new(place(seed), colour.mix(0.45).stroke_width(1)))
                .map_err(infallible)?;
        }
        let line = place(&s.line);
        if s.dashed {
            let dashes = DashedLineSeries::new(line, 6, 5, colour.stroke_width(2));
            chart.draw_series(dashes).map_err(infallible)?;
        } else {
            chart.draw_series(LineSeries::new(line.clone(), colour.stroke_width(2))).map_err(infallible)?;
            let points = line.into_iter();
            match marker(s.model) {
                Marker::Circle => chart
                    .draw_series(points.map(|p| Circle::new(p, 3, colour.filled())))
                    .map_err(infallible)?,
                Marker::Triangle => chart
                    .draw_series(points.map(|p| TriangleMarker::new(p, 5, colour.filled())))
                    .map_err(infallible)?,
                Marker::Cross => chart
                    .draw_series(points.map(|p| Cross::new(p, 4, colour.stroke_width(2))))
                    .map_err(infallible)?,
            };
        }
    }
    drop(chart);
    root.present().map_err(infallible)
}

fn infallible<E: std::error::Error + Send + Sync>(
    error: DrawingAreaErrorKind<E>,
) -> DrawingAreaErrorKind<std::convert::Infallible> {
    match error {
        DrawingAreaErrorKind::BackendError(_) | DrawingAreaErrorKind::SharingError => {
            DrawingAreaErrorKind::SharingError
        }
        DrawingAreaErrorKind::LayoutError => DrawingAreaErrorKind::LayoutError,
    }
}

/// The axis' ends in its scale, never empty.
fn ends(axis: &Axis, values: impl Iterator<Item = f64>) -> Range<f64> {
    let placed = values.filter(|v| v.is_finite()).map(|v| axis.scale.place(v));
    let (low, high) = match &axis.range {
        Some(range) => (axis.scale.place(range.start), axis.scale.place(range.end)),
        None => placed.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v))),
    };
    if low > high {
        return 0.0..1.0;
    }
    let room = if high > low { 0.04 * (high - low) } else { 0.5 };
    let room = if axis.range.is_some() { 0.0 } else { room };
    low - room..high + room
}
