//! `fastweight demo`: small facts about memories that can be checked by hand.

mod attention;
mod check;
mod figures;
mod memory;
mod numbers;
mod sequence;
mod surprise;
mod surprise_figure;

use std::path::PathBuf;

use burn::tensor::Device;
use clap::ValueEnum;
use comfy_table::{CellAlignment, Table, TableComponent, presets};
use serde::Serialize;

use crate::commands::ledger;
use crate::error::CommandError;
use crate::global::Global;
use crate::output;
use crate::values::refuse_file;
use check::{Check, Expected, Experiment};
use numbers::Numbers;

const EXAMPLE: &str = "\
Everything is computed by the operators that train and run models: their float64 definitions, and
their float32 functions on --device. The exit code is 1 when any value is not the expected one.

A file for --numbers is JSON: queries `q` and keys `k`, a list of 4 numbers a token; values `v`, 3 numbers a token; what is
expected of them, 3 numbers a token, as `elu1_explicit`, `elu1_recurrent` and `softmax`; and `delta_memory`, the readings
expected of a 2x2 memory, each {\"value\": [a, b]}: `same_key_twice_additive_read`, `same_key_twice_delta_read`,
`gated_unrelated_key_read`, `half_beta_read`, `no_forgetting_read`, and `crosstalk_old_key_read`, which is
{\"value_by_rho\": {\"0.5\": [a, b]}} with a reading for each inner product. The embedded one is
crates/fastweight/src/commands/demo/seed_demo.json in the source.

Example:
  fastweight demo
  fastweight demo crosstalk forgetting --out figures --json
  fastweight demo surprise --data bible.txt";

/// Arguments of `fastweight demo`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub struct Args {
    /// Experiments to run [default: all but surprise, which trains a small model first]
    #[arg(value_enum)]
    experiments: Vec<Name>,
    /// Folder for the figures memory.svg and crosstalk.svg, or surprise.svg
    #[arg(long, value_name = "DIR", default_value = "demo")]
    out: PathBuf,
    /// Write no figures
    #[arg(long, conflicts_with = "out")]
    no_figures: bool,
    /// Tokens and the numbers expected of them, a JSON file as described below [default: embedded]
    #[arg(long, value_name = "FILE")]
    numbers: Option<PathBuf>,
    /// Text for surprise, a UTF-8 file or a folder of them [default: Genesis 1 to 6, embedded]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Run folder for surprise: a trained model with a titans layer [default: a small one, trained on the text]
    #[arg(long, value_name = "RUN")]
    run: Option<PathBuf>,
}

/// The experiments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Name {
    /// One key, two values: the mean or the last one
    SameKeyTwice,
    /// Keys that are not orthogonal disturb each other
    Crosstalk,
    /// A decay forgets what it does not touch
    Forgetting,
    /// A write of strength 0.5 goes half of the way
    HalfStep,
    /// Erasing along a key
    Householder,
    /// How far back a decay of 0.9 sees
    MovingAverage,
    /// Weights over all tokens, and a recurrence
    ExplicitRecurrent,
    /// Linear beside softmax attention
    LinearSoftmax,
    /// Later tokens change nothing earlier
    FutureLeak,
    /// What reading before writing loses
    ReadBeforeWrite,
    /// Bytes of a KV cache and of a fixed state
    Ledger,
    /// What each token of a text does to a Titans memory
    Surprise,
}

/// One check as JSON.
#[derive(Serialize)]
struct Line<'a> {
    experiment: Name,
    #[serde(flatten)]
    check: &'a Check,
    pass: bool,
}

/// A written figure as JSON.
#[derive(Serialize)]
struct Figure {
    figure: &'static str,
    path: String,
}

/// Runs the experiments, prints expected beside computed values and writes the figures.
///
/// # Errors
/// [`CommandError::Failure`] when a computed value is not the expected one or a figure cannot be written;
/// [`CommandError::Input`] for a file of numbers that does not fit, or an unknown device.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let device = global.device()?;
    if !args.no_figures {
        refuse_file(&args.out)?;
    }
    let numbers = Numbers::load(args.numbers.as_deref())?;
    let surprise = args.experiments.contains(&Name::Surprise);
    if !surprise && (args.data.is_some() || args.run.is_some()) {
        return Err(CommandError::input(
            "--data and --run belong to the experiment surprise; name it as well",
        ));
    }
    let names: Vec<Name> = match args.experiments.as_slice() {
        [] => Name::value_variants().iter().copied().filter(|name| *name != Name::Surprise).collect(),
        chosen => chosen.to_vec(),
    };
    let mut tokens = Vec::new();
    let (mut total, mut failed) = (0, Vec::new());
    for &name in &names {
        let experiment = if name == Name::Surprise {
            let (data, run) = (args.data.as_deref(), args.run.as_deref());
            let (experiment, read) = surprise::trace(data, run, global, &device)?;
            tokens = read;
            experiment
        } else {
            compute(name, &numbers, global.seed.unwrap_or(0), &device)?
        };
        total += experiment.checks.len();
        failed.extend(
            experiment
                .checks
                .iter()
                .filter(|check| !check.passes())
                .map(|check| (name, check.quantity.clone())),
        );
        print(&experiment, global.json)?;
    }
    if global.json {
        tokens.iter().try_for_each(output::json)?;
    }
    let mut drawn = Vec::new();
    if !args.no_figures && !tokens.is_empty() {
        drawn.push(("surprise", surprise_figure::draw(&tokens)?));
    }
    if !args.no_figures && names != [Name::Surprise] {
        drawn.extend(figures::draw()?);
    }
    let figures = if drawn.is_empty() { Vec::new() } else { figures::write(&args.out, drawn)? };
    for (figure, path) in figures {
        let path = path.display().to_string();
        if global.json {
            output::json(&Figure { figure, path })?
        } else {
            output::line(format_args!("figure {path}"))?
        }
    }
    match failed.first() {
        Some((name, quantity)) => Err(CommandError::failure(format_args!(
            "{} of {total} values are not the expected ones, the first is {quantity:?} of {}; an operator of this build \
             computes something else than its definition says, or --numbers expects something else",
            failed.len(),
            title(*name),
        ))),
        None if global.json => Ok(()),
        None => output::line(format_args!("all {total} values are as expected")),
    }
}

fn compute(name: Name, numbers: &Numbers, seed: u64, device: &Device) -> Result<Experiment, CommandError> {
    match name {
        Name::SameKeyTwice => memory::same_key_twice(numbers, device),
        Name::Crosstalk => memory::crosstalk(numbers, device),
        Name::Forgetting => memory::forgetting(numbers, device),
        Name::HalfStep => memory::half_step(numbers, device),
        Name::Householder => memory::householder(device),
        Name::MovingAverage => memory::moving_average(device),
        Name::ExplicitRecurrent => attention::explicit_recurrent(numbers, seed, device),
        Name::LinearSoftmax => attention::linear_softmax(numbers, device),
        Name::FutureLeak => attention::future_leak(numbers, device),
        Name::ReadBeforeWrite => attention::read_before_write(numbers, device),
        Name::Ledger => Ok(bytes()),
        Name::Surprise => Err(CommandError::failure("surprise needs a model")),
    }
}

/// The example of the ledger.
fn bytes() -> Experiment {
    let example = ledger::example(ledger::EXAMPLE_TOKENS);
    let exactly = |quantity, expected: f64, computed: usize| {
        Check::equal(quantity, &[expected], 0.0, &[computed as f64])
    };
    let checks = vec![
        exactly("KV cache, bytes", 32.0 * 1024.0 * 1024.0, example.kv_cache),
        exactly("fixed state, bytes", 16_640.0, example.state),
        Check::equal("ratio", &[2016.49], 0.005, &[example.ratio()]),
    ];
    let about =
        "65,536 tokens of keys and values, 64 wide, in float32, beside a 64 x 64 memory with its normaliser.";
    Experiment { name: Name::Ledger, about, checks }
}

fn title(name: Name) -> String {
    name.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}

fn print(experiment: &Experiment, json: bool) -> Result<(), CommandError> {
    if json {
        let lines = experiment.checks.iter();
        return lines
            .map(|check| Line { experiment: experiment.name, check, pass: check.passes() })
            .try_for_each(|line| output::json(&line));
    }
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    // No lines between rows.
    table.remove_style(TableComponent::HorizontalLines).remove_style(TableComponent::MiddleIntersections);
    table.set_header(["quantity", "expected", "computed", ""]);
    for check in &experiment.checks {
        let verdict = if check.passes() { "ok" } else { "DIFFERS" };
        table.add_row([&check.quantity, &expected(check), &list(&check.computed), verdict]);
    }
    for column in table.column_iter_mut().skip(1).take(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    output::line(format_args!("{}\n{}\n{table}\n", title(experiment.name), experiment.about))
}

fn expected(check: &Check) -> String {
    match &check.expected {
        Expected::Equal { expected, .. } => list(expected),
        Expected::AtMost { expected } => format!("at most {}", number(*expected)),
        Expected::AtLeast { expected } => format!("at least {}", number(*expected)),
    }
}

fn list(numbers: &[f64]) -> String {
    match numbers {
        [one] => number(*one),
        several => format!("[{}]", several.iter().map(|&x| number(x)).collect::<Vec<_>>().join(", ")),
    }
}

/// Up to six digits after the point, scientific when that would show nothing.
fn number(x: f64) -> String {
    if x != 0.0 && x.abs() < 1e-3 {
        return format!("{x:.1e}");
    }
    let text = format!("{x:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_hide_nothing() {
        for (x, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (0.5, "0.5"),
            (2016.4923, "2016.4923"),
            (33_554_432.0, "33554432"),
            (2.22e-16, "2.2e-16"),
            (-3.0, "-3"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(number(x), text);
        }
        assert_eq!(list(&[0.25, 0.5]), "[0.25, 0.5]");
    }
}
