//! `fastweight ledger`: where the bytes of a session are.

use std::path::Path;

use comfy_table::{CellAlignment, Table, TableComponent, presets};
use fastweight::memory::layers::{Elu1LinearAttentionConfig, SoftmaxAttentionConfig};
use fastweight::memory::{LayerContext, MixerConfig};
use fastweight::models::{self, ModelConfig, StateBytes};
use fastweight::train::{Recipe, checkpoint};
use serde::Serialize;

use crate::commands::experts::Experts;
use crate::commands::limits;
use crate::error::CommandError;
use crate::global::Global;
use crate::output::{self, count};
use crate::values::whole;

const HELP: &str = "\
A session holds a fixed state in every recurrent layer, and keys and values of the tokens read (the
KV cache) in every softmax attention layer. Parameters are not part of it: sessions share them. Of a model
with lookup experts the bytes that a token reads of them are shown as well, as networks and as tables.

Example:
  fastweight ledger --example
  fastweight ledger hybrid_3to1-small --tokens 4096,131072 --sessions 64
  fastweight ledger recipes/recall.toml --json";

/// Bytes of a number in the sessions of this build, float32.
const FLOAT32: u64 = 4;

/// Most tokens a ledger is made for.
const MOST_TOKENS: u64 = 1 << 36;

/// Tokens of the example.
pub const EXAMPLE_TOKENS: usize = 65_536;

/// Arguments of `fastweight ledger`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// A preset, a run folder, or a recipe [default: the example]
    #[arg(value_name = "PRESET|RUN|RECIPE")]
    model: Option<String>,
    /// One 64 wide head: keys and values of 65,536 tokens beside a fixed state
    #[arg(long, conflicts_with_all = ["model", "tokens", "sessions"])]
    example: bool,
    /// Tokens each session has read, one or several numbers
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1024,8192,65536",
        allow_negative_numbers = true, requires = "model", value_parser = whole::<u64>(0..=MOST_TOKENS))]
    tokens: Vec<u64>,
    /// Sessions held at the same time
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, requires = "model",
        value_parser = whole::<u32>(1..=u32::MAX.into()))]
    sessions: u32,
    /// Bytes of a number; sessions of this build hold float32, 4 bytes
    #[arg(long, value_name = "N", default_value_t = FLOAT32, allow_negative_numbers = true,
        value_parser = whole::<u64>(1..=16))]
    bytes_per_element: u64,
}

/// Bytes of one head's KV cache, and of a fixed state of the same width.
#[derive(Debug, Clone, Copy)]
pub struct Example {
    /// Bytes of keys and values, K = V = 64.
    pub kv_cache: usize,
    /// Bytes of the 64 x 64 memory and its normaliser.
    pub state: usize,
}

impl Example {
    /// How many times larger the cache is.
    pub fn ratio(&self) -> f64 {
        self.kv_cache as f64 / self.state as f64
    }
}

/// Softmax attention after `tokens` tokens beside ELU+1 linear attention: one head, 64 wide, float32, no
/// convolution.
pub fn example(tokens: usize) -> Example {
    let context = LayerContext::new(64, 1);
    let attention = SoftmaxAttentionConfig { conv_width: 0, ..Default::default() };
    let linear = Elu1LinearAttentionConfig { conv_width: 0 };
    Example {
        kv_cache: MixerConfig::SoftmaxAttention(attention).state_size(&context, tokens).total(),
        state: MixerConfig::Elu1LinearAttention(linear).state_size(&context, tokens).total(),
    }
}

/// The example as JSON.
#[derive(Serialize)]
struct ExampleLine {
    model: &'static str,
    tokens: usize,
    kv_cache_bytes: u128,
    state_bytes: u128,
    ratio: f64,
}

/// Bytes of one layer in one session.
#[derive(Debug, Serialize)]
struct Layer {
    round: usize,
    layer: usize,
    mixer: &'static str,
    state_bytes: u128,
    kv_cache_bytes: u128,
}

/// Bytes of a model's sessions at one length.
#[derive(Debug, Serialize)]
struct Entry {
    model: String,
    params: usize,
    tokens: usize,
    sessions: u32,
    bytes_per_element: u64,
    layers: Vec<Layer>,
    state_bytes: u128,
    kv_cache_bytes: u128,
    session_bytes: u128,
    total_bytes: u128,
    /// One session of the same model with plain softmax attention in every layer.
    all_attention_session_bytes: u128,
    /// What a token reads of the lookup experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    lookup_experts: Option<Experts>,
}

/// Prints the ledger of a preset, a run or a recipe, or the example.
///
/// # Errors
/// [`CommandError::Input`] for a model that cannot be found or read.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let scaled = |bytes: usize| bytes as u128 * u128::from(args.bytes_per_element) / u128::from(FLOAT32);
    let Some(name) = args.model.as_deref().filter(|_| !args.example) else {
        return print_example(scaled, global.json);
    };
    let models = find(name)?;
    for (name, config) in &models {
        config.validate().map_err(|error| CommandError::input(format_args!("{name}: {error}")))?;
    }
    for (name, config) in models {
        let experts =
            config.experts().map_err(|error| CommandError::input(format_args!("{name}: {error}")))?;
        let experts = Experts::of(&experts, scaled);
        let entry = |tokens: &u64| entry(&name, &config, *tokens as usize, args, experts.clone());
        let entries: Vec<Entry> = args.tokens.iter().map(entry).collect();
        if global.json {
            entries.iter().try_for_each(output::json)?;
        } else {
            output::line(table(&config, &entries))?;
        }
    }
    Ok(())
}

/// The model of a run folder, the models of a recipe file, or the model of a preset.
fn find(name: &str) -> Result<Vec<(String, ModelConfig)>, CommandError> {
    let path = Path::new(name);
    if path.is_dir() {
        limits::check_loading(path)?;
        let found = if path.join(checkpoint::STATE).is_file() {
            checkpoint::load(path)
        } else {
            checkpoint::newest(path).map(|(checkpoint, _)| checkpoint)
        };
        return Ok(vec![(name.to_owned(), found.map_err(CommandError::input)?.state.model)]);
    }
    if path.is_file() {
        let recipe = Recipe::load(path).map_err(CommandError::input)?;
        limits::check_sizes(&recipe)?;
        let mut found: Vec<(String, ModelConfig)> = Vec::new();
        for part in recipe.parts() {
            // The vocabulary, unknown for a text without its data, is not part of a session; of several tasks, only
            // those that change a model's sizes have sessions of their own.
            let models = part.resolve(recipe.task.vocab()).map_err(CommandError::input)?;
            for model in models {
                match found.iter().find(|(name, _)| *name == model.name) {
                    None => found.push((model.name, model.config)),
                    Some((_, known)) if known.state_bytes(1) == model.config.state_bytes(1) => {}
                    Some(_) => found.push((format!("{} on {}", model.name, part.task.name()), model.config)),
                }
            }
        }
        return Ok(found);
    }
    let config = models::presets::by_name(name).map_err(|error| {
        CommandError::input(format_args!(
            "{error}; there is no run folder and no recipe file called {name:?} either"
        ))
    })?;
    Ok(vec![(name.to_owned(), config)])
}

fn entry(
    name: &str,
    config: &ModelConfig,
    tokens: usize,
    args: &Args,
    lookup_experts: Option<Experts>,
) -> Entry {
    let scaled = |bytes: usize| bytes as u128 * u128::from(args.bytes_per_element) / u128::from(FLOAT32);
    let held = config.state_bytes(tokens);
    let layers = held.layers.iter().map(|layer| Layer {
        round: layer.round,
        layer: layer.layer,
        mixer: layer.mixer,
        state_bytes: scaled(layer.size.fixed),
        kv_cache_bytes: scaled(layer.size.growing),
    });
    Entry {
        model: name.to_owned(),
        params: config.parameter_count(),
        tokens,
        sessions: args.sessions,
        bytes_per_element: args.bytes_per_element,
        layers: layers.collect(),
        state_bytes: scaled(held.fixed()),
        kv_cache_bytes: scaled(held.growing()),
        session_bytes: scaled(held.total()),
        total_bytes: scaled(held.total()) * u128::from(args.sessions),
        all_attention_session_bytes: scaled(all_attention(config, tokens).total()),
        lookup_experts,
    }
}

/// The same model with plain softmax attention in every layer.
fn all_attention(config: &ModelConfig, tokens: usize) -> StateBytes {
    let attention = MixerConfig::SoftmaxAttention(SoftmaxAttentionConfig::default());
    ModelConfig { mixers: vec![attention], ..config.clone() }.state_bytes(tokens)
}

fn print_example(scaled: impl Fn(usize) -> u128, json: bool) -> Result<(), CommandError> {
    let example = example(EXAMPLE_TOKENS);
    let (kv_cache_bytes, state_bytes) = (scaled(example.kv_cache), scaled(example.state));
    if json {
        let ratio = example.ratio();
        return output::json(&ExampleLine {
            model: "example",
            tokens: EXAMPLE_TOKENS,
            kv_cache_bytes,
            state_bytes,
            ratio,
        });
    }
    output::line(format_args!(
        "One head, 64 wide, after {} tokens:\n\
         \x20 softmax attention   K and V of every token   {}\n\
         \x20 linear attention    64 x 64 memory and 64    {}\n\
         \x20 ratio                                        {}",
        grouped(EXAMPLE_TOKENS as u128),
        bytes(kv_cache_bytes),
        bytes(state_bytes),
        ratio(example.ratio()),
    ))
}

/// One column a length, one row a layer, then sums.
fn table(config: &ModelConfig, entries: &[Entry]) -> String {
    let Some(first) = entries.first() else { return String::new() };
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    // No lines between rows.
    table.remove_style(TableComponent::HorizontalLines).remove_style(TableComponent::MiddleIntersections);
    let lengths = entries.iter().map(|entry| count(grouped(entry.tokens as u128), "token"));
    table.set_header(["layer".into(), "mixer".into(), "held".into()].into_iter().chain(lengths));
    let mut row = |labels: [String; 3], cell: &dyn Fn(&Entry) -> String| {
        table.add_row(labels.into_iter().chain(entries.iter().map(cell)));
    };
    for (i, layer) in first.layers.iter().enumerate() {
        let place = match config.rounds {
            1 => layer.layer.to_string(),
            _ => format!("{}, round {}", layer.layer, layer.round),
        };
        let labels = |held: &str| [place.clone(), layer.mixer.to_owned(), held.to_owned()];
        if layer.state_bytes > 0 {
            row(labels("state"), &|entry| bytes(entry.layers[i].state_bytes));
        }
        if config.mixer(layer.layer).state_size(&config.context(layer.layer), 2).growing > 0 {
            row(labels("keys and values"), &|entry| bytes(entry.layers[i].kv_cache_bytes));
        }
    }
    let sum = |held: String| ["all".into(), String::new(), held];
    row(sum("state".into()), &|entry| bytes(entry.state_bytes));
    row(sum("keys and values".into()), &|entry| bytes(entry.kv_cache_bytes));
    row(sum("one session".into()), &|entry| bytes(entry.session_bytes));
    if first.sessions > 1 {
        row(sum(format!("{} sessions", grouped(first.sessions.into()))), &|entry| bytes(entry.total_bytes));
    }
    row(sum("with softmax attention only".into()), &|entry| bytes(entry.all_attention_session_bytes));
    row(sum("times larger".into()), &|entry| match entry.session_bytes {
        0 => "-".into(),
        held => ratio(entry.all_attention_session_bytes as f64 / held as f64),
    });
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let LayerContext { width, heads, head_dim, value_dim, layers, .. } = config.context(0);
    let experts = first.lookup_experts.as_ref().map(lookup_experts).unwrap_or_default();
    format!(
        "{}: {} parameters, {}, width {width}, {}, keys {head_dim} and values {value_dim} wide, {} a number\n{table}\n{experts}",
        first.model,
        grouped(first.params as u128),
        count(layers, "layer"),
        count(heads, "head"),
        count(first.bytes_per_element, "byte"),
    )
}

/// What a token reads of the lookup experts, in a sentence.
fn lookup_experts(experts: &Experts) -> String {
    let form = match experts.form {
        "both" => "as networks in some layers and as tables in others",
        form => &format!("as {form}"),
    };
    let sum = &experts.sum;
    format!(
        "Lookup experts: a token reads {} as networks, {} as tables, {} times less; the tables hold {}, the networks {}.\n\
         This model has them {form}.\n",
        bytes(sum.networks_bytes_per_token),
        bytes(sum.tables_bytes_per_token),
        ratio(sum.ratio()),
        bytes(sum.tables_bytes),
        bytes(sum.networks_bytes),
    )
}

/// Exact bytes, and from 1 KiB on the same with a binary prefix.
pub(super) fn bytes(count: u128) -> String {
    let exact = format!("{} B", grouped(count));
    let (mut scaled, mut prefix) = (count as f64, "");
    for next in ["Ki", "Mi", "Gi", "Ti", "Pi"] {
        if scaled < 1024.0 {
            break;
        }
        (scaled, prefix) = (scaled / 1024.0, next);
    }
    if prefix.is_empty() {
        return exact;
    }
    let short = format!("{scaled:.2}");
    format!("{exact} ({} {prefix}B)", short.trim_end_matches('0').trim_end_matches('.'))
}

/// Two digits after the point, thousands apart.
pub(super) fn ratio(x: f64) -> String {
    let text = format!("{x:.2}");
    match text.split_once('.') {
        Some((whole, fraction)) => format!("{}.{fraction}", whole.parse().map_or(whole.to_owned(), grouped)),
        None => text,
    }
}

/// A whole number with commas between thousands.
fn grouped(number: u128) -> String {
    let digits = number.to_string();
    let first = (digits.len() - 1) % 3 + 1;
    let rest = digits.as_bytes()[first..].chunks(3).map(String::from_utf8_lossy);
    rest.fold(digits[..first].to_owned(), |text, three| text + "," + &three)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_exact_and_readable() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1,023 B"),
            (16_640, "16,640 B (16.25 KiB)"),
            (33_554_432, "33,554,432 B (32 MiB)"),
            (1 << 40, "1,099,511,627,776 B (1 TiB)"),
        ] {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(ratio(2016.4923), "2,016.49");
        assert_eq!(ratio(0.5), "0.50");
        assert_eq!(grouped(999_999), "999,999");
    }
}
