//! Scores on strings of a formal language, by their length.

use std::ops::RangeInclusive;

use burn::tensor::Tensor;
use fastweight_models::LanguageModel;
use fastweight_tasks::TokenBatch;
use fastweight_tasks::formal::{self, FormalConfig, StringTally, TEST_STRINGS};
use serde::{Deserialize, Serialize};

use super::{ROWS, device_of, not_finite};
use crate::diagnose::diverged;
use crate::error::TrainError;
use crate::task::Task;
use crate::trainer::{offsets, token_tensor};

/// Strings of each single length that [`by_length`] scores.
const OF_ONE_LENGTH: usize = 256;

/// How well strings of some lengths are tracked.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LengthScore {
    /// Symbols of the shortest strings.
    pub shortest: usize,
    /// Symbols of the longest strings.
    pub longest: usize,
    /// Strings that were read.
    pub tested: usize,
    /// Answers that were asked for, one for each symbol.
    pub answers: usize,
    /// Share of right answers, one for each symbol.
    #[serde(rename = "answers_right", alias = "steps")]
    pub steps: f64,
    /// Share of strings in which every answer is right.
    #[serde(rename = "strings_right", alias = "strings")]
    pub strings: f64,
}

/// Scores at the training lengths and beyond them, over `batches` batches of strings each (0: all of the test strings).
pub(super) fn bins(
    model: &LanguageModel,
    config: &FormalConfig,
    batches: usize,
) -> Result<[LengthScore; 2], TrainError> {
    let count = if batches == 0 { TEST_STRINGS } else { batches.saturating_mul(ROWS).min(TEST_STRINGS) };
    let [within, beyond] = config.bins();
    Ok([of_lengths(model, config, within, count)?, of_lengths(model, config, beyond, count)?])
}

/// Scores on strings of single lengths: an eighth of the longest training length, a quarter, .. up to four times it.
/// Empty for other tasks than a formal language.
///
/// # Errors
/// As [`super::score`].
pub fn by_length(model: &LanguageModel, task: &Task) -> Result<Vec<LengthScore>, TrainError> {
    let Task::Formal(config) = task else { return Ok(Vec::new()) };
    let lengths = [config.longest / 8, config.longest / 4, config.longest / 2].into_iter();
    let lengths = lengths.filter(|length| *length >= config.shortest);
    lengths
        .chain([1, 2, 4].map(|times| times * config.longest))
        .map(|length| of_lengths(model, config, length..=length, OF_ONE_LENGTH))
        .collect()
}

fn of_lengths(
    model: &LanguageModel,
    config: &FormalConfig,
    lengths: RangeInclusive<usize>,
    count: usize,
) -> Result<LengthScore, TrainError> {
    let mut tally = StringTally::default();
    for first in (0..count).step_by(ROWS) {
        let strings = ROWS.min(count - first);
        let batch = formal::evaluation_batch(config.language, &lengths, first as u64, strings)?;
        tally += formal::score_strings(&batch, &predictions(model, &batch)?)?;
    }
    let share = |tally: fastweight_tasks::Tally| tally.accuracy().unwrap_or_default();
    Ok(LengthScore {
        shortest: *lengths.start(),
        longest: *lengths.end(),
        tested: tally.strings.total,
        answers: tally.steps.total,
        steps: share(tally.steps),
        strings: share(tally.strings),
    })
}

/// The most likely token at every position of `batch`, the first of equals.
fn predictions(model: &LanguageModel, batch: &TokenBatch) -> Result<Vec<u32>, TrainError> {
    let tokens = token_tensor(batch, &device_of(model));
    let (hidden, _) = model
        .hidden(tokens.clone(), None, offsets(batch).as_ref())
        .map_err(|error| diverged(error, model, None))?;
    let hidden: Tensor<2> = hidden.flatten(0, 1);
    let logits = model.logits(hidden);
    let [_, vocab] = logits.dims();
    let logits: Vec<f32> =
        logits.into_data().try_to_vec().map_err(|error| TrainError::device("the logits", error))?;
    if !logits.iter().all(|logit| logit.is_finite()) {
        return Err(not_finite("a logit", model, tokens)?);
    }
    let best = |row: &[f32]| {
        let first = (0, f32::NEG_INFINITY);
        (0u32..).zip(row).fold(first, |best, (id, &logit)| if logit > best.1 { (id, logit) } else { best }).0
    };
    Ok(logits.chunks(vocab).map(best).collect())
}
