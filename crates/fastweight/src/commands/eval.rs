//! `fastweight eval`: scores a trained model.

use std::path::{Path, PathBuf};

use fastweight::tasks::formal::{FormalConfig, Language};
use fastweight::tasks::recall;
use fastweight::train::Task;
use fastweight::train::evaluate::{self, LayerLoad, Routing};
use fastweight::train::recipe::{TaskKind, TaskRecipe};
use fastweight::train::run::{self, Loaded};
use serde_json::json;

use crate::commands::train::{read, refuse_data};
use crate::commands::{footprint, limits};
use crate::error::CommandError;
use crate::global::Global;
use crate::output;
use crate::progress::{self, Progress};
use crate::values::whole;

const EXAMPLE: &str = "\
Recall is scored by accuracy on rows the model was not trained on, a formal language by the share of
strings with no wrong answer, beyond the training length and at it, and text by bits per byte: of the
part of the training text that was held out, or of the whole of another text. Of a mixture of memories
it shows the share of the tokens that each memory gets and the load balance (1: all are as busy), of a
model with halting the mean rounds of a token.

Example:
  fastweight eval runs/bible
  fastweight eval runs/bible --data other.txt --json
  fastweight eval runs/recall small_t64_n16
  fastweight eval runs/parity parity";

/// Arguments of `fastweight eval`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub struct Args {
    /// Run folder, or one of its checkpoints
    run: PathBuf,
    /// Task: a recipe, or the name of a recall preset or formal language [default: the task it was trained on]
    task: Option<String>,
    /// Text to score on, a UTF-8 file or a folder of them, in place of the task's
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Batches to score on; 0 for all of a text or of the test strings [default: 16 for recall, else 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<usize>(0..=1 << 20))]
    batches: Option<usize>,
}

/// Batches of 64 rows that recall is scored on.
const RECALL_BATCHES: usize = 16;

/// Scores the model.
///
/// # Errors
/// A run, recipe or text that cannot be loaded; a task with other tokens than the model's.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let device = global.device()?;
    limits::check_loading(&args.run)?;
    let loaded = run::load(&args.run, &device).map_err(CommandError::train)?;
    loaded.notes.iter().for_each(progress::note);
    let task = task(args, &loaded, global)?;
    let known = loaded.model.config().vocab;
    if task.vocab() > known {
        return Err(CommandError::input(format_args!(
            "the task has {} token ids, the model of {} knows {known}; choose a task with at most as many",
            task.vocab(),
            args.run.display()
        )));
    }
    task.caution().iter().for_each(progress::note);
    let name = args.run.display().to_string();
    limits::check_trained(&name, loaded.model.config(), footprint::scoring(&task))?;
    let (batches, pairs_batches) = match task {
        Task::Recall(_) => (args.batches.unwrap_or(RECALL_BATCHES), args.batches.unwrap_or(RECALL_BATCHES)),
        Task::Formal(_) | Task::Text(_) => (args.batches.unwrap_or(0), 0),
    };
    let mut progress = Progress::new(global, "eval");
    progress.milestone(0.0, None, &format!("scoring {} of {}", task.metric().name(), args.run.display()));
    let score = evaluate::score(&loaded.model, &task, batches).map_err(CommandError::train)?;
    progress.at(0.5, None, String::new);
    let by_pairs =
        evaluate::recall_by_pairs(&loaded.model, &task, pairs_batches).map_err(CommandError::train)?;
    let by_length = evaluate::by_length(&loaded.model, &task).map_err(CommandError::train)?;
    let routing = evaluate::routing(&loaded.model, &task).map_err(CommandError::train)?;
    progress.finish();

    let part = scored_part(&task).filter(|_| batches == 0);
    if global.json {
        let mut line = json!({
            "model": loaded.state.name, "seed": loaded.state.seed, "step": loaded.state.step,
            "metric": score.metric, "score": score.score, "loss": score.loss, "scored_tokens": score.scored,
            "checkpoint": loaded.folder,
        });
        if let Some(part) = part {
            line["part"] = part.into();
        }
        if let Some(routing) = &routing {
            (line["loads"], line["mean_rounds"]) = (json!(routing.loads), json!(routing.mean_rounds));
        }
        if !by_pairs.is_empty() {
            line["by_pairs"] = json!(by_pairs);
        }
        if let Some(bins) = score.bins {
            (line["bins"], line["by_length"]) = (json!(bins), json!(by_length));
        }
        return output::json(&line);
    }
    output::line(format_args!(
        "{}, seed {}, step {}: {} {:.4} over {}{}",
        loaded.state.name,
        loaded.state.seed,
        loaded.state.step,
        score.metric.name(),
        score.score,
        output::count(score.scored, "token"),
        match part {
            Some("whole") => ", the whole text",
            Some(_) => ", the held-out part of the text",
            None => "",
        },
    ))?;
    for (pairs, accuracy) in by_pairs {
        output::line(format_args!("{:>12}: {accuracy:.4}", output::count(pairs, "pair")))?;
    }
    for part in score.bins.iter().flatten().chain(&by_length) {
        let lengths = match part.shortest == part.longest {
            true => part.longest.to_string(),
            false => format!("{}-{}", part.shortest, part.longest),
        };
        output::line(format_args!(
            "{lengths:>7} symbols: strings right {:.4}, answers right {:.4}, over {}",
            part.strings,
            part.steps,
            output::count(part.tested, "string")
        ))?;
    }
    let Some(Routing { loads, mean_rounds }) = routing else { return Ok(()) };
    for LayerLoad { layer, share, balance } in loads {
        let shares: Vec<String> = share.iter().map(|share| format!("{:.0}%", 100.0 * share)).collect();
        output::line(format_args!(
            "layer {layer}: share of the tokens in each memory {}, load balance {balance:.3}",
            shares.join(" ")
        ))?;
    }
    if let Some(rounds) = mean_rounds {
        output::line(format_args!("rounds a token: {rounds:.2} of {}", loaded.model.config().rounds))?;
    }
    Ok(())
}

fn task(args: &Args, loaded: &Loaded, global: &Global) -> Result<Task, CommandError> {
    let data = args.data.as_deref();
    let Some(name) = &args.task else {
        refuse_data(&[loaded.state.task.kind], data)?;
        return loaded.task(data).map_err(CommandError::train);
    };
    let path = Path::new(name);
    if path.exists() || path.extension().is_some_and(|extension| extension == "toml") {
        let recipe = read(path, data, global)?;
        let trained = &loaded.state.task;
        // Of several tasks the one of this name and kind, else the first of this kind.
        let fits = |task: &&TaskRecipe| task.kind == trained.kind && task.language == trained.language;
        let named = recipe.tasks().filter(fits).find(|task| task.name() == trained.name());
        let task = named.or_else(|| recipe.tasks().find(fits)).unwrap_or(&recipe.task);
        refuse_kind(args, loaded, task.kind)?;
        return Task::open(task, data).map_err(CommandError::train);
    }
    let task = match (recall::by_name(name), Language::by_name(name)) {
        (Ok(preset), _) => Task::Recall(preset),
        (_, Ok(language)) => Task::Formal(FormalConfig::new(language)),
        (Err(_), Err(unknown)) if loaded.state.task.kind == TaskKind::FormalLanguage => {
            return Err(CommandError::input(unknown));
        }
        (Err(unknown), Err(_)) => return Err(CommandError::input(unknown)),
    };
    let kind = if matches!(task, Task::Recall(_)) { TaskKind::Recall } else { TaskKind::FormalLanguage };
    refuse_data(&[kind], data)?;
    refuse_kind(args, loaded, kind)?;
    Ok(task)
}

/// Which part of a text is scored: what was held out in training, or a whole other text.
fn scored_part(task: &Task) -> Option<&'static str> {
    match task {
        Task::Text(text) if text.dataset.train_tokens().is_empty() => Some("whole"),
        Task::Text(_) => Some("held_out"),
        Task::Recall(_) | Task::Formal(_) => None,
    }
}

/// Refuses a task of another kind than the one the model was trained on: its token ids mean something else.
fn refuse_kind(args: &Args, loaded: &Loaded, kind: TaskKind) -> Result<(), CommandError> {
    let trained = loaded.state.task.kind;
    if kind == trained {
        return Ok(());
    }
    Err(CommandError::input(format_args!(
        "{} was trained on {}, the task {} is {}; choose a task of the kind it was trained on",
        args.run.display(),
        trained.name(),
        args.task.as_deref().unwrap_or_default(),
        kind.name()
    )))
}
