//! Multi-query associative recall (Arora et al. 2023, "Zoology").
//!
//! A row begins with `n` key-value pairs, then asks for every key once:
//!
//! ```text
//! k1 v1 k2 v2 .. kn vn | query at even distances from here, the rest filler
//! ```
//!
//! Keys are drawn from `[1, V/2)` and values from `[V/2, V)`, each without replacement within a row. The
//! queries of the `n` keys go to `n` different places `2 i` after the pairs, `i` in `[0, (T - 2 n) / 2)`, drawn
//! with probability `p(i) ~ a (i + 1)^(a - 1)`: most soon after the pairs, some far away. At a query the input
//! is the key and the target is its value; every other target is [`IGNORE`].
//!
//! Filler is drawn from all tokens but the keys of the row, so a key occurs exactly twice: where it is
//! written and where it is asked for.

mod presets;

pub use presets::{by_name, names};

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::stream::{Purpose, Stream};
use crate::{IGNORE, Tally, TaskError, TokenBatch, score};

/// Name of the task in errors and random streams.
const TASK: &str = "recall";

/// What stands where nothing is written or asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Filler {
    /// Random tokens of the whole vocabulary, the row's keys left out.
    #[default]
    Random,
    /// Token 0, which is neither key nor value.
    Zero,
}

/// Sizes of the recall task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecallConfig {
    /// Vocabulary size `V`: 0 is neither key nor value, keys are `[1, V/2)`, values `[V/2, V)`.
    pub vocab: usize,
    /// Tokens in a row, `T`; at least `4 n`.
    pub length: usize,
    /// Key-value pairs in a row, `n`; every one is asked for once.
    pub pairs: usize,
    /// Exponent `a` of the distribution of query places; smaller is nearer to the pairs.
    #[serde(default = "default_power")]
    pub power: f64,
    /// What stands where nothing is written or asked.
    #[serde(default)]
    pub filler: Filler,
}

fn default_power() -> f64 {
    0.01
}

impl RecallConfig {
    /// A task with the published power 0.01 and random filler.
    pub fn new(vocab: usize, length: usize, pairs: usize) -> Self {
        Self { vocab, length, pairs, power: default_power(), filler: Filler::default() }
    }

    /// The same task with another number of pairs.
    pub fn with_pairs(&self, pairs: usize) -> Self {
        Self { pairs, ..self.clone() }
    }

    /// Checks that rows of these sizes exist.
    ///
    /// # Errors
    /// [`TaskError::Setting`] names the setting, its range and what to change.
    pub fn validate(&self) -> Result<(), TaskError> {
        let fail = |setting, found: String, expected: String, advice: &str| {
            Err(TaskError::Setting { task: TASK, setting, found, expected, advice: advice.into() })
        };
        if self.pairs == 0 {
            return fail("pairs", "0".into(), "at least 1".into(), "ask for one pair or more");
        }
        if u32::try_from(self.vocab).is_err() {
            return fail("vocab", self.vocab.to_string(), format!("at most {}", u32::MAX), "ids are 32-bit");
        }
        if self.pairs.checked_mul(4).is_none_or(|least| least > self.length) {
            return fail(
                "length",
                self.length.to_string(),
                format!("at least 4 x pairs = {}", self.pairs.saturating_mul(4)),
                "make rows longer or use fewer pairs",
            );
        }
        if self.pairs >= self.vocab / 2 {
            return fail(
                "vocab",
                self.vocab.to_string(),
                format!(
                    "at least 2 x (pairs + 1) = {}, so that every pair has a key of its own",
                    2 * (self.pairs + 1)
                ),
                "use a larger vocabulary or fewer pairs",
            );
        }
        if !(self.power.is_finite() && self.power > 0.0) {
            return fail(
                "power",
                self.power.to_string(),
                "a number above 0".into(),
                "the published value is 0.01",
            );
        }
        Ok(())
    }

    fn stream(&self, purpose: Purpose, seed: u64, example: u64) -> Stream {
        let settings = [
            self.vocab as u64,
            self.length as u64,
            self.pairs as u64,
            self.power.to_bits(),
            match self.filler {
                Filler::Random => 0,
                Filler::Zero => 1,
            },
        ];
        Stream::new(TASK, &settings, purpose, seed, example)
    }
}

/// Batch number `index` of the training data of `seed`: rows `index * batch ..` of one endless sequence of rows.
///
/// A pure function of its arguments. Rows do not depend on how they are cut into batches.
///
/// # Errors
/// [`TaskError::Setting`] when rows of these sizes do not exist or `batch` is 0.
pub fn batch(config: &RecallConfig, seed: u64, index: u64, batch: usize) -> Result<TokenBatch, TaskError> {
    rows(config, Purpose::Train, seed, index, batch)
}

/// As [`batch()`], of the evaluation data: another random stream, so no training row comes back by construction.
///
/// # Errors
/// As [`batch()`].
pub fn evaluation_batch(
    config: &RecallConfig,
    seed: u64,
    index: u64,
    batch: usize,
) -> Result<TokenBatch, TaskError> {
    rows(config, Purpose::Evaluate, seed, index, batch)
}

/// Accuracy of `predictions`, `[batch * time]` token ids, by the number of pairs in the row.
///
/// # Errors
/// [`TaskError::Predictions`] when there is not one prediction per position.
pub fn score_by_pairs(batch: &TokenBatch, predictions: &[u32]) -> Result<BTreeMap<usize, Tally>, TaskError> {
    score(batch, predictions)?;
    let mut tallies: BTreeMap<usize, Tally> = BTreeMap::new();
    for ((_, targets), predicted) in batch.rows().zip(batch.cut(predictions)) {
        let pairs = targets.iter().filter(|&&target| target != IGNORE).count();
        let correct = targets.iter().zip(predicted).filter(|(target, p)| **target == i64::from(**p)).count();
        *tallies.entry(pairs).or_default() += Tally { correct, total: pairs };
    }
    Ok(tallies)
}

fn rows(
    config: &RecallConfig,
    purpose: Purpose,
    seed: u64,
    index: u64,
    batch: usize,
) -> Result<TokenBatch, TaskError> {
    config.validate()?;
    if batch == 0 {
        return Err(TaskError::Setting {
            task: TASK,
            setting: "batch",
            found: "0".into(),
            expected: "at least 1".into(),
            advice: "ask for one row or more".into(),
        });
    }
    let mut result = TokenBatch::with_capacity(batch, config.length);
    for row in 0..batch as u64 {
        let example = index.wrapping_mul(batch as u64).wrapping_add(row);
        push_row(config, &mut config.stream(purpose, seed, example), &mut result);
    }
    Ok(result)
}

/// Adds one row to `batch`. Draws, in this order: keys, values, query places, filler.
fn push_row(config: &RecallConfig, stream: &mut Stream, batch: &mut TokenBatch) {
    let RecallConfig { vocab, length, pairs, power, filler } = *config;
    let first_value = vocab / 2;
    let keys = draw(stream, 1, first_value, pairs);
    let values = draw(stream, first_value, vocab, pairs);
    let places = query_places(stream, (length - 2 * pairs) / 2, pairs, power);

    let mut is_key = vec![false; vocab];
    for &key in &keys {
        is_key[key as usize] = true;
    }
    let mut tokens = vec![None; length];
    let mut targets = vec![IGNORE; length];
    for (i, (&key, &value)) in keys.iter().zip(&values).enumerate() {
        tokens[2 * i] = Some(key);
        tokens[2 * i + 1] = Some(value);
        let query = 2 * pairs + 2 * places[i];
        tokens[query] = Some(key);
        targets[query] = i64::from(value);
    }
    batch.tokens.extend(tokens.into_iter().map(|token| match (token, filler) {
        (Some(token), _) => token,
        (None, Filler::Zero) => 0,
        (None, Filler::Random) => loop {
            let token = stream.below(vocab as u64);
            if !is_key[token as usize] {
                break token as u32;
            }
        },
    }));
    batch.targets.extend(targets);
    batch.batch += 1;
}

/// `count` different tokens of `[from, to)` in random order: the first steps of a Fisher-Yates shuffle.
fn draw(stream: &mut Stream, from: usize, to: usize, count: usize) -> Vec<u32> {
    let mut tokens: Vec<u32> = (from as u32..to as u32).collect();
    for i in 0..count {
        let other = i + stream.below((tokens.len() - i) as u64) as usize;
        tokens.swap(i, other);
    }
    tokens.truncate(count);
    tokens
}

/// `count` different places of `[0, space)`, drawn one after the other with `p(i) ~ (i + 1)^(power - 1)`.
///
/// The `count` earliest of independent exponential clocks with these rates, which is the same distribution
/// (Efraimidis and Spirakis 2006). The constant factor `a` of `p` cancels.
fn query_places(stream: &mut Stream, space: usize, count: usize, power: f64) -> Vec<usize> {
    let mut clocks: Vec<(f64, usize)> =
        (0..space).map(|i| (-stream.unit().ln() * ((i + 1) as f64).powf(1.0 - power), i)).collect();
    clocks.sort_by(|a, b| a.0.total_cmp(&b.0));
    clocks.truncate(count);
    clocks.into_iter().map(|(_, place)| place).collect()
}
