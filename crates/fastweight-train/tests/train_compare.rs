//! Comparisons: results on disk, continuation, the table and the report.

mod common;

use std::fs;
use std::path::Path;

use common::{device, recall, text, text_file};
use fastweight_train::compare::{Comparison, Options, RESULTS, Spread, compare};
use fastweight_train::progress::Event;
use fastweight_train::{Recipe, TrainError, report};

const TRAIN: &str = "steps = 4\nbatch = 2\neval_every = 2\neval_batches = 1\nseeds = [1, 2]";
const MIXERS: [&str; 2] = ["softmax_attention", "delta_net"];

fn options(folder: &Path) -> Options {
    Options { folder: folder.to_path_buf(), data: None, restart: false }
}

/// Compares and returns which trainings were run and which were reused.
fn run(recipe: &Recipe, options: &Options) -> (Comparison, Vec<(String, u64, bool)>) {
    let mut finished = Vec::new();
    let comparison = compare(recipe, options, &device(), &mut |event| {
        if let Event::Finished { model, seed, reused, .. } = event {
            finished.push((model.to_string(), seed, reused));
        }
    });
    (comparison.unwrap_or_else(|error| panic!("{error}")), finished)
}

fn reused(finished: &[(String, u64, bool)]) -> Vec<bool> {
    finished.iter().map(|(_, _, reused)| *reused).collect()
}

#[test]
fn every_model_and_seed_gives_one_line_with_the_agreed_fields() {
    let folder = tempfile::tempdir().unwrap();
    let (comparison, finished) = run(&recall(TRAIN, &MIXERS), &options(folder.path()));
    let order: Vec<_> = finished.iter().map(|(model, seed, _)| (model.as_str(), *seed)).collect();
    assert_eq!(order, [(MIXERS[0], 1), (MIXERS[0], 2), (MIXERS[1], 1), (MIXERS[1], 2)]);
    let stored = fs::read_to_string(folder.path().join(RESULTS)).unwrap();
    assert_eq!(stored.lines().count(), 4);
    for (entry, line) in comparison.tasks[0].entries.iter().zip(stored.lines()) {
        let short: serde_json::Value = serde_json::from_str(&entry.line()).unwrap();
        let long: serde_json::Value = serde_json::from_str(line).unwrap();
        let mut keys: Vec<_> = short.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        let mut expected = [
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
        expected.sort_unstable();
        assert_eq!(short["state_grows"], entry.model == "softmax_attention");
        keys.retain(|key| *key != "state_grows");
        assert_eq!(keys, expected);
        assert!(expected.iter().all(|key| short[key] == long[key]), "{short} {long}");
        assert_eq!(entry.tokens, 4 * 2 * 16);
        assert_eq!(entry.curve.iter().map(|(tokens, _)| *tokens).collect::<Vec<_>>(), [64, 128]);
        assert_eq!(entry.by_pairs.len(), 3);
        assert!(entry.train_tokens_per_s > 0.0 && entry.decode_tokens_per_s > 0.0 && entry.seconds > 0.0);
    }
    for row in &comparison.tasks[0].rows {
        let scores: Vec<f64> =
            comparison.tasks[0].entries.iter().filter(|e| e.model == row.model).map(|e| e.score).collect();
        assert_eq!(row.score, Spread::of(scores.into_iter()));
        assert_eq!(row.score.count, 2);
    }
    assert_eq!(Spread::of([1.0, 4.0].into_iter()), Spread { mean: 2.5, low: 1.0, high: 4.0, count: 2 });
}

#[test]
fn an_interrupted_comparison_continues_where_it_stopped() {
    let recipe = recall(TRAIN, &MIXERS);
    let folder = tempfile::tempdir().unwrap();
    let (whole, _) = run(&recipe, &options(folder.path()));
    let path = folder.path().join(RESULTS);
    let stored = fs::read_to_string(&path).unwrap();

    // Killed in the middle of writing the third line.
    let lines: Vec<&str> = stored.lines().collect();
    fs::write(&path, format!("{}\n{}\n{}", lines[0], lines[1], &lines[2][..40])).unwrap();
    let (again, finished) = run(&recipe, &options(folder.path()));
    assert_eq!(reused(&finished), [true, true, false, false]);
    let scores = |comparison: &Comparison| {
        comparison.tasks[0].entries.iter().map(|e| e.score.to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(scores(&again), scores(&whole));
    let repaired = fs::read_to_string(&path).unwrap();
    assert!(
        repaired.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()),
        "{repaired}"
    );
    assert_eq!(repaired.lines().count(), 4);

    // Another recipe makes old results useless; another list of seeds does not.
    let (_, finished) =
        run(&recall(&TRAIN.replace("steps = 4", "steps = 5"), &MIXERS), &options(folder.path()));
    assert_eq!(reused(&finished), [false; 4]);
    let (_, finished) = run(&recall(&TRAIN.replace("[1, 2]", "[2, 3]"), &MIXERS), &options(folder.path()));
    assert_eq!(reused(&finished), [true, false, true, false]);
    let (_, finished) = run(&recipe, &Options { restart: true, ..options(folder.path()) });
    assert_eq!(reused(&finished), [false; 4]);
}

#[test]
fn a_results_file_of_something_else_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(RESULTS), "{\"model\": \"x\"}\n").unwrap();
    let error =
        compare(&recall(TRAIN, &MIXERS), &options(folder.path()), &device(), &mut |_| {}).unwrap_err();
    assert!(matches!(error, TrainError::Folder { .. }), "{error}");
    assert!(error.to_string().contains("line 1"), "{error}");
}

#[test]
fn learning_rates_are_tried_and_the_best_is_kept_and_reported() {
    let train = format!(
        "{}\n[compare]\nlearning_rates = [1e-9, 1e-2]\npilot = 0.5",
        TRAIN.replace("steps = 4", "steps = 60").replace("[1, 2]", "[1]")
    );
    let folder = tempfile::tempdir().unwrap();
    let home = tempfile::tempdir().unwrap();
    let text = text(&train.replace("[compare]", "target = 0.5\n[compare]"), "linear_attention");
    let options = Options { data: Some(text_file(home.path())), ..options(folder.path()) };
    let (comparison, _) = run(&text, &options);
    assert_eq!(comparison.tasks[0].trials.len(), 2);
    assert!(
        comparison.tasks[0].trials[1].score < comparison.tasks[0].trials[0].score,
        "{:?}",
        comparison.tasks[0].trials
    );
    assert_eq!(comparison.tasks[0].rows[0].learning_rate, 1e-2);
    assert_eq!(comparison.tasks[0].entries[0].learning_rate, 1e-2);
    let trials = fs::read_to_string(folder.path().join("trials.jsonl")).unwrap();
    let (again, finished) = run(&text, &options);
    let rates = |comparison: &Comparison| {
        comparison.tasks[0].trials.iter().map(|t| t.learning_rate).collect::<Vec<_>>()
    };
    assert_eq!((rates(&again), reused(&finished)), (rates(&comparison), vec![true]));
    assert_eq!(
        fs::read_to_string(folder.path().join("trials.jsonl")).unwrap(),
        trials,
        "nothing was tried again"
    );
}

#[test]
fn unmatched_parameters_are_said() {
    let recipe = recall(&format!("{TRAIN}\n[compare]\nmatch_parameters = false"), &["delta_net"]);
    let text = recipe.source.clone() + "[[models]]\nname = \"wide\"\nwidth = 32\nmixers = [\"delta_net\"]\n";
    let recipe = Recipe::parse(&text.replace("seeds = [1, 2]", "seeds = [1]")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (comparison, _) = run(&recipe, &options(folder.path()));
    assert_eq!(comparison.notes.len(), 1);
    assert!(
        comparison.notes[0].contains("wide") && comparison.notes[0].contains("not matched"),
        "{:?}",
        comparison.notes
    );
    assert!(report::render(&comparison).unwrap().contains("is not matched within 5%"));
}

#[test]
fn the_report_stands_alone_and_escapes_what_it_shows() {
    let mut recipe = recall(TRAIN, &MIXERS);
    recipe.name = "<script>alert(1)</script> & co".into();
    recipe.source.push_str("# \"<b>\"\n");
    let folder = tempfile::tempdir().unwrap();
    let (comparison, _) = run(&recipe, &options(folder.path()));
    let path = folder.path().join("report.html");
    report::write(&comparison, &path).unwrap();
    let page = fs::read_to_string(&path).unwrap();
    assert_eq!(page, report::render(&comparison).unwrap());
    for outside in ["<script", "<link", "<img", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    let addresses = page.replace("http://www.w3.org/2000/svg", "");
    assert!(!addresses.contains("http"), "the page asks for nothing");
    assert_eq!(page.matches("<svg ").count(), 3);
    assert_eq!(page.matches("</svg>").count(), 3);
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt; &amp; co"));
    assert!(page.contains("# &quot;&lt;b&gt;&quot;"), "the exact recipe");
    for part in
        ["softmax_attention", "delta_net", "within 5%", "KV cache", "AVX", "burn", report::BURN_VERSION]
    {
        assert!(page.contains(part) || part == "AVX", "{part}");
    }
    assert!(!page.contains("#010203") && !page.contains("NaN"), "colours are the page's own");
    let leftovers = fs::read_dir(folder.path())
        .unwrap()
        .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().ends_with(".partial"));
    assert_eq!(leftovers.count(), 0);
}

#[test]
fn the_named_version_of_burn_is_the_pinned_one() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let pinned = format!("burn = {{ version = \"={}\"", report::BURN_VERSION);
    assert!(fs::read_to_string(workspace).unwrap().contains(&pinned), "{pinned}");
}

#[test]
fn a_learning_rate_that_diverges_is_recorded_and_the_search_goes_on() {
    let mixers = ["softmax_attention", "gated_delta_net", "mamba2"];
    let source = recall("steps = 2\nbatch = 2\nwarmup = 0\neval_batches = 1", &mixers).source;
    let recipe =
        Recipe::parse(&format!("{source}[compare]\nlearning_rates = [1e30, 1e-3]\npilot = 1.0\n")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (comparison, _) = run(&recipe, &options(folder.path()));
    let diverged: Vec<_> = comparison.tasks[0].trials.iter().map(|trial| trial.score.is_none()).collect();
    assert_eq!(diverged, [true, false].repeat(3));
    assert!(comparison.tasks[0].models.iter().all(|model| model.learning_rate == 1e-3));
}

#[test]
fn a_model_that_diverges_is_named_and_finished_results_stay() {
    let source =
        recall("steps = 2\nbatch = 2\nwarmup = 0\nseeds = [7]", &["delta_net", "gated_delta_net"]).source;
    let source =
        source.replace("name = \"gated_delta_net\"", "name = \"gated_delta_net\"\nlearning_rate = 1e30");
    let recipe = Recipe::parse(&source).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let comparison = compare(&recipe, &options(folder.path()), &device(), &mut |_| {}).unwrap();
    let [told] = &comparison.diverged[..] else { panic!("{:?}", comparison.diverged) };
    assert!(told.contains("stopped at step") && told.contains("gated_delta_net with seed 7"), "{told}");
    assert_eq!(comparison.entries().count(), 1);
    assert_eq!(comparison.tasks[0].rows[1].score.count, 0);
    let page = report::render(&comparison).unwrap();
    assert!(page.contains("<td>diverged</td>") && page.contains("gated_delta_net with seed 7"));
    let stored = fs::read_to_string(folder.path().join(RESULTS)).unwrap();
    assert!(stored.lines().count() == 1 && !stored.contains("null,\"params"), "{stored}");
}

#[test]
fn a_model_with_a_learning_rate_of_its_own_tries_no_other() {
    let source = recall("steps = 2\nbatch = 2\nwarmup = 0\neval_batches = 1", &MIXERS).source;
    let source = source.replacen("[[models]]\n", "[[models]]\nlearning_rate = 7e-3\n", 1);
    let recipe =
        Recipe::parse(&format!("{source}[compare]\nlearning_rates = [1e-3, 2e-3]\npilot = 1.0\n")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (comparison, _) = run(&recipe, &options(folder.path()));
    let task = &comparison.tasks[0];
    assert_eq!(task.models[0].learning_rate, 7e-3);
    assert_eq!(task.trials.iter().map(|trial| trial.model.as_str()).collect::<Vec<_>>(), [MIXERS[1]; 2]);
}

#[test]
fn of_learning_rates_with_the_same_score_the_lowest_loss_decides() {
    // Strings without an error: none after so few steps, whatever the rate.
    let text = "[task]\nkind = \"formal_language\"\nlanguage = \"parity\"\nlongest = 12\n\
                [train]\nsteps = 12\nbatch = 8\nlearning_rate = 1e-3\nwarmup = 0\neval_batches = 1\n\
                [model]\nname = \"one\"\nwidth = 16\nlayers = 1\nheads = 2\nmixers = [\"retnet\"]\n\
                [compare]\nlearning_rates = [1e-5, 1e-2]\npilot = 1.0\n";
    let folder = tempfile::tempdir().unwrap();
    let (comparison, _) = run(&Recipe::parse(text).unwrap(), &options(folder.path()));
    let [slow, fast] = &comparison.tasks[0].trials[..] else { panic!("two trials") };
    assert_eq!((slow.score, fast.score), (Some(0.0), Some(0.0)));
    assert!(fast.loss < slow.loss, "{:?} {:?}", fast.loss, slow.loss);
    assert_eq!(comparison.tasks[0].models[0].learning_rate, 1e-2);
}
