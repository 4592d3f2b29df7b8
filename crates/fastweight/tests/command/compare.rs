//! `fastweight compare`.

use std::collections::BTreeSet;

use crate::recipes;
use crate::support::{Folder, Running, lines, run};

const KEYS: [&str; 11] = [
    "state_grows",
    "model",
    "task",
    "seed",
    "score",
    "params",
    "state_bytes",
    "train_tokens_per_s",
    "decode_tokens_per_s",
    "seconds",
    "learning_rate",
];

/// Model and seed of each line.
fn trainings(rows: &[serde_json::Value]) -> Vec<(String, u64)> {
    let name = |row: &serde_json::Value| row["model"].as_str().expect("a name").to_owned();
    rows.iter().map(|row| (name(row), row["seed"].as_u64().expect("a seed"))).collect()
}

fn expected() -> Vec<(String, u64)> {
    [("attention", 1), ("attention", 2), ("delta", 1), ("delta", 2)]
        .map(|(model, seed)| (model.into(), seed))
        .into()
}

#[test]
fn json_has_one_complete_line_for_each_model_and_seed() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(6));
    let ran = run(&["compare", &recipe, "--out", &folder.arg("out"), "--json"]).ok();
    let rows = ran.json();
    assert_eq!(trainings(&rows), expected());
    for row in &rows {
        let keys: BTreeSet<&str> = row.as_object().expect("an object").keys().map(String::as_str).collect();
        assert_eq!(keys, BTreeSet::from(KEYS));
        assert!(row["score"].as_f64().is_some_and(|score| (0.0..=1.0).contains(&score)), "{row}");
        assert_eq!(row["state_grows"], row["model"] == "attention", "{row}");
        for figure in &KEYS[5..] {
            assert!(row[figure].as_f64().is_some_and(|figure| figure > 0.0), "{figure} of {row}");
        }
    }
    assert!(
        ran.stderr.contains("attention on recall, seed 1"),
        "progress is on standard error: {}",
        ran.stderr
    );
    assert!(std::fs::read_to_string(folder.path("out/report.html")).expect("a report").contains("<svg"));
    assert_eq!(lines(&folder.path("out/results.jsonl")).len(), 4);
}

#[test]
fn the_table_names_models_parameters_and_where_the_report_is() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(6));
    let ran = run(&["compare", &recipe, "--out", &folder.arg("out"), "--quick", "--quiet"]).ok();
    for word in ["attention", "delta", "accuracy", "state bytes", "within 5%", "report.html", "results.jsonl"]
    {
        assert!(ran.stdout.contains(word), "{word} is missing: {}", ran.stdout);
    }
    assert_eq!(ran.stderr, "", "--quiet shows no progress");
    assert_eq!(lines(&folder.path("out/results.jsonl")).len(), 2, "quick has one seed");
}

#[test]
fn a_seed_of_the_command_line_replaces_the_recipes() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(2));
    for quick in [&["--quick"][..], &[]] {
        let mut args = vec!["compare", &recipe, "--seed", "11", "--json"];
        args.extend(quick);
        let out = folder.arg("out");
        args.extend(["--out", &out]);
        let seeds: Vec<u64> = trainings(&run(&args).ok().json()).into_iter().map(|(_, seed)| seed).collect();
        assert_eq!(seeds, [11, 11]);
    }
}

#[test]
fn a_killed_comparison_continues_and_trains_nothing_twice() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(60));
    let out = folder.arg("out");
    let args = ["compare", &recipe, "--out", &out, "--json"];
    let results = folder.path("out/results.jsonl");
    assert!(Running::start(&args).kill_when(|| !lines(&results).is_empty()), "it was killed midway");
    let before = lines(&results);
    assert!(before.len() < 4, "the kill came before the end");

    let ran = run(&args).ok();
    let after = lines(&results);
    assert_eq!(after[..before.len()], before, "finished results stay as they were");
    assert_eq!(after.len(), 4);
    assert_eq!(ran.stderr.matches("from an earlier run").count(), before.len());
    let rows = ran.json();
    assert_eq!(trainings(&rows), expected());
    let kept: serde_json::Value = serde_json::from_str(&before[0]).expect("a result");
    assert_eq!(rows[0]["seconds"], kept["seconds"], "a second training would take another time");

    let again = run(&args).ok();
    assert_eq!(again.stdout, ran.stdout, "nothing is left to train, and no figure changes in a file");
    let fresh = run(&["compare", &recipe, "--out", &out, "--json", "--quick", "--fresh"]).ok();
    assert!(!fresh.stderr.contains("from an earlier run"), "{}", fresh.stderr);
    assert_eq!(lines(&results).len(), 2);
}

#[test]
fn a_last_line_that_was_cut_short_is_trained_again() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(2));
    let out = folder.arg("out");
    let args = ["compare", &recipe, "--out", &out, "--json", "--quiet"];
    run(&args).ok();
    let whole = std::fs::read_to_string(folder.path("out/results.jsonl")).expect("results");
    folder.write("out/results.jsonl", &whole[..whole.len() - 20]);
    assert_eq!(trainings(&run(&args).ok().json()), expected());
    assert_eq!(lines(&folder.path("out/results.jsonl")).len(), 4);
}

#[test]
fn a_model_that_diverges_does_not_keep_the_others_from_their_results() {
    let folder = Folder::new();
    let text =
        recipes::recall(6).replace("name = \"attention\"", "name = \"attention\"\nlearning_rate = 1e30");
    let recipe = folder.write("tiny.toml", text);
    let args = ["compare", &recipe, "--out", &folder.arg("out")];
    let words =
        ["2 of 4 trainings diverged", "attention with seed 1", "attention with seed 2", "learning rate"];
    let ran = run(&args).failed(1, &words);
    let rows: Vec<&str> = ran.stdout.lines().filter(|line| line.contains("attention ")).collect();
    assert!(rows[0].contains("diverged"), "{}", ran.stdout);
    assert!(ran.stdout.contains("delta "), "{}", ran.stdout);
    assert!(std::fs::read_to_string(folder.path("out/report.html")).unwrap().contains("diverged"));
    let ran = run(&[&args[..], &["--json"]].concat()).failed(1, &words);
    assert_eq!(trainings(&ran.json()), expected()[2..]);
    let all = folder.write("all.toml", recipes::recall(6).replace("3e-3", "1e30"));
    let ran = run(&["compare", &all, "--out", &folder.arg("all")]).failed(1, &["4 of 4 trainings diverged"]);
    assert_eq!(ran.stdout.matches("diverged").count(), 2, "{}", ran.stdout);
}

#[test]
fn a_folder_of_another_kind_is_refused_and_other_results_are_named() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(4));
    let [trained, compared] = ["trained", "compared"].map(|name| folder.arg(name));
    run(&["train", &recipe, "--out", &trained]).ok();
    run(&["compare", &recipe, "--out", &compared]).ok();
    run(&["compare", &recipe, "--out", &trained])
        .refused(2, &["holds a training run", "choose another folder"]);
    run(&["train", &recipe, "--out", &compared, "--fresh"]).refused(2, &["results of a comparison"]);
    let longer = folder.write("longer.toml", recipes::recall(5));
    let ran = run(&["compare", &longer, "--out", &compared]).ok();
    assert!(ran.stderr.contains("4 earlier results in the folder are of other models"), "{}", ran.stderr);
    let ran = run(&["compare", &longer, "--out", &compared, "--fresh"]).ok();
    assert!(!ran.stderr.contains("earlier"), "{}", ran.stderr);
}

#[test]
fn files_that_no_run_wrote_are_not_replaced() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(4));
    for (command, name) in [("train", "recipe.toml"), ("train", "tokenizer.json"), ("compare", "report.html")]
    {
        let out = folder.path(command).join(name.replace('.', "-"));
        std::fs::create_dir_all(&out).unwrap();
        std::fs::write(out.join(name), "mine").unwrap();
        let args = [command, &recipe, "--out", out.to_str().unwrap()];
        run(&[&args[..], &["--fresh"]].concat()).refused(2, &[name, "no run wrote", "another folder"]);
        assert_eq!(std::fs::read_to_string(out.join(name)).unwrap(), "mine");
        assert_eq!(std::fs::read_dir(&out).unwrap().count(), 1, "{command} left something beside {name}");
        std::fs::remove_file(out.join(name)).unwrap();
        run(&args).ok();
        run(&args).ok();
    }
}

#[test]
fn a_quick_run_that_changes_nothing_is_refused() {
    let folder = Folder::new();
    let text = recipes::recall(6);
    let recipe = folder.write("plain.toml", &text[..text.find("[compare.quick]").unwrap()]);
    run(&["compare", &recipe, "--out", &folder.arg("out"), "--quick"])
        .refused(2, &["[compare.quick]", "--quick"]);
    assert!(!folder.path("out").exists());
}
