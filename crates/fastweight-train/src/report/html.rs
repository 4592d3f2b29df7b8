//! The page around the plots.

use std::fmt::Write;

use plotters::style::RGBColor;

use super::BURN_VERSION;
use super::charts::{Chart, count};
use super::plot::{self, Marker};
use super::tables::{overview, table, trials};
use crate::compare::{Comparison, TaskComparison};
use crate::recipe::{MatchBy, ParameterMatch, ResolvedModel};
use crate::task::Metric;

const STYLE: &str = include_str!("style.css");

/// The whole page.
pub fn page(comparison: &Comparison, charts: &[Vec<Chart>], states: Option<&Chart>) -> String {
    let title = escape(&comparison.recipe.name);
    let mut body = String::new();
    let several = comparison.tasks.len() > 1;
    let (about, first) = match &comparison.tasks[..] {
        [task] => (lead(task), table(task)),
        tasks => {
            let models = tasks.first().map_or(0, |task| task.models.len());
            let about = format!("{} on {}.", plural(models, "model"), plural(tasks.len(), "task"));
            (about, overview(comparison))
        }
    };
    let _ = write!(body, "<header><h1>{title}</h1><p class=\"lead\">{}</p></header>", escape(&about));
    let _ = write!(body, "<section>{first}{}</section>", notes(comparison));
    for (task, charts) in comparison.tasks.iter().zip(charts) {
        if several {
            let (name, lead) = (escape(&task.name), escape(&lead(task)));
            let heading = format!("<h2 class=\"task\">{name}</h2><p class=\"lead\">{lead}</p>");
            let _ = write!(body, "<section>{heading}</section><section>{}</section>", table(task));
        }
        charts.iter().for_each(|chart| body.push_str(&figure(task, chart)));
        if !task.trials.is_empty() {
            let _ = write!(body, "<section><h2>Learning rates tried</h2>{}</section>", trials(task));
        }
    }
    if let (Some(task), Some(chart)) = (comparison.tasks.first(), states) {
        body.push_str(&figure(task, chart));
    }
    let _ = write!(
        body,
        "<section><h2>Recipe</h2><pre>{}</pre></section><section><h2>Made with</h2>{}</section>",
        escape(&comparison.recipe.annotated_source()),
        versions()
    );
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>{title}</title><style>{STYLE}</style></head>\
         <body><main>{body}</main></body></html>\n"
    )
}

fn figure(task: &TaskComparison, chart: &Chart) -> String {
    format!(
        "<section><h2>{}</h2>{}<figure>{}<figcaption>{}</figcaption></figure></section>",
        chart.title,
        legend(task, chart),
        chart.svg,
        escape(&chart.caption)
    )
}

fn plural(n: usize, word: &str) -> String {
    if n == 1 { format!("1 {word}") } else { format!("{n} {word}s") }
}

fn lead(task: &TaskComparison) -> String {
    let seeds = task.recipe.train.seeds.len();
    let budget = match task.recipe.match_by() {
        MatchBy::Tokens => {
            let tokens = task.entries.iter().map(|entry| entry.tokens).max().unwrap_or_default();
            format!("{} training tokens", count(tokens as f64))
        }
        MatchBy::Seconds => format!("{} s of training", task.recipe.train.seconds.unwrap_or_default()),
    };
    let what = match task.metric {
        Metric::Accuracy => format!(
            "associative recall of {} pairs in {} tokens",
            task.recipe.task.pairs.unwrap_or_default(),
            task.length
        ),
        Metric::Strings => format!(
            "{} of strings of at most {} symbols, scored on strings up to twice as long as well",
            task.recipe.task.language.map_or("membership", |language| language.name()),
            task.length,
        ),
        Metric::BitsPerByte => format!("next-token prediction with {} tokens of context", task.length),
    };
    format!(
        "{} on {what}, each with {} and at most {budget} per training.",
        plural(task.models.len(), "model"),
        plural(seeds, "seed")
    )
}

fn notes(comparison: &Comparison) -> String {
    let models = || comparison.tasks.iter().flat_map(|task| &task.models);
    let all_near = models().all(|model| model.matching != ParameterMatch::Apart);
    let mut lines = Vec::new();
    if all_near && comparison.tasks.iter().any(|task| task.models.len() > 1) {
        let mut adjusted: Vec<&str> = Vec::new();
        for model in models().filter(|model| model.matching == ParameterMatch::Adjusted) {
            if !adjusted.contains(&model.name.as_str()) {
                adjusted.push(&model.name);
            }
        }
        let how = match adjusted.is_empty() {
            true => "as described".to_string(),
            false => format!("after the MLP width was changed for {}", adjusted.join(", ")),
        };
        lines.push(format!("Parameter counts are within 5% of the first model's, {how}."));
    }
    lines.extend(comparison.notes.iter().chain(&comparison.diverged).cloned());
    let items: String = lines.iter().map(|line| format!("<li>{}</li>", escape(line))).collect();
    if items.is_empty() { items } else { format!("<ul class=\"notes\">{items}</ul>") }
}

fn legend(task: &TaskComparison, chart: &Chart) -> String {
    let model = |(index, model): (usize, &ResolvedModel)| {
        format!("<span>{}{}</span>", swatch(index), escape(&model.name))
    };
    let mut entries: String = task.models.iter().enumerate().map(model).collect();
    if let Some(name) = chart.reference {
        let _ = write!(entries, "<span>{}{name}</span>", sign(plot::REFERENCE, Marker::Circle));
    }
    format!("<p class=\"legend\">{entries}</p>")
}

fn versions() -> String {
    let rows = [
        ("fastweight", env!("CARGO_PKG_VERSION").to_string()),
        ("burn", format!("{BURN_VERSION}, flex backend unless another device was chosen")),
        ("compiler", option_env!("FASTWEIGHT_RUSTC").unwrap_or("unknown").to_string()),
        ("system", format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
        ("instruction set", instruction_set().to_string()),
        ("threads", rayon::current_num_threads().to_string()),
    ];
    let rows: String = rows
        .iter()
        .map(|(name, value)| format!("<tr><th scope=\"row\">{name}</th><td>{}</td></tr>", escape(value)))
        .collect();
    format!("<table class=\"plain\"><tbody>{rows}</tbody></table>")
}

/// The widest vector instructions this CPU has.
fn instruction_set() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        return "AVX-512";
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        return "AVX2 and FMA";
    }
    if cfg!(target_arch = "aarch64") { "NEON" } else { "portable" }
}

/// The sign of model number `model` in the plots.
pub fn swatch(model: usize) -> String {
    sign(plot::colour(model), plot::marker(model))
}

fn sign(colour: RGBColor, marker: Marker) -> String {
    let class = match marker {
        Marker::Circle => "",
        Marker::Triangle => " class=\"triangle\"",
        Marker::Cross => " class=\"cross\"",
    };
    format!("<i{class} style=\"background:rgb({},{},{})\"></i>", colour.0, colour.1, colour.2)
}

/// Text for use between tags and in attributes.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(c),
        }
    }
    escaped
}
