//! `fastweight rules`: the list, one rule, its explanation, and the matrix of choices.

use std::collections::BTreeSet;

use fastweight::memory::{ChannelMixerConfig, MixerConfig};
use fastweight::train::Recipe;

use crate::support::run;

const FIELDS: [&str; 9] = [
    "title",
    "architecture",
    "attentional_bias",
    "retention",
    "learner",
    "equation",
    "state_size",
    "source",
    "name",
];

#[test]
fn every_rule_has_its_choices_equation_state_and_source() {
    let lines = run(&["rules", "--json"]).ok().json();
    assert!(lines.len() >= 24, "{}", lines.len());
    for line in &lines {
        for field in FIELDS {
            assert!(line[field].as_str().is_some_and(|text| !text.is_empty()), "{field} of {line}");
        }
        assert!(line["state_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{line}");
    }
    let text = run(&["rules"]).ok().stdout;
    for line in &lines {
        assert!(text.contains(line["title"].as_str().unwrap()), "{line}");
    }
}

#[test]
fn bytes_are_those_of_the_given_sizes() {
    let bytes = |args: &[&str]| {
        let all = [&["rules"][..], args, &["--json"]].concat();
        run(&all).ok().json()[0]["state_bytes"].as_u64().unwrap()
    };
    assert_eq!(bytes(&["delta_net"]), 4 * 4 * 64 * 64);
    assert_eq!(bytes(&["delta_net", "--heads", "2", "--head-dim", "8", "--value-dim", "3"]), 4 * 2 * 8 * 3);
    assert_eq!(bytes(&["titans", "--heads", "1", "--head-dim", "8"]), 4 * 2 * 64);
    assert_eq!(bytes(&["softmax_attention", "--tokens", "10"]), 4 * 4 * 10 * 128);
    let text = run(&["rules", "delta_net", "--heads", "2"]).ok().stdout;
    assert!(text.contains("32768 bytes for H = 2, K = 64, V = 64"), "{text}");
}

#[test]
fn an_explanation_has_the_objective_and_a_computed_example() {
    let text = run(&["rules", "explain", "delta_net"]).ok().stdout;
    // Half of the first value [1, 2] is written under the key [0.6, 0.8].
    for words in ["argmin_S", "reads      [0.5000, 1.0000]", "memory     [0.3000, 0.6000] [0.4000, 0.8000]"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let all = run(&["rules", "--json"]).ok().json();
    for rule in &all {
        let name = rule["name"].as_str().unwrap();
        let line = &run(&["rules", "explain", name, "--json"]).ok().json()[0];
        assert!(!line["objective"].as_str().unwrap().is_empty(), "{name}");
        let steps = line["example"]["steps"].as_array().unwrap();
        assert_eq!(steps.len(), 3, "{name}");
        for step in steps {
            assert_eq!(step["read_after"].as_array().unwrap().len(), 2, "{name}");
        }
    }
}

#[test]
fn an_unknown_rule_is_refused_with_a_suggestion() {
    run(&["rules", "explain", "delta-net"]).refused(2, &["delta-net", "did you mean \"delta_net\""]);
    run(&["rules", "titan"]).refused(2, &["did you mean \"titans\""]);
    run(&["rules", "explain", "xyzzy"]).refused(2, &["known are", "rwkv7"]);
}

#[test]
fn a_layer_that_is_no_rule_says_what_it_is_and_where_its_options_are() {
    let rules = run(&["rules", "--json"]).ok().json();
    let rules: BTreeSet<&str> = rules.iter().map(|rule| rule["name"].as_str().unwrap()).collect();
    for name in MixerConfig::NAMES.into_iter().chain(ChannelMixerConfig::NAMES) {
        if rules.contains(name) {
            run(&["rules", name]).ok();
            continue;
        }
        let options = format!("`fastweight options {name}`");
        let words = [name, "no rule", options.as_str()];
        run(&["rules", name]).refused(2, &words);
        run(&["rules", "explain", name]).refused(2, &words);
    }
    run(&["rules", "titans_mac"]).refused(2, &["titans_mlp", "attention"]);
    run(&["rules", "rwkv7_dea"]).refused(2, &["the rule inside is rwkv7"]);
}

#[test]
fn every_rule_has_a_recipe_or_the_reason_why_not() {
    let text = run(&["rules"]).ok().stdout;
    for line in run(&["rules", "--json"]).ok().json() {
        match (line["recipe"].as_str(), line["no_recipe"].as_str()) {
            (Some(mixer), None) => assert_mixer(mixer),
            (None, Some(reason)) => {
                assert_eq!(line["name"], "oja", "no other rule is without a layer");
                let shown = run(&["rules", "oja"]).ok().stdout;
                let card: Vec<&str> = shown.split_whitespace().collect();
                assert!(card.join(" ").contains(&format!("recipe none: {}", &reason[..40])), "{shown}");
                assert!(text.contains("none: "), "{text}");
            }
            other => panic!("{other:?} of {line}"),
        }
    }
}

/// That a recipe takes a mixer.
#[track_caller]
fn assert_mixer(mixer: &str) {
    let recipe = format!(
        "[task]\nkind = \"recall\"\nvocab = 16\nlength = 16\npairs = 2\n[train]\nsteps = 1\nbatch = 1\nlearning_rate = 1e-3\n\
         [model]\nwidth = 16\nlayers = 1\nheads = 2\nmixers = [{mixer}]"
    );
    if let Err(error) = Recipe::parse(&recipe) {
        panic!("{error}");
    }
}

#[test]
fn the_matrix_as_json_has_a_line_for_every_combination() {
    let lines = run(&["rules", "matrix", "--json"]).ok().json();
    assert_eq!(lines.len(), 384);
    let text = run(&["rules", "matrix"]).ok().stdout;
    let sound = lines.iter().filter(|line| line["sound"] == true);
    assert!(text.starts_with(&format!("{} of the 384", sound.clone().count())), "{text}");
    for line in sound {
        let [memory, bias, retention, learner] =
            ["memory", "bias", "retention", "learner"].map(|choice| &line[choice]);
        assert_mixer(&format!(
            "{{ kind = \"rule\", memory = {memory}, bias = {bias}, retention = {retention}, learner = {learner} }}"
        ));
        assert_eq!(line.get("reason"), None, "{line}");
    }
    for line in lines.iter().filter(|line| line["sound"] == false) {
        assert!(text.contains(line["reason"].as_str().unwrap()), "{line}");
    }
}

#[test]
fn the_matrix_has_a_reason_for_every_unsound_choice() {
    let text = run(&["rules", "matrix"]).ok().stdout;
    for words in ["memory = \"vector\"", "memory = \"mlp\"", "| kl |", "1. ", "couples all weights"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}
