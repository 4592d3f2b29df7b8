//! `fastweight rules`: the list, one rule, its explanation, and the matrix of choices.

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
fn the_matrix_has_a_reason_for_every_unsound_choice() {
    let text = run(&["rules", "matrix"]).ok().stdout;
    for words in ["memory = \"vector\"", "memory = \"mlp\"", "| kl |", "1. ", "couples all weights"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}
