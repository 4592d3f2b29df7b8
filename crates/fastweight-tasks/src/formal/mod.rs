//! Strings of formal languages: what a state can track, and whether it still can beyond the training length.
//!
//! A model reads a string symbol by symbol and is asked after every one, for parity whether the number of ones so far
//! is odd. It is trained on short strings and scored on two lengths (reported apart): those of the training, and up
//! to twice as long. A string counts as right only when every answer in it is.
//!
//! A batch packs its strings, of different lengths, into one row of documents: there is no padding that a state
//! could read or a score could count.

mod language;

pub use language::Language;

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::stream::{Purpose, Stream};
use crate::{Tally, TaskError, TokenBatch, score};

/// Name of the task in errors and random streams.
const TASK: &str = "formal language";
/// Strings that one length range is scored on.
pub const TEST_STRINGS: usize = 2000;
/// Longest string that can be trained on; scoring needs four times as much.
const LONGEST: usize = 1 << 22;

/// A language and the strings a model is trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormalConfig {
    /// The language.
    pub language: Language,
    /// Symbols of the shortest training strings.
    #[serde(default = "default_shortest")]
    pub shortest: usize,
    /// Symbols of the longest training strings.
    #[serde(default = "default_longest")]
    pub longest: usize,
    /// Different training strings; batches draw from them.
    #[serde(default = "default_strings")]
    pub strings: usize,
}

fn default_shortest() -> usize {
    2
}
fn default_longest() -> usize {
    50
}
fn default_strings() -> usize {
    10_000
}

impl FormalConfig {
    /// 10,000 training strings of 2 to 50 symbols.
    pub fn new(language: Language) -> Self {
        Self {
            language,
            shortest: default_shortest(),
            longest: default_longest(),
            strings: default_strings(),
        }
    }

    /// Checks that there are such strings.
    ///
    /// # Errors
    /// [`TaskError::Setting`] names the setting, its range and what to change.
    pub fn validate(&self) -> Result<(), TaskError> {
        let fail = |setting, found: usize, expected: String, advice: &str| {
            let found = found.to_string();
            Err(TaskError::Setting { task: TASK, setting, found, expected, advice: advice.into() })
        };
        if self.shortest == 0 {
            return fail("shortest", 0, "at least 1".into(), "a string has one symbol or more");
        }
        if self.longest > LONGEST {
            return fail("longest", self.longest, format!("at most {LONGEST}"), "train on shorter strings");
        }
        if self.longest < self.shortest {
            let expected = format!("at least shortest = {}", self.shortest);
            return fail("longest", self.longest, expected, "make the longest strings longer");
        }
        if self.strings == 0 {
            return fail("strings", 0, "at least 1".into(), "10000 is usual");
        }
        Ok(())
    }

    /// Token ids: the symbols, then the answers.
    pub fn vocab(&self) -> usize {
        self.language.symbols() + self.language.answers()
    }

    /// Symbols of the average training string.
    pub fn mean_length(&self) -> f64 {
        (self.shortest as f64 + self.longest as f64) / 2.0
    }

    /// The lengths that scores are reported for: those of the training, then beyond them up to twice the longest.
    pub fn bins(&self) -> [RangeInclusive<usize>; 2] {
        [self.shortest..=self.longest, self.longest + 1..=2 * self.longest]
    }
}

/// Right answers, and strings in which every answer is right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StringTally {
    /// One for each symbol.
    pub steps: Tally,
    /// One for each string.
    pub strings: Tally,
}

impl std::ops::AddAssign for StringTally {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.strings += other.strings;
    }
}

/// Batch number `index` of the training data of `seed`: `batch` strings drawn from the training strings, packed.
///
/// A pure function of its arguments. Strings do not depend on how they are cut into batches.
///
/// # Errors
/// [`TaskError::Setting`] when there are no such strings or `batch` is 0.
pub fn batch(config: &FormalConfig, seed: u64, index: u64, batch: usize) -> Result<TokenBatch, TaskError> {
    config.validate()?;
    let lengths = config.shortest..=config.longest;
    let strings = config.strings as u64;
    pack(config.language, &lengths, batch, |row| {
        let example = index.wrapping_mul(batch as u64).wrapping_add(row);
        let mut order = Stream::new("formal language, order", &[strings], Purpose::Train, seed, example);
        stream(config.language, &lengths, Purpose::Train, seed, order.below(strings))
    })
}

/// Strings `first ..  first + count` of the evaluation data with the given lengths, packed; they are drawn apart from
/// any training strings.
///
/// # Errors
/// [`TaskError::Setting`] when there are no such strings or `count` is 0.
pub fn evaluation_batch(
    language: Language,
    lengths: &RangeInclusive<usize>,
    first: u64,
    count: usize,
) -> Result<TokenBatch, TaskError> {
    if *lengths.start() == 0 || lengths.is_empty() {
        return Err(TaskError::Setting {
            task: TASK,
            setting: "lengths",
            found: format!("{}..={}", lengths.start(), lengths.end()),
            expected: "lengths from 1 on, the shortest first".into(),
            advice: "a string has one symbol or more".into(),
        });
    }
    pack(language, lengths, count, |row| {
        stream(language, lengths, Purpose::Evaluate, 0, first.wrapping_add(row))
    })
}

/// Right answers and right strings of `predictions`, one token id for each position of a packed `batch`.
///
/// # Errors
/// [`TaskError::Predictions`] when there is not one prediction per position.
pub fn score_strings(batch: &TokenBatch, predictions: &[u32]) -> Result<StringTally, TaskError> {
    let steps = score(batch, predictions)?;
    let right = |((_, targets), predicted): ((&[u32], &[i64]), &[u32])| {
        targets.iter().zip(predicted).all(|(target, p)| *target == i64::from(*p))
    };
    let strings: Vec<bool> = batch.rows().zip(batch.cut(predictions)).map(right).collect();
    let correct = strings.iter().filter(|right| **right).count();
    Ok(StringTally { steps, strings: Tally { correct, total: strings.len() } })
}

fn stream(
    language: Language,
    lengths: &RangeInclusive<usize>,
    purpose: Purpose,
    seed: u64,
    string: u64,
) -> Stream {
    let name = format!("{TASK} {}", language.name());
    Stream::new(&name, &[*lengths.start() as u64, *lengths.end() as u64], purpose, seed, string)
}

/// `count` strings, each drawn from its stream: first its length, then its symbols.
fn pack(
    language: Language,
    lengths: &RangeInclusive<usize>,
    count: usize,
    stream: impl Fn(u64) -> Stream,
) -> Result<TokenBatch, TaskError> {
    if count == 0 {
        return Err(TaskError::Setting {
            task: TASK,
            setting: "batch",
            found: "0".into(),
            expected: "at least 1".into(),
            advice: "ask for one string or more".into(),
        });
    }
    let (mut tokens, mut targets, mut documents) = (Vec::new(), Vec::new(), Vec::with_capacity(count));
    for row in 0..count as u64 {
        let mut stream = stream(row);
        let spread = (lengths.end() - lengths.start()) as u64 + 1;
        let length = lengths.start() + stream.below(spread) as usize;
        language.draw(&mut stream, length, &mut tokens, &mut targets);
        documents.push(length);
    }
    let time = tokens.len();
    Ok(TokenBatch { tokens, targets, batch: 1, time, documents: Some(documents) })
}
