//! Refuses work that takes more memory than is left, before anything is allocated.

use std::path::Path;

use fastweight::models::ModelConfig;
use fastweight::train::checkpoint::RunState;
use fastweight::train::recipe::TaskKind;
use fastweight::train::{Recipe, checkpoint};

use crate::commands::footprint::{self, Part, Work};
use crate::error::CommandError;
use crate::memory::{self, Available};

/// Checks every model of a recipe whose sizes pass [`check_sizes`], and the memory that training it takes.
///
/// # Errors
/// A model that is none, or more memory than is left.
pub fn check(recipe: &Recipe, data: Option<&Path>) -> Result<(), CommandError> {
    recipe.parts().iter().try_for_each(|part| check_part(part, data))
}

/// Checks the models of a recipe of one task.
fn check_part(recipe: &Recipe, data: Option<&Path>) -> Result<(), CommandError> {
    let data = data.or(recipe.task.data.as_deref()).filter(|_| recipe.task.kind == TaskKind::Text);
    let text = data.and_then(|path| path.metadata().ok()).filter(|data| data.is_file());
    let work = training(recipe, text.map_or(0, |data| data.len()));
    for model in recipe.resolve(recipe.task.vocab()).map_err(CommandError::train)? {
        let name = &model.name;
        model.config.validate().map_err(|error| CommandError::input(format_args!("{name}: {error}")))?;
        let training = format!("training {name} ({} parameters)", model.parameters);
        refuse_memory(&training, &footprint::of(&model.config, work))?;
    }
    Ok(())
}

/// Training on the task of a recipe, with a text of that many bytes.
fn training(recipe: &Recipe, text: u64) -> Work {
    let time = recipe.task.length();
    // Recall scores the values asked for, one for every pair.
    let scored = recipe.task.pairs.map_or(time, |pairs| pairs.min(time));
    let evaluated = footprint::evaluated(&recipe.task);
    Work::Training { batch: recipe.train.batch, time, scored, evaluated, text }
}

/// Checks the memory that reading the newest checkpoint of a run takes. A run that cannot be read passes: loading it says
/// why.
///
/// # Errors
/// More memory than is left.
pub fn check_loading(run: &Path) -> Result<(), CommandError> {
    match checkpoint::peek(run) {
        Some(state) => {
            let work = Work::Loading { moments: has_moments(&state) };
            check_trained(&run.display().to_string(), &state.model, work)
        }
        None => Ok(()),
    }
}

/// Checks the memory that exporting the newest checkpoint of a run takes. A run that cannot be read passes: loading it
/// says why.
///
/// # Errors
/// More memory than is left.
pub fn check_exporting(run: &Path) -> Result<(), CommandError> {
    match checkpoint::peek(run) {
        Some(state) => check_trained(&run.display().to_string(), &state.model, Work::Exporting),
        None => Ok(()),
    }
}

/// Whether a checkpoint holds the optimizer's moments, which an exported model has none of.
fn has_moments(state: &RunState) -> bool {
    let bytes = |file: &str| state.files.get(file).map_or(0, |file| file.bytes);
    bytes(checkpoint::OPTIMIZER) >= bytes(checkpoint::WEIGHTS)
}

/// Checks the memory that work with a trained model takes.
///
/// # Errors
/// More memory than is left.
pub fn check_trained(name: &str, config: &ModelConfig, work: Work) -> Result<(), CommandError> {
    let verb = match work {
        Work::Training { .. } => "training",
        Work::Loading { .. } => "loading",
        Work::Exporting => "exporting",
        Work::Scoring { .. } => "scoring",
        Work::Generating { .. } => "generating with",
    };
    refuse_memory(&format!("{verb} {name}"), &footprint::of(config, work))
}

/// Checks the sizes of a recipe one by one.
///
/// # Errors
/// A size beyond anything this program trains.
pub fn check_sizes(recipe: &Recipe) -> Result<(), CommandError> {
    recipe.parts().iter().try_for_each(check_part_sizes)
}

fn check_part_sizes(recipe: &Recipe) -> Result<(), CommandError> {
    let (task, train) = (&recipe.task, &recipe.train);
    refuse(
        "task",
        &[
            ("vocab", task.vocab, 1 << 24),
            ("length", task.length, 1 << 24),
            ("longest", task.longest, 1 << 22),
            ("context", task.context, 1 << 24),
        ],
    )?;
    refuse(
        "train",
        &[
            ("batch", Some(train.batch), 1 << 20),
            ("accumulate", Some(train.accumulate), 1 << 20),
            ("eval_batches", Some(train.eval_batches), 1 << 20),
        ],
    )?;
    for model in std::iter::once(&recipe.model).chain(&recipe.models) {
        refuse(
            "model",
            &[
                ("width", model.width, 1 << 16),
                ("layers", model.layers, 1 << 10),
                ("rounds", model.rounds, 1 << 10),
                ("heads", model.heads, 1 << 10),
                ("head_dim", model.head_dim, 1 << 14),
                ("value_dim", model.value_dim, 1 << 14),
                ("mlp_hidden", model.mlp_hidden, 1 << 20),
            ],
        )?;
    }
    Ok(())
}

/// Refuses work that takes more memory than is left.
///
/// # Errors
/// [`CommandError::Input`] with the estimate and what to lower.
pub fn refuse_memory(work: &str, parts: &[Part]) -> Result<(), CommandError> {
    let needed: f64 = parts.iter().map(|part| part.bytes).sum();
    let largest = parts.iter().max_by(|a, b| a.bytes.total_cmp(&b.bytes));
    let (Some(Available { bytes, owner }), Some(largest)) = (memory::available(), largest) else {
        return Ok(());
    };
    if needed <= bytes {
        return Ok(());
    }
    Err(CommandError::input(format_args!(
        "{work} needs about {:.1} GiB, {:.1} GiB of it for {}, {owner} has {:.1} GiB left; make {} smaller",
        gib(needed),
        gib(largest.bytes),
        largest.name,
        gib(bytes),
        largest.lower
    )))
}

fn refuse(section: &str, sizes: &[(&str, Option<usize>, usize)]) -> Result<(), CommandError> {
    match sizes.iter().find(|(_, size, most)| size.is_some_and(|size| size > *most)) {
        Some((key, size, most)) => Err(CommandError::input(format_args!(
            "`{key}` in [{section}] is {}, expected at most {most}; is there a digit too many?",
            size.unwrap_or_default()
        ))),
        None => Ok(()),
    }
}

fn gib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Peaks of the process, measured on Linux with two threads.
    #[test]
    fn the_estimate_is_near_the_measured_peak() {
        for (recipe, model, text, mib) in [("text", 0, 4_404_412, 355.0), ("recall", 3, 0, 107.0)] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
            let recipe = Recipe::load(&folder.join(recipe).with_extension("toml")).unwrap();
            let models = recipe.resolve(recipe.task.vocab()).unwrap();
            let parts = footprint::of(&models[model].config, training(&recipe, text));
            let estimate = parts.iter().map(|part| part.bytes).sum::<f64>() / f64::from(1 << 20);
            assert!((estimate / mib - 1.0).abs() < 0.03, "{}: {estimate} MiB, not {mib}", models[model].name);
        }
    }
}
