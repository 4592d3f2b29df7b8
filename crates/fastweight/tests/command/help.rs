//! Help, version and usage errors.

use crate::support::run;

const SUBCOMMANDS: [&str; 9] =
    ["compare", "train", "eval", "generate", "export", "ledger", "rules", "demo", "bench"];

#[test]
fn every_help_has_an_example_that_names_its_subcommand() {
    for subcommand in SUBCOMMANDS {
        let help = run(&[subcommand, "--help"]).ok().stdout;
        let (_, example) = help.split_once("Example").unwrap_or_else(|| panic!("no example: {help}"));
        assert!(example.contains(&format!("fastweight {subcommand}")), "{help}");
        for option in ["--json", "--seed", "--quiet", "--threads", "--device"] {
            assert!(help.contains(option), "{option} is missing: {help}");
        }
    }
}

#[test]
fn the_subcommands_of_rules_have_an_example() {
    for subcommand in ["explain", "matrix"] {
        let help = run(&["rules", subcommand, "--help"]).ok().stdout;
        let (_, example) = help.split_once("Example").unwrap_or_else(|| panic!("no example: {help}"));
        assert!(example.contains(&format!("fastweight rules {subcommand}")), "{help}");
    }
}

#[test]
fn the_help_of_demo_describes_the_file_of_numbers() {
    let help = run(&["demo", "--help"]).ok().stdout;
    let embedded = include_str!("../../src/commands/demo/seed_demo.json");
    let embedded: serde_json::Value = serde_json::from_str(embedded).unwrap();
    let [all, readings] = [&embedded, &embedded["delta_memory"]].map(|part| part.as_object().unwrap());
    let notes = ["about", "elu1_max_abs_difference", "convention"];
    for key in all.keys().chain(readings.keys()).filter(|key| !notes.contains(&key.as_str())) {
        assert!(help.contains(&format!("`{key}`")), "{key}: {help}");
    }
}

#[test]
fn the_main_help_lists_subcommands_and_exit_codes() {
    let help = run(&["--help"]).ok().stdout;
    for word in SUBCOMMANDS.iter().chain(&["Exit codes", "70"]) {
        assert!(help.contains(word), "{word} is missing: {help}");
    }
}

#[test]
fn a_mistyped_subcommand_is_a_usage_error_with_a_suggestion() {
    run(&["compar"]).refused(2, &["compar", "compare"]);
    run(&["bench", "--tiem", "8"]).refused(2, &["--tiem", "--time"]);
}

#[test]
fn a_device_that_is_not_built_says_how_to_build_it() {
    run(&["bench", "--device", "rocm"]).refused(2, &["rocm", "--features fastweight/rocm"]);
    run(&["bench", "--device", "abacus"]).refused(2, &["abacus", "flex", "cuda"]);
}

#[test]
fn impossible_thread_counts_are_refused() {
    run(&["bench", "--threads", "0"]).refused(2, &["--threads"]);
}
