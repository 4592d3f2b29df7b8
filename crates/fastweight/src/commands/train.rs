//! `fastweight train`: trains one model in a run folder.

use std::path::{Path, PathBuf};

use fastweight::train::Recipe;
use fastweight::train::progress::Event;
use fastweight::train::recipe::TaskKind;
use fastweight::train::run::{self, Options, Summary};
use serde_json::json;

use crate::commands::limits;
use crate::error::CommandError;
use crate::global::Global;
use crate::output;
use crate::training::TrainingProgress;
use crate::values::refuse_file;

const EXAMPLE: &str = "\
A run folder that holds checkpoints of the same recipe and data is continued: after an interruption
of any kind, run the same command again. The losses are those of an uninterrupted run.

Example:
  fastweight train recipes/text.toml --data bible.txt --out runs/bible
  fastweight generate runs/bible --prompt \"In the beginning\"

With --json every evaluation is one line, the final one with \"final\": true, the summary the last.";

/// Arguments of `fastweight train`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub struct Args {
    /// Recipe, a TOML file (`fastweight options` lists what it can hold); of several models the first is trained
    recipe: PathBuf,
    /// Task of a recipe with several [default: the first]
    #[arg(long, value_name = "NAME")]
    task: Option<String>,
    /// Text to train on, a UTF-8 file or a folder of them, in place of the recipe's
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Run folder, created when missing [default: runs/NAME of the recipe, with -TASK if --task is given]
    #[arg(long, value_name = "RUN")]
    out: Option<PathBuf>,
    /// Remove the run's checkpoints and start over
    #[arg(long)]
    fresh: bool,
}

/// Trains the model.
///
/// # Errors
/// Bad recipe, data or run folder; a loss that is not finite; a full disk.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let device = global.device()?;
    let mut recipe = load(&args.recipe, args.data.as_deref(), global)?;
    let mut folder = folder_of(&recipe);
    let tasks = recipe.tasks().count();
    if let Some(name) = &args.task {
        recipe = recipe.only(name).map_err(CommandError::train)?;
        refuse_data(&[recipe.task.kind], args.data.as_deref())?;
        folder.as_mut_os_string().push(format!("-{}", safe(name)));
    }
    let folder = args.out.clone().unwrap_or(folder);
    let options = Options { folder, data: args.data.clone(), restart: args.fresh };
    refuse_file(&options.folder)?;
    let mut progress = TrainingProgress::new(global, &recipe.name, &options.folder);
    if recipe.models.len() > 1 {
        progress.say("the recipe has several models; the first is trained, `fastweight compare` trains all");
    }
    if tasks > 1 && args.task.is_none() {
        let name = recipe.task.name();
        progress.say(&format!(
            "the recipe has several tasks; the first, {name}, is trained, --task chooses another"
        ));
    }
    if let Some((seed, others)) = recipe.train.seeds.split_first().filter(|(_, others)| !others.is_empty()) {
        progress.say(&format!(
            "the recipe has {} seeds; the first, {seed}, is taken, --seed chooses another",
            others.len() + 1
        ));
    }
    let mut written = Ok(());
    let mut evaluations = Evaluations::default();
    let summary = run::train(&recipe, &options, &device, &mut |event| {
        if global.json && written.is_ok() {
            written = evaluations.report(&event);
        }
        progress.show(event);
    });
    progress.finish();
    if global.json && written.is_ok() {
        written = evaluations.finish(false);
    }
    let summary = summary.map_err(CommandError::train)?;
    written?;
    if global.json {
        output::json(&summary_json(&summary, &options.folder))
    } else {
        output::line(summary_text(&summary, &options.folder))
    }
}

/// [`read`]s a recipe that is to be trained.
///
/// # Errors
/// Those of [`read`], and a training that takes more memory than is left.
pub fn load(path: &Path, data: Option<&Path>, global: &Global) -> Result<Recipe, CommandError> {
    let recipe = read(path, data, global)?;
    limits::check(&recipe, data)?;
    Ok(recipe)
}

/// Reads a recipe, with the seed of the command line in place of its seeds.
///
/// # Errors
/// The recipe cannot be read or is not valid, or there is `data` for a task that has none.
pub fn read(path: &Path, data: Option<&Path>, global: &Global) -> Result<Recipe, CommandError> {
    let recipe = Recipe::load(path).map_err(CommandError::train)?;
    refuse_data(&recipe.tasks().map(|task| task.kind).collect::<Vec<_>>(), data)?;
    limits::check_sizes(&recipe)?;
    Ok(match global.seed {
        Some(seed) => recipe.with_seed(seed),
        None => recipe,
    })
}

/// Refuses a text for tasks that all make their own data.
///
/// # Errors
/// There is `data` and none of the tasks is `text`.
pub fn refuse_data(kinds: &[TaskKind], data: Option<&Path>) -> Result<(), CommandError> {
    match data {
        Some(path) if !kinds.contains(&TaskKind::Text) => Err(CommandError::input(format_args!(
            "--data expects a task that learns a text, and this one is {}, which makes its own data; \
             leave out --data {} or choose a recipe of a text",
            kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(" and "),
            path.display()
        ))),
        _ => Ok(()),
    }
}

/// Where the results of a recipe go by default.
pub fn folder_of(recipe: &Recipe) -> PathBuf {
    let name = safe(&recipe.name);
    Path::new("runs").join(if name.is_empty() { "unnamed" } else { &name })
}

/// A name as part of a path.
fn safe(name: &str) -> String {
    let safe = |c: char| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    name.trim_matches('.').chars().map(safe).collect()
}

/// Evaluations as JSON, one a step. Each is held back until it is known whether it is the final one, on all
/// evaluation data, which takes the place of an earlier one of the same step.
#[derive(Default)]
struct Evaluations {
    held: Option<serde_json::Value>,
}

impl Evaluations {
    fn report(&mut self, event: &Event<'_>) -> Result<(), CommandError> {
        match event {
            Event::Evaluated(at) => {
                self.held = Some(json!({
                    "event": "evaluated", "model": at.model, "seed": at.seed, "step": at.step,
                    "tokens": at.tokens, "loss": at.loss, "score": at.score,
                    "train_tokens_per_s": at.tokens_per_s, "seconds": at.seconds,
                }));
                Ok(())
            }
            Event::Step(_) => self.finish(false),
            Event::Finished { .. } => self.finish(true),
            _ => Ok(()),
        }
    }

    /// Writes what is held back.
    fn finish(&mut self, last: bool) -> Result<(), CommandError> {
        let Some(mut line) = self.held.take() else { return Ok(()) };
        line["final"] = last.into();
        output::json(&line)
    }
}

fn summary_json(summary: &Summary, folder: &Path) -> serde_json::Value {
    json!({
        "event": "finished", "model": summary.model, "seed": summary.seed, "steps": summary.steps,
        "tokens": summary.tokens, "score": summary.score, "metric": summary.metric,
        "params": summary.parameters, "train_tokens_per_s": summary.train_tokens_per_s,
        "seconds": summary.seconds, "stopped_early": summary.stopped_early,
        "resumed_from": summary.resumed_from, "run": folder, "checkpoint": summary.checkpoint,
    })
}

fn summary_text(summary: &Summary, folder: &Path) -> String {
    let early = if summary.stopped_early { ", the target was reached" } else { "" };
    format!(
        "{}, seed {}: {} {:.4} after {}{early} ({}, {:.0} s, {:.0} tokens/s)\nrun: {}",
        summary.model,
        summary.seed,
        summary.metric.name(),
        summary.score,
        output::count(summary.steps, "step"),
        output::count(summary.tokens, "token"),
        summary.seconds,
        summary.train_tokens_per_s,
        folder.display(),
    )
}
