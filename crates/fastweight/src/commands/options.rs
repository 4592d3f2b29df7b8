//! `fastweight options`: every key a recipe can hold, from the schema that recipes are read by.

use fastweight::memory::{ChannelMixerConfig, MixerConfig, names};
use fastweight::train::recipe::schema;
use serde_json::{Map, Value};

use crate::error::CommandError;
use crate::global::Global;
use crate::output;

const HELP: &str = "\
Without a name everything is printed, as Markdown; a name is a section (recipe, task, train, model, compare, quick,
halting, changes), a mixer or a channel mixer. With --json the output is a JSON Schema, which editors complete and check
recipes with: an editor with Taplo takes it from a first line `#:schema recipe.schema.json` of a recipe.

Example:
  fastweight options
  fastweight options train
  fastweight options softmax_attention
  fastweight options --json > recipe.schema.json";

/// Arguments of `fastweight options`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Section, mixer or channel mixer to show alone
    name: Option<String>,
}

/// Sections of a recipe: name, heading, and definition in the schema; the file itself has none.
const SECTIONS: [(&str, &str, &str); 8] = [
    ("recipe", "The file", ""),
    ("task", "`[task]` and each of `[[tasks]]`", "TaskRecipe"),
    ("train", "`[train]`", "TrainRecipe"),
    ("model", "`[model]` and each of `[[models]]`", "ModelRecipe"),
    ("compare", "`[compare]`", "CompareRecipe"),
    ("quick", "`[compare.quick]` and `[tasks.quick]`", "QuickRecipe"),
    ("halting", "`halting` of a model", "HaltingConfig"),
    ("changes", "`[tasks.train]`", "TrainChanges"),
];

/// Prints the keys of every section and layer, or of one.
///
/// # Errors
/// [`CommandError::Input`] for an unknown name, with the closest one.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let schema = schema();
    match &args.name {
        None if global.json => output::json(&schema),
        None => output::line(everything(&schema).trim_end()),
        Some(name) => {
            let (heading, part) = find(&schema, name)?;
            if global.json {
                return output::json(&alone(&schema, part));
            }
            output::line(section(&schema, &heading, part).trim_end())
        }
    }
}

fn defined<'s>(schema: &'s Value, definition: &str) -> &'s Value {
    if definition.is_empty() { schema } else { &schema["$defs"][definition] }
}

/// A part as a schema of its own: with the definitions that it refers to, and those that they do.
fn alone(schema: &Value, part: &Value) -> Value {
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str).and_then(name_of).map(str::to_owned));
                map.iter().filter(|(key, _)| *key != "$defs").for_each(|(_, value)| references(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let (mut definitions, mut open) = (Map::new(), Vec::new());
    references(part, &mut open);
    while let Some(name) = open.pop() {
        let definition = &schema["$defs"][&name];
        if definitions.insert(name, definition.clone()).is_none() {
            references(definition, &mut open);
        }
    }
    let mut whole = part.clone();
    whole["$schema"] = schema["$schema"].clone();
    if !definitions.is_empty() {
        whole["$defs"] = definitions.into();
    }
    whole
}

/// The definition that a reference names.
fn name_of(reference: &str) -> Option<&str> {
    reference.strip_prefix("#/$defs/")
}

fn find<'s>(schema: &'s Value, name: &str) -> Result<(String, &'s Value), CommandError> {
    let layers = [("MixerConfig", "mixer"), ("ChannelMixerConfig", "channel mixer")];
    let layer = || {
        layers.iter().find_map(|(definition, what)| {
            let part = tables(schema, definition).find(|part| kind(part) == name)?;
            Some((format!("{what} `{name}`"), part))
        })
    };
    let found = SECTIONS.iter().find(|(section, ..)| *section == name);
    match found {
        Some((_, heading, definition)) => Ok((heading.to_string(), defined(schema, definition))),
        None => layer().ok_or_else(|| {
            let sections = SECTIONS.iter().map(|(name, ..)| *name);
            let known: Vec<&str> =
                sections.chain(MixerConfig::NAMES).chain(ChannelMixerConfig::NAMES).collect();
            CommandError::input(names::unknown("section or layer", name, &known))
        }),
    }
}

/// Everything as Markdown.
fn everything(schema: &Value) -> String {
    let mut text = String::from(
        "# What a recipe can hold\n\n[recipes.md](recipes.md) explains recipes by example. \
         Written by `fastweight options`; `fastweight options NAME` prints one part.\n\n",
    );
    for (_, heading, definition) in SECTIONS {
        text += &section(schema, heading, defined(schema, definition));
    }
    for (heading, definition) in [("Mixers", "MixerConfig"), ("Channel mixers", "ChannelMixerConfig")] {
        text += &format!("# {heading}\n\n");
        for table in tables(schema, definition) {
            text += &section(schema, &format!("`{}`", kind(table)), table);
        }
    }
    text
}

/// The tables of a choice between kinds.
fn tables<'s>(schema: &'s Value, definition: &str) -> impl Iterator<Item = &'s Value> {
    let choice = schema["$defs"][definition]["anyOf"].as_array().into_iter().flatten();
    choice.filter_map(|part| part["oneOf"].as_array()).flatten()
}

fn kind(table: &Value) -> &str {
    table["properties"]["kind"]["const"].as_str().unwrap_or_default()
}

/// A heading, the meaning, and a table of the keys.
fn section(schema: &Value, heading: &str, part: &Value) -> String {
    let mut text = format!("## {heading}\n\n{}\n\n", meaning(part));
    // The kind of a layer is its heading.
    let keys =
        part["properties"].as_object().into_iter().flatten().filter(|(_, value)| value["const"].is_null());
    let rows: Vec<String> = keys.map(|(key, value)| row(schema, part, key, value)).collect();
    if rows.is_empty() {
        return text + "It has no options.\n\n";
    }
    text += "| key | value | default | meaning |\n|---|---|---|---|\n";
    text += &rows.concat();
    text + "\n"
}

fn row(schema: &Value, part: &Value, key: &str, value: &Value) -> String {
    let required = part["required"].as_array().is_some_and(|keys| keys.iter().any(|known| known == key));
    let default = match &value["default"] {
        _ if required => "required".into(),
        Value::Null => "-".into(),
        // Empty sections, which have their own tables.
        Value::Object(_) => "-".into(),
        default => format!("`{}`", written(default)),
    };
    let meaning = match meaning(value) {
        empty if empty.is_empty() => meaning(resolved(schema, value)),
        own => own,
    };
    format!("| `{key}` | {} | {default} | {} |\n", kind_of(schema, value), meaning.replace('|', "\\|"))
}

/// The description on one line, without the name of what it describes in front.
fn meaning(value: &Value) -> String {
    let text = value["description"].as_str().unwrap_or_default();
    let text = text.strip_prefix(&format!("`{}`: ", kind(value))).unwrap_or(text);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A default as a recipe writes it; numbers of single precision in their own digits.
fn written(default: &Value) -> String {
    match default {
        Value::Number(number) if number.is_f64() => {
            let value = number.as_f64().unwrap_or_default();
            let single = value as f32;
            match value.abs() {
                size if 0.0 < size && size < 1e-6 => format!("{value:e}"),
                _ if f64::from(single) == value => single.to_string(),
                _ => value.to_string(),
            }
        }
        Value::Array(items) => format!("[{}]", items.iter().map(written).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

/// What a reference stands for; other values are themselves.
fn resolved<'s>(schema: &'s Value, value: &'s Value) -> &'s Value {
    value["$ref"].as_str().and_then(name_of).map_or(value, |name| &schema["$defs"][name])
}

/// What may be written, in words.
fn kind_of(schema: &Value, value: &Value) -> String {
    let reference = value["$ref"].as_str().and_then(name_of);
    if let (Some(name), None) = (reference, value.get("enum")) {
        return match name {
            "MixerConfig" => "mixer".into(),
            "ChannelMixerConfig" => "channel mixer".into(),
            _ => kind_of(schema, resolved(schema, value)),
        };
    }
    if let Some(word) = value["const"].as_str() {
        return format!("`{word:?}`");
    }
    let choices = ["enum", "oneOf", "anyOf"].iter().find_map(|key| value[key].as_array());
    if let Some(choices) = choices {
        let words =
            choices.iter().filter(|choice| choice["type"] != "null").map(|choice| match choice.as_str() {
                Some(word) => format!("`{word:?}`"),
                None => kind_of(schema, choice),
            });
        return words.collect::<Vec<_>>().join(", ");
    }
    let types = match &value["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).find(|kind| *kind != "null"),
        kind => kind.as_str(),
    };
    match types {
        Some("integer") => format!("whole number{}", bounds(value)),
        Some("number") => format!("number{}", bounds(value)),
        Some("boolean") => "`true` or `false`".into(),
        Some("string") => "text".into(),
        Some("array") => format!("list: {}", kind_of(schema, &value["items"])),
        _ => "table".into(),
    }
}

/// Largest bound that is worth naming; beyond it a number is a slip.
const LARGEST: f64 = 1e6;

/// The range of a number, in words.
fn bounds(value: &Value) -> String {
    let words = [
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    ];
    let bound = |(key, words): (&str, &str)| {
        let bound = value.get(key)?;
        let number = bound.as_f64()?;
        // No whole number of a recipe is below 0.
        let whole = value["format"].as_str().is_some_and(|f| f.starts_with("uint"));
        let told = number <= LARGEST && !(number == 0.0 && key == "minimum" && whole);
        told.then(|| format!(", {words} {}", written(bound)))
    };
    words.into_iter().filter_map(bound).collect()
}
