//! `fastweight compare`: trains several models on one task and compares them.

use std::path::PathBuf;

use fastweight::train::compare::{self, Comparison, Options, RESULTS, Row};
use fastweight::train::recipe::ParameterMatch;
use fastweight::train::report;

use crate::commands::limits;
use crate::commands::train::{folder_of, load, metric};
use crate::error::CommandError;
use crate::global::Global;
use crate::output;
use crate::training::TrainingProgress;
use crate::values::refuse_file;

const EXAMPLE: &str = "\
Every model is trained with every seed, one after the other. Finished trainings are kept in the
folder, so an interrupted comparison continues when the same command runs again.

Example:
  fastweight compare recipes/recall.toml
  fastweight compare recipes/recall.toml --quick --json

With --json there is one line for each model and seed:
  {\"model\",\"seed\",\"score\",\"params\",\"state_bytes\",\"train_tokens_per_s\",\"decode_tokens_per_s\",\"seconds\"}";

/// Arguments of `fastweight compare`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub struct Args {
    /// Recipe, a TOML file
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
        limits::check(&recipe)?;
        if let Some(seed) = global.seed {
            recipe = recipe.with_seed(seed);
        }
    }
    let options =
        Options { folder: args.out.clone().unwrap_or(folder), data: args.data.clone(), restart: args.fresh };
    refuse_file(&options.folder)?;
    let mut progress = TrainingProgress::new(global, &recipe.name, metric(&recipe), &options.folder);
    let comparison = compare::compare(&recipe, &options, &device, &mut |event| progress.show(event));
    progress.finish();
    let comparison = comparison.map_err(CommandError::train)?;
    let page = options.folder.join("report.html");
    report::write(&comparison, &page).map_err(CommandError::train)?;
    if global.json {
        return comparison.entries.iter().try_for_each(|entry| output::line(entry.line()));
    }
    output::line(table(&comparison))?;
    for note in &comparison.notes {
        output::line(note)?;
    }
    output::line(parameters(&comparison))?;
    output::line(format_args!("report:  {}", page.display()))?;
    output::line(format_args!("results: {}", options.folder.join(RESULTS).display()))
}

fn table(comparison: &Comparison) -> String {
    let mut table = output::table([
        "model",
        comparison.metric.name(),
        "parameters",
        "state bytes",
        "learning rate",
        "training tokens/s",
        "decode tokens/s",
        "seconds",
    ]);
    for row in &comparison.rows {
        table.add_row([
            row.model.clone(),
            score(row),
            row.params.to_string(),
            row.state_bytes.to_string(),
            row.learning_rate.to_string(),
            format!("{:.0}", row.train_tokens_per_s),
            format!("{:.0}", row.decode_tokens_per_s),
            format!("{:.1}", row.seconds),
        ]);
    }
    table.to_string()
}

/// Mean score, and half the range over seeds when there are several.
fn score(row: &Row) -> String {
    let half_range = (row.score.high - row.score.low) / 2.0;
    match row.score.count {
        0 | 1 => format!("{:.4}", row.score.mean),
        _ => format!("{:.4} ± {half_range:.4}", row.score.mean),
    }
}

fn parameters(comparison: &Comparison) -> String {
    let apart = comparison.rows.iter().filter(|row| row.matching == ParameterMatch::Apart).count();
    let adjusted = comparison.rows.iter().filter(|row| row.matching == ParameterMatch::Adjusted).count();
    let spread = match comparison.rows.iter().map(|row| row.score.count).max() {
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
    format!(
        "{matched}; state bytes are for one sequence of {}{spread}",
        output::count(comparison.length, "token")
    )
}
