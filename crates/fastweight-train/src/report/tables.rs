//! The tables of a comparison.

use std::fmt::Write;

use super::charts::bytes;
use super::html::{escape, swatch};
use crate::compare::{Column, Comparison, Row, Spread, TaskComparison};
use crate::recipe::ParameterMatch;

/// Every task's scores side by side, a row a model.
pub fn overview(comparison: &Comparison) -> String {
    let columns: Vec<(String, Column)> = comparison
        .tasks
        .iter()
        .flat_map(|task| {
            task.headline().into_iter().map(|column| (format!("{}: {}", task.name, column.name), column))
        })
        .collect();
    let Some(first) = comparison.tasks.first() else { return String::new() };
    let mut rows = String::new();
    for (index, row) in first.rows.iter().enumerate() {
        let scores: String = columns.iter().map(|(_, column)| score(column, index)).collect();
        let _ = write!(
            rows,
            "<tr><th scope=\"row\">{}{}</th>{scores}<td>{}{}</td><td>{}</td><td>{:.0} s</td></tr>",
            swatch(index),
            escape(&row.model),
            grouped(row.params),
            mark(row),
            state(row),
            comparison
                .tasks
                .iter()
                .filter_map(|task| task.rows.get(index))
                .map(|row| row.seconds)
                .sum::<f64>()
        );
    }
    let heads: String = columns.iter().map(|(name, column)| head(name, column)).collect();
    format!(
        "<div class=\"scroll\"><table><thead><tr><th>model</th>{heads}<th>parameters</th>\
         <th>state per sequence</th><th>training</th></tr></thead><tbody>{rows}</tbody></table></div>\
         <p class=\"small\">Scores: mean, and the range over seeds. Parameters and state are those on {}, where the state \
         is what one session holds after {} tokens. Training: seconds of one seed on every task.</p>",
        escape(&first.name),
        first.length
    )
}

/// The figures of one task, a row a model.
pub fn table(task: &TaskComparison) -> String {
    let columns = task.columns();
    let mut rows = String::new();
    for (index, row) in task.rows.iter().enumerate() {
        let scores: String = columns.iter().map(|column| score(column, index)).collect();
        let _ = write!(
            rows,
            "<tr><th scope=\"row\">{}{}</th>{scores}<td>{}{}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td>{:.0} s</td><td>{}</td></tr>",
            swatch(index),
            escape(&row.model),
            grouped(row.params),
            mark(row),
            state(row),
            grouped(row.train_tokens_per_s as usize),
            grouped(row.decode_tokens_per_s as usize),
            row.seconds,
            row.learning_rate
        );
    }
    let heads: String = columns.iter().map(|column| head(&column.name, column)).collect();
    format!(
        "<div class=\"scroll\"><table><thead><tr><th>model</th>{heads}<th>parameters</th>\
         <th>state per sequence</th><th>training tokens/s</th><th>decoding tokens/s</th><th>training</th>\
         <th>learning rate</th></tr></thead><tbody>{rows}</tbody></table></div>\
         <p class=\"small\">Score: mean, and the range over seeds. State: bytes one session holds after {} tokens, \
         from its tensors. Decoding: one session, token by token.</p>",
        task.length
    )
}

/// The learning rates that were tried.
pub fn trials(task: &TaskComparison) -> String {
    let mut rows = String::new();
    for trial in &task.trials {
        let score = trial.score.map_or("diverged".into(), |score| format!("{score:.4}"));
        let loss = trial.loss.map_or(String::new(), |loss| format!("{loss:.4}"));
        let _ = write!(
            rows,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{score}</td><td>{loss}</td></tr>",
            escape(&trial.model),
            trial.learning_rate
        );
    }
    format!(
        "<table><thead><tr><th>model</th><th>learning rate</th><th>{}</th><th>loss</th></tr></thead>\
         <tbody>{rows}</tbody></table><p class=\"small\">Short trainings with the first seed; each model keeps the rate with the \
         best score, of equal ones that with the lowest loss.</p>",
        task.metric.name()
    )
}

fn head(name: &str, column: &Column) -> String {
    let arrow = if column.higher_is_better { "&uarr;" } else { "&darr;" };
    format!("<th>{} {arrow}</th>", escape(name))
}

/// The cell of row `index`, set off when it is the best of the column.
fn score(column: &Column, index: usize) -> String {
    let better = |a: f64, b: f64| if column.higher_is_better { a.max(b) } else { a.min(b) };
    let best = column.values.iter().filter(|value| value.count > 0).map(|value| value.mean).reduce(better);
    let Some(value) = column.values.get(index) else { return "<td></td>".into() };
    let class = if value.count > 0 && Some(value.mean) == best { " class=\"best\"" } else { "" };
    format!("<td{class}>{}</td>", spread(value))
}

fn mark(row: &Row) -> &'static str {
    match row.matching {
        ParameterMatch::Apart => " <abbr title=\"more than 5% from the first model\">&ne;</abbr>",
        ParameterMatch::Reference | ParameterMatch::AsGiven | ParameterMatch::Adjusted => "",
    }
}

fn state(row: &Row) -> String {
    let grows = if row.state_grows { ", growing" } else { "" };
    format!("{}{grows}", bytes(row.state_bytes as f64))
}

fn spread(score: &Spread) -> String {
    match score.count {
        0 => "diverged".into(),
        1 => format!("{:.3}", score.mean),
        _ => format!("{:.3} <small>{:.3}&ndash;{:.3}</small>", score.mean, score.low, score.high),
    }
}

/// 1234567 as 1 234 567, with narrow no-break spaces.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}
