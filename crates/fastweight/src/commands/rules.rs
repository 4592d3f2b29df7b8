//! `fastweight rules`: every named memory as four choices, what it minimises, and which choices go together.

use std::fmt::Write;

use comfy_table::{ContentArrangement, Table, presets};
use fastweight::memory::rule::explain::{Example, Step, example};
use fastweight::memory::rule::named::{self, Definition, NamedRule, Sizes};
use fastweight::memory::rule::soundness::{cells, markdown, unsound};
use fastweight::memory::{ChannelMixerConfig, MixerConfig, names};
use serde::Serialize;

use crate::error::CommandError;
use crate::global::Global;
use crate::output;

const HELP: &str = "\
A memory is four choices: its architecture, the inner loss a write lowers (attentional bias), what a
write keeps of the memory before it (retention), and how a write lowers the loss (learner). `recipe` is
how a recipe names it. `matrix` prints which of the choices go together, and why others do not.

Example:
  fastweight rules
  fastweight rules gated_delta_net --heads 8 --head-dim 128
  fastweight rules explain dgd
  fastweight rules matrix";

const EXPLAIN: &str = "\
The example has two key and two value channels and three tokens, and is computed by the rule's float64 definition.

Example:
  fastweight rules explain delta_net
  fastweight rules explain yaad --heads 8 --head-dim 32 --json";

const MATRIX: &str = "\
With --json there is one line for each of the combinations, {\"memory\",\"bias\",\"retention\",\"learner\",\"sound\"}, and the
\"reason\" of one that is not sound.

Example:
  fastweight rules matrix
  fastweight rules matrix --json";

/// Arguments of `fastweight rules`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP, args_conflicts_with_subcommands = true)]
pub struct Args {
    /// Show this rule only
    name: Option<String>,
    #[command(flatten)]
    sizes: SizeArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// One rule with the objective it minimises and a small example, computed now
    #[command(after_help = EXPLAIN)]
    Explain {
        /// Name of the rule
        name: String,
        #[command(flatten)]
        sizes: SizeArgs,
    },
    /// Which choices go together, as Markdown, with the reason for each that do not
    #[command(after_help = MATRIX)]
    Matrix,
}

/// Sizes for the bytes of the state.
#[derive(Debug, Clone, Copy, clap::Args)]
struct SizeArgs {
    /// Heads
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=65536))]
    heads: u32,
    /// Key channels a head
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    head_dim: u32,
    /// Value channels a head; as the key channels when absent
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    value_dim: Option<u32>,
    /// Tokens read
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
}

impl SizeArgs {
    fn sizes(self, rule: &NamedRule) -> Sizes {
        let key = self.head_dim as usize;
        let value = if rule.needs_square() { key } else { self.value_dim.map_or(key, |v| v as usize) };
        Sizes { heads: self.heads as usize, key, value, tokens: self.tokens as usize }
    }
}

/// A rule as JSON.
#[derive(Serialize)]
struct Line {
    name: &'static str,
    title: &'static str,
    architecture: &'static str,
    attentional_bias: &'static str,
    retention: &'static str,
    learner: &'static str,
    equation: &'static str,
    state_size: &'static str,
    state_bytes: usize,
    recipe: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    no_recipe: Option<&'static str>,
    source: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    objective: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    example: Option<Example>,
}

impl Line {
    fn new(rule: &NamedRule, sizes: SizeArgs) -> Self {
        Self {
            name: rule.name,
            title: rule.title,
            architecture: rule.architecture,
            attentional_bias: rule.attentional_bias,
            retention: rule.retention,
            learner: rule.learner,
            equation: rule.equation,
            state_size: rule.state_size,
            state_bytes: rule.state_bytes(&sizes.sizes(rule)),
            recipe: recipe(rule),
            no_recipe: rule.no_recipe(),
            source: rule.source,
            objective: None,
            example: None,
        }
    }
}

/// How a recipe names the rule: its own layer, or the layer `rule` with its choices.
fn recipe(rule: &NamedRule) -> Option<String> {
    match rule.definition {
        _ if MixerConfig::NAMES.contains(&rule.name) => Some(format!("{:?}", rule.name)),
        Definition::Cell(cell) => Some(cell.recipe()),
        Definition::Special(_) => None,
    }
}

/// A combination of the four choices as JSON.
#[derive(Serialize)]
struct Combination {
    memory: &'static str,
    bias: &'static str,
    retention: &'static str,
    learner: &'static str,
    sound: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

fn matrix(global: &Global) -> Result<(), CommandError> {
    if !global.json {
        return output::line(markdown().trim_end());
    }
    cells().try_for_each(|(memory, bias, retention, learner)| {
        let reason = unsound(memory, bias, retention, learner);
        let [memory, bias, retention, learner] =
            [memory.name(), bias.name(), retention.name(), learner.name()];
        output::json(&Combination { memory, bias, retention, learner, sound: reason.is_none(), reason })
    })
}

/// Prints all rules, one rule, its explanation, or the matrix of choices.
///
/// # Errors
/// [`CommandError::Input`] for an unknown name, with the closest one.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    match (&args.command, &args.name) {
        (Some(Command::Matrix), _) => matrix(global),
        (Some(Command::Explain { name, sizes }), _) => explain(find(name)?, *sizes, global),
        (None, Some(name)) => list(&[find(name)?], args.sizes, global),
        (None, None) => {
            list(&named::all().collect::<Vec<_>>(), args.sizes, global)?;
            if global.json { Ok(()) } else { output::line(LEGEND) }
        }
    }
}

fn find(name: &str) -> Result<&'static NamedRule, CommandError> {
    named::by_name(name).ok_or_else(|| {
        if MixerConfig::NAMES.contains(&name) || ChannelMixerConfig::NAMES.contains(&name) {
            return CommandError::input(format_args!(
                "{}; `fastweight options {name}` lists its options",
                no_rule(name)
            ));
        }
        let known: Vec<&str> = named::all().map(|rule| rule.name).collect();
        let unknown = names::unknown("rule", name, &known);
        CommandError::input(format_args!("{unknown}; `fastweight rules` lists them all"))
    })
}

/// What a layer of recipes is that is no rule.
fn no_rule(layer: &str) -> String {
    let inside = |what, rules| {
        format!("{layer} is no rule of its own but {what}; the rule inside is {rules} (`fastweight rules`)")
    };
    match layer {
        "titans_mac" | "titans_mag" | "titans_mal" => {
            inside("attention beside a memory", "titans_mlp, or titans with memory = \"matrix\"")
        }
        "rwkv7_dea" => inside("attention over small caches beside a memory", "rwkv7"),
        "rule" => inside(
            "the layer of any sound combination of the four choices (`fastweight rules matrix`)",
            "what they say",
        ),
        _ => format!("{layer} is no rule: it is a channel mixer, a map of each token without a memory"),
    }
}

fn list(rules: &[&NamedRule], sizes: SizeArgs, global: &Global) -> Result<(), CommandError> {
    rules.iter().try_for_each(|rule| {
        let line = Line::new(rule, sizes);
        if global.json { output::json(&line) } else { output::line(card(&line, sizes.sizes(rule))) }
    })
}

fn explain(rule: &NamedRule, sizes: SizeArgs, global: &Global) -> Result<(), CommandError> {
    let example = example(rule);
    let line = Line { objective: Some(rule.objective), ..Line::new(rule, sizes) };
    if global.json {
        return output::json(&Line { example: Some(example), ..line });
    }
    output::line(card(&line, sizes.sizes(rule)))?;
    output::line(worked(&example))
}

const LEGEND: &str = "State in numbers of one sequence and layer: H heads, K key and V value channels a head, T tokens, E hidden channels of\n\
                      an MLP a key channel; bytes in float32. A short convolution of width W adds (W - 1) H (2 K + V). `fastweight rules\n\
                      explain NAME` adds the objective and an example, `fastweight rules matrix` shows which choices go together.";

fn card(line: &Line, sizes: Sizes) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    let Sizes { heads, key, value, tokens } = sizes;
    let state = format!(
        "{}: {} bytes for H = {heads}, K = {key}, V = {value}, T = {tokens}",
        line.state_size, line.state_bytes
    );
    let none = line.no_recipe.map(|reason| format!("none: {reason}"));
    let rows = [
        ("architecture", Some(line.architecture)),
        ("attentional bias", Some(line.attentional_bias)),
        ("retention", Some(line.retention)),
        ("learner", Some(line.learner)),
        ("equation", Some(line.equation)),
        ("objective", line.objective),
        ("state", Some(&state)),
        ("recipe", line.recipe.as_deref().or(none.as_deref())),
        ("source", Some(line.source)),
    ];
    for (choice, text) in rows {
        if let Some(text) = text {
            table.add_row([choice, text]);
        }
    }
    format!("{}: {}\n{table}\n", line.name, line.title)
}

/// The example as text.
fn worked(example: &Example) -> String {
    let vector = |x: &[f64]| {
        let numbers: Vec<String> = x.iter().map(|x| format!("{x:.4}")).collect();
        format!("[{}]", numbers.join(", "))
    };
    let mut text = format!("Example with K = V = 2 and {}; the query is the key.\n", example.numbers);
    for (t, step) in example.steps.iter().enumerate() {
        let Step { key, value, memory, read_before, read_after, objective_before, objective_after } = step;
        let _ = writeln!(text, "  token {}: key {}, value {}", t + 1, vector(key), vector(value));
        if !memory.is_empty() {
            let rows: Vec<String> = memory.iter().map(|row| vector(row)).collect();
            let _ = writeln!(text, "    memory     {}", rows.join(" "));
        }
        let before = if read_before.is_empty() { "nothing".into() } else { vector(read_before) };
        let _ = writeln!(text, "    reads      {} (before the write {before})", vector(read_after));
        match (objective_before, objective_after) {
            (Some(before), Some(after)) => {
                let _ =
                    writeln!(text, "    objective  {after:.6} (at the memory before the write {before:.6})");
            }
            (None, Some(after)) => {
                let _ = writeln!(text, "    objective  {after:.6}");
            }
            _ => {}
        }
    }
    text.trim_end().to_owned()
}
