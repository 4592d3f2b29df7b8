//! Bad input: each case ends with one paragraph, an exit code, and nothing on standard output.

use std::process::Stdio;

use crate::recipes;
use crate::support::{Folder, command, run};

#[test]
fn recipes_that_cannot_be_read_are_refused() {
    let folder = Folder::new();
    let here = folder.arg("");
    let missing = folder.arg("missing.toml");
    let empty = folder.write("empty.toml", "");
    let binary = folder.write("binary.toml", [0xff, 0xfe, 0x00]);
    for subcommand in ["compare", "train"] {
        run(&[subcommand, &missing]).refused(2, &["missing.toml", "check the path"]);
        run(&[subcommand, &here]).refused(2, &["recipe", &here]);
        run(&[subcommand, &empty]).refused(2, &["empty.toml", "task"]);
        run(&[subcommand, &binary]).refused(2, &["binary.toml", "UTF-8"]);
        run(&[subcommand]).refused(2, &["RECIPE"]);
    }
}

#[test]
fn mistakes_in_a_recipe_are_shown_with_line_and_column() {
    let folder = Folder::new();
    let good = recipes::recall(4);
    let line_of =
        |text: &str, part: &str| text.lines().position(|line| line.contains(part)).expect("a line") + 1;
    let cases: [(&str, &str, &[&str]); 8] = [
        ("batch = 4", "bacth = 4", &["bacth", "did you mean `batch`"]),
        ("batch = 4", "batch = \"four\"", &["four"]),
        ("batch = 4", "batch = 0", &["batch"]),
        ("batch = 4", "batch = = 4", &["batch = = 4"]),
        ("kind = \"recall\"", "kind = \"recal\"", &["recal", "did you mean `recall`"]),
        ("mixers = [\"delta_net\"]", "mixers = [\"delta_nt\"]", &["delta_nt", "delta_net"]),
        ("seeds = [1, 2]", "seeds = [1, 1]", &["seed", "twice"]),
        ("pairs = 2", "context = 8", &["context"]),
    ];
    for (from, to, words) in cases {
        let text = good.replacen(from, to, 1);
        let recipe = folder.write("typo.toml", &text);
        let place = format!("line {}, column", line_of(&text, to));
        let mut words = words.to_vec();
        words.extend([place.as_str(), "typo.toml"]);
        run(&["compare", &recipe, "--out", &folder.arg("out")]).refused(2, &words);
        run(&["train", &recipe, "--out", &folder.arg("out")]).refused(2, &words);
    }
    assert!(!folder.path("out").exists(), "nothing was begun");
}

#[test]
fn sizes_that_no_memory_holds_are_refused_before_any_training() {
    let folder = Folder::new();
    for (from, to, word) in [
        ("width = 16", "width = 1000000000000", "width"),
        ("layers = 1", "layers = 1000000000", "layers"),
        ("batch = 4", "batch = 4611686018427387904", "batch"),
        ("vocab = 16", "vocab = 4000000000", "vocab"),
        ("length = 16", "length = 10000000000000", "length"),
        ("mlp_hidden = 32", "mlp_hidden = 99999999999999", "mlp_hidden"),
        ("eval_batches = 1", "eval_batches = 999999999999", "eval_batches"),
    ] {
        let recipe = folder.write("huge.toml", recipes::recall(4).replacen(from, to, 1));
        run(&["compare", &recipe, "--out", &folder.arg("out")]).refused(2, &[word, "expected at most"]);
    }
    let wide = recipes::recall(4).replacen("width = 16", "width = 65536", 1).replacen(
        "layers = 1",
        "layers = 1024",
        1,
    );
    let recipe = folder.write("huge.toml", wide);
    if cfg!(target_os = "linux") {
        run(&["train", &recipe, "--out", &folder.arg("out")]).refused(2, &["GiB", "parameters", "smaller"]);
    }
    assert!(!folder.path("out").exists(), "nothing was begun");
}

#[test]
fn an_unknown_preset_comes_with_a_suggestion() {
    let folder = Folder::new();
    let known = fastweight::models::presets::names();
    let name = known.first().expect("a preset");
    let mistyped = format!("{name}x");
    let text = recipes::recall(4).replacen(
        "mixers = [\"softmax_attention\"]",
        &format!("preset = \"{mistyped}\""),
        1,
    );
    let recipe = folder.write("preset.toml", text);
    run(&["compare", &recipe, "--out", &folder.arg("out")]).refused(2, &[&mistyped, name]);
}

#[test]
fn texts_that_cannot_be_trained_on_are_refused() {
    let folder = Folder::new();
    let recipe = folder.write("text.toml", recipes::text(2));
    let empty = folder.write("empty.txt", "");
    let short = folder.write("short.txt", "too short");
    let latin = folder.write("latin.txt", b"caf\xe9 ".repeat(100));
    std::fs::create_dir(folder.path("nothing")).expect("a folder");
    let cases: [(&str, &[&str]); 5] = [
        ("missing.txt", &["missing.txt"]),
        (&empty, &["no text", "empty.txt"]),
        (&short, &["tokens", "context"]),
        (&latin, &["not UTF-8", "offset 3"]),
        (&folder.arg("nothing"), &["no text", "nothing"]),
    ];
    let out = folder.arg("out");
    for (data, words) in cases {
        run(&["train", &recipe, "--out", &out, "--data", data]).refused(2, words);
        run(&["compare", &recipe, "--out", &out, "--data", data]).refused(2, words);
    }
    run(&["train", &recipe, "--out", &out]).refused(2, &["text", "data"]);
    assert!(!folder.path("out").exists(), "nothing was begun");
}

#[test]
fn a_text_for_a_task_that_has_none_is_refused() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(2));
    let data = folder.write("data.txt", "some text");
    for subcommand in ["train", "compare"] {
        run(&[subcommand, &recipe, "--data", &data, "--out", &folder.arg("out")])
            .refused(2, &["--data", "recall"]);
    }
}

#[test]
fn a_training_that_diverges_names_step_and_place() {
    let folder = Folder::new();
    let text = recipes::recall(20).replace("3e-3", "1e30");
    let recipe = folder.write("hot.toml", text);
    let words = ["stopped at step", "not finite", "learning rate"];
    run(&["train", &recipe, "--out", &folder.arg("out")]).refused(1, &words);
    run(&["compare", &recipe, "--out", &folder.arg("cmp")]).refused(1, &words);
}

#[test]
fn folders_that_are_not_runs_are_refused() {
    let folder = Folder::new();
    let here = folder.arg("");
    let file = folder.write("file", "not a run");
    for args in [&["eval"][..], &["generate", "--prompt", "a"]] {
        for (run_folder, word) in [("missing-run", "missing-run"), (&here, "no checkpoint"), (&file, "file")]
        {
            run(&[args, &[run_folder]].concat()).refused(2, &[word, "training run"]);
        }
    }
}

#[test]
fn folders_that_cannot_be_written_are_an_error_before_any_training() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(4));
    folder.write("file", "in the way");
    let inside = folder.arg("file/out");
    for subcommand in ["compare", "train"] {
        run(&[subcommand, &recipe, "--out", &inside]).refused(1, &["could not create the folder", &inside]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn standard_output_that_is_full_is_an_error() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(2));
    let out = folder.arg("out");
    for args in [&["compare", &recipe, "--quick", "--out", &out][..], &["rules"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
        let child = command(args).args(["--quiet"]).stdout(full).stderr(Stdio::piped()).spawn();
        let output = child.expect("the command starts").wait_with_output().expect("the command ends");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        assert!(text.contains("standard output could not be written"), "{args:?}: {text}");
    }
    let results = std::fs::read_to_string(folder.path("out/results.jsonl")).expect("results");
    assert_eq!(results.lines().count(), 2, "the results are kept");
}
