//! The page around the plots.

use std::fmt::Write;

use super::BURN_VERSION;
use super::charts::{Chart, bytes, count};
use super::plot::PALETTE;
use crate::compare::{Comparison, Row, Spread};
use crate::recipe::{MatchBy, ParameterMatch};
use crate::task::Metric;

const STYLE: &str = include_str!("style.css");

/// The whole page.
pub fn page(comparison: &Comparison, charts: &[Chart]) -> String {
    let title = escape(&comparison.recipe.name);
    let mut body = String::new();
    let _ =
        write!(body, "<header><h1>{title}</h1><p class=\"lead\">{}</p></header>", escape(&lead(comparison)));
    let _ = write!(body, "<section>{}{}</section>", table(comparison), notes(comparison));
    for chart in charts {
        let _ = write!(
            body,
            "<section><h2>{}</h2>{}<figure>{}<figcaption>{}</figcaption></figure></section>",
            chart.title,
            legend(comparison, chart),
            chart.svg,
            escape(&chart.caption)
        );
    }
    if !comparison.trials.is_empty() {
        let _ = write!(body, "<section><h2>Learning rates tried</h2>{}</section>", trials(comparison));
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

fn lead(comparison: &Comparison) -> String {
    let seeds = comparison.recipe.train.seeds.len();
    let budget = match comparison.recipe.match_by() {
        MatchBy::Tokens => {
            let tokens = comparison.entries.iter().map(|entry| entry.tokens).max().unwrap_or_default();
            format!("{} training tokens", count(tokens as f64))
        }
        MatchBy::Seconds => format!("{} s of training", comparison.recipe.train.seconds.unwrap_or_default()),
    };
    let task = match comparison.metric {
        Metric::Accuracy => format!(
            "associative recall of {} pairs in {} tokens",
            comparison.recipe.task.pairs.unwrap_or_default(),
            comparison.length
        ),
        Metric::Strings => format!("strings of at most {} tokens", comparison.length),
        Metric::BitsPerByte => format!("next-token prediction with {} tokens of context", comparison.length),
    };
    let plural = |n: usize, word: &str| if n == 1 { format!("1 {word}") } else { format!("{n} {word}s") };
    format!(
        "{} on {task}, each with {} and at most {budget} per training.",
        plural(comparison.models.len(), "model"),
        plural(seeds, "seed")
    )
}

fn table(comparison: &Comparison) -> String {
    let higher = comparison.metric.higher_is_better();
    let best = comparison
        .rows
        .iter()
        .map(|row| row.score.mean)
        .reduce(|a, b| if higher { a.max(b) } else { a.min(b) });
    let score = match comparison.metric {
        Metric::Accuracy => "accuracy &uarr;",
        Metric::Strings => "long strings right &uarr;",
        Metric::BitsPerByte => "bits per byte &darr;",
    };
    let mut rows = String::new();
    for (index, row) in comparison.rows.iter().enumerate() {
        let class = if Some(row.score.mean) == best { " class=\"best\"" } else { "" };
        let _ = write!(
            rows,
            "<tr><th scope=\"row\">{}{}</th><td{class}>{}</td><td>{}{}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td>{:.0} s</td><td>{}</td></tr>",
            swatch(index),
            escape(&row.model),
            spread(&row.score),
            grouped(row.params),
            mark(row),
            bytes(row.state_bytes as f64),
            grouped(row.train_tokens_per_s as usize),
            grouped(row.decode_tokens_per_s as usize),
            row.seconds,
            row.learning_rate
        );
    }
    format!(
        "<div class=\"scroll\"><table><thead><tr><th>model</th><th>{score}</th><th>parameters</th>\
         <th>state per sequence</th><th>training tokens/s</th><th>decoding tokens/s</th><th>training</th>\
         <th>learning rate</th></tr></thead><tbody>{rows}</tbody></table></div>\
         <p class=\"small\">Score: mean, and the range over seeds. State: bytes one session holds after {} tokens, \
         from its tensors. Decoding: one session, token by token.</p>",
        comparison.length
    )
}

fn notes(comparison: &Comparison) -> String {
    let all_near = comparison.models.iter().all(|model| model.matching != ParameterMatch::Apart);
    let mut lines = Vec::new();
    if all_near && comparison.models.len() > 1 {
        let adjusted: Vec<&str> = comparison
            .models
            .iter()
            .filter(|model| model.matching == ParameterMatch::Adjusted)
            .map(|model| model.name.as_str())
            .collect();
        let how = match adjusted.is_empty() {
            true => "as described".to_string(),
            false => format!("after the MLP width was changed for {}", adjusted.join(", ")),
        };
        lines.push(format!("Parameter counts are within 5% of the first model's, {how}."));
    }
    lines.extend(comparison.notes.iter().cloned());
    let items: String = lines.iter().map(|line| format!("<li>{}</li>", escape(line))).collect();
    if items.is_empty() { items } else { format!("<ul class=\"notes\">{items}</ul>") }
}

fn legend(comparison: &Comparison, chart: &Chart) -> String {
    let models = comparison.models.iter().enumerate().map(|(index, model)| (model.name.clone(), index));
    let entry = |(name, colour): (String, usize)| format!("<span>{}{}</span>", swatch(colour), escape(&name));
    let entries: String = models.chain(chart.extra.iter().cloned()).map(entry).collect();
    format!("<p class=\"legend\">{entries}</p>")
}

fn trials(comparison: &Comparison) -> String {
    let mut rows = String::new();
    for trial in &comparison.trials {
        let score = trial.score.map_or("diverged".into(), |score| format!("{score:.4}"));
        let _ = write!(
            rows,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{score}</td></tr>",
            escape(&trial.model),
            trial.learning_rate
        );
    }
    format!(
        "<table><thead><tr><th>model</th><th>learning rate</th><th>{}</th></tr></thead><tbody>{rows}</tbody></table>\
         <p class=\"small\">Short trainings with the first seed; each model keeps its best rate.</p>",
        comparison.metric.name()
    )
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

fn mark(row: &Row) -> &'static str {
    match row.matching {
        ParameterMatch::Apart => " <abbr title=\"more than 5% from the first model\">&ne;</abbr>",
        ParameterMatch::Reference | ParameterMatch::AsGiven | ParameterMatch::Adjusted => "",
    }
}

fn spread(score: &Spread) -> String {
    match score.count {
        0 => "none".into(),
        1 => format!("{:.3}", score.mean),
        _ => format!("{:.3} <small>{:.3}&ndash;{:.3}</small>", score.mean, score.low, score.high),
    }
}

fn swatch(colour: usize) -> String {
    let c = PALETTE[colour % PALETTE.len()];
    format!("<i style=\"background:rgb({},{},{})\"></i>", c.0, c.1, c.2)
}

/// 1234567 as 1 234 567, with narrow no-break spaces.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// Text for use between tags and in attributes.
fn escape(text: &str) -> String {
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
