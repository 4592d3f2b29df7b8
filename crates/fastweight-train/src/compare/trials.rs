//! Short trials that choose a learning rate.

use burn::tensor::Device;

use super::results::Results;
use super::{Trial, key};
use crate::error::TrainError;
use crate::progress::Event;
use crate::recipe::{Recipe, ResolvedModel, TrainRecipe, Warmup};
use crate::task::{Metric, Task};
use crate::trainer::{self, Trainer};

/// Sets each model's learning rate to the best of the recipe's list by a short trial with the first seed; of rates with the
/// same score, to the one with the lowest training loss. A model with a rate of its own keeps it.
pub(super) fn choose_learning_rates(
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
    for model in models.iter_mut().filter(|model| !model.own_learning_rate) {
        let mut best: Option<Trial> = None;
        for &learning_rate in rates {
            let candidate = ResolvedModel { learning_rate, ..model.clone() };
            let key = key(&Recipe { train: pilot.clone(), ..recipe.clone() }, task, &candidate, seed);
            let known = results.find_trial(&model.name, &key);
            let origin = if known.is_some() { ", from an earlier run" } else { "" };
            let trial = match known {
                Some(trial) => trial,
                None => {
                    let (score, loss) = try_out(task, &pilot, &candidate, seed, device)?.unzip();
                    let trial = Trial { model: model.name.clone(), learning_rate, score, loss, key };
                    results.append_trial(&trial)?;
                    trial
                }
            };
            let words = match (trial.score, trial.loss) {
                (Some(score), Some(loss)) => format!("{} {score:.4}, loss {loss:.4}", metric.name()),
                (Some(score), None) => format!("{} {score:.4}", metric.name()),
                (None, _) => "diverged".into(),
            };
            on_event(Event::Note(&format!(
                "{} on {}: trial of learning rate {learning_rate}: {words}{origin}",
                model.name,
                recipe.task.name()
            )));
            if trial.score.is_some() && best.as_ref().is_none_or(|best| is_better(&trial, best, metric)) {
                best = Some(trial.clone());
            }
            trials.push(trial);
        }
        match best {
            Some(trial) => model.learning_rate = trial.learning_rate,
            None => on_event(Event::Note(&format!(
                "{} on {}: every learning rate tried diverged; it is trained with {}, that of [train]",
                model.name,
                recipe.task.name(),
                model.learning_rate
            ))),
        }
    }
    Ok(trials)
}

/// Whether a trial has the better score, or the same one and the lower loss.
fn is_better(trial: &Trial, best: &Trial, metric: Metric) -> bool {
    match (trial.score, best.score) {
        (Some(a), Some(b)) if a == b => trial.loss < best.loss,
        (Some(a), Some(b)) => metric.reaches(a, b),
        (score, _) => score.is_some(),
    }
}

/// The score after a short training, and the mean loss of its last steps; absent when it diverged.
fn try_out(
    task: &Task,
    pilot: &TrainRecipe,
    model: &ResolvedModel,
    seed: u64,
    device: &Device,
) -> Result<Option<(f64, f64)>, TrainError> {
    let mut trainer = Trainer::new(task, pilot, model, seed, device)?;
    match trainer.run(&mut |_, _| Ok(())) {
        Ok(score) => {
            let losses = &trainer.position().losses;
            let last = &losses[losses.len() - losses.len().div_ceil(4)..];
            Ok(Some((score.score, last.iter().map(|(_, loss)| loss).sum::<f64>() / last.len().max(1) as f64)))
        }
        Err(TrainError::NonFinite { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn pilot(recipe: &Recipe, task: &Task) -> TrainRecipe {
    let share = recipe.compare.pilot;
    let mut pilot = recipe.train.clone();
    let shorter = |steps: usize| (steps as f64 * share).ceil() as usize;
    // A rate that diverges shows it at the second step.
    pilot.steps = trainer::steps(task, &recipe.train).map(|steps| shorter(steps).max(2));
    pilot.tokens = None;
    pilot.seconds = recipe.train.seconds.map(|seconds| seconds * share);
    pilot.eval_every = 0;
    if let Warmup::Steps(steps) = pilot.warmup {
        pilot.warmup = Warmup::Steps(shorter(steps));
    }
    pilot
}
