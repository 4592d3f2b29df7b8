//! The table of a comparison: one row per model, over its seeds.

use super::{Entry, TaskComparison};
use crate::evaluate::LengthScore;
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

/// Scores on strings of some lengths over a model's seeds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BinRow {
    /// Symbols of the shortest strings.
    pub shortest: usize,
    /// Symbols of the longest strings.
    pub longest: usize,
    /// Share of right answers.
    pub steps: Spread,
    /// Share of strings in which every answer is right.
    pub strings: Spread,
}

/// One model's figures over its seeds.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The model.
    pub model: String,
    /// Final score.
    pub score: Spread,
    /// Formal language: at the training lengths and beyond them, the share of right answers and of right strings.
    pub bins: Vec<BinRow>,
    /// Trained parameters.
    pub params: usize,
    /// How that number relates to the first model's.
    pub matching: ParameterMatch,
    /// Bytes a session holds after one training sequence.
    pub state_bytes: usize,
    /// Whether these grow with every token.
    pub state_grows: bool,
    /// Training tokens per second, mean.
    pub train_tokens_per_s: f64,
    /// Tokens per second of one session decoding one by one, mean.
    pub decode_tokens_per_s: f64,
    /// Seconds of training, mean.
    pub seconds: f64,
    /// Peak learning rate.
    pub learning_rate: f64,
}

/// A column of scores, one for each model.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// What it shows.
    pub name: String,
    /// Whether a higher figure is better.
    pub higher_is_better: bool,
    /// The figure of each row.
    pub values: Vec<Spread>,
}

impl TaskComparison {
    /// The scores of the task, the main one first. A formal language has four: right strings and right answers beyond
    /// the training lengths, then at them.
    pub fn columns(&self) -> Vec<Column> {
        let higher_is_better = self.metric.higher_is_better();
        let column = |name: String, figure: &dyn Fn(&Row) -> Spread| Column {
            name,
            higher_is_better,
            values: self.rows.iter().map(figure).collect(),
        };
        // Rows of models that diverged have none.
        let Some(bins) = self.rows.iter().map(|row| &row.bins).find(|bins| !bins.is_empty()) else {
            return vec![column(self.metric.name().into(), &|row| row.score)];
        };
        let of_bin = |(index, bin): (usize, &BinRow)| {
            let lengths = format!("{}-{}", bin.shortest, bin.longest);
            let figure = move |row: &Row, pick: fn(&BinRow) -> Spread| {
                row.bins.get(index).map_or(Spread::of(std::iter::empty()), pick)
            };
            [
                column(format!("strings right, {lengths}"), &|row| figure(row, |bin| bin.strings)),
                column(format!("answers right, {lengths}"), &|row| figure(row, |bin| bin.steps)),
            ]
        };
        bins.iter().enumerate().rev().flat_map(of_bin).collect()
    }

    /// The scores that stand for the task beside other tasks: the main one, and for a formal language the share of
    /// right answers beyond the training lengths, which has a chance level.
    pub fn headline(&self) -> Vec<Column> {
        let mut columns = self.columns();
        columns.truncate(2);
        columns
    }
}

/// One row for each of `models`, from its `entries`.
pub fn rows(models: &[ResolvedModel], entries: &[Entry]) -> Vec<Row> {
    let row = |model: &ResolvedModel| {
        let own: Vec<&Entry> = entries.iter().filter(|entry| entry.model == model.name).collect();
        let spread = |figure: fn(&Entry) -> f64| Spread::of(own.iter().map(|entry| figure(entry)));
        let bins = own.first().map_or(&[][..], |entry| &entry.bins);
        let bin = |(index, bin): (usize, &LengthScore)| {
            let all = || own.iter().filter_map(|entry| entry.bins.get(index));
            BinRow {
                shortest: bin.shortest,
                longest: bin.longest,
                steps: Spread::of(all().map(|bin| bin.steps)),
                strings: Spread::of(all().map(|bin| bin.strings)),
            }
        };
        Row {
            model: model.name.clone(),
            score: spread(|entry| entry.score),
            bins: bins.iter().enumerate().map(bin).collect(),
            params: model.parameters,
            matching: model.matching,
            state_bytes: own.first().map_or(0, |entry| entry.state_bytes),
            state_grows: model.config.state_grows(),
            train_tokens_per_s: spread(|entry| entry.train_tokens_per_s).mean,
            decode_tokens_per_s: spread(|entry| entry.decode_tokens_per_s).mean,
            seconds: spread(|entry| entry.seconds).mean,
            learning_rate: model.learning_rate,
        }
    };
    models.iter().map(row).collect()
}
