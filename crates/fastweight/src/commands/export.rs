//! `fastweight export`: a trained model's lookup experts as tables.

use std::path::PathBuf;

use fastweight::train::export;
use serde_json::json;

use crate::commands::experts::Experts;
use crate::commands::ledger::{bytes, ratio};
use crate::commands::limits;
use crate::error::CommandError;
use crate::global::Global;
use crate::output;
use crate::progress::{self, Progress};
use crate::values::refuse_file;

const EXAMPLE: &str = "\
Lookup experts (the channel mixer `mole`) read nothing but the token, so after training the outputs of
each fit in a table with a row for every token of the vocabulary. The model in --out gives the same
logits to float rounding and reads one row an expert and token in place of the experts' weights; eval,
generate and ledger take it as any run. It cannot be trained further. The same command again replaces it.

Example:
  fastweight export runs/mole --out runs/mole-tables
  fastweight eval runs/mole-tables
  fastweight export runs/mole --out runs/mole-tables --json";

/// Arguments of `fastweight export`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub struct Args {
    /// Run folder, or one of its checkpoints
    run: PathBuf,
    /// Folder for the exported model, a run folder of its own
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Writes the tables.
///
/// # Errors
/// A run that cannot be loaded or has no lookup experts, a folder that holds something else or cannot be written.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let device = global.device()?;
    refuse_file(&args.out)?;
    limits::check_exporting(&args.run)?;
    let mut progress = Progress::new(global, "export");
    progress.milestone(0.0, None, &format!("tables of {}", args.run.display()));
    let exported = export::export(&args.run, &args.out, &device).map_err(CommandError::train);
    progress.finish();
    let exported = exported?;
    exported.notes.iter().for_each(progress::note);
    let Some(experts) = Experts::of(&exported.experts, |bytes| bytes as u128) else { return Ok(()) };
    let state = &exported.state;
    if global.json {
        return output::json(&json!({
            "model": state.name, "seed": state.seed, "step": state.step, "source": exported.source,
            "checkpoint": exported.checkpoint, "lookup_experts": experts,
        }));
    }
    let header = ["layer", "experts", "read as networks", "as tables", "held as networks", "as tables"];
    let mut table = output::table(header);
    table.add_rows(experts.rows(bytes));
    output::line(format_args!(
        "{}, seed {}, step {}: lookup experts as tables in {}\n{table}\n\
         A token reads {} times less of the experts; what it reads of the rest of the model stays the same.",
        state.name,
        state.seed,
        state.step,
        exported.checkpoint.display(),
        ratio(experts.sum.ratio()),
    ))
}
