//! `fastweight compare`: trains several models on the same tasks and compares them.

use std::path::PathBuf;

use fastweight::train::compare::{self, Comparison, Options, REPORT, RESULTS, Spread};
use fastweight::train::recipe::ParameterMatch;
use fastweight::train::report;

use crate::commands::limits;
use crate::commands::train::{folder_of, load};
use crate::error::CommandError;
use crate::global::Global;
use crate::output;
use crate::training::TrainingProgress;
use crate::values::refuse_file;

const EXAMPLE: &str = "\
Every model is trained on every task of the recipe with every seed, one after the other. Finished trainings are kept in the
folder, so an interrupted comparison continues when the same command runs again.

Example:
  fastweight compare recipes/recall.toml
  fastweight compare recipes/rules.toml --quick --json

With --json there is one line for each task, model and seed:
  {\"model\",\"task\",\"seed\",\"score\",\"params\",\"state_bytes\",\"train_tokens_per_s\",\"decode_tokens_per_s\",\"seconds\",
   \"learning_rate\",\"state_grows\"}
and for a formal language \"bins\", its scores at the training lengths and beyond them: \"tested\" strings with \"answers\"
symbols in all, and the shares \"answers_right\" and \"strings_right\" (strings without a wrong answer).";

/// Arguments of `fastweight compare`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub struct Args {
    /// Recipe, a TOML file (`fastweight options` lists what it can hold)
    recipe: PathBuf,
    /// Make the changes of the recipe's [compare.quick]: a short run that shows that everything works
    #[arg(long)]
    quick: bool,
    /// Text to train on, a UTF-8 file or a folder of them, in place of the recipe's
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Folder of results, created when missing [default: runs/NAME of the recipe, with -quick if so]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Remove the folder's results and start over
    #[arg(long)]
    fresh: bool,
}

/// Compares the models.
///
/// # Errors
/// Bad recipe, data or folder; a loss that is not finite; a full disk.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let device = global.device()?;
    let mut recipe = load(&args.recipe, args.data.as_deref(), global)?;
    let mut folder = folder_of(&recipe);
    if args.quick {
        folder.as_mut_os_string().push("-quick");
        recipe = recipe.quick().map_err(CommandError::train)?;
        limits::check_sizes(&recipe)?;
        limits::check(&recipe, args.data.as_deref())?;
        if let Some(seed) = global.seed {
            recipe = recipe.with_seed(seed);
        }
    }
    let options =
        Options { folder: args.out.clone().unwrap_or(folder), data: args.data.clone(), restart: args.fresh };
    refuse_file(&options.folder)?;
    let mut progress = TrainingProgress::new(global, &recipe.name, &options.folder);
    let comparison = compare::compare(&recipe, &options, &device, &mut |event| progress.show(event));
    progress.finish();
    let comparison = comparison.map_err(CommandError::train)?;
    let page = options.folder.join(REPORT);
    report::write(&comparison, &page).map_err(CommandError::train)?;
    if global.json {
        comparison.entries().try_for_each(|entry| output::line(entry.line()))?;
        return finished(&comparison);
    }
    output::line(table(&comparison))?;
    for note in &comparison.notes {
        output::line(note)?;
    }
    output::line(parameters(&comparison))?;
    output::line(format_args!("report:  {}", page.display()))?;
    if comparison.entries().next().is_some() {
        output::line(format_args!("results: {}", options.folder.join(RESULTS).display()))?;
    }
    finished(&comparison)
}

/// Fails when a training diverged: the others have their results.
fn finished(comparison: &Comparison) -> Result<(), CommandError> {
    let diverged = comparison.diverged.len();
    if diverged == 0 {
        return Ok(());
    }
    let finished = comparison.entries().count();
    Err(CommandError::failure(format_args!(
        "{diverged} of {} diverged and {} no result{}. {}",
        output::count(diverged + finished, "training"),
        if diverged == 1 { "has" } else { "have" },
        if finished > 0 { "; those of the others are kept" } else { "" },
        comparison.diverged.join(". ")
    )))
}

/// One row for each model: every task's scores, then figures of the first task.
fn table(comparison: &Comparison) -> String {
    let several = comparison.tasks.len() > 1;
    let scores = comparison.tasks.iter().flat_map(|task| {
        let name = move |name: &str| if several { format!("{}: {name}", task.name) } else { name.to_owned() };
        task.headline().into_iter().map(move |column| (name(&column.name), column.values))
    });
    let (names, scores): (Vec<String>, Vec<Vec<Spread>>) = scores.unzip();
    let costs =
        ["parameters", "state bytes", "learning rate", "training tokens/s", "decode tokens/s", "seconds"];
    let header = ["model".to_owned()].into_iter().chain(names).chain(costs.map(str::to_owned));
    let mut table = output::table(header);
    let rows = comparison.tasks.first().map_or(&[][..], |task| &task.rows);
    for (index, row) in rows.iter().enumerate() {
        let scores = scores.iter().filter_map(|column| column.get(index)).map(score);
        let seconds = comparison.tasks.iter().filter_map(|task| task.rows.get(index)).map(|row| row.seconds);
        let costs = [
            row.params.to_string(),
            format!("{}{}", row.state_bytes, if row.state_grows { ", growing" } else { "" }),
            rates(comparison, index),
            format!("{:.0}", row.train_tokens_per_s),
            format!("{:.0}", row.decode_tokens_per_s),
            format!("{:.1}", seconds.sum::<f64>()),
        ];
        table.add_row([row.model.clone()].into_iter().chain(scores).chain(costs));
    }
    table.to_string()
}

/// The learning rate of a model, or that on each task where they differ.
fn rates(comparison: &Comparison, index: usize) -> String {
    let rates = comparison.tasks.iter().filter_map(|task| task.rows.get(index));
    let mut rates: Vec<String> = rates.map(|row| row.learning_rate.to_string()).collect();
    rates.dedup();
    rates.join(", ")
}

/// The mean, and half the range over seeds when there are several.
fn score(figure: &Spread) -> String {
    let half_range = (figure.high - figure.low) / 2.0;
    match figure.count {
        0 => "diverged".into(),
        1 => format!("{:.4}", figure.mean),
        _ => format!("{:.4} ± {half_range:.4}", figure.mean),
    }
}

/// What the figures after the scores are of.
fn parameters(comparison: &Comparison) -> String {
    let models = || comparison.tasks.iter().flat_map(|task| &task.rows);
    let of = |matching: ParameterMatch| {
        let mut names: Vec<&str> =
            models().filter(|row| row.matching == matching).map(|row| row.model.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        names.len()
    };
    let (apart, adjusted) = (of(ParameterMatch::Apart), of(ParameterMatch::Adjusted));
    let spread = match models().map(|row| row.score.count).max() {
        Some(seeds) if seeds > 1 => format!("; ± is half the range over {seeds} seeds"),
        _ => String::new(),
    };
    let matched = match (apart, adjusted) {
        (0, 0) => "parameter counts are matched within 5%".to_owned(),
        (0, _) => {
            format!("parameter counts are matched within 5% ({adjusted} by changing the width of the MLP)")
        }
        _ => format!("the parameter counts of {} are not matched", output::count(apart, "model")),
    };
    let Some(first) = comparison.tasks.first() else { return matched };
    let tokens = output::count(first.length, "token");
    let of_first = match comparison.tasks.len() {
        1 => format!("state bytes are for one sequence of {tokens}"),
        _ => format!(
            "parameters, state bytes (of one sequence of {tokens}) and speeds are those on {}, learning rates those on \
             each task where they differ, seconds of one seed on every task",
            first.name
        ),
    };
    format!("{matched}; {of_first}{spread}")
}
