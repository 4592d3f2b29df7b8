//! Recipes with several tasks: what is shared, what a task changes, faults, and their comparison.

mod common;

use std::fs;
use std::path::Path;

use common::device;
use fastweight_train::compare::{Comparison, Options, RESULTS, compare};
use fastweight_train::progress::Event;
use fastweight_train::recipe::{RecipeError, Warmup};
use fastweight_train::task::Metric;
use fastweight_train::{Recipe, report};

const TASKS: &str = r#"
name = "two tasks"

[[tasks]]
kind = "recall"
vocab = 32
length = 16
pairs = 2

[[tasks]]
kind = "formal_language"
language = "parity"
longest = 8

[tasks.train]
steps = 3
batch = 4
learning_rate = 2e-3
seeds = [5]

[tasks.model]
layers = 1

[tasks.quick]
longest = 4
batch = 3

[train]
steps = 4
batch = 2
learning_rate = 1e-2
warmup = 2
eval_every = 2
eval_batches = 1
seeds = [1, 2]

[model]
width = 16
layers = 2
heads = 2

[[models]]
name = "attention"
mixers = ["softmax_attention"]

[[models]]
name = "delta"
mixers = ["delta_net"]

[compare.quick]
steps = 2
batch = 1
length = 8
pairs = 1
"#;

fn recipe() -> Recipe {
    Recipe::parse(TASKS).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_task_changes_what_it_says_and_keeps_the_rest() {
    let recipe = recipe();
    let parts = recipe.parts();
    let names: Vec<&str> = parts.iter().map(|part| part.task.name()).collect();
    assert_eq!(names, ["recall", "parity"]);
    let [recall, parity] = &parts[..] else { panic!("two parts") };
    assert_eq!((recall.train.steps, recall.train.batch, recall.train.learning_rate), (Some(4), 2, 1e-2));
    assert_eq!((parity.train.steps, parity.train.batch, parity.train.learning_rate), (Some(3), 4, 2e-3));
    assert_eq!((&recall.train.seeds[..], &parity.train.seeds[..]), (&[1, 2][..], &[5][..]));
    assert_eq!(parity.train.warmup, Warmup::Steps(2), "what the task does not say is shared");
    let layers =
        |part: &Recipe| part.resolve(part.task.vocab()).unwrap().iter().map(|m| m.config.layers).max();
    assert_eq!((layers(recall), layers(parity)), (Some(2), Some(1)));
    assert_eq!((recall.task.vocab(), parity.task.vocab()), (32, 4));
    assert_eq!(parts[1].parts()[0].train.steps, Some(3), "a part is its own only part");

    let only = recipe.only("parity").unwrap();
    assert_eq!((only.task.name(), only.train.steps, only.further.len()), ("parity", Some(3), 0));
    let message = recipe.only("partiy").unwrap_err().to_string();
    assert!(message.contains("no task is called `partiy`") && message.contains("did you mean `parity`?"));
}

#[test]
fn another_kind_of_budget_takes_the_place_of_the_shared_one() {
    let text = TASKS.replacen("steps = 3", "tokens = 700", 1);
    let parts = Recipe::parse(&text).unwrap().parts();
    assert_eq!((parts[1].train.steps, parts[1].train.tokens), (None, Some(700)));
}

#[test]
fn a_single_task_may_have_changes_too() {
    let text = TASKS.replacen("[[tasks]]\nkind = \"formal_language\"", "[[other]]\nkind = \"\"", 1);
    assert!(Recipe::parse(&text).is_err());
    let from = TASKS.find("[[tasks]]\nkind = \"recall\"").unwrap();
    let to = TASKS.find("[[tasks]]\nkind = \"formal_language\"").unwrap();
    let text = format!("{}{}", &TASKS[..from], &TASKS[to..])
        .replace("[[tasks]]", "[task]")
        .replace("[tasks.", "[task.")
        .replace("length = 8\npairs = 1\n", "");
    let parts = Recipe::parse(&text).unwrap_or_else(|error| panic!("{error}")).parts();
    assert_eq!((parts.len(), parts[0].train.steps, parts[0].task.name()), (1, Some(3), "parity"));
}

#[test]
fn quick_changes_the_shared_settings_then_each_tasks_own() {
    let parts = recipe().quick().unwrap().parts();
    let [recall, parity] = &parts[..] else { panic!("two parts") };
    assert_eq!((recall.train.steps, recall.train.batch), (Some(2), 1));
    assert_eq!((recall.task.length, recall.task.pairs), (Some(8), Some(1)));
    assert_eq!((parity.train.steps, parity.train.batch), (Some(2), 3), "[tasks.quick] comes last");
    assert_eq!((parity.task.longest, parity.task.length), (Some(4), None), "sizes go where they belong");
    let parts = recipe().with_seed(9).parts();
    assert!(parts.iter().all(|part| part.train.seeds == [9]), "a seed of the command is everyone's");
}

fn fault(from: &str, to: &str) -> RecipeError {
    assert!(TASKS.contains(from), "{from}");
    Recipe::parse(&TASKS.replacen(from, to, 1)).expect_err(to)
}

#[test]
fn faults_name_line_and_column_of_the_task_they_are_in() {
    // (what is changed, into what, line, column, parts of the message)
    let cases: &[(&str, &str, usize, usize, &[&str])] = &[
        ("\"parity\"", "\"partiy\"", 12, 12, &["unknown name `partiy`", "did you mean `parity`?"]),
        ("\"formal_language\"", "\"formal_langage\"", 11, 8, &["did you mean `formal_language`?"]),
        ("language = \"parity\"\n", "", 11, 1, &["needs `language`", "\"parity\""]),
        ("longest = 8", "longest = 0", 13, 1, &["longest is 0", "at least shortest = 2"]),
        ("longest = 8", "longest = 8\nshortest = 0", 14, 1, &["shortest is 0", "at least 1"]),
        ("longest = 8", "strings = 0", 13, 1, &["strings is 0"]),
        (
            "longest = 8",
            "length = 0",
            13,
            1,
            &["`length` is not an option of a formal_language task", "`longest`"],
        ),
        ("longest = 8", "name = \"recall\"", 13, 1, &["two tasks are called \"recall\"", "`name`"]),
        ("longest = 8", "name = \" \"", 13, 1, &["name is empty"]),
        ("pairs = 2\n", "pairs = 2\nlongest = 9\n", 9, 1, &["`longest` is not an option of a recall task"]),
        ("pairs = 2\n", "pairs = 0\n", 8, 1, &["pairs is 0"]),
        ("steps = 3", "steps = 0", 16, 1, &["above zero"]),
        ("steps = 3", "steps = 3\nseconds = 1.0", 17, 1, &["more than one budget"]),
        ("steps = 3", "stesp = 3", 16, 1, &["unknown key `stesp`", "did you mean `steps`?"]),
        ("batch = 4", "batch = 0", 17, 1, &["at least 1 sequence"]),
        ("batch = 4", "betas = [0.9]", 17, 0, &["two numbers"]),
        ("learning_rate = 2e-3", "learning_rate = -1.0", 18, 1, &["positive"]),
        ("seeds = [5]", "seeds = [5, 5]", 19, 1, &["listed twice"]),
        ("layers = 1", "layers = 0", 22, 1, &["`layers` must be at least 1"]),
        ("layers = 1", "learning_rate = 1e-3", 22, 1, &["belongs in its [tasks.train]"]),
        ("longest = 4", "longest = 1", 25, 1, &["[tasks.quick]", "longest is 1"]),
        ("batch = 3", "batch = 0", 26, 1, &["[tasks.quick]", "at least 1 sequence"]),
        ("steps = 4", "steps = 0", 29, 1, &["above zero"]),
        ("warmup = 2", "warmup = 1.5", 32, 1, &["fraction of the budget"]),
        ("width = 16", "width = 0", 38, 1, &["`width` must be at least 1"]),
        ("pairs = 1", "pairs = 5", 53, 1, &["[compare.quick]", "length is 8"]),
        ("steps = 2\n", "steps = 0\n", 51, 1, &["[compare.quick]", "above zero"]),
        ("[train]", "[task]\nkind = \"recall\"\n[train]", 28, 1, &["both [task] and [[tasks]]"]),
    ];
    for (from, to, line, column, parts) in cases {
        let error = fault(from, to);
        let (found_line, found_column) = error.place.unwrap_or_else(|| panic!("{to}: no place in {error}"));
        assert_eq!(found_line, *line, "{to}: {error}");
        assert!(*column == 0 || found_column == *column, "{to}: column {found_column}: {error}");
        let message = error.to_string();
        for part in *parts {
            assert!(message.contains(part), "{to}: {part:?} is not in {message}");
        }
    }
    let twice = TASKS.replacen(
        "kind = \"formal_language\"\nlanguage = \"parity\"\nlongest = 8",
        "kind = \"recall\"\nvocab = 32\nlength = 16\npairs = 2",
        1,
    );
    let error = Recipe::parse(&twice).unwrap_err();
    assert!(error.to_string().contains("two tasks are called \"recall\""), "{error}");
    assert_eq!(error.place, Some((10, 1)), "without a name, the section is at fault: {error}");
    let none = "[train]\nsteps = 1\nbatch = 1\nlearning_rate = 1e-3\n";
    let message = Recipe::parse(none).unwrap_err().to_string();
    assert!(message.contains("no task") && message.contains("[[tasks]]"), "{message}");
}

#[test]
fn changes_written_within_one_line_are_found_as_well() {
    let text = TASKS.replacen("longest = 8\n", "longest = 8\ntrain = { batch = 0 }\n", 1).replacen(
        "[tasks.train]\nsteps = 3\nbatch = 4\nlearning_rate = 2e-3\nseeds = [5]\n",
        "",
        1,
    );
    let error = Recipe::parse(&text).unwrap_err();
    assert_eq!(error.place, Some((14, 11)), "{error}");
}

fn options(folder: &Path) -> Options {
    Options { folder: folder.to_path_buf(), data: None, restart: false }
}

type Training = (String, String, u64, bool);

fn run(recipe: &Recipe, folder: &Path) -> (Comparison, Vec<Training>) {
    let mut finished = Vec::new();
    let comparison = compare(recipe, &options(folder), &device(), &mut |event| {
        if let Event::Finished { model, task, seed, reused, metric, .. } = event {
            assert_eq!(metric, if task == "recall" { Metric::Accuracy } else { Metric::Strings });
            finished.push((task.to_string(), model.to_string(), seed, reused));
        }
    });
    (comparison.unwrap_or_else(|error| panic!("{error}")), finished)
}

fn reused(finished: &[Training]) -> Vec<bool> {
    finished.iter().map(|training| training.3).collect()
}

#[test]
fn every_model_is_trained_on_every_task_and_a_killed_comparison_continues() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, finished) = run(&recipe(), folder.path());
    let order: Vec<(&str, &str, u64)> =
        finished.iter().map(|(task, model, seed, _)| (task.as_str(), model.as_str(), *seed)).collect();
    let expected = [
        ("recall", "attention", 1),
        ("recall", "attention", 2),
        ("recall", "delta", 1),
        ("recall", "delta", 2),
        ("parity", "attention", 5),
        ("parity", "delta", 5),
    ];
    assert_eq!(order, expected);
    let path = folder.path().join(RESULTS);
    let stored = fs::read_to_string(&path).unwrap();
    assert_eq!(stored.lines().count(), 6);
    for (entry, (task, model, seed)) in whole.entries().zip(expected) {
        assert_eq!((entry.task.as_str(), entry.model.as_str(), entry.seed), (task, model, seed));
        let line: serde_json::Value = serde_json::from_str(&entry.line()).unwrap();
        assert_eq!((&line["task"], line.get("bins").is_some()), (&task.into(), task == "parity"));
        assert_eq!(entry.steps, if task == "recall" { 4 } else { 3 });
        assert_eq!(
            (entry.by_pairs.is_empty(), entry.by_length.is_empty()),
            (task == "parity", task == "recall")
        );
        assert_eq!(entry.config.layers, if task == "recall" { 2 } else { 1 });
    }
    assert_eq!(whole.tasks[1].length, 8);

    // Killed in the middle of writing the fifth line.
    let lines: Vec<&str> = stored.lines().collect();
    fs::write(&path, format!("{}\n{}", lines[..4].join("\n"), &lines[4][..40])).unwrap();
    let (again, finished) = run(&recipe(), folder.path());
    assert_eq!(reused(&finished), [true, true, true, true, false, false]);
    let scores =
        |comparison: &Comparison| comparison.entries().map(|e| e.score.to_bits()).collect::<Vec<_>>();
    assert_eq!(scores(&again), scores(&whole));

    // Another setting of one task leaves the results of the other; another name leaves all.
    let other = Recipe::parse(&TASKS.replacen("steps = 3", "steps = 2", 1)).unwrap();
    assert_eq!(reused(&run(&other, folder.path()).1), [true, true, true, true, false, false]);
    let renamed = Recipe::parse(&TASKS.replacen("longest = 8", "longest = 8\nname = \"bits\"", 1)).unwrap();
    let (renamed, finished) = run(&renamed, folder.path());
    assert_eq!(reused(&finished), [true; 6]);
    assert_eq!(renamed.tasks[1].name, "bits");
    assert!(renamed.tasks[1].entries.iter().all(|entry| entry.task == "bits"));
}

#[test]
fn a_result_of_before_tasks_had_names_is_still_found() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = common::recall("steps = 2\nbatch = 2\neval_batches = 1", &["delta_net"]);
    run(&recipe, folder.path());
    let path = folder.path().join(RESULTS);
    let mut line: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let fields = line.as_object_mut().unwrap();
    fields.remove("task").unwrap();
    fs::write(&path, format!("{line}\n")).unwrap();
    let (comparison, finished) = run(&recipe, folder.path());
    assert_eq!(reused(&finished), [true]);
    assert_eq!(comparison.tasks[0].entries[0].task, "recall");
}

#[test]
fn the_report_has_one_table_of_all_tasks_and_plots_for_each() {
    let folder = tempfile::tempdir().unwrap();
    let two = Recipe::parse(&TASKS.replacen("seeds = [5]", "seeds = [5, 6]\neval_every = 1", 1)).unwrap();
    let (comparison, _) = run(&two, folder.path());
    let columns = |task: usize| -> Vec<String> {
        comparison.tasks[task].columns().into_iter().map(|column| column.name).collect()
    };
    assert_eq!(columns(0), ["accuracy"]);
    assert_eq!(
        columns(1),
        ["strings right, 9-16", "answers right, 9-16", "strings right, 2-8", "answers right, 2-8"]
    );
    let parity = &comparison.tasks[1];
    let [strings, answers, ..] = &parity.columns()[..] else { panic!("four columns") };
    for (index, own) in parity.entries.chunks(2).enumerate() {
        assert_eq!(strings.values[index].mean, (own[0].score + own[1].score) / 2.0);
        assert_eq!(answers.values[index].mean, (own[0].bins[1].steps + own[1].bins[1].steps) / 2.0);
        assert_ne!(own[0].tokens, own[1].tokens, "strings of other lengths");
    }
    let page = report::render(&comparison).unwrap();
    for part in [
        "2 models on 2 tasks",
        "<th>recall: accuracy &uarr;</th>",
        "<th>parity: strings right, 9-16 &uarr;</th>",
        "<th>parity: answers right, 9-16 &uarr;</th>",
        "<h2 class=\"task\">recall</h2>",
        "<h2 class=\"task\">parity</h2>",
        "Accuracy against training tokens",
        "Recall against number of pairs",
        "Long strings right against training tokens",
        "Right answers against the length of the string",
        "State of one sequence against its length",
        "chance</span>",
    ] {
        assert!(page.contains(part), "{part}");
    }
    let start = page.find("<h2>Long strings right against training tokens").unwrap();
    let plot = &page[start..start + page[start..].find("</svg>").unwrap()];
    assert_eq!(plot.matches("<circle ").count(), 2 * 3, "the mean of two seeds at each of three steps");
    assert_eq!(page.matches("<svg ").count(), 5);
    assert_eq!(page.matches("<table>").count(), 3, "all tasks, then each");
    assert!(!page.contains("NaN"));
}

#[test]
fn many_models_differ_in_colour_or_marker() {
    let models: String =
        (0..13).map(|n| format!("[[models]]\nname = \"m{n}\"\nmixers = [\"retnet\"]\n")).collect();
    let end = TASKS.find("[[models]]").unwrap();
    let text = format!("{}{models}", &TASKS[..end]).replace("seeds = [1, 2]", "seeds = [1]");
    let folder = tempfile::tempdir().unwrap();
    let (comparison, _) = run(&Recipe::parse(&text).unwrap(), folder.path());
    let page = report::render(&comparison).unwrap();
    let table = &page[page.find("<tbody>").unwrap()..page.find("</tbody>").unwrap()];
    let signs: std::collections::BTreeSet<&str> =
        table.split("<i").skip(1).filter_map(|rest| rest.split("</i>").next()).collect();
    assert_eq!(signs.len(), 13, "{signs:?}");
}

#[test]
fn the_recipes_of_the_repository_are_valid_whole_and_quick() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let mut names = Vec::new();
    for file in fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let recipe = Recipe::load(&path).unwrap_or_else(|error| panic!("{error}"));
        for part in recipe.clone().quick().unwrap().parts().iter().chain(&recipe.parts()) {
            part.resolve(part.task.vocab()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        }
        names.push(recipe.name);
    }
    names.sort_unstable();
    assert_eq!(names, ["recall", "rules", "text"]);
}
