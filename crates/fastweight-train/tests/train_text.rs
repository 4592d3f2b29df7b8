//! Runs on a text: what is scored, and the tokenizer that a run keeps.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{device, text, text_file};
use fastweight_train::compare;
use fastweight_train::evaluate;
use fastweight_train::progress::Event;
use fastweight_train::run::{self, Options};
use fastweight_train::{Recipe, TrainError};

fn options(folder: &Path, data: PathBuf) -> Options {
    Options { folder: folder.to_path_buf(), data: Some(data), restart: false }
}

#[test]
fn another_text_is_scored_as_a_whole_and_the_trained_one_where_it_was_held_out() {
    let home = tempfile::tempdir().unwrap();
    let data = text_file(home.path());
    let recipe = text("steps = 1\nbatch = 2", "delta_net");
    let with_data = options(&home.path().join("run"), data.clone());
    run::train(&recipe, &with_data, &device(), &mut |_| {}).unwrap();
    let loaded = run::load(&with_data.folder, &device()).unwrap();
    let scored = |data: Option<&Path>| {
        let task = loaded.task(data).unwrap();
        evaluate::score(&loaded.model, &task, 0).unwrap()
    };
    let length = fs::metadata(&data).unwrap().len() as usize;
    let held_out = scored(None);
    assert_eq!(held_out.scored, length.div_ceil(5));
    let copy = home.path().join("copy.txt");
    fs::copy(&data, &copy).unwrap();
    assert_eq!(scored(Some(&copy)), held_out, "the same text under another name");
    let other = home.path().join("other.txt");
    fs::write(&other, "what the model has never read, in a few words more than its context").unwrap();
    assert_eq!(scored(Some(&other)).scored, fs::metadata(&other).unwrap().len() as usize);

    let short = home.path().join("short.txt");
    fs::write(&short, "a few words").unwrap();
    let message = loaded.task(Some(&short)).unwrap_err().to_string();
    assert!(message.contains("it has 11 tokens") && message.contains("context of 32"), "{message}");
}

/// A tokenizer of two words; every other one is the first.
fn two_words(path: &Path, words: [&str; 2]) {
    let definition = format!(
        "{{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": [], \"normalizer\": null, \
          \"pre_tokenizer\": {{\"type\": \"WhitespaceSplit\"}}, \"post_processor\": null, \"decoder\": null, \
          \"model\": {{\"type\": \"WordLevel\", \"vocab\": {{\"{}\": 0, \"{}\": 1}}, \"unk_token\": \"{}\"}}}}",
        words[0], words[1], words[0]
    );
    fs::write(path, definition).unwrap();
}

#[test]
fn a_run_keeps_its_tokenizer_and_says_when_it_loses_text() {
    let home = tempfile::tempdir().unwrap();
    let tokenizer = home.path().join("words.json");
    two_words(&tokenizer, ["sheep,", "more;"]);
    let recipe = text("steps = 1\nbatch = 2", "delta_net").source;
    let recipe = recipe.replace("[train]", &format!("tokenizer = {tokenizer:?}\n[train]"));
    let recipe = Recipe::parse(&recipe).unwrap();
    let with_data = options(&home.path().join("run"), text_file(home.path()));
    let mut notes = Vec::new();
    run::train(&recipe, &with_data, &device(), &mut |event| {
        if let Event::Note(note) = event {
            notes.push(note.to_string());
        }
    })
    .unwrap();
    assert!(notes.iter().any(|note| note.contains("too low to compare")), "{notes:?}");
    let score = || {
        let loaded = run::load(&with_data.folder, &device()).unwrap();
        evaluate::score(&loaded.model, &loaded.task(None).unwrap(), 0).unwrap()
    };
    let before = score();

    // Another tokenizer of the same size: the run keeps what it was trained with, and is not continued with the other.
    two_words(&tokenizer, ["sheep,", "then"]);
    assert_eq!(score(), before);
    let error = run::train(&recipe, &with_data, &device(), &mut |_| {}).unwrap_err();
    assert!(matches!(error, TrainError::Folder { .. }), "{error}");
    assert!(error.to_string().contains("another tokenizer"), "{error}");
    fs::remove_file(&tokenizer).unwrap();
    assert_eq!(score(), before);
    // Without the copy the recipe's file is read, which is not the one it was trained with.
    two_words(&tokenizer, ["sheep,", "then"]);
    let copy = with_data.folder.join("tokenizer.json");
    let kept = fs::read(&copy).unwrap();
    for replaced in [None, Some(fs::read(&tokenizer).unwrap())] {
        match replaced {
            Some(other) => fs::write(&copy, other).unwrap(),
            None => fs::remove_file(&copy).unwrap(),
        }
        let loaded = run::load(&with_data.folder, &device()).unwrap();
        for error in [loaded.task(None).unwrap_err(), loaded.tokenizer().unwrap_err()] {
            assert!(error.to_string().contains("has changed"), "{error}");
        }
        let error = run::train(&recipe, &with_data, &device(), &mut |_| {}).unwrap_err();
        assert!(matches!(error, TrainError::Folder { .. }), "{error}");
    }
    fs::write(&copy, kept).unwrap();
    let moved = home.path().join("moved");
    fs::rename(&with_data.folder, &moved).unwrap();
    assert!(run::load(&moved, &device()).unwrap().tokenizer().is_ok());
}

#[test]
fn results_of_another_tokenizer_are_not_taken() {
    let home = tempfile::tempdir().unwrap();
    let tokenizer = home.path().join("words.json");
    let recipe = text("steps = 1\nbatch = 2", "delta_net").source;
    let recipe = recipe.replace("[train]", &format!("tokenizer = {tokenizer:?}\n[train]"));
    let recipe = Recipe::parse(&recipe).unwrap();
    let options = compare::Options {
        folder: home.path().join("results"),
        data: Some(text_file(home.path())),
        restart: false,
    };
    let reused = || {
        let mut reuses = 0;
        compare::compare(&recipe, &options, &device(), &mut |event| {
            reuses += usize::from(matches!(event, Event::Finished { reused: true, .. }));
        })
        .unwrap();
        reuses
    };
    two_words(&tokenizer, ["sheep,", "more;"]);
    assert_eq!([reused(), reused()], [0, 1]);
    two_words(&tokenizer, ["sheep,", "then"]);
    assert_eq!(reused(), 0);
}

#[test]
fn starting_over_removes_checkpoints_and_nothing_else() {
    let home = tempfile::tempdir().unwrap();
    let fresh = Options { restart: true, ..options(&home.path().join("run"), text_file(home.path())) };
    let recipe = text("steps = 2\nbatch = 2\ncheckpoint_every = 1\nkeep = 9", "delta_net");
    let all = fresh.folder.join("checkpoints");
    fs::create_dir_all(all.join("mine")).unwrap();
    fs::write(all.join("mine/notes"), "kept").unwrap();
    run::train(&recipe, &fresh, &device(), &mut |_| {}).unwrap();
    let shorter = text("steps = 1\nbatch = 2", "delta_net");
    run::train(&shorter, &fresh, &device(), &mut |_| {}).unwrap();
    let mut names: Vec<_> =
        fs::read_dir(&all).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["mine", "step-00000001"]);
    assert_eq!(fs::read_to_string(all.join("mine/notes")).unwrap(), "kept");
}
