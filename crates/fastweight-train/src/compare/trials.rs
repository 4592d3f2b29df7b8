//! Short trials that choose a learning rate.

use burn::tensor::Device;

use super::results::Results;
use super::{Trial, key};
use crate::error::TrainError;
use crate::progress::Event;
use crate::recipe::{Recipe, ResolvedModel, TrainRecipe, Warmup};
use crate::task::Task;
use crate::trainer::{self, Trainer};

/// Sets each model's learning rate to the best of the recipe's list by a short trial with the first seed.
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
                "{} on {}: trial of learning rate {learning_rate}: {words}",
                model.name,
                recipe.task.name()
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
