//! The plots of a comparison, task by task.

use fastweight_memory::MixerConfig;
use fastweight_models::ModelConfig;

use super::plot::{Axis, Scale, Series, draw};
use crate::compare::{Entry, TaskComparison};
use crate::error::TrainError;
use crate::task::Metric;

/// Sequence lengths of the plot of state sizes, as powers of two.
const LENGTHS: std::ops::RangeInclusive<u32> = 4..=16;

/// A drawn plot.
#[derive(Debug)]
pub struct Chart {
    /// Heading.
    pub title: &'static str,
    /// The SVG element.
    pub svg: String,
    /// What the reader sees.
    pub caption: String,
    /// Name of a dashed reference line, where there is one.
    pub reference: Option<&'static str>,
}

/// Every plot that `task` has data for, except that of the states.
pub fn all(task: &TaskComparison) -> Result<Vec<Chart>, TrainError> {
    let mut charts = vec![score_by_tokens(task)?];
    if task.entries.iter().any(|entry| !entry.by_pairs.is_empty()) {
        charts.push(recall_by_pairs(task)?);
    }
    if task.entries.iter().any(|entry| !entry.by_length.is_empty()) {
        charts.push(answers_by_length(task)?);
    }
    Ok(charts)
}

fn score_by_tokens(task: &TaskComparison) -> Result<Chart, TrainError> {
    let (title, label, range) = match task.metric {
        Metric::Accuracy => ("Accuracy against training tokens", "accuracy", Some(0.0..1.0)),
        Metric::Strings => {
            ("Long strings right against training tokens", "long strings right", Some(0.0..1.0))
        }
        Metric::BitsPerByte => ("Bits per byte against training tokens", "bits per byte, held out", None),
    };
    let x = Axis { label: "training tokens", scale: Scale::Linear, format: count, range: None };
    let y = Axis { label, scale: Scale::Linear, format: short, range };
    let series = per_model(task, |entry| entry.curve.iter().map(|(t, s)| (*t as f64, *s)).collect());
    let svg = draw(title, &x, &y, &series)?;
    Ok(Chart { title, svg, caption: over_seeds(task), reference: None })
}

fn recall_by_pairs(task: &TaskComparison) -> Result<Chart, TrainError> {
    let title = "Recall against number of pairs";
    let x = Axis { label: "key-value pairs in a row", scale: Scale::Log2, format: short, range: None };
    let y = Axis { label: "accuracy", scale: Scale::Linear, format: short, range: Some(0.0..1.0) };
    let series = per_model(task, |entry| entry.by_pairs.iter().map(|(n, s)| (*n as f64, *s)).collect());
    let svg = draw(title, &x, &y, &series)?;
    let trained = task.recipe.task.pairs.unwrap_or_default();
    let caption = format!(
        "Trained with {trained} pairs in {} tokens, asked with fewer and more in rows of the same length. {}",
        task.length,
        over_seeds(task)
    );
    Ok(Chart { title, svg, caption, reference: None })
}

fn answers_by_length(task: &TaskComparison) -> Result<Chart, TrainError> {
    let title = "Right answers against the length of the string";
    let x = Axis { label: "symbols in the string", scale: Scale::Log2, format: short, range: None };
    let y =
        Axis { label: "accuracy, per symbol", scale: Scale::Linear, format: short, range: Some(0.0..1.0) };
    let mut series = per_model(task, |entry| {
        entry.by_length.iter().map(|score| (score.longest as f64, score.steps)).collect()
    });
    let lengths = || series.iter().flat_map(|series| &series.line).map(|point| point.0);
    let ends = [lengths().fold(f64::INFINITY, f64::min), lengths().fold(0.0, f64::max)];
    if let Some(language) = task.recipe.task.language {
        series.push(Series::reference(ends.map(|length| (length, language.chance())).into()));
    }
    let svg = draw(title, &x, &y, &series)?;
    let caption = format!(
        "Trained on strings of at most {} symbols; everything to the right of that is longer than anything seen. {}",
        task.length,
        over_seeds(task)
    );
    Ok(Chart { title, svg, caption, reference: Some("chance") })
}

/// The plot of state sizes.
pub fn state_by_length(task: &TaskComparison) -> Result<Chart, TrainError> {
    let title = "State of one sequence against its length";
    let x = Axis { label: "tokens read", scale: Scale::Log2, format: short, range: None };
    let y = Axis { label: "bytes", scale: Scale::Log2, format: bytes, range: None };
    let line = |config: &ModelConfig| -> Vec<(f64, f64)> {
        LENGTHS
            .map(|power| 1usize << power)
            .map(|n| (n as f64, config.state_bytes(n).total() as f64))
            .collect()
    };
    let model = |(index, model): (usize, &crate::recipe::ResolvedModel)| Series {
        model: index,
        line: line(&model.config),
        seeds: Vec::new(),
        dashed: false,
    };
    let mut series: Vec<Series> = task.models.iter().enumerate().map(model).collect();
    let mut reference = None;
    let attention = MixerConfig::by_name("softmax_attention");
    if let (Some(first), Some(attention)) = (task.models.first(), attention) {
        let cache = ModelConfig { mixers: vec![attention], ..first.config.clone() };
        series.push(Series::reference(line(&cache)));
        reference = Some("KV cache of the same width and layers");
    }
    let svg = draw(title, &x, &y, &series)?;
    let caption =
        "Bytes a session holds (float32), by the ledger; models with equal state lie on one line.".into();
    Ok(Chart { title, svg, caption, reference })
}

fn per_model(task: &TaskComparison, points: impl Fn(&Entry) -> Vec<(f64, f64)>) -> Vec<Series> {
    let series = |(index, model): (usize, &crate::recipe::ResolvedModel)| {
        let own = task.entries.iter().filter(|entry| entry.model == model.name);
        let seeds: Vec<Vec<(f64, f64)>> = own.map(&points).collect();
        let line = mean(&seeds);
        Series { model: index, line, seeds: if seeds.len() > 1 { seeds } else { Vec::new() }, dashed: false }
    };
    task.models.iter().enumerate().map(series).collect()
}

/// The mean of lines, point by point as far as all of them go. Seeds differ in their place too where sequences differ in
/// length.
fn mean(lines: &[Vec<(f64, f64)>]) -> Vec<(f64, f64)> {
    let points = lines.iter().map(Vec::len).min().unwrap_or_default();
    let count = lines.len().max(1) as f64;
    let at = |i: usize| {
        let sum = lines.iter().fold((0.0, 0.0), |sum, line| (sum.0 + line[i].0, sum.1 + line[i].1));
        (sum.0 / count, sum.1 / count)
    };
    (0..points).map(at).collect()
}

fn over_seeds(task: &TaskComparison) -> String {
    match task.recipe.train.seeds.len() {
        1 => "One seed.".into(),
        n => format!("Mean of {n} seeds; thin lines are the seeds."),
    }
}

/// 1200 as 1.2k.
pub fn count(value: f64) -> String {
    let (value, unit) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    format!("{}{unit}", short(value))
}

/// 16640 as 16.25 KiB.
pub fn bytes(value: f64) -> String {
    let (value, unit) = match value {
        v if v >= 1073741824.0 => (value / 1073741824.0, "GiB"),
        v if v >= 1048576.0 => (value / 1048576.0, "MiB"),
        v if v >= 1024.0 => (value / 1024.0, "KiB"),
        _ => (value, "B"),
    };
    format!("{} {unit}", short(value))
}

/// At most two decimals, without trailing zeros.
fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
