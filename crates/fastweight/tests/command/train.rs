//! `fastweight train`: interruption, checkpoints and run folders in use.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::recipes;
use crate::support::{Folder, Running, run};

/// Checkpoints of a run, oldest first.
fn checkpoints(folder: &Folder, run: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.path(run).join("checkpoints"));
    let mut found: Vec<PathBuf> = entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-")));
    found.sort();
    found
}

fn state(folder: &Folder, run: &str) -> Value {
    let newest = checkpoints(folder, run).pop().expect("a checkpoint");
    serde_json::from_str(&fs::read_to_string(newest.join("state.json")).expect("a state")).expect("JSON")
}

fn weights(folder: &Folder, run: &str) -> Vec<u8> {
    fs::read(checkpoints(folder, run).pop().expect("a checkpoint").join("weights.safetensors"))
        .expect("weights")
}

#[test]
fn a_killed_run_resumes_with_the_losses_and_weights_of_an_uninterrupted_one() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(90));
    let (whole, cut) = (folder.arg("whole"), folder.arg("cut"));
    run(&["train", &recipe, "--out", &whole, "--quiet"]).ok();

    let args = ["train", &recipe, "--out", &cut, "--json"];
    assert!(
        Running::start(&args).kill_when(|| !checkpoints(&folder, "cut").is_empty()),
        "it was killed midway"
    );
    let ran = run(&args).ok();
    let summary = ran.json().pop().expect("a summary");
    let resumed = summary["resumed_from"].as_u64().expect("it resumed");
    assert!(resumed > 0 && resumed < 90, "{summary}");
    assert!(ran.stderr.contains("continuing from step"), "{}", ran.stderr);

    let (a, b) = (state(&folder, "whole"), state(&folder, "cut"));
    for part in ["step", "tokens", "losses", "scores", "score", "data_index"] {
        assert_eq!(a[part], b[part], "{part}");
    }
    assert_eq!(a["losses"].as_array().map(Vec::len), Some(90), "the losses before the kill are compared too");
    assert!(weights(&folder, "whole") == weights(&folder, "cut"), "the weights differ");
}

#[test]
fn json_lines_are_evaluations_and_a_summary_last() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(8));
    let ran = run(&["train", &recipe, "--out", &folder.arg("run"), "--json", "--seed", "5"]).ok();
    let rows = ran.json();
    let (summary, evaluations) = rows.split_last().expect("lines");
    assert!(evaluations.iter().all(|row| row["event"] == "evaluated" && row["seed"] == 5));
    assert_eq!(evaluations[0]["step"], 4);
    let steps: Vec<_> =
        evaluations.iter().map(|row| (row["step"].as_u64(), row["final"].as_bool())).collect();
    assert_eq!(steps, [(Some(4), Some(false)), (Some(8), Some(true))], "one line a step, the last marked");
    assert_eq!(evaluations[1]["score"], summary["score"]);
    assert_eq!((&summary["event"], &summary["steps"]), (&"finished".into(), &8.into()));

    let text = run(&["train", &recipe, "--out", &folder.arg("run"), "--seed", "5"]).ok();
    assert!(text.stderr.contains("the same command continues"), "{}", text.stderr);
    assert!(text.stdout.contains("accuracy") && text.stdout.contains("8 steps"), "{}", text.stdout);
    assert!(!text.stdout.contains("left"), "progress is not on standard output");
}

#[test]
fn a_run_folder_in_use_is_refused() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(1_000_000));
    let out = folder.arg("run");
    let args = ["train", &recipe, "--out", &out];
    let mut first = Running::start(&args);
    while checkpoints(&folder, "run").is_empty() {
        assert!(first.0.try_wait().expect("a child").is_none(), "the first training ended early");
        std::thread::yield_now();
    }
    run(&args).refused(1, &["in use by another process", &out]);
    run(&["compare", &recipe, "--out", &out]).refused(1, &["in use by another process"]);
    assert!(first.0.try_wait().expect("a child").is_none(), "the first one goes on");
}

#[test]
fn a_broken_checkpoint_is_passed_over_for_an_older_one() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(6));
    let out = folder.arg("run");
    let args = ["train", &recipe, "--out", &out, "--json"];
    run(&args).ok();
    let saved = checkpoints(&folder, "run");
    assert_eq!(saved.len(), 2);

    truncate(&saved[1].join("weights.safetensors"));
    let ran = run(&args).ok();
    assert_eq!(ran.json().pop().expect("a summary")["resumed_from"], 3);
    assert!(ran.stderr.contains("expected"), "the broken one is named: {}", ran.stderr);

    for checkpoint in checkpoints(&folder, "run") {
        truncate(&checkpoint.join("weights.safetensors"));
    }
    run(&args).refused(2, &["no checkpoint", "bytes, expected", &out]);
    run(&["eval", &out]).refused(2, &["no checkpoint", "bytes, expected"]);
    run(&["train", &recipe, "--out", &out, "--fresh"]).ok();
}

fn truncate(file: &std::path::Path) {
    let bytes = fs::read(file).expect("a file");
    fs::write(file, &bytes[..bytes.len() / 2]).expect("a shorter file");
}

#[test]
fn a_run_of_another_model_or_recipe_is_refused_and_stays() {
    let folder = Folder::new();
    let out = folder.arg("run");
    let recipe = folder.write("tiny.toml", recipes::recall(3));
    run(&["train", &recipe, "--out", &out, "--quiet"]).ok();
    let before = weights(&folder, "run");

    let wider = folder.write("wider.toml", recipes::recall(3).replace("width = 16", "width = 32"));
    run(&["train", &wider, "--out", &out]).refused(2, &["of another model", "in the checkpoint"]);
    let hotter = folder.write("hotter.toml", recipes::recall(3).replace("3e-3", "2e-3"));
    run(&["train", &hotter, "--out", &out]).refused(2, &["another recipe", &out]);
    assert!(weights(&folder, "run") == before, "nothing is lost");
}

#[test]
fn the_final_score_of_a_text_takes_the_place_of_the_sampled_one() {
    let folder = Folder::new();
    let recipe = folder.write("text.toml", recipes::text(20));
    let data = folder.write("data.txt", "to be or not to be ".repeat(60));
    let args = ["train", &recipe, "--data", &data, "--out", &folder.arg("run"), "--json", "--quiet"];
    let rows = run(&args).ok().json();
    let last: Vec<_> = rows.iter().filter(|row| row["event"] == "evaluated" && row["step"] == 20).collect();
    assert_eq!(last.len(), 1, "{rows:?}");
    assert_eq!((&last[0]["final"], &last[0]["score"]), (&true.into(), &rows[rows.len() - 1]["score"]));
}

#[test]
fn one_of_something_is_singular() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(1));
    let text = run(&["train", &recipe, "--out", &folder.arg("run"), "--quiet"]).ok().stdout;
    assert!(text.contains("after 1 step ("), "{text}");
}

/// A limit on the size of files stands for a full disk: the write fails in the middle.
#[cfg(unix)]
#[test]
fn a_full_disk_is_an_error_that_keeps_earlier_checkpoints() {
    let folder = Folder::new();
    let out = folder.arg("run");
    let short = folder.write("short.toml", recipes::recall(3));
    run(&["train", &short, "--out", &out, "--quiet"]).ok();
    let before = weights(&folder, "run");

    let script = "trap '' XFSZ; ulimit -f 4; exec \"$0\" \"$@\"";
    let ran: crate::support::Ran = std::process::Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_fastweight"), "train", &short, "--out", &out, "--fresh"])
        .output()
        .expect("a shell")
        .into();
    ran.refused(1, &["could not write the checkpoint", &out]);
    let other = folder.arg("other");
    run(&["train", &short, "--out", &other, "--quiet"]).ok();
    assert!(weights(&folder, "other") == before);
    let left: Vec<_> = fs::read_dir(folder.path("run/checkpoints")).expect("a folder").collect();
    assert!(left.is_empty(), "no half-written checkpoint stays: {left:?}");
}
