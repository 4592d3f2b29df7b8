//! What a caller is told while work goes on.

use std::path::Path;

use crate::task::Metric;
use crate::trainer::Trainer;

/// Something that happened in [`crate::run::train`] or [`crate::compare::compare`].
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// One sentence worth showing.
    Note(&'a str),
    /// A training begins.
    Started {
        /// The model.
        model: &'a str,
        /// The task.
        task: &'a str,
        /// What its scores measure.
        metric: Metric,
        /// Its seed.
        seed: u64,
        /// Its trained parameters.
        parameters: usize,
        /// Number of this training, from 0.
        index: usize,
        /// Trainings in all.
        count: usize,
        /// Share of its budget that was spent before, in `[0, 1]`.
        fraction: f64,
    },
    /// A step was taken.
    Step(Progress<'a>),
    /// The model was scored.
    Evaluated(Progress<'a>),
    /// A checkpoint is complete.
    Checkpoint {
        /// Its folder.
        path: &'a Path,
        /// Its step.
        step: usize,
    },
    /// A training ended, or its result was there already.
    Finished {
        /// The model.
        model: &'a str,
        /// The task.
        task: &'a str,
        /// What its score measures.
        metric: Metric,
        /// Its seed.
        seed: u64,
        /// Its final score.
        score: f64,
        /// Whether the result is an earlier one.
        reused: bool,
    },
}

/// Where a training stands.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The model.
    pub model: &'a str,
    /// Its seed.
    pub seed: u64,
    /// Steps taken.
    pub step: usize,
    /// Steps in the budget, when it is not in seconds.
    pub steps: Option<usize>,
    /// Share of the budget that is spent, in `[0, 1]`.
    pub fraction: f64,
    /// Training tokens read.
    pub tokens: u64,
    /// Loss of the last step, in nats per scored token.
    pub loss: f64,
    /// Learning rate of the last step.
    pub learning_rate: f64,
    /// Latest score.
    pub score: Option<f64>,
    /// Training tokens per second.
    pub tokens_per_s: f64,
    /// Seconds spent in training steps.
    pub seconds: f64,
    /// Seconds left of this training, at its pace so far.
    pub seconds_left: f64,
    /// Seconds left of all trainings, if those to come take as long as this one.
    pub seconds_left_in_all: f64,
}

impl<'a> Progress<'a> {
    /// Of `trainer`, with `more` trainings of the same length to come.
    pub(crate) fn of(trainer: &Trainer, model: &'a str, more: usize) -> Self {
        let position = trainer.position();
        let (fraction, seconds_left) = (trainer.fraction(), trainer.seconds_left());
        Progress {
            model,
            seed: trainer.seed(),
            step: position.step,
            steps: trainer.steps(),
            fraction,
            tokens: position.tokens,
            loss: position.losses.last().map_or(f64::NAN, |(_, loss)| *loss),
            learning_rate: position.learning_rate,
            score: position.scores.last().map(|(_, score)| *score),
            tokens_per_s: position.tokens as f64 / position.seconds.max(f64::MIN_POSITIVE),
            seconds: position.seconds,
            seconds_left,
            seconds_left_in_all: seconds_left + more as f64 * trainer.seconds_of_whole(),
        }
    }
}
