//! Checkpoints: exact resumption, damage, other models and versions.

mod common;

use std::fs;
use std::path::Path;

use burn::tensor::{Int, Tensor};
use common::{device, recall, text, text_file, weights};
use fastweight_train::checkpoint::{self, CHECKPOINTS, CheckpointError, OPTIMIZER, STATE, WEIGHTS};
use fastweight_train::progress::Event;
use fastweight_train::run::{self, Options, RECIPE};
use fastweight_train::{Recipe, TrainError};

const TRAIN: &str =
    "steps = 10\nbatch = 2\naccumulate = 2\neval_every = 3\neval_batches = 1\ncheckpoint_every = 5\nkeep = 9";

fn options(folder: &Path) -> Options {
    Options { folder: folder.to_path_buf(), data: None, restart: false }
}

/// Step and loss, as bits, of each step taken.
type Losses = Vec<(usize, u64)>;

/// Trains and returns the losses of the steps taken, the notes, and the result.
fn train(recipe: &Recipe, options: &Options) -> (Losses, Vec<String>, Result<run::Summary, TrainError>) {
    let (mut losses, mut notes) = (Vec::new(), Vec::new());
    let result = run::train(recipe, options, &device(), &mut |event| match event {
        Event::Step(progress) => losses.push((progress.step, progress.loss.to_bits())),
        Event::Note(note) => notes.push(note.to_string()),
        _ => {}
    });
    (losses, notes, result)
}

fn final_weights(folder: &Path) -> Vec<(String, Vec<u32>)> {
    weights(&run::load(folder, &device()).unwrap().model)
}

/// What a kill leaves of a run that had finished step `step`: only the checkpoints up to it.
fn cut_back(folder: &Path, step: usize) {
    for path in checkpoint::list(folder) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.trim_start_matches("step-").parse::<usize>().unwrap() > step {
            fs::remove_dir_all(path).unwrap();
        }
    }
}

#[test]
fn a_resumed_run_has_the_losses_and_weights_of_an_uninterrupted_one() {
    for mixer in ["softmax_attention", "elu1_linear_attention", "gated_delta_net"] {
        let recipe = recall(TRAIN, &[mixer]);
        let folder = tempfile::tempdir().unwrap();
        let (whole, _, result) = train(&recipe, &options(folder.path()));
        assert_eq!(result.unwrap().resumed_from, None);
        let expected = final_weights(folder.path());
        let state = run::load(folder.path(), &device()).unwrap().state;

        cut_back(folder.path(), 5);
        // A kill in the middle of the next checkpoint.
        let partial = folder.path().join(CHECKPOINTS).join(".step-00000010.partial");
        fs::create_dir(&partial).unwrap();
        fs::write(partial.join(WEIGHTS), b"half").unwrap();

        let (rest, notes, result) = train(&recipe, &options(folder.path()));
        assert_eq!(rest, whole[5..], "{mixer}");
        assert_eq!(result.unwrap().resumed_from, Some(5));
        assert!(notes.iter().any(|note| note.contains("step 5")), "{notes:?}");
        assert_eq!(final_weights(folder.path()), expected, "{mixer}");
        assert!(!partial.exists());
        let again = run::load(folder.path(), &device()).unwrap().state;
        assert_eq!(
            (again.scores, again.losses, again.best_score),
            (state.scores, state.losses, state.best_score)
        );
        assert_eq!((again.tokens, again.data_index), (10 * 2 * 2 * 16, 20));
    }
}

#[test]
fn a_finished_run_is_not_trained_again_unless_asked() {
    let recipe = recall(TRAIN, &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    let first = train(&recipe, &options(folder.path())).2.unwrap();
    let (losses, _, again) = train(&recipe, &options(folder.path()));
    assert!(losses.is_empty());
    assert_eq!(again.unwrap().score, first.score);
    let (losses, _, _) = train(&recipe, &Options { restart: true, ..options(folder.path()) });
    assert_eq!(losses.len(), 10);
    assert_eq!(fs::read_to_string(folder.path().join(RECIPE)).unwrap(), recipe.source);
}

#[test]
fn loading_initialises_nothing_again() {
    for tied in ["true", "false"] {
        let source = recall(TRAIN, &["delta_net"]).source.replacen(
            "layers = 2",
            &format!("layers = 2\ntied = {tied}"),
            1,
        );
        let recipe = Recipe::parse(&source).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut kept = None;
        let observe = &mut |event: Event<'_>| {
            if let Event::Checkpoint { path, .. } = event {
                kept = Some(path.to_path_buf());
            }
        };
        run::train(&recipe, &options(folder.path()), &device(), observe).unwrap();
        let tokens = || Tensor::<2, Int>::from_data([[1, 2, 3, 4, 5]], &device());
        let logits = |path: &Path| {
            let loaded = run::load(path, &device()).unwrap();
            loaded.model.forward(tokens(), None, None).unwrap().0.into_data()
        };
        let from_run = logits(folder.path());
        assert_eq!(from_run, logits(&kept.unwrap()), "a run folder and its checkpoint are the same model");
        // Saved again and read again, nothing moves.
        let loaded = run::load(folder.path(), &device()).unwrap();
        let copy = tempfile::tempdir().unwrap();
        let values = fastweight_memory::parameters::export(&loaded.model);
        let saved = checkpoint::save(copy.path(), loaded.state.clone(), &values, &[], 1).unwrap();
        assert_eq!(from_run, logits(&saved));
    }
}

#[test]
fn only_the_newest_checkpoints_are_kept() {
    let recipe = recall(
        &TRAIN.replace("checkpoint_every = 5\nkeep = 9", "checkpoint_every = 2\nkeep = 2"),
        &["delta_net"],
    );
    let folder = tempfile::tempdir().unwrap();
    train(&recipe, &options(folder.path())).2.unwrap();
    let names: Vec<_> = checkpoint::list(folder.path())
        .iter()
        .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, ["step-00000008", "step-00000010"]);
}

#[test]
fn damage_is_named_and_the_newest_good_checkpoint_is_used() {
    let recipe = recall(TRAIN, &["delta_net"]);
    for file in [WEIGHTS, OPTIMIZER, STATE] {
        let cut = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() - 7);
        let flip = |bytes: &mut Vec<u8>| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        };
        for (damage, change) in [("cut", &cut as &dyn Fn(&mut Vec<u8>)), ("flip", &flip)] {
            let folder = tempfile::tempdir().unwrap();
            train(&recipe, &options(folder.path())).2.unwrap();
            let expected = final_weights(folder.path());
            let newest = checkpoint::list(folder.path()).pop().unwrap();
            let path = newest.join(file);
            let mut bytes = fs::read(&path).unwrap();
            change(&mut bytes);
            fs::write(&path, bytes).unwrap();

            let error = run::load(&newest, &device()).unwrap_err();
            let TrainError::Checkpoint(CheckpointError::Broken { file: named, .. }) = &error else {
                panic!("{error}")
            };
            assert_eq!(named, &path, "{damage}");
            let loaded = run::load(folder.path(), &device()).unwrap();
            assert_eq!(loaded.state.step, 5, "{damage} {file}");
            assert!(loaded.notes[0].contains(file), "{:?}", loaded.notes);
            assert!(loaded.notes[0].contains("using the older checkpoint of step 5"), "{:?}", loaded.notes);

            let (losses, notes, result) = train(&recipe, &options(folder.path()));
            assert_eq!((losses.len(), result.unwrap().resumed_from), (5, Some(5)), "{damage} {file}");
            assert!(notes[0].contains(file), "{notes:?}");
            assert_eq!(final_weights(folder.path()), expected);
        }
    }
}

#[test]
fn a_missing_file_or_run_is_named() {
    let recipe = recall(TRAIN, &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    let message = run::load(folder.path(), &device()).unwrap_err().to_string();
    assert!(message.contains("holds no checkpoint"), "{message}");
    train(&recipe, &options(folder.path())).2.unwrap();
    for path in checkpoint::list(folder.path()) {
        fs::remove_file(path.join(WEIGHTS)).unwrap();
    }
    let error = run::load(folder.path(), &device()).unwrap_err();
    assert!(matches!(error, TrainError::Checkpoint(CheckpointError::AllBroken { .. })), "{error}");
    assert!(error.to_string().contains(WEIGHTS), "{error}");
    assert!(error.to_string().contains("--fresh"), "{error}");
}

#[test]
fn a_path_without_checkpoints_says_what_it_is() {
    let home = tempfile::tempdir().unwrap();
    let message = |path: &Path| run::load(path, &device()).unwrap_err().to_string();
    assert!(message(&home.path().join("none")).contains("does not exist"));
    let file = home.path().join("file");
    fs::write(&file, "text").unwrap();
    assert!(message(&file).contains("is a file"));
    assert!(message(home.path()).contains("is not the folder of a training run"));
    fs::write(home.path().join(RECIPE), "").unwrap();
    assert!(message(home.path()).contains("holds no checkpoint yet"));
}

#[test]
fn a_version_that_is_none_is_told_from_a_newer_one() {
    let recipe = recall(TRAIN, &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    let newest = train(&recipe, &options(folder.path())).2.unwrap().checkpoint;
    let text = fs::read_to_string(newest.join(STATE)).unwrap();
    for (version, newer) in [
        ("\"two\"", false),
        ("null", false),
        ("-1", false),
        ("0", false),
        ("1.5", false),
        ("5000000000", true),
        ("123456789012345678901234567890", true),
    ] {
        let changed = text.replacen("\"version\": 1", &format!("\"version\": {version}"), 1);
        fs::write(newest.join(STATE), changed).unwrap();
        let error = run::load(&newest, &device()).unwrap_err();
        let found = matches!(error, TrainError::Checkpoint(CheckpointError::Newer { .. }));
        assert_eq!(found, newer, "{version}: {error}");
        assert!(newer || error.to_string().contains("is not a checkpoint of fastweight"), "{error}");
    }
}

#[test]
fn each_step_is_saved_once() {
    let recipe = recall(TRAIN, &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    let mut saved = Vec::new();
    run::train(&recipe, &options(folder.path()), &device(), &mut |event| {
        if let Event::Checkpoint { step, .. } = event {
            saved.push(step);
        }
    })
    .unwrap();
    assert_eq!(saved, [5, 10]);
    // A finished run that is started again finds its last checkpoint as it should be and does not write it again.
    let newest = checkpoint::list(folder.path()).pop().unwrap();
    fs::write(newest.join("marker"), "").unwrap();
    train(&recipe, &options(folder.path())).2.unwrap();
    assert!(newest.join("marker").exists());
}

#[test]
fn the_old_checkpoint_of_a_step_stays_until_the_new_one_stands() {
    let recipe = recall(TRAIN, &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    train(&recipe, &options(folder.path())).2.unwrap();
    let expected = final_weights(folder.path());
    let newest = checkpoint::list(folder.path()).pop().unwrap();
    let aside = newest.with_file_name(".step-00000010.old");

    // Killed between setting the old one aside and naming the new one.
    fs::rename(&newest, &aside).unwrap();
    let loaded = run::load(folder.path(), &device()).unwrap();
    assert_eq!((loaded.state.step, loaded.folder), (10, aside.clone()));
    assert_eq!(train(&recipe, &options(folder.path())).2.unwrap().resumed_from, Some(10));
    assert!(newest.is_dir() && !aside.exists());
    assert_eq!(final_weights(folder.path()), expected);

    // Another state of the same step replaces it; when that fails, the old one is still there.
    let again = |loss: f64| {
        let loaded = run::load(folder.path(), &device()).unwrap();
        let values = fastweight_memory::parameters::export(&loaded.model);
        let state = checkpoint::RunState { losses: vec![(10, loss)], ..loaded.state };
        checkpoint::save(folder.path(), state, &values, &[], 9)
    };
    fs::write(&aside, "in the way").unwrap();
    assert!(again(1.0).is_err());
    assert_eq!(run::load(folder.path(), &device()).unwrap().state.step, 10);
    fs::remove_file(&aside).unwrap();
    again(1.0).unwrap();
    assert_eq!(run::load(folder.path(), &device()).unwrap().state.losses, [(10, 1.0)]);
    assert!(!aside.exists());
}

#[test]
fn entries_that_are_no_checkpoints_push_none_out() {
    let recipe = recall(&TRAIN.replace("keep = 9", "keep = 2"), &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    train(&recipe, &options(folder.path())).2.unwrap();
    cut_back(folder.path(), 5);
    let all = folder.path().join(CHECKPOINTS);
    fs::create_dir(all.join("step-99999999")).unwrap();
    fs::write(all.join("step-00000099"), "").unwrap();
    assert!(!checkpoint::list(folder.path()).contains(&all.join("step-00000099")));
    train(&recipe, &options(folder.path())).2.unwrap();
    assert!(["step-00000005", "step-00000010", "step-99999999"].iter().all(|name| all.join(name).is_dir()));
    assert_eq!(run::load(folder.path(), &device()).unwrap().state.step, 10);
}

#[test]
fn values_that_are_not_finite_are_never_saved() {
    // The last update breaks the model: at once, or so that its next output is not finite.
    for rate in ["1e39", "1e30"] {
        for mixer in ["softmax_attention", "gated_delta_net"] {
            let source = recall("steps = 1\nbatch = 2\nwarmup = 0\ncheckpoint_every = 1", &[mixer]).source;
            let recipe = Recipe::parse(&source.replace("1e-2", rate)).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let error = train(&recipe, &options(folder.path())).2.unwrap_err();
            assert!(matches!(error, TrainError::NonFinite { step: Some(1), .. }), "{mixer} {rate}: {error}");
            assert!(!error.is_input() && error.to_string().contains("lower the learning rate"), "{error}");
            assert!(checkpoint::list(folder.path()).is_empty(), "{mixer} {rate}");
        }
    }
    let recipe = recall(TRAIN, &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    train(&recipe, &options(folder.path())).2.unwrap();
    let loaded = run::load(folder.path(), &device()).unwrap();
    let values = fastweight_memory::parameters::export(&loaded.model);
    let mut spoiled = values.clone();
    let size = spoiled[0].1.shape().num_elements();
    spoiled[0].1 = burn::tensor::TensorData::new(vec![f32::NAN; size], spoiled[0].1.shape().to_vec());
    let copy = tempfile::tempdir().unwrap();
    let save = |state: &checkpoint::RunState, values: &[_]| {
        checkpoint::save(copy.path(), state.clone(), values, &[], 1).unwrap_err().to_string()
    };
    let message = save(&loaded.state, &spoiled);
    assert!(message.contains(&spoiled[0].0) && message.contains("step 10"), "{message}");
    let state = checkpoint::RunState { score: Some(f64::NAN), ..loaded.state };
    let message = save(&state, &values);
    assert!(message.contains("the score is not finite"), "{message}");
    assert!(checkpoint::list(copy.path()).is_empty());
}

#[test]
fn a_newer_format_is_refused_and_not_overwritten() {
    let recipe = recall(TRAIN, &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    train(&recipe, &options(folder.path())).2.unwrap();
    let newest = checkpoint::list(folder.path()).pop().unwrap().join(STATE);
    let text = fs::read_to_string(&newest).unwrap().replacen("\"version\": 1", "\"version\": 2", 1);
    fs::write(&newest, &text).unwrap();
    let message = train(&recipe, &options(folder.path())).2.unwrap_err().to_string();
    assert!(message.contains("format version 2") && message.contains("up to version 1"), "{message}");
    assert_eq!(fs::read_to_string(&newest).unwrap(), text);
}

#[test]
fn another_model_recipe_or_text_is_refused_with_the_difference() {
    let recipe = recall(TRAIN, &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    train(&recipe, &options(folder.path())).2.unwrap();
    let before = final_weights(folder.path());

    let mut wider = recipe.clone();
    wider.model.mlp_hidden = Some(24);
    let error = train(&wider, &options(folder.path())).2.unwrap_err();
    assert!(matches!(error, TrainError::Checkpoint(CheckpointError::OtherModel { .. })), "{error}");
    let message = error.to_string();
    assert!(
        message.contains("blocks.0.mlp") && message.contains("[16, 24]") && message.contains("more"),
        "{message}"
    );

    let other = recall(TRAIN, &["softmax_attention"]);
    let message = train(&other, &options(folder.path())).2.unwrap_err().to_string();
    assert!(
        message.contains("is not in the model") || message.contains("is not in the checkpoint"),
        "{message}"
    );

    let slower = recall(&TRAIN.replace("batch = 2", "batch = 3"), &["delta_net"]);
    let message = train(&slower, &options(folder.path())).2.unwrap_err().to_string();
    assert!(message.contains("another recipe or seed"), "{message}");
    let message = train(&recipe.clone().with_seed(8), &options(folder.path())).2.unwrap_err().to_string();
    assert!(message.contains("another recipe or seed"), "{message}");
    assert_eq!(final_weights(folder.path()), before);

    let home = tempfile::tempdir().unwrap();
    let data = text_file(home.path());
    let recipe = text("steps = 4\nbatch = 2\ncheckpoint_every = 2", "delta_net");
    let with_data = Options { data: Some(data.clone()), ..options(&home.path().join("run")) };
    train(&recipe, &with_data).2.unwrap();
    let loaded = run::load(&with_data.folder, &device()).unwrap();
    assert_eq!(loaded.state.task.data.as_deref(), Some(fs::canonicalize(&data).unwrap().as_path()));
    assert_eq!(loaded.task(None).unwrap().fingerprint(), loaded.state.data);
    fs::write(&data, fs::read_to_string(&data).unwrap() + "more").unwrap();
    let message = train(&recipe, &with_data).2.unwrap_err().to_string();
    assert!(message.contains("other data"), "{message}");
}

#[test]
fn a_place_that_cannot_be_written_is_an_error_and_older_checkpoints_stay() {
    let recipe = recall(TRAIN, &["delta_net"]);
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("file");
    fs::write(&file, b"").unwrap();
    let error = train(&recipe, &options(&file.join("run"))).2.unwrap_err();
    assert!(matches!(error, TrainError::Io { .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("create the folder") && message.contains("run"), "{message}");

    // The next checkpoint's hidden folder cannot be made because a file has its name.
    let folder = home.path().join("run");
    train(&recipe, &options(&folder)).2.unwrap();
    cut_back(&folder, 5);
    let kept = final_weights(&folder);
    fs::write(folder.join(CHECKPOINTS).join(".step-00000010.partial"), b"").unwrap();
    let error = train(&recipe, &options(&folder)).2.unwrap_err();
    assert!(error.to_string().contains("write the checkpoint"), "{error}");
    assert_eq!(final_weights(&folder), kept);
}

#[test]
fn two_processes_cannot_train_in_one_folder() {
    let recipe = recall(TRAIN, &["delta_net"]);
    let folder = tempfile::tempdir().unwrap();
    let mut inner = None;
    run::train(&recipe, &options(folder.path()), &device(), &mut |event| {
        if matches!(event, Event::Started { .. }) {
            inner = Some(train(&recipe, &options(folder.path())).2);
        }
    })
    .unwrap();
    let error = inner.unwrap().unwrap_err();
    assert!(matches!(error, TrainError::Busy { .. }) && !error.is_input(), "{error}");
}
