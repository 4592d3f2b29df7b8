//! `fastweight options`, and the pages of documentation that it and recipes keep true.

use std::path::Path;

use fastweight::memory::{ChannelMixerConfig, MixerConfig};
use fastweight::train::Recipe;
use serde_json::{Map, Value};

use crate::support::run;

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    std::fs::read_to_string(&path).unwrap()
}

#[test]
fn the_page_of_options_is_what_the_command_prints() {
    let printed = run(&["options"]).ok().stdout;
    assert!(
        page("options.md") == printed,
        "docs/options.md is not what `fastweight options` prints; write it again"
    );
}

#[test]
fn one_section_or_layer_is_shown_alone_and_a_typo_finds_its_name() {
    let text = run(&["options", "train"]).ok().stdout;
    assert!(text.contains("`learning_rate` | number, above 0 | required |"), "{text}");
    assert!(text.contains("`weight_decay` | number, at least 0 | `0.1` |"), "{text}");
    assert!(!text.contains("`rope`"), "{text}");
    let text = run(&["options", "softmax_attention"]).ok().stdout;
    assert!(text.contains("`rope` | `true` or `false` | `true` |"), "{text}");
    assert!(run(&["options", "swiglu"]).ok().stdout.contains("no options"));
    let text = run(&["options", "rule"]).ok().stdout;
    for row in [
        "`bias` | `\"dot_product\"`",
        "| `\"squared\"` | The inner loss.",
        "`p` | number, at least 1, at most 16 | `3` |",
    ] {
        assert!(text.contains(row), "{row}: {text}");
    }
    let text = run(&["options", "moneta"]).ok().stdout;
    assert!(text.contains("`memory` | `\"mlp\"`, `\"matrix\"` | `\"mlp\"` |"), "{text}");
    run(&["options", "softmax_atention"]).refused(2, &["did you mean \"softmax_attention\"?"]);
}

/// The tables of a choice in the schema.
fn tables(schema: &Value, definition: &str) -> Vec<Map<String, Value>> {
    let tables = schema["$defs"][definition]["anyOf"][1]["oneOf"].as_array().unwrap();
    tables.iter().map(|table| table["properties"].as_object().unwrap().clone()).collect()
}

/// A layer's options and their defaults as recipes take them, its kind among them.
fn taken(definition: &str, name: &str) -> Map<String, Value> {
    let config = match definition {
        "MixerConfig" => serde_json::to_value(MixerConfig::by_name(name).unwrap()),
        _ => serde_json::to_value(ChannelMixerConfig::by_name(name).unwrap()),
    };
    config.unwrap().as_object().unwrap().clone()
}

const LAYERS: [(&str, usize); 2] =
    [("MixerConfig", MixerConfig::NAMES.len()), ("ChannelMixerConfig", ChannelMixerConfig::NAMES.len())];

#[test]
fn the_schema_has_every_layer_with_the_options_and_defaults_that_recipes_take() {
    let schema = &run(&["options", "--json"]).ok().json()[0];
    let text = page("options.md");
    for (definition, count) in LAYERS {
        let layers = tables(schema, definition);
        assert_eq!(layers.len(), count, "{definition}");
        for options in layers {
            let name = options["kind"]["const"].as_str().unwrap();
            let taken = taken(definition, name);
            let keys = |map: &Map<String, Value>| map.keys().cloned().collect::<Vec<_>>();
            assert_eq!(keys(&options), keys(&taken), "{name}");
            let section = text.split(&format!("\n## `{name}`\n")).nth(1).unwrap();
            let section = section.split("\n## ").next().unwrap();
            assert_eq!(section.contains("It has no options."), taken.len() == 1, "{section}");
            for (key, default) in taken.iter().filter(|(key, _)| *key != "kind") {
                assert_eq!(&options[key]["default"], default, "{key} of {name}");
                assert!(section.contains(&format!("\n| `{key}` |")), "{key}: {section}");
            }
        }
    }
}

/// Calls `see` with every part of a schema.
fn walk(part: &Value, see: &mut impl FnMut(&Map<String, Value>)) {
    match part {
        Value::Object(map) => {
            see(map);
            map.values().for_each(|part| walk(part, see));
        }
        Value::Array(items) => items.iter().for_each(|part| walk(part, see)),
        _ => {}
    }
}

/// A schema that editors can check recipes with: tables refuse unknown keys, and references lead somewhere.
#[track_caller]
fn assert_checks(schema: &Value) {
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    walk(schema, &mut |part| {
        if part.get("type") == Some(&"object".into()) {
            assert_eq!(part.get("additionalProperties"), Some(&false.into()), "{part:?}");
            assert!(part.get("$ref").is_none(), "{part:?}");
        }
        if let Some(Value::String(reference)) = part.get("$ref") {
            assert!(schema.pointer(&reference[1..]).is_some(), "{reference} leads nowhere");
        }
        if let Some(Value::String(text)) = part.get("description") {
            assert!(!text.contains("[`") && !text.contains("::"), "{text}");
        }
    });
}

#[test]
fn every_part_of_the_schema_stands_alone_and_refuses_unknown_keys() {
    assert_checks(&run(&["options", "--json"]).ok().json()[0]);
    let sections = ["recipe", "task", "train", "model", "compare", "quick", "halting", "changes"];
    for name in sections.into_iter().chain(MixerConfig::NAMES).chain(ChannelMixerConfig::NAMES) {
        assert_checks(&run(&["options", name, "--json"]).ok().json()[0]);
    }
}

#[test]
fn the_schema_of_a_task_has_the_keys_of_its_kind() {
    let schema = &run(&["options", "task", "--json"]).ok().json()[0];
    let kinds = schema["allOf"].as_array().unwrap();
    let example = |kind: &str| match kind {
        "recall" => "vocab = 64\nlength = 32\npairs = 4\n",
        "formal_language" => "language = \"parity\"\n",
        _ => "context = 8\n",
    };
    let keys = [("recall", "pairs"), ("formal_language", "longest"), ("text", "context")];
    for (kind, own) in keys {
        let rule = kinds.iter().find(|rule| rule["if"]["properties"]["kind"]["const"] == kind).unwrap();
        let needed: Vec<_> = rule["then"]["required"].as_array().unwrap().iter().map(Value::as_str).collect();
        let given: Vec<_> = example(kind).lines().map(|line| line.split(' ').next()).collect();
        assert_eq!(needed, given, "{kind}");
        let foreign = rule["then"]["properties"].as_object().unwrap();
        for (_, key) in keys {
            assert_eq!(foreign.get(key), (key != own).then_some(&false.into()), "{kind}: {key}");
        }
        for (key, allowed) in foreign {
            assert_eq!(allowed, false, "{kind}: {key}");
            let value = match key.as_str() {
                "filler" => "\"zero\"",
                "language" => "\"parity\"",
                "data" | "tokenizer" => "\"file\"",
                "power" | "held_out" => "0.1",
                _ => "8",
            };
            let task = format!("[task]\nkind = \"{kind}\"\n{}", example(kind));
            assert_eq!(Recipe::parse(&[&task, TRAIN, MODEL].concat()).err(), None);
            let error = Recipe::parse(&format!("{task}{key} = {value}\n{TRAIN}{MODEL}")).unwrap_err();
            assert!(error.message.contains("is not an option"), "{error}");
        }
    }
}

const TASK: &str = "[task]\nkind = \"recall\"\nvocab = 256\nlength = 64\npairs = 8\n";
const TRAIN: &str = "[train]\nsteps = 10\nbatch = 4\nlearning_rate = 1e-3\n";
const MODEL: &str = "[model]\nwidth = 16\nlayers = 1\nheads = 2\nmixers = [\"delta_net\"]\n";

/// A recipe with `key = value` in a section (of the schema), in place of what it has there.
fn with_key(definition: &str, key: &str, value: &str) -> String {
    let header = match definition {
        "" => "",
        "TaskRecipe" => "[task]\n",
        "TrainRecipe" => "[train]\n",
        "ModelRecipe" => "[model]\n",
        "CompareRecipe" => "[compare]\n",
        "QuickRecipe" => "[compare.quick]\n",
        "TrainChanges" => "[task.train]\n",
        "HaltingConfig" => "[model.halting]\n",
        other => panic!("no section for {other}"),
    };
    let rounds = if definition == "HaltingConfig" { "rounds = 2\n" } else { "" };
    let text = [TASK, TRAIN, MODEL, rounds].concat();
    let line = format!("{key} = {value}\n");
    match text.split_once(header).filter(|_| !header.is_empty()) {
        _ if header.is_empty() && text.contains(&format!("[{key}]")) => {
            // In place of the whole section.
            let sections = [TASK, TRAIN, MODEL];
            let kept = sections.into_iter().filter(|section| !section.starts_with(&format!("[{key}]")));
            line + &kept.collect::<String>()
        }
        _ if header.is_empty() => line + &text,
        Some((before, after)) => {
            let (section, rest) = after.split_once("\n[").unwrap_or((after, ""));
            let kept: Vec<&str> =
                section.lines().filter(|line| line.split(' ').next() != Some(key)).collect();
            let rest = if rest.is_empty() { String::new() } else { format!("\n[{rest}") };
            format!("{before}{header}{line}{}{rest}", kept.join("\n"))
        }
        None => format!("{text}{header}{line}"),
    }
}

/// A key of a section, or an option of a layer.
struct Key {
    /// The section or layer it stands in.
    place: String,
    name: String,
    schema: Value,
    /// A recipe with a value of it.
    recipe: Box<dyn Fn(&str) -> String>,
}

/// Every key of the sections and layers.
fn keys(schema: &Value) -> Vec<Key> {
    let mut keys = Vec::new();
    let sections = [
        "",
        "TaskRecipe",
        "TrainRecipe",
        "ModelRecipe",
        "CompareRecipe",
        "QuickRecipe",
        "TrainChanges",
        "HaltingConfig",
    ];
    for section in sections {
        let part = if section.is_empty() { schema } else { &schema["$defs"][section] };
        for (name, option) in part["properties"].as_object().unwrap() {
            let key = name.clone();
            let recipe = Box::new(move |value: &str| with_key(section, &key, value));
            keys.push(Key { place: section.into(), name: name.clone(), schema: option.clone(), recipe });
        }
    }
    for (definition, list) in [("MixerConfig", "mixers"), ("ChannelMixerConfig", "channel_mixers")] {
        for options in tables(schema, definition) {
            let layer = options["kind"]["const"].as_str().unwrap().to_owned();
            for (name, option) in options.iter().filter(|(name, _)| *name != "kind") {
                let (kind, key) = (layer.clone(), name.clone());
                let recipe = Box::new(move |value: &str| {
                    with_key("ModelRecipe", list, &format!("[{{ kind = \"{kind}\", {key} = {value} }}]"))
                });
                keys.push(Key { place: layer.clone(), name: name.clone(), schema: option.clone(), recipe });
            }
        }
    }
    keys
}

#[test]
fn a_number_outside_the_range_in_the_schema_is_refused() {
    let schema = &run(&["options", "--json"]).ok().json()[0];
    let mut seen = 0;
    for Key { place, name: key, schema: option, recipe } in keys(schema) {
        let whole = option["format"].as_str().is_some_and(|format| format.starts_with("uint"));
        for bound in ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"] {
            let Some(limit) = option.get(bound).and_then(Value::as_f64) else { continue };
            if let Some(default) = option["default"].as_f64() {
                let inside = if bound.ends_with("inimum") { default >= limit } else { default <= limit };
                assert!(inside, "{key} of {place}: default {default}");
            }
            let step = if whole { 1.0 } else { limit.abs().max(1.0) * 1e-3 };
            let beyond = match bound {
                "minimum" => limit - step,
                "maximum" => limit + step,
                _ => limit,
            };
            let value = if whole { format!("{beyond:.0}") } else { format!("{beyond:?}") };
            let error = Recipe::parse(&recipe(&value)).expect_err(&format!("{key} = {value} of {place}"));
            assert!(error.to_string().contains(&key), "{key} = {value} of {place}: {error}");
            seen += 1;
        }
    }
    assert!(seen > 150, "{seen} bounds");
}

#[test]
fn no_message_about_a_wrong_value_speaks_of_types_of_this_language() {
    const WORDS: [&str; 20] = [
        "invalid type",
        "invalid value",
        "invalid length",
        "a sequence",
        "a map",
        "variant",
        " field",
        "struct ",
        "usize",
        "u64",
        "i64",
        "f64",
        "f32",
        "enum ",
        "unit value",
        "newtype",
        "visitor",
        "tuple",
        "untagged",
        "expected expected",
    ];
    let schema = &run(&["options", "--json"]).ok().json()[0];
    let values = ["true", "-1", "3.5", "\"x\"", "[]", "[\"x\"]", "[true]", "{}", "{ a = 1 }", "1979-05-27"];
    let mut refused = 0;
    for Key { place, name: key, recipe, .. } in keys(schema) {
        for value in values {
            let Err(error) = Recipe::parse(&recipe(value)) else { continue };
            refused += 1;
            let message = format!("{} {}", error.message, error.help.unwrap_or_default());
            for word in WORDS {
                let told = message.contains(word) && !message.contains("at least 1 sequence");
                assert!(!told, "{key} = {value} of {place}: {message}");
            }
        }
    }
    assert!(refused > 1000, "{refused} messages");
    let error = Recipe::parse(&with_key("ModelRecipe", "mixers", "\"delta_net\"")).unwrap_err();
    assert!(error.message.contains("expected a list, such as [\"delta_net\"]"), "{error}");
}

#[test]
fn every_recipe_in_the_documentation_is_read() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let pages = std::fs::read_dir(docs).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let mut examples = 0;
    for path in pages.chain([readme]) {
        let text = std::fs::read_to_string(&path).unwrap();
        for block in text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()) {
            examples += 1;
            // Only an example that says so may leave out what a recipe needs.
            let part = block.starts_with("# part of a recipe\n");
            let missing = |section: &str, text| if !part || block.contains(section) { "" } else { text };
            let recipe =
                [block, missing("[task", TASK), missing("[train]", TRAIN), missing("[model", MODEL)].concat();
            if let Err(error) = Recipe::parse(&recipe) {
                panic!("{}: {error}\n{recipe}", path.display());
            }
            assert_eq!(part, Recipe::parse(block).is_err(), "{}: {block}", path.display());
        }
    }
    assert!(examples >= 11, "{examples}");
}
