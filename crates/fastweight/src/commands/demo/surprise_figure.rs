//! The figure of `demo surprise`: four curves over the tokens, and the tokens under them.

use plotters::prelude::*;

use super::figures::{COLOURS, undrawn};
use super::surprise::Token;
use crate::error::CommandError;

/// Pixels of a token.
const STEP: u32 = 9;
const MARGIN: u32 = 60;
const PANEL: u32 = 130;

/// A curve of the figure: its title and where it comes from.
type Curve = (&'static str, fn(&Token) -> f64);

/// Draws the inner gradient's norm and the gates of every token; the second reading starts at a vertical line.
///
/// # Errors
/// [`CommandError::Failure`] when the drawing fails.
pub fn draw(tokens: &[Token]) -> Result<String, CommandError> {
    let curves: [Curve; 4] = [
        ("norm of the inner gradient (surprise)", |t| t.surprise),
        ("theta: rate of the write", |t| t.theta),
        ("eta: momentum", |t| t.eta),
        ("alpha: forgetting", |t| t.alpha),
    ];
    let width = 2 * MARGIN + STEP * tokens.len() as u32;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (width, 4 * PANEL + 70)).into_drawing_area();
        area.fill(&WHITE).map_err(undrawn)?;
        let (panels, text) = area.split_vertically(4 * PANEL);
        for ((panel, (title, value)), colour) in panels.split_evenly((4, 1)).iter().zip(curves).zip(COLOURS) {
            let top = tokens.iter().map(value).fold(1e-6, f64::max) * 1.05;
            let mut chart = ChartBuilder::on(panel)
                .caption(title, ("sans-serif", 15))
                .margin_right(MARGIN)
                .set_label_area_size(LabelAreaPosition::Left, MARGIN)
                .build_cartesian_2d(0f64..tokens.len() as f64, 0f64..top)
                .map_err(undrawn)?;
            chart
                .configure_mesh()
                .disable_x_mesh()
                .light_line_style(TRANSPARENT)
                .x_labels(0)
                .y_labels(4)
                .draw()
                .map_err(undrawn)?;
            let half = tokens.len() as f64 / 2.0;
            chart
                .draw_series([PathElement::new([(half, 0.0), (half, top)], BLACK.mix(0.3))])
                .map_err(undrawn)?;
            let points = tokens.iter().map(|t| (t.token as f64 + 0.5, value(t)));
            chart.draw_series(LineSeries::new(points, colour.stroke_width(2))).map_err(undrawn)?;
        }
        for token in tokens {
            let place = ((MARGIN + STEP * token.token as u32 + 1) as i32, 8);
            let style = ("monospace", 13).into_font().transform(turn(&token.text)).color(&BLACK);
            text.draw(&Text::new(printable(&token.text), shifted(&token.text, place), style))
                .map_err(undrawn)?;
        }
        area.present().map_err(undrawn)?;
    }
    Ok(svg)
}

/// Tokens of more than one character stand upright.
fn turn(text: &str) -> FontTransform {
    if text.chars().count() > 1 { FontTransform::Rotate90 } else { FontTransform::None }
}

/// A turned text hangs to the left of its place.
fn shifted(text: &str, (x, y): (i32, i32)) -> (i32, i32) {
    if text.chars().count() > 1 { (x + 12, y) } else { (x, y) }
}

/// Line breaks and other characters without a shape as a sign.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c == '\n' {
                '↵'
            } else if c.is_control() {
                '·'
            } else {
                c
            }
        })
        .collect()
}
