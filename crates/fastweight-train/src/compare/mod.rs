//! Several models on one task, trained one after the other at equal budget.

mod results;
mod table;

use std::path::PathBuf;

use burn::module::Module;
use burn::tensor::Device;

pub use results::{Entry, RESULTS, Trial};
pub use table::{Row, Spread, rows};

use crate::diagnose;
use crate::error::TrainError;
use crate::evaluate;
use crate::files::{self, FolderLock};
use crate::progress::{Event, Progress};
use crate::recipe::{ParameterMatch, Recipe, ResolvedModel, TrainRecipe, Warmup};
use crate::task::{Metric, Task};
use crate::trainer::{self, Moment, Trainer};
use results::Results;

/// Tokens that the decoding speed is measured over.
const DECODED: usize = 256;
/// Points of a stored loss curve, at most about twice this.
const CURVE: usize = 200;

/// Where to compare.
#[derive(Debug, Clone)]
pub struct Options {
    /// Folder of results; created when missing.
    pub folder: PathBuf,
    /// Text that takes the place of the recipe's.
    pub data: Option<PathBuf>,
    /// Train everything again although results are there.
    pub restart: bool,
}

/// The outcome of a comparison.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The recipe.
    pub recipe: Recipe,
    /// What the scores measure.
    pub metric: Metric,
    /// Tokens in a training sequence.
    pub length: usize,
    /// The models, in the recipe's order.
    pub models: Vec<ResolvedModel>,
    /// One entry per model and seed, in the recipe's order.
    pub entries: Vec<Entry>,
    /// One row per model.
    pub rows: Vec<Row>,
    /// Trials of learning rates, if there were any.
    pub trials: Vec<Trial>,
    /// Sentences about the fairness of the comparison.
    pub notes: Vec<String>,
}

/// Trains and scores every model of `recipe` with every seed.
///
/// Each result is appended to `results.jsonl` in the folder as it is made; a comparison that was interrupted takes
/// the results it finds there for the same model, seed, recipe and data, and trains the rest.
///
/// # Errors
/// Bad recipe or data, a folder in use, a loss that is not finite, a disk that is full.
pub fn compare(
    recipe: &Recipe,
    options: &Options,
    device: &Device,
    on_event: &mut dyn FnMut(Event),
) -> Result<Comparison, TrainError> {
    let task = Task::open(&recipe.task, options.data.as_deref())?;
    let mut models = recipe.resolve(task.vocab())?;
    files::create_folder(&options.folder)?;
    let _lock = FolderLock::take(&options.folder)?;
    let mut results = Results::open(&options.folder, options.restart)?;
    let notes = fairness(recipe, &models);
    notes.iter().for_each(|note| on_event(Event::Note(note)));

    let trials = choose_learning_rates(recipe, &task, &mut models, &mut results, device, on_event)?;
    let count = models.len() * recipe.train.seeds.len();
    let mut entries = Vec::with_capacity(count);
    for model in &models {
        for &seed in &recipe.train.seeds {
            let key = key(recipe, &task, model, seed);
            let entry = match results.find(&model.name, seed, &key) {
                Some(entry) => {
                    on_event(Event::Finished { model: &model.name, seed, score: entry.score, reused: true });
                    entry
                }
                None => {
                    let index = entries.len();
                    on_event(Event::Started {
                        model: &model.name,
                        seed,
                        parameters: model.parameters,
                        index,
                        count,
                    });
                    let place = Place { recipe, task: &task, model, seed, more: count - index - 1 };
                    let entry = place.train(key, device, on_event).map_err(|error| place.named(error))?;
                    results.append(&entry)?;
                    on_event(Event::Finished { model: &model.name, seed, score: entry.score, reused: false });
                    entry
                }
            };
            entries.push(entry);
        }
    }
    let rows = rows(&models, &entries);
    let (recipe, metric, length) = (recipe.clone(), task.metric(), task.length());
    Ok(Comparison { recipe, metric, length, models, entries, rows, trials, notes })
}

fn key(recipe: &Recipe, task: &Task, model: &ResolvedModel, seed: u64) -> String {
    format!("{}-{}", recipe.fingerprint(model, seed), task.fingerprint())
}

struct Place<'a> {
    recipe: &'a Recipe,
    task: &'a Task,
    model: &'a ResolvedModel,
    seed: u64,
    more: usize,
}

impl Place<'_> {
    /// `error` with the model and seed that diverged.
    fn named(&self, error: TrainError) -> TrainError {
        match error {
            TrainError::NonFinite { step, what, place } => {
                let place = format!("{place} of the model {} with seed {}", self.model.name, self.seed);
                TrainError::NonFinite { step, what, place }
            }
            other => other,
        }
    }

    fn train(
        &self,
        key: String,
        device: &Device,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<Entry, TrainError> {
        let Place { recipe, task, model, seed, more } = *self;
        let mut trainer = Trainer::new(task, &recipe.train, model, seed, device)?;
        let (mut curve, mut losses) = (Vec::new(), Vec::new());
        let mut next = 0.0;
        let score = trainer.run(&mut |trainer, moment| {
            let position = trainer.position();
            match moment {
                Moment::Step => {
                    if trainer.fraction() >= next {
                        losses.extend(position.losses.last().map(|(_, loss)| (position.tokens, *loss)));
                        next = trainer.fraction() + 1.0 / CURVE as f64;
                    }
                    on_event(Event::Step(Progress::of(trainer, &model.name, more)));
                }
                Moment::Evaluated => {
                    curve.retain(|(tokens, _)| *tokens != position.tokens);
                    curve.extend(position.scores.last().map(|(_, score)| (position.tokens, *score)));
                    on_event(Event::Evaluated(Progress::of(trainer, &model.name, more)));
                }
                Moment::Settled => {}
            }
            Ok(())
        })?;
        let position = trainer.position();
        let trained = trainer.model().valid();
        let at_step = |error| diagnose::at_step(error, position.step);
        Ok(Entry {
            model: model.name.clone(),
            seed,
            score: score.score,
            params: model.parameters,
            state_bytes: evaluate::state_bytes(&trained, task.vocab(), task.length()).map_err(at_step)?,
            train_tokens_per_s: position.tokens as f64 / position.seconds.max(f64::MIN_POSITIVE),
            decode_tokens_per_s: evaluate::decode_tokens_per_s(&trained, task.vocab(), DECODED)
                .map_err(at_step)?,
            seconds: position.seconds,
            learning_rate: model.learning_rate,
            steps: position.step,
            tokens: position.tokens,
            curve,
            losses,
            by_pairs: evaluate::recall_by_pairs(&trained, task, recipe.train.eval_batches)
                .map_err(at_step)?,
            config: model.config.clone(),
            key,
        })
    }
}

/// Sets each model's learning rate to the best of the recipe's list by a short trial with the first seed.
fn choose_learning_rates(
    recipe: &Recipe,
    task: &Task,
    models: &mut [ResolvedModel],
    results: &mut Results,
    device: &Device,
    on_event: &mut dyn FnMut(Event),
) -> Result<Vec<Trial>, TrainError> {
    let rates = &recipe.compare.learning_rates;
    let mut trials = Vec::new();
    if rates.is_empty() {
        return Ok(trials);
    }
    let pilot = pilot(recipe, task);
    let seed = recipe.train.seeds.first().copied().unwrap_or_default();
    let metric = task.metric();
    for model in models.iter_mut() {
        let mut best: Option<(f64, f64)> = None;
        for &learning_rate in rates {
            let candidate = ResolvedModel { learning_rate, ..model.clone() };
            let key = key(&Recipe { train: pilot.clone(), ..recipe.clone() }, task, &candidate, seed);
            let trial = match results.find_trial(&model.name, &key) {
                Some(trial) => trial,
                None => {
                    let score = try_out(task, &pilot, &candidate, seed, device)?;
                    let trial = Trial { model: model.name.clone(), learning_rate, score, key };
                    results.append_trial(&trial)?;
                    trial
                }
            };
            let words = match trial.score {
                Some(score) => format!("{} {score:.4}", metric.name()),
                None => "diverged".into(),
            };
            on_event(Event::Note(&format!(
                "{}: trial of learning rate {learning_rate}: {words}",
                model.name
            )));
            if let Some(score) = trial.score
                && best.is_none_or(|(_, known)| score != known && metric.reaches(score, known))
            {
                best = Some((learning_rate, score));
            }
            trials.push(trial);
        }
        model.learning_rate = best.map_or(model.learning_rate, |(rate, _)| rate);
    }
    Ok(trials)
}

/// The score after a short training, absent when it diverged.
fn try_out(
    task: &Task,
    pilot: &TrainRecipe,
    model: &ResolvedModel,
    seed: u64,
    device: &Device,
) -> Result<Option<f64>, TrainError> {
    match Trainer::new(task, pilot, model, seed, device)?.run(&mut |_, _| Ok(())) {
        Ok(score) => Ok(Some(score.score)),
        Err(TrainError::NonFinite { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn pilot(recipe: &Recipe, task: &Task) -> TrainRecipe {
    let share = recipe.compare.pilot;
    let mut pilot = recipe.train.clone();
    let shorter = |steps: usize| ((steps as f64 * share).ceil() as usize).max(1);
    pilot.steps = trainer::steps(task, &recipe.train).map(shorter);
    pilot.tokens = None;
    pilot.seconds = recipe.train.seconds.map(|seconds| seconds * share);
    pilot.eval_every = 0;
    if let Warmup::Steps(steps) = pilot.warmup {
        pilot.warmup = Warmup::Steps(shorter(steps));
    }
    pilot
}

/// What a reader should know before believing the table.
fn fairness(recipe: &Recipe, models: &[ResolvedModel]) -> Vec<String> {
    let Some(reference) = models.first() else { return Vec::new() };
    let mut notes = Vec::new();
    for model in models {
        let off = 100.0 * (model.parameters as f64 / reference.parameters.max(1) as f64 - 1.0);
        if model.matching == ParameterMatch::Apart {
            let why = if recipe.compare.match_parameters { "cannot be matched" } else { "is not matched" };
            notes.push(format!(
                "{} has {} parameters, {off:+.1}% from {}'s {}: the parameter count {why} within 5%",
                model.name, model.parameters, reference.name, reference.parameters
            ));
        }
    }
    notes
}
