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
fn every_example_of_the_guide_is_a_recipe() {
    const TASK: &str = "[task]\nkind = \"recall\"\nvocab = 256\nlength = 64\npairs = 8\n";
    const TRAIN: &str = "[train]\nsteps = 10\nbatch = 4\nlearning_rate = 1e-3\n";
    let guide = page("recipes.md");
    let examples: Vec<&str> =
        guide.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(examples.len() >= 8, "{}", examples.len());
    for example in examples {
        let missing = |section: &str, text| if example.contains(section) { "" } else { text };
        let recipe = [example, missing("[task", TASK), missing("[train]", TRAIN)].concat();
        if let Err(error) = Recipe::parse(&recipe) {
            panic!("{error}\n{recipe}");
        }
    }
}

#[test]
fn one_section_or_layer_is_shown_alone_and_a_typo_finds_its_name() {
    let text = run(&["options", "train"]).ok().stdout;
    assert!(text.contains("`learning_rate` | number | required |"), "{text}");
    assert!(text.contains("`weight_decay` | number | `0.1` |"), "{text}");
    assert!(!text.contains("`rope`"), "{text}");
    let text = run(&["options", "softmax_attention"]).ok().stdout;
    assert!(text.contains("`rope` | `true` or `false` | `true` |"), "{text}");
    assert!(run(&["options", "swiglu"]).ok().stdout.contains("no options"));
    run(&["options", "softmax_atention"]).refused(2, &["did you mean \"softmax_attention\"?"]);
}

/// The tables of a choice in the schema.
fn tables(schema: &Value, definition: &str) -> Vec<Map<String, Value>> {
    let tables = schema["$defs"][definition]["anyOf"][1]["oneOf"].as_array().unwrap();
    tables.iter().map(|table| table["properties"].as_object().unwrap().clone()).collect()
}

#[test]
fn the_schema_has_every_layer_with_the_options_and_defaults_that_recipes_take() {
    let schema = &run(&["options", "--json"]).ok().json()[0];
    let choice = |definition: &str| -> Vec<(String, Value)> {
        let tables = tables(schema, definition).into_iter();
        let explicit = tables.map(|properties| {
            let kind = properties["kind"]["const"].clone();
            let given = properties.into_iter().filter(|(_, option)| !option["default"].is_null());
            let mut table: Map<String, Value> =
                given.map(|(name, option)| (name, option["default"].clone())).collect();
            table.insert("kind".into(), kind.clone());
            (kind.as_str().unwrap().to_string(), Value::Object(table))
        });
        explicit.collect()
    };
    let mixers = choice("MixerConfig");
    let mut names: Vec<&str> = mixers.iter().map(|(name, _)| name.as_str()).collect();
    let mut known = MixerConfig::NAMES.to_vec();
    names.sort_unstable();
    known.sort_unstable();
    assert_eq!(names, known);
    for (name, table) in mixers {
        assert_eq!(
            serde_json::from_value::<MixerConfig>(table).unwrap(),
            MixerConfig::by_name(&name).unwrap()
        );
    }
    let maps = choice("ChannelMixerConfig");
    assert_eq!(maps.len(), ChannelMixerConfig::NAMES.len());
    for (name, table) in maps {
        let parsed: ChannelMixerConfig = serde_json::from_value(table).unwrap();
        assert_eq!(parsed, ChannelMixerConfig::by_name(&name).unwrap());
    }
}
