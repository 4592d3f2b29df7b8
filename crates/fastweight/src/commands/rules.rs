//! `fastweight rules`: every named memory as four choices.

use comfy_table::{ContentArrangement, Table, presets};
use fastweight::memory::names;
use fastweight::memory::rules::{self, RULES, Rule};
use serde::Serialize;

use crate::error::CommandError;
use crate::global::Global;
use crate::output;

const HELP: &str = "\
A memory is four choices: its architecture, the inner loss a write lowers (attentional bias), what a
write keeps of the memory before it (retention), and how a write lowers the loss (learner). The name is
what recipes call it: mixers = [\"gated_delta_net\"].

Example:
  fastweight rules
  fastweight rules gated_delta_net";

/// Arguments of `fastweight rules`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Show this rule only, with everything known of it
    name: Option<String>,
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
    source: &'static str,
}

impl From<&Rule> for Line {
    fn from(rule: &Rule) -> Self {
        let Rule {
            name,
            title,
            architecture,
            attentional_bias,
            retention,
            learner,
            equation,
            state_size,
            source,
        } = *rule;
        Self { name, title, architecture, attentional_bias, retention, learner, equation, state_size, source }
    }
}

/// Prints all rules, or one.
///
/// # Errors
/// [`CommandError::Input`] for an unknown name, with the closest one.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let (shown, one) = match &args.name {
        None => (RULES.iter().collect::<Vec<_>>(), false),
        Some(name) => {
            let rule = rules::by_name(name).ok_or_else(|| {
                let known = RULES.map(|rule| rule.name);
                CommandError::input(format_args!(
                    "{}; `fastweight rules` lists them all",
                    names::unknown("rule", name, &known)
                ))
            })?;
            (vec![rule], true)
        }
    };
    if global.json {
        return shown.into_iter().try_for_each(|rule| output::json(&Line::from(rule)));
    }
    for rule in shown {
        output::line(card(rule))?;
    }
    if one { Ok(()) } else { output::line(LEGEND) }
}

const LEGEND: &str = "State in numbers of one sequence and layer: H heads, K key and V value channels a head, T tokens. A short\n\
                      convolution of width W adds (W - 1) H (2 K + V).";

fn card(rule: &Rule) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    for (choice, text) in [
        ("architecture", rule.architecture),
        ("attentional bias", rule.attentional_bias),
        ("retention", rule.retention),
        ("learner", rule.learner),
        ("equation", rule.equation),
        ("state", rule.state_size),
        ("source", rule.source),
    ] {
        table.add_row([choice, text]);
    }
    format!("{}: {}\n{table}\n", rule.name, rule.title)
}
