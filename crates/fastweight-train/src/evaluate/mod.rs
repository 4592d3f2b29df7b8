//! Scores and speeds of a model.
//!
//! Models come without gradients (`Module::valid`).

mod routing;
mod strings;

use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fastweight_memory::{MemoryError, State};
use fastweight_models::{LanguageModel, ModelState};
use fastweight_ops::loss::{Score as Count, count_correct, cross_entropy};
use fastweight_tasks::recall::{self, RecallConfig};
use fastweight_tasks::text::bits_per_byte;
use fastweight_tasks::{IGNORE, TokenBatch};

pub use routing::{LayerLoad, Routing, routing};
pub use strings::{LengthScore, by_length};

use crate::diagnose::{diverged, first_non_finite};
use crate::error::TrainError;
use crate::task::{Metric, Task, TextTask};
use crate::trainer::{scored_logits, token_tensor};

/// Rows of an evaluation batch of recall.
pub const ROWS: usize = 64;
/// Seed of recall's evaluation data, the same for every model.
const EVALUATION_SEED: u64 = 0;
/// Most parts of the held-out text that are read side by side.
pub const LANES: usize = 16;

/// How well a model does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// In the unit of `metric`.
    pub score: f64,
    /// What it measures.
    pub metric: Metric,
    /// Mean loss in nats per scored token; of a text only.
    pub loss: Option<f64>,
    /// Scored tokens.
    pub scored: usize,
    /// Formal language: at the training lengths, then beyond them.
    pub bins: Option<[LengthScore; 2]>,
}

/// Scores `model` on `batches` batches of the task's evaluation data, none of which it was trained on.
///
/// Recall: accuracy over `batches` x 64 rows. Formal language: strings right beyond the training length, of `batches` x
/// 64 (0: 2,000). Text: held-out bits per byte; the held-out text is cut into up to 16
/// lanes read side by side, and `batches` windows of each lane are read (0: all). A state of fixed size is carried
/// from window to window, so each lane is read as one text. Attention whose state grows is never shown more
/// than the context it was trained on: every window is half of it, and is read after the half before it.
///
/// # Errors
/// The model refuses its input, for example because its vocabulary is smaller than the task's, or has diverged: its
/// logits are not finite.
pub fn score(model: &LanguageModel, task: &Task, batches: usize) -> Result<Score, TrainError> {
    match task {
        Task::Recall(config) => {
            let count = recall_count(model, config, batches)?;
            let score = count.correct as f64 / count.scored.max(1) as f64;
            Ok(Score { score, metric: Metric::Accuracy, loss: None, scored: count.scored, bins: None })
        }
        Task::Formal(config) => {
            let bins = strings::bins(model, config, batches)?;
            let scored = bins.iter().map(|bin| bin.answers).sum();
            Ok(Score {
                score: bins[1].strings,
                metric: Metric::Strings,
                loss: None,
                scored,
                bins: Some(bins),
            })
        }
        Task::Text(text) => text_score(model, text, batches),
    }
}

/// Accuracy on recall with other numbers of pairs in rows of the same length: 1, 2, 4, .. as far as they fit,
/// and the task's own. Empty for other tasks.
///
/// # Errors
/// As [`score`].
pub fn recall_by_pairs(
    model: &LanguageModel,
    task: &Task,
    batches: usize,
) -> Result<Vec<(usize, f64)>, TrainError> {
    let Task::Recall(config) = task else { return Ok(Vec::new()) };
    let mut numbers: Vec<usize> = std::iter::successors(Some(1), |n| Some(n * 2))
        .take_while(|n| config.with_pairs(*n).validate().is_ok())
        .chain([config.pairs])
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    let accuracy = |pairs: usize| {
        let count = recall_count(model, &config.with_pairs(pairs), batches)?;
        Ok((pairs, count.correct as f64 / count.scored.max(1) as f64))
    };
    numbers.into_iter().map(accuracy).collect()
}

/// Tokens per second of one session decoding `tokens` tokens one by one.
///
/// # Errors
/// The model refuses its input.
pub fn decode_tokens_per_s(model: &LanguageModel, vocab: usize, tokens: usize) -> Result<f64, TrainError> {
    let device = device_of(model);
    let mut state = model.zero_state(1, &device);
    let mut start = Instant::now();
    let warm_up = tokens / 8;
    for position in 0..warm_up + tokens {
        if position == warm_up {
            start = Instant::now();
        }
        let (logits, next) = model
            .step(single((position % vocab.max(1)) as i64, &device), state)
            .map_err(|error| diverged(error, model, None))?;
        state = next;
        // Reading the logits is part of decoding.
        let _ = logits.into_data();
    }
    Ok(tokens as f64 / start.elapsed().as_secs_f64())
}

/// Bytes that a session holds after reading `tokens` tokens, from its tensors.
///
/// # Errors
/// The model refuses its input.
pub fn state_bytes(model: &LanguageModel, vocab: usize, tokens: usize) -> Result<usize, TrainError> {
    let device = device_of(model);
    let ids: Vec<i64> = (0..tokens).map(|i| (i % vocab.max(1)) as i64).collect();
    let (_, state) = model
        .forward(Tensor::from_data(TensorData::new(ids, [1, tokens]), &device), None, None)
        .map_err(|error| diverged(error, model, None))?;
    Ok(state.bytes())
}

/// The device a model lives on.
pub(crate) fn device_of(model: &LanguageModel) -> Device {
    model.devices().into_iter().next().unwrap_or_default()
}

pub(crate) fn single(id: i64, device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(vec![id], [1]), device)
}

fn recall_count(model: &LanguageModel, config: &RecallConfig, batches: usize) -> Result<Count, TrainError> {
    let device = device_of(model);
    let mut total = Count::default();
    for index in 0..batches.max(1) as u64 {
        let batch = recall::evaluation_batch(config, EVALUATION_SEED, index, ROWS)?;
        let tokens = token_tensor(&batch, &device);
        let (hidden, _) =
            model.hidden(tokens.clone(), None, None).map_err(|error| diverged(error, model, None))?;
        let (logits, targets) = scored_logits(model, hidden, &batch);
        if !logits.clone().into_data().iter::<f32>().all(f32::is_finite) {
            return Err(not_finite("a logit", model, tokens)?);
        }
        let count = count_correct(&logits, &targets).map_err(MemoryError::from)?;
        total.correct += count.correct;
        total.scored += count.scored;
    }
    Ok(total)
}

fn text_score(model: &LanguageModel, text: &TextTask, windows: usize) -> Result<Score, TrainError> {
    let lanes = lanes(text);
    let grows = grows(model);
    let window = if grows { (text.context / 2).max(1) } else { text.context };
    let device = device_of(model);
    let (mut nats, mut scored) = (0.0, 0);
    let mut state: Option<ModelState> = None;
    let count = lanes.time.div_ceil(window);
    for index in 0..if windows == 0 { count } else { windows.min(count) } {
        let range = |index: usize| index * window..((index + 1) * window).min(lanes.time);
        let part = columns(&lanes, range(index));
        if grows && index > 0 {
            let before = columns(&lanes, range(index - 1));
            let read = model.hidden(token_tensor(&before, &device), None, None);
            state = Some(read.map_err(|error| diverged(error, model, None))?.1);
        }
        let tokens = token_tensor(&part, &device);
        let (logits, after) = model
            .forward(tokens.clone(), state.take(), None)
            .map_err(|error| diverged(error, model, None))?;
        state = (!grows).then_some(after);
        let loss = cross_entropy(logits.flatten(0, 1), &part.targets).map_err(MemoryError::from)?;
        let value = f64::from(loss.into_scalar::<f32>());
        if !value.is_finite() {
            return Err(not_finite("the loss", model, tokens)?);
        }
        nats += value * part.scored() as f64;
        scored += part.scored();
    }
    let loss = nats / scored.max(1) as f64;
    // Bytes per token of the whole held-out text stand for those of the part that was read.
    let dataset = &text.dataset;
    let score = bits_per_byte(loss, dataset.held_out_tokens().len(), dataset.held_out_bytes());
    Ok(Score { score, metric: Metric::BitsPerByte, loss: Some(loss), scored, bins: None })
}

/// The error of a model whose output for `tokens` is not finite.
fn not_finite(
    what: &'static str,
    model: &LanguageModel,
    tokens: Tensor<2, Int>,
) -> Result<TrainError, TrainError> {
    let place = first_non_finite(model, tokens)?;
    Ok(TrainError::NonFinite { step: None, what, place })
}

/// Whether a session of `model` grows without end.
fn grows(model: &LanguageModel) -> bool {
    let growing = |power: u32| model.config().state_bytes(1 << power).growing();
    growing(30) > growing(29)
}

/// The held-out text as rows of equal length that follow each other; every token is a target once.
fn lanes(text: &TextTask) -> TokenBatch {
    let held_out = text.dataset.held_out_tokens();
    let before = text.dataset.train_tokens().last().copied().unwrap_or_default();
    let batch = (held_out.len() / text.context.max(1)).clamp(1, LANES);
    let time = held_out.len().div_ceil(batch);
    let mut tokens: Vec<u32> =
        [before].into_iter().chain(held_out.iter().copied()).take(held_out.len()).collect();
    let mut targets: Vec<i64> = held_out.iter().map(|&id| i64::from(id)).collect();
    tokens.resize(batch * time, 0);
    targets.resize(batch * time, IGNORE);
    TokenBatch { tokens, targets, batch, time, documents: None }
}

/// Columns `range` of every row.
fn columns(batch: &TokenBatch, range: std::ops::Range<usize>) -> TokenBatch {
    let tokens = batch.rows().flat_map(|(tokens, _)| tokens[range.clone()].iter().copied()).collect();
    let targets = batch.rows().flat_map(|(_, targets)| targets[range.clone()].iter().copied()).collect();
    TokenBatch { tokens, targets, batch: batch.batch, time: range.len(), documents: None }
}
