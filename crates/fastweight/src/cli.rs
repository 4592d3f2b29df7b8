//! The command line: one variant per subcommand.

use clap::{Parser, Subcommand};

use crate::commands::{bench, compare, demo, eval, export, generate, ledger, options, rules, train};
use crate::error::CommandError;
use crate::global::Global;

const AFTER_HELP: &str = "\
Results go to standard output, progress and errors to standard error.

Exit codes:
  0   done
  1   the work failed: full disk, run folder in use or not writable, training that diverged
  2   bad input: an argument, recipe, file or run folder is missing or does not fit
  70  internal error, a bug

Example:
  fastweight compare recipes/recall.toml --quick";

/// Train, compare and run sequence models whose memory learns while they read
#[derive(Debug, Parser)]
#[command(name = "fastweight", version, after_help = AFTER_HELP)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train several memories on one task at equal budget and compare them
    Compare(compare::Args),
    /// Train one model
    Train(train::Args),
    /// Score a trained model
    Eval(eval::Args),
    /// Continue a text with a trained model
    Generate(generate::Args),
    /// Turn the lookup experts of a trained model into tables
    Export(export::Args),
    /// Show where the bytes of a session are
    Ledger(ledger::Args),
    /// List every key a recipe can hold: type, default, meaning
    Options(options::Args),
    /// List every named memory rule: its choices, equation and state
    Rules(rules::Args),
    /// Show small facts about memories that can be checked by hand
    Demo(demo::Args),
    /// Time every operator on this machine
    Bench(bench::Args),
}

impl Cli {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// What the subcommand returns.
    pub fn run(&self) -> Result<(), CommandError> {
        let global = &self.global;
        global.check_device()?;
        match &self.command {
            quick @ (Command::Ledger(_) | Command::Options(_) | Command::Rules(_)) => quick.run(global),
            command => global.within_threads(|| command.run(global)),
        }
    }
}

impl Command {
    fn run(&self, global: &Global) -> Result<(), CommandError> {
        match self {
            Self::Compare(args) => compare::run(args, global),
            Self::Train(args) => train::run(args, global),
            Self::Eval(args) => eval::run(args, global),
            Self::Generate(args) => generate::run(args, global),
            Self::Export(args) => export::run(args, global),
            Self::Ledger(args) => ledger::run(args, global),
            Self::Options(args) => options::run(args, global),
            Self::Rules(args) => rules::run(args, global),
            Self::Demo(args) => demo::run(args, global),
            Self::Bench(args) => bench::run(args, global),
        }
    }
}
