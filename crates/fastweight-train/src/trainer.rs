//! The training loop.

use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fastweight_models::{LanguageModel, ModelConfig};
use fastweight_ops::Offsets;
use fastweight_ops::loss::cross_entropy;
use fastweight_tasks::{IGNORE, TokenBatch};

use crate::diagnose;
use crate::error::TrainError;
use crate::evaluate;
use crate::gradients::Gradients;
use crate::optimizer::{AdamW, AdamWOptions};
use crate::recipe::{ResolvedModel, TrainRecipe};
use crate::schedule::Schedule;
use crate::task::Task;

/// Losses a trainer remembers.
const REMEMBERED: usize = 100;

/// Trains one model on one task with one seed.
///
/// Same recipe, seed, machine and thread count: same bits. The data of a step is a function of seed and step.
#[derive(Debug)]
pub struct Trainer<'a> {
    task: &'a Task,
    recipe: &'a TrainRecipe,
    config: ModelConfig,
    schedule: Schedule,
    seed: u64,
    device: Device,
    model: LanguageModel,
    optimizer: AdamW,
    position: Position,
    session: Instant,
    session_start: f64,
}

/// Where a training stands.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Position {
    /// Optimizer steps taken.
    pub step: usize,
    /// Training tokens read.
    pub tokens: u64,
    /// Seconds spent in training steps.
    pub seconds: f64,
    /// Learning rate of the last step.
    pub learning_rate: f64,
    /// Loss of the last steps, as step and loss.
    pub losses: Vec<(usize, f64)>,
    /// Evaluations, as step and score.
    pub scores: Vec<(usize, f64)>,
}

/// What just happened in a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// An optimizer step was taken.
    Step,
    /// The model was scored.
    Evaluated,
    /// A step and its evaluation, if one was due, are over: the moment for checkpoints.
    Settled,
}

impl<'a> Trainer<'a> {
    /// A trainer at step 0, with the weights of `seed`.
    ///
    /// `device` is the plain device; gradients are added here.
    ///
    /// # Errors
    /// The configuration is not a model.
    pub fn new(
        task: &'a Task,
        recipe: &'a TrainRecipe,
        model: &ResolvedModel,
        seed: u64,
        device: &Device,
    ) -> Result<Self, TrainError> {
        let device = device.clone().autodiff();
        let schedule = Schedule { peak: model.learning_rate, min: recipe.min_lr, warmup: recipe.warmup };
        Ok(Trainer {
            task,
            recipe,
            config: model.config.clone(),
            schedule,
            seed,
            model: model.config.init(seed, &device)?,
            device,
            optimizer: AdamW::new(optimizer_options(recipe)),
            position: Position::default(),
            session: Instant::now(),
            session_start: 0.0,
        })
    }

    /// Puts the trainer where a checkpoint left off.
    ///
    /// # Errors
    /// The moments do not belong together.
    pub fn resume(
        &mut self,
        restore: impl FnOnce(LanguageModel) -> Result<LanguageModel, TrainError>,
        moments: Vec<(String, TensorData)>,
        position: Position,
    ) -> Result<(), TrainError> {
        self.model = restore(self.model.clone())?;
        self.optimizer = AdamW::import(optimizer_options(self.recipe), position.step as u64, moments)?;
        self.position = position;
        self.session = Instant::now();
        self.session_start = self.fraction();
        Ok(())
    }

    /// Takes one optimizer step and returns its loss, in nats per scored token.
    ///
    /// # Errors
    /// The loss, a gate, a gradient or an updated weight is not finite; the model was not updated.
    pub fn step(&mut self) -> Result<f64, TrainError> {
        let start = Instant::now();
        let rate = self.schedule.at(self.position.step, self.fraction());
        let (loss, gradients, tokens) = self.loss_and_gradients()?;
        let norm = gradients.norm()?;
        if !norm.is_finite() {
            let place = gradients.last_non_finite().map(|name| format!("the gradient of {name}"));
            let place = place.unwrap_or_else(|| "the sum over all parameters".into());
            return Err(TrainError::NonFinite {
                step: Some(self.position.step + 1),
                what: "the gradient",
                place,
            });
        }
        let clip = self.recipe.clip;
        let scale = if clip > 0.0 && norm > clip { clip / norm } else { 1.0 };
        self.model = self.optimizer.step(self.model.clone(), &gradients, rate, scale as f32)?;

        let position = &mut self.position;
        position.step += 1;
        position.tokens += tokens;
        position.seconds += start.elapsed().as_secs_f64();
        position.learning_rate = rate;
        if position.losses.len() == REMEMBERED {
            position.losses.remove(0);
        }
        position.losses.push((position.step, loss));
        Ok(loss)
    }

    /// Trains to the end of the budget or until the target is reached, then scores the model on all evaluation
    /// data. `observe` is told after each step and evaluation, and stops the training with an error of its own.
    ///
    /// # Errors
    /// A loss, gradient, weight or score that is not finite, or an error of `observe`.
    pub fn run(
        &mut self,
        observe: &mut dyn FnMut(&Trainer, Moment) -> Result<(), TrainError>,
    ) -> Result<evaluate::Score, TrainError> {
        while !self.is_finished() {
            self.step()?;
            observe(self, Moment::Step)?;
            let every = self.recipe.eval_every;
            // The end of the budget has an evaluation of its own.
            if every > 0 && self.position.step.is_multiple_of(every) && self.fraction() < 1.0 {
                self.evaluate(self.recipe.eval_batches)?;
                observe(self, Moment::Evaluated)?;
            }
            observe(self, Moment::Settled)?;
        }
        let whole = match self.task {
            Task::Text(_) | Task::Formal(_) => 0,
            Task::Recall(_) => self.recipe.eval_batches,
        };
        let score = self.evaluate(whole)?;
        observe(self, Moment::Evaluated)?;
        Ok(score)
    }

    /// Scores the model on `batches` batches of evaluation data (0: all of a text's) and remembers the score.
    ///
    /// # Errors
    /// The model refuses its input, or its score is not finite.
    pub fn evaluate(&mut self, batches: usize) -> Result<evaluate::Score, TrainError> {
        let step = self.position.step;
        let score = evaluate::score(&self.model.valid(), self.task, batches)
            .map_err(|error| diagnose::at_step(error, step))?;
        self.position.scores.retain(|(known, _)| *known != step);
        self.position.scores.push((step, score.score));
        Ok(score)
    }

    /// Whether the budget is spent or the target reached.
    pub fn is_finished(&self) -> bool {
        self.reached_target() || self.fraction() >= 1.0
    }

    /// Whether the last evaluation reached the target.
    pub fn reached_target(&self) -> bool {
        let metric = self.task.metric();
        let last = self.position.scores.last();
        self.recipe.target.zip(last).is_some_and(|(target, (_, score))| metric.reaches(*score, target))
    }

    /// Share of the budget that is spent, in `[0, 1]`.
    pub fn fraction(&self) -> f64 {
        let share = match (self.steps(), self.recipe.seconds) {
            (Some(steps), _) => self.position.step as f64 / steps as f64,
            (None, Some(seconds)) => self.position.seconds / seconds,
            (None, None) => 1.0,
        };
        share.min(1.0)
    }

    /// Steps in the budget, when it is not in seconds.
    pub fn steps(&self) -> Option<usize> {
        steps(self.task, self.recipe)
    }

    /// Seconds until the budget is spent, at the pace of this process so far.
    pub fn seconds_left(&self) -> f64 {
        self.seconds_of_whole() * (1.0 - self.fraction())
    }

    /// Seconds the whole budget takes, at the pace of this process so far.
    pub fn seconds_of_whole(&self) -> f64 {
        let done = self.fraction() - self.session_start;
        if done > 0.0 { self.session.elapsed().as_secs_f64() / done } else { 0.0 }
    }

    /// Where the training stands.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// The model, with gradients.
    pub fn model(&self) -> &LanguageModel {
        &self.model
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// The seed of weights and data.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Loss and gradients of the next step, and the tokens it reads.
    fn loss_and_gradients(&self) -> Result<(f64, Gradients, u64), TrainError> {
        let parts = self.recipe.accumulate;
        let first = (self.position.step * parts) as u64;
        let batches: Vec<TokenBatch> = (0..parts as u64)
            .map(|part| self.task.train_batch(self.seed, first + part, self.recipe.batch))
            .collect::<Result<_, _>>()?;
        let scored: usize = batches.iter().map(TokenBatch::scored).sum();
        let (mut total, mut gradients) = (0.0, Gradients::default());
        let step = Some(self.position.step + 1);
        for batch in &batches {
            // Each part weighs as much as it has scored tokens, so that the sum is the mean over the whole batch.
            let share = batch.scored() as f64 / scored.max(1) as f64;
            let tokens = token_tensor(batch, &self.device);
            let reading = self
                .model
                .read(tokens.clone(), None, offsets(batch).as_ref())
                .map_err(|error| diagnose::diverged(error, &self.model.valid(), step))?;
            let auxiliary = self.model.auxiliary_loss(&reading, self.recipe.balance);
            let (logits, targets) = scored_logits(&self.model, reading.hidden, batch);
            let loss = cross_entropy(logits, &targets).map_err(fastweight_memory::MemoryError::from)?;
            let value = f64::from(loss.clone().into_scalar::<f32>());
            if !value.is_finite() {
                let place = diagnose::first_non_finite(&self.model.valid(), tokens)?;
                return Err(TrainError::NonFinite { step, what: "the loss", place });
            }
            total += share * value;
            // What the model adds for itself is trained on, but is no part of the loss that is reported.
            let loss = auxiliary.map_or(loss.clone(), |auxiliary| loss + auxiliary);
            let loss = if batches.len() == 1 { loss } else { loss * share };
            gradients.add(Gradients::take(&self.model, loss.backward()))?;
        }
        let tokens = batches.iter().map(|batch| batch.tokens.len() as u64).sum();
        Ok((total, gradients, tokens))
    }
}

/// The tokens of a batch as a `[batch, time]` tensor.
pub(crate) fn token_tensor(batch: &TokenBatch, device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i64> = batch.tokens.iter().map(|&id| i64::from(id)).collect();
    Tensor::from_data(TensorData::new(ids, [batch.batch, batch.time]), device)
}

/// The boundaries of the documents that a batch packs in its row.
pub(crate) fn offsets(batch: &TokenBatch) -> Option<Offsets> {
    batch.documents.as_deref().map(Offsets::from_lengths)
}

/// Logits `[scored, vocab]` and targets of the scored positions of `batch`, from its channels before the head.
pub(crate) fn scored_logits(
    model: &LanguageModel,
    hidden: Tensor<3>,
    batch: &TokenBatch,
) -> (Tensor<2>, Vec<i64>) {
    let hidden: Tensor<2> = hidden.flatten(0, 1);
    let scored = || (0i64..).zip(&batch.targets).filter(|(_, target)| **target != IGNORE);
    let targets: Vec<i64> = scored().map(|(_, target)| *target).collect();
    if targets.is_empty() || targets.len() == batch.targets.len() {
        return (model.logits(hidden), batch.targets.clone());
    }
    let rows: Vec<i64> = scored().map(|(row, _)| row).collect();
    let rows = Tensor::from_data(TensorData::new(rows, [targets.len()]), &hidden.device());
    (model.logits(hidden.select(0, rows)), targets)
}

/// Steps in a recipe's budget, when it is not in seconds.
pub(crate) fn steps(task: &Task, recipe: &TrainRecipe) -> Option<usize> {
    let from_tokens = |tokens: u64| (tokens as f64 / tokens_per_step(task, recipe)).ceil() as usize;
    recipe.steps.or_else(|| recipe.tokens.map(from_tokens))
}

/// Tokens of the average step.
fn tokens_per_step(task: &Task, recipe: &TrainRecipe) -> f64 {
    (task.mean_length() * recipe.batch as f64 * recipe.accumulate as f64).max(1.0)
}

fn optimizer_options(recipe: &TrainRecipe) -> AdamWOptions {
    AdamWOptions { betas: recipe.betas, weight_decay: recipe.weight_decay, ..AdamWOptions::default() }
}
