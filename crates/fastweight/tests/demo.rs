//! `fastweight demo`, run as a person or a script runs it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

const NUMBERS: &str = include_str!("../src/commands/demo/seed_demo.json");

struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn demo(folder: &Path, args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastweight"));
    let output = command.arg("demo").args(args).current_dir(folder).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

fn lines(ran: &Ran) -> Vec<Value> {
    ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_experiment_agrees_with_its_expected_values() {
    let folder = tempfile::tempdir().unwrap();
    let ran = demo(folder.path(), &["--json"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let mut checks: BTreeMap<String, usize> = BTreeMap::new();
    for line in lines(&ran).iter().filter(|line| line.get("experiment").is_some()) {
        assert_eq!(line["pass"], json!(true), "{line}");
        *checks.entry(line["experiment"].as_str().unwrap().into()).or_default() += 1;
    }
    let expected = [
        ("crosstalk", 12),
        ("explicit-recurrent", 17),
        ("forgetting", 4),
        ("future-leak", 9),
        ("half-step", 2),
        ("householder", 6),
        ("ledger", 3),
        ("linear-softmax", 4),
        ("moving-average", 4),
        ("read-before-write", 10),
        ("same-key-twice", 4),
    ];
    assert_eq!(checks, expected.map(|(name, count)| (name.to_owned(), count)).into());
}

#[test]
fn the_computed_values_are_those_of_the_hand_calculation() {
    let folder = tempfile::tempdir().unwrap();
    let ran = demo(folder.path(), &["--json", "--no-figures"]);
    let lines = lines(&ran);
    let computed = |experiment: &str, quantity: &str| -> Vec<f64> {
        let found =
            lines.iter().find(|line| line["experiment"] == experiment && line["quantity"] == quantity);
        let line = found.unwrap_or_else(|| panic!("no {quantity:?} in {experiment}"));
        line["computed"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    for (form, tolerance) in [("float64 loop", 1e-12), ("float32 operator", 1e-6)] {
        for (experiment, quantity, expected) in [
            ("same-key-twice", "additive, normalised reading", vec![0.5, 0.5]),
            ("same-key-twice", "delta reading", vec![0.0, 1.0]),
            ("crosstalk", "old key, k1.k2 = 0", vec![1.0, 0.0]),
            ("crosstalk", "old key, k1.k2 = 0.5", vec![0.75, 0.5]),
            ("crosstalk", "old key, k1.k2 = 0.9", vec![0.19, 0.9]),
            ("forgetting", "old key, decay 0.8", vec![0.0, 0.8]),
            ("forgetting", "old key, decay 1", vec![0.0, 1.0]),
            ("half-step", "reading", vec![0.25, 0.5]),
            ("householder", "state, beta 0.5 (shrinks)", vec![1.5, 2.0]),
            ("read-before-write", "read first, first token", vec![0.0, 0.0, 0.0]),
        ] {
            let computed = computed(experiment, &format!("{quantity}, {form}"));
            assert_eq!(computed.len(), expected.len());
            for (c, e) in computed.iter().zip(&expected) {
                assert!((c - e).abs() <= tolerance, "{experiment}, {quantity}, {form}: {computed:?}");
            }
        }
        let difference = computed("linear-softmax", &format!("linear against softmax, {form}"));
        assert!((difference[0] - 0.92144).abs() < 5e-6, "{difference:?}");
    }
    assert_eq!(computed("ledger", "KV cache, bytes"), [33_554_432.0]);
    assert_eq!(computed("ledger", "fixed state, bytes"), [16_640.0]);
}

#[test]
fn expected_stands_beside_computed() {
    let folder = tempfile::tempdir().unwrap();
    let ran = demo(folder.path(), &["half-step", "--no-figures"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let row = ran.stdout.lines().find(|line| line.contains("float64 loop")).unwrap();
    assert_eq!(row.matches("[0.25, 0.5]").count(), 2, "{row}");
    assert!(row.trim_end().ends_with("ok"), "{row}");
    assert!(ran.stdout.contains("all 2 values are as expected"), "{}", ran.stdout);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written");
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let out =
        |seed| demo(folder.path(), &["explicit-recurrent", "--json", "--no-figures", "--seed", seed]).stdout;
    assert_eq!(out("3"), out("3"));
    assert_ne!(out("3"), out("4"));
}

#[test]
fn a_value_that_differs_is_shown_and_fails() {
    let folder = tempfile::tempdir().unwrap();
    for (pointer, experiment) in [
        ("/delta_memory/half_beta_read/value/1", "half-step"),
        ("/delta_memory/crosstalk_old_key_read/value_by_rho/0.9/0", "crosstalk"),
        ("/elu1_recurrent/7/2", "explicit-recurrent"),
        ("/softmax/0/0", "linear-softmax"),
    ] {
        let mut numbers: Value = serde_json::from_str(NUMBERS).unwrap();
        let number = numbers.pointer_mut(pointer).unwrap();
        *number = json!(number.as_f64().unwrap() + 0.01);
        fs::write(folder.path().join("numbers.json"), numbers.to_string()).unwrap();
        let ran = demo(folder.path(), &[experiment, "--no-figures", "--numbers", "numbers.json"]);
        assert_eq!(ran.code, Some(1), "{experiment}");
        assert!(ran.stdout.contains("DIFFERS"), "{}", ran.stdout);
        assert!(ran.stderr.contains("not the expected") && ran.stderr.contains(experiment), "{}", ran.stderr);
        let all = demo(folder.path(), &["--json", "--no-figures", "--numbers", "numbers.json"]);
        assert_eq!(all.code, Some(1));
        let failed: Vec<Value> =
            lines(&all).into_iter().filter(|line| line["pass"] == json!(false)).collect();
        assert!(
            !failed.is_empty() && failed.iter().all(|line| line["experiment"] == experiment),
            "{failed:?}"
        );
    }
}

#[test]
fn both_figures_are_written_whole() {
    let folder = tempfile::tempdir().unwrap();
    let ran = demo(folder.path(), &["half-step", "--out", "a/b"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let mut names: Vec<_> =
        fs::read_dir(folder.path().join("a/b")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["crosstalk.svg", "memory.svg"]);
    for (name, words) in [
        ("memory", ["tokens read", "bytes", "KV cache", "fixed state"]),
        ("crosstalk", ["inner product", "distance", "delta rule", "additive"]),
    ] {
        let svg = fs::read_to_string(folder.path().join(format!("a/b/{name}.svg"))).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(words.iter().all(|word| svg.contains(word)), "{name}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}");
    }
}

#[test]
fn bad_input_is_refused_and_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "{}").unwrap();
    let mut short: Value = serde_json::from_str(NUMBERS).unwrap();
    short["k"].as_array_mut().unwrap().pop();
    fs::write(folder.path().join("short"), short.to_string()).unwrap();
    for (args, code, words) in [
        (&["crosstlak"][..], 2, &["crosstlak", "crosstalk"][..]),
        (&["--numbers", "missing"], 2, &["missing"]),
        (&["--numbers", "."], 2, &["cannot read ."]),
        (
            &["--numbers", "file"],
            2,
            &["file", "layout that `fastweight demo --help` describes", "`q` is missing at line 1"],
        ),
        (&["--numbers", "short"], 2, &["short", "same number of tokens"]),
        (&["half-step", "--out", "file"], 2, &["is a file, give a folder", "--out"]),
    ] {
        let ran = demo(folder.path(), args);
        assert_eq!(ran.code, Some(code), "{args:?}: {}", ran.stderr);
        assert!(words.iter().all(|word| ran.stderr.contains(word)), "{args:?}: {}", ran.stderr);
        assert!(!ran.stderr.contains("panicked"));
    }
    assert_eq!(fs::read_to_string(folder.path().join("file")).unwrap(), "{}");
}

#[test]
fn surprise_reads_a_text_with_a_titans_memory() {
    let folder = tempfile::tempdir().unwrap();
    let ran = demo(folder.path(), &["surprise", "--json", "--out", "figures"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let lines: Vec<serde_json::Value> =
        ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tokens: Vec<_> = lines.iter().filter(|line| line["token"].is_u64()).collect();
    assert_eq!(tokens.len(), 160);
    for (first, second) in tokens[..80].iter().zip(&tokens[80..]) {
        assert_eq!(first["text"], second["text"]);
    }
    for token in &tokens {
        let of = |name: &str| token[name].as_f64().unwrap();
        assert!(of("surprise") > 0.0, "{token}");
        for gate in ["theta", "eta", "alpha"] {
            assert!((0.0..=1.0).contains(&of(gate)), "{token}");
        }
    }
    let svg = std::fs::read_to_string(folder.path().join("figures/surprise.svg")).unwrap();
    for curve in ["surprise", "theta", "eta", "alpha"] {
        assert!(svg.contains(curve), "{curve}");
    }
    assert!(svg.matches("<text").count() > 160, "every token stands under the curves");
    assert!(!folder.path().join("figures/memory.svg").exists());

    let ran = demo(folder.path(), &["half-step", "--data", "text"]);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("surprise"), "{}", ran.stderr);
    let ran = demo(folder.path(), &["surprise", "--data", "missing"]);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("missing"), "{}", ran.stderr);
}
