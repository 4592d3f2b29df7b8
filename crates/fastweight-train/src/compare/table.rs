//! The table of a comparison: one row per model, over its seeds.

use super::Entry;
use crate::recipe::{ParameterMatch, ResolvedModel};

/// Mean and range of a figure over seeds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest.
    pub low: f64,
    /// Largest.
    pub high: f64,
    /// How many seeds.
    pub count: usize,
}

impl Spread {
    /// Of these values; all zero when there are none.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.collect();
        let count = values.len();
        if count == 0 {
            return Spread { mean: 0.0, low: 0.0, high: 0.0, count };
        }
        Spread {
            mean: values.iter().sum::<f64>() / count as f64,
            low: values.iter().copied().fold(f64::INFINITY, f64::min),
            high: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            count,
        }
    }
}

/// One model's figures over its seeds.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The model.
    pub model: String,
    /// Final score.
    pub score: Spread,
    /// Trained parameters.
    pub params: usize,
    /// How that number relates to the first model's.
    pub matching: ParameterMatch,
    /// Bytes a session holds after one training sequence.
    pub state_bytes: usize,
    /// Training tokens per second, mean.
    pub train_tokens_per_s: f64,
    /// Tokens per second of one session decoding one by one, mean.
    pub decode_tokens_per_s: f64,
    /// Seconds of training, mean.
    pub seconds: f64,
    /// Peak learning rate.
    pub learning_rate: f64,
}

/// One row for each of `models`, from its `entries`.
pub fn rows(models: &[ResolvedModel], entries: &[Entry]) -> Vec<Row> {
    let row = |model: &ResolvedModel| {
        let own: Vec<&Entry> = entries.iter().filter(|entry| entry.model == model.name).collect();
        let spread = |figure: fn(&Entry) -> f64| Spread::of(own.iter().map(|entry| figure(entry)));
        Row {
            model: model.name.clone(),
            score: spread(|entry| entry.score),
            params: model.parameters,
            matching: model.matching,
            state_bytes: own.first().map_or(0, |entry| entry.state_bytes),
            train_tokens_per_s: spread(|entry| entry.train_tokens_per_s).mean,
            decode_tokens_per_s: spread(|entry| entry.decode_tokens_per_s).mean,
            seconds: spread(|entry| entry.seconds).mean,
            learning_rate: model.learning_rate,
        }
    };
    models.iter().map(row).collect()
}
