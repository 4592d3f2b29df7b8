//! Several tasks in one recipe, and formal languages.

use crate::recipes;
use crate::support::{Folder, Running, lines, run};

fn trainings(rows: &[serde_json::Value]) -> Vec<(String, String)> {
    let text = |value: &serde_json::Value| value.as_str().expect("a name").to_owned();
    rows.iter().map(|row| (text(&row["task"]), text(&row["model"]))).collect()
}

fn expected() -> Vec<(String, String)> {
    [("recall", "attention"), ("recall", "delta"), ("parity", "attention"), ("parity", "delta")]
        .map(|(task, model)| (task.into(), model.into()))
        .into()
}

#[test]
fn a_comparison_of_two_tasks_has_one_table_and_lines_that_name_the_task() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::tasks(4));
    let out = folder.arg("out");
    let ran = run(&["compare", &recipe, "--out", &out, "--json"]).ok();
    let rows = ran.json();
    assert_eq!(trainings(&rows), expected());
    assert!(rows[0].get("bins").is_none());
    let bins = rows[2]["bins"].as_array().expect("bins");
    assert_eq!((&bins[0]["longest"], &bins[1]["longest"]), (&8.into(), &16.into()));
    assert_eq!(bins[1]["strings_right"], rows[2]["score"]);
    assert_eq!((&bins[0]["tested"], &bins[1]["tested"]), (&2000.into(), &2000.into()));
    assert!(ran.stderr.contains("attention on parity, seed 1"), "{}", ran.stderr);

    let text = run(&["compare", &recipe, "--out", &out, "--quiet"]).ok().stdout;
    for word in
        ["recall: accuracy", "parity: strings right, 9-16", "parity: answers right, 9-16", "those on recall"]
    {
        let flat: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(word), "{word} is missing: {text}");
    }
    let page = std::fs::read_to_string(folder.path("out/report.html")).expect("a report");
    assert_eq!(page.matches("<svg ").count(), 5);
}

#[test]
fn a_killed_comparison_of_two_tasks_continues() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::tasks(60));
    let out = folder.arg("out");
    let args = ["compare", &recipe, "--out", &out, "--json"];
    let results = folder.path("out/results.jsonl");
    assert!(Running::start(&args).kill_when(|| lines(&results).len() >= 2), "it was killed midway");
    let before = lines(&results);
    assert!(before.len() < 4, "the kill came before the end");
    let ran = run(&args).ok();
    assert_eq!(lines(&results)[..before.len()], before, "finished results stay as they were");
    assert_eq!(ran.stderr.matches("from an earlier run").count(), before.len());
    assert_eq!(trainings(&ran.json()), expected());
}

#[test]
fn one_task_of_several_is_trained_and_scored() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::tasks(4));
    let out = folder.arg("run");
    let ran = run(&["train", &recipe, "--task", "parity", "--out", &out, "--json"]).ok();
    let summary = ran.json().pop().expect("a summary");
    assert_eq!((&summary["metric"], &summary["steps"]), (&"strings".into(), &4.into()));

    let own = run(&["eval", &out, "--json", "--quiet"]).ok().json().remove(0);
    assert_eq!(own["score"], summary["score"], "the final score is over all test strings");
    assert_eq!(own["bins"][1]["longest"], 16);
    let by_recipe = run(&["eval", &out, &recipe, "--json", "--quiet"]).ok().json().remove(0);
    assert_eq!(by_recipe["bins"], own["bins"], "of the recipe's tasks, the one it was trained on");
    let by_name = run(&["eval", &out, "parity", "--batches", "1", "--json", "--quiet"]).ok().json().remove(0);
    assert_eq!((&by_name["bins"][1]["longest"], &by_name["bins"][1]["tested"]), (&100.into(), &64.into()));
    let text = run(&["eval", &out, "--quiet"]).ok().stdout;
    for word in ["long strings right", "2-8 symbols", "9-16 symbols", "32 symbols", "over 2000 strings"] {
        assert!(text.contains(word), "{word} is missing: {text}");
    }

    let first = run(&["train", &recipe, "--out", &folder.arg("first")]).ok();
    assert!(first.stderr.contains("the first, recall, is trained"), "{}", first.stderr);
    run(&["eval", &folder.arg("first"), "parity"]).refused(2, &["trained on recall", "formal_language"]);
    run(&["eval", &out, "small_t32_n4"]).refused(2, &["trained on formal_language", "recall"]);
    run(&["eval", &out, "partiy"]).refused(2, &["partiy", "did you mean \"parity\""]);
    run(&["generate", &out, "--prompt", "01"]).refused(2, &["formal_language", "no text"]);
}

#[test]
fn mistakes_in_tasks_are_shown_with_line_and_column() {
    let folder = Folder::new();
    let good = recipes::tasks(4);
    let cases: [(&str, &str, &[&str]); 5] = [
        ("language = \"parity\"", "language = \"party\"", &["party", "did you mean `parity`"]),
        ("longest = 8", "longest = 0", &["longest is 0"]),
        ("longest = 8", "name = \"recall\"", &["two tasks are called", "recall"]),
        ("longest = 8", "train = { steps = 0 }", &["above zero"]),
        ("longest = 8", "longst = 8", &["did you mean `longest`"]),
    ];
    for (from, to, words) in cases {
        let text = good.replacen(from, to, 1);
        let recipe = folder.write("typo.toml", &text);
        let line = text.lines().position(|line| line.contains(to)).expect("a line") + 1;
        let place = format!("line {line}, column");
        let mut words = words.to_vec();
        words.push(&place);
        run(&["compare", &recipe, "--out", &folder.arg("out")]).refused(2, &words);
    }
    let recipe = folder.write("tiny.toml", &good);
    run(&["train", &recipe, "--task", "recal"]).refused(2, &["recal", "did you mean `recall`"]);
    let huge = folder.write("huge.toml", good.replacen("longest = 8", "longest = 99999999", 1));
    run(&["compare", &huge, "--out", &folder.arg("out")]).refused(2, &["longest", "at most"]);
    let data = folder.write("data.txt", "some text");
    run(&["compare", &recipe, "--data", &data]).refused(2, &["--data", "recall and formal_language"]);
    assert!(!folder.path("out").exists(), "nothing was begun");
}

#[test]
fn the_ledger_lists_a_model_again_where_a_task_changes_its_state() {
    let folder = Folder::new();
    let text = recipes::tasks(4).replacen(
        "longest = 8",
        "longest = 8\n\n[tasks.model]\nheads = 4\nmlp_hidden = 8",
        1,
    );
    let ran = run(&["ledger", &folder.write("tiny.toml", text), "--json"]).ok();
    let names: std::collections::BTreeSet<String> =
        ran.json().iter().map(|row| row["model"].as_str().expect("a name").to_owned()).collect();
    let expected = ["attention", "delta", "delta on parity"].map(str::to_owned);
    assert_eq!(names, expected.into(), "four heads of attention hold as many keys and values as two");
}
