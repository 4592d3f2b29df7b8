//! Exports: trained lookup experts as tables, in a folder of their own.

mod common;

use std::fs;
use std::path::Path;

use burn::tensor::{Int, Tensor, TensorData};
use common::{device, losses, open, weights};
use fastweight_memory::parameters;
use fastweight_train::checkpoint::{self, CHECKPOINTS, CheckpointError, OPTIMIZER, STATE, WEIGHTS};
use fastweight_train::evaluate;
use fastweight_train::export::{Exported, export};
use fastweight_train::run::{self, Options};
use fastweight_train::{Recipe, TrainError, Trainer};

/// A recipe with lookup experts in both layers, other than the shared one of the tests by `changes`.
fn recipe(steps: usize, changes: &[(&str, &str)]) -> Recipe {
    let mut text = format!(
        "name = \"test\"\n[task]\nkind = \"recall\"\nvocab = 32\nlength = 16\npairs = 2\n\
         [train]\nlearning_rate = 1e-2\nsteps = {steps}\nbatch = 4\neval_batches = 1\ncheckpoint_every = 3\nkeep = 9\n\
         [model]\nname = \"mole\"\nwidth = 16\nlayers = 2\nheads = 2\nmixers = [\"softmax_attention\", \"gated_delta_net\"]\n\
         channel_mixers = [{{ kind = \"mole\", experts = 3, expert_hidden = 24 }}]\n"
    );
    for (from, to) in changes {
        assert!(text.contains(from), "{from}");
        text = text.replacen(from, to, 1);
    }
    Recipe::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

fn train(recipe: &Recipe, folder: &Path) {
    let options = Options { folder: folder.to_path_buf(), data: None, restart: false };
    run::train(recipe, &options, &device(), &mut |_| {}).unwrap();
}

fn exported(run: &Path, out: &Path) -> Exported {
    export(run, out, &device()).unwrap()
}

fn refused(run: &Path, out: &Path) -> TrainError {
    let error = export(run, out, &device()).unwrap_err();
    assert!(error.is_input(), "{error}");
    error
}

/// Every file below a folder with its content.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push((path.display().to_string(), fs::read(path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn thirty_steps_of_either_form_are_finite() {
    for tables in ["false", "true"] {
        let options = format!("experts = 3, tables = {tables}");
        let recipe = recipe(30, &[("experts = 3", &options)]);
        let (task, model) = open(&recipe);
        let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
        let losses: Vec<f64> = losses(&mut trainer, 30).into_iter().map(f64::from_bits).collect();
        assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
        assert!(losses[25..].iter().sum::<f64>() < losses[..5].iter().sum::<f64>(), "{losses:?}");
    }
}

/// The search for the cause goes through the model as the model itself does.
#[test]
fn a_model_whose_experts_overflow_is_named() {
    let recipe = recipe(1, &[]);
    let (task, model) = open(&recipe);
    let model = model.config.init(1, &device()).unwrap();
    let values = parameters::export(&model);
    let model = parameters::import(model, |info| {
        let (_, data) = values.iter().find(|(name, _)| *name == info.name)?;
        let large = info.name.starts_with("blocks.1.mlp.experts.networks");
        let values = || TensorData::new(vec![1e25f32; data.num_elements()], info.shape.clone());
        Some(if large { values() } else { data.clone() })
    });
    let model = model.unwrap();
    for model in [model.export_tables().unwrap(), model] {
        let error = evaluate::score(&model, &task, 1).unwrap_err();
        let TrainError::NonFinite { place, .. } = &error else { panic!("{error}") };
        let table = model.config().experts().unwrap()[0].are_tables;
        let cause = if table { "blocks.1.mlp.experts.table" } else { "the MLP of layer 1" };
        assert!(place.contains(cause), "{place}");
    }
}

#[test]
fn an_export_is_a_run_with_the_same_scores() {
    let [run, out] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    train(&recipe(12, &[]), run.path());
    let out = out.path().join("new/tables");
    let made = exported(run.path(), &out);
    assert_eq!(made.checkpoint, out.join(CHECKPOINTS).join("step-00000012"));
    assert!(made.notes.is_empty());
    assert!(made.experts.iter().all(|layer| layer.are_tables && layer.tables.stored == 32 * 3 * 16 * 4));

    let [before, after] = [run.path(), &out].map(|folder| run::load(folder, &device()).unwrap());
    assert_eq!(after.state.model, before.state.model.with_tables().unwrap());
    assert_eq!((after.state.step, after.state.seed, after.state.name.as_str()), (12, 1, "mole"));
    let task = after.state.task.clone();
    assert_eq!(task, before.state.task);
    let tokens = || Tensor::<2, Int>::from_data([[1, 2, 3, 4, 31, 2, 1]], &device());
    let logits = |of: &run::Loaded| -> Vec<f32> {
        of.model.forward(tokens(), None, None).unwrap().0.into_data().try_to_vec().unwrap()
    };
    for (a, b) in logits(&after).iter().zip(logits(&before)) {
        assert!((a - b).abs() <= 5e-6 * b.abs().max(1.0), "{a} {b}");
    }
    let [a, b] = [&after, &before].map(|of| {
        let task = of.task(None).unwrap();
        evaluate::score(&of.model, &task, 2).unwrap()
    });
    assert_eq!(a.score, b.score);

    // One checkpoint of a run: that one, and by its path the same.
    let first = run.path().join(CHECKPOINTS).join("step-00000003");
    assert_eq!(exported(&first, &out).state.step, 3);
    assert_eq!(checkpoint::list(&out), [out.join(CHECKPOINTS).join("step-00000003")]);
}

#[test]
fn an_export_is_replaced_by_one_of_the_same_training_only() {
    let [run, other, plain, out] = [(); 4].map(|()| tempfile::tempdir().unwrap());
    train(&recipe(6, &[]), run.path());
    train(&recipe(6, &[("learning_rate = 1e-2", "learning_rate = 1e-3")]), other.path());
    train(
        &recipe(6, &[("{ kind = \"mole\", experts = 3, expert_hidden = 24 }", "\"swiglu\"")]),
        plain.path(),
    );
    exported(run.path(), out.path());
    let made = files(out.path());
    exported(run.path(), out.path());
    assert!(files(out.path()) == made, "the same export is the same files");

    // Damage is repaired by the same command.
    let checkpoint = out.path().join(CHECKPOINTS).join("step-00000006");
    let cut = fs::read(checkpoint.join(WEIGHTS)).unwrap();
    fs::write(checkpoint.join(WEIGHTS), &cut[..cut.len() - 9]).unwrap();
    exported(run.path(), out.path());
    assert!(files(out.path()) == made);

    // Folders that hold something else stay as they are.
    let foreign = tempfile::tempdir().unwrap();
    fs::write(foreign.path().join("letter.txt"), "to nobody").unwrap();
    let runs = [run.path(), other.path(), plain.path()].map(files);
    for (source, target, words) in [
        (other.path(), out.path(), "holds a training, or an export of another one"),
        (run.path(), run.path(), "holds a training"),
        (run.path(), other.path(), "holds a training"),
        (run.path(), plain.path(), "holds a training"),
        (run.path(), checkpoint.as_path(), "is a checkpoint"),
        (run.path(), &run.path().join("new"), "lies inside a run"),
        (run.path(), &run.path().join(CHECKPOINTS), "lies inside a run"),
        (run.path(), foreign.path(), "holds letter.txt"),
    ] {
        let error = refused(source, target);
        assert!(matches!(error, TrainError::ForeignFolder { .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    assert!(files(out.path()) == made);
    assert!([run.path(), other.path(), plain.path()].map(files) == runs);
    fs::write(checkpoint.join(STATE), "{}").unwrap();
    assert!(refused(run.path(), out.path()).to_string().contains("cannot be read"));

    // Nothing to export, and an export again: nothing is begun.
    let missing = out.path().join("nothing");
    let error = refused(plain.path(), &missing).to_string();
    assert!(error.contains("channel_mixers is swiglu") && error.contains("`mole`"), "{error}");
    let second = tempfile::tempdir().unwrap();
    exported(run.path(), second.path());
    let error = refused(second.path(), &missing).to_string();
    assert!(error.contains("mole with tables"), "{error}");
    assert!(!missing.exists());
}

/// What a kill leaves: an unfinished folder, a checkpoint set aside, both.
#[test]
fn what_a_kill_leaves_is_whole_or_not_there() {
    let [run, out] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    train(&recipe(6, &[]), run.path());
    let all = out.path().join(CHECKPOINTS);
    let partial = all.join(".step-00000006.partial");
    fs::create_dir_all(&partial).unwrap();
    fs::write(partial.join(WEIGHTS), b"half").unwrap();
    assert!(run::load(out.path(), &device()).is_err());
    let made = exported(run.path(), out.path());
    assert!(!partial.exists());
    let expected = weights(&run::load(out.path(), &device()).unwrap().model);

    // Killed between the two renames of a replacement.
    fs::rename(&made.checkpoint, all.join(".step-00000006.old")).unwrap();
    assert_eq!(weights(&run::load(out.path(), &device()).unwrap().model), expected);
    exported(run.path(), out.path());
    assert_eq!(fs::read_dir(&all).unwrap().count(), 1);
    assert_eq!(weights(&run::load(out.path(), &device()).unwrap().model), expected);
}

#[test]
fn damaged_runs_and_exports_are_named() {
    let [run, out] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    train(&recipe(6, &[]), run.path());
    let made = exported(run.path(), out.path());
    for file in [WEIGHTS, OPTIMIZER, STATE] {
        let path = made.checkpoint.join(file);
        let good = fs::read(&path).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 1;
        for bad in [&good[..good.len() - 3], &flipped, b""] {
            fs::write(&path, bad).unwrap();
            let error = run::load(out.path(), &device()).unwrap_err();
            assert!(
                matches!(error, TrainError::Checkpoint(CheckpointError::BrokenExport { .. })),
                "{file}: {error}"
            );
            let error = error.to_string();
            assert!(error.contains(file) && error.contains("`fastweight export`"), "{file}: {error}");
        }
        fs::write(&path, good).unwrap();
    }
    run::load(out.path(), &device()).unwrap();

    // The newest checkpoint of the run is broken: the one before it, with a note.
    let newest = run.path().join(CHECKPOINTS).join("step-00000006");
    fs::write(newest.join(WEIGHTS), b"broken").unwrap();
    let fresh = tempfile::tempdir().unwrap();
    let made = exported(run.path(), fresh.path());
    assert_eq!(made.state.step, 3);
    assert!(made.notes[0].contains("older checkpoint of step 3"), "{:?}", made.notes);
    for folder in checkpoint::list(run.path()) {
        fs::write(folder.join(WEIGHTS), b"broken").unwrap();
    }
    let none = fresh.path().join("none");
    let error = refused(run.path(), &none).to_string();
    assert!(error.contains("no checkpoint") && error.contains(WEIGHTS), "{error}");
    assert!(!none.exists());
}

#[test]
fn an_export_is_not_trained_further() {
    let [run, out] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let recipe = recipe(6, &[]);
    train(&recipe, run.path());
    exported(run.path(), out.path());
    let before = files(out.path());
    let again = |restart| {
        let options = Options { folder: out.path().to_path_buf(), data: None, restart };
        run::train(&recipe, &options, &device(), &mut |_| {})
    };
    let error = again(false).unwrap_err();
    assert!(matches!(error, TrainError::Folder { .. }), "{error}");
    assert!(error.to_string().contains("exported model") && error.to_string().contains("--fresh"), "{error}");
    assert!(files(out.path()) == before);

    // Started over, the folder is that of a training.
    again(true).unwrap();
    for folder in checkpoint::list(out.path()) {
        fs::write(folder.join(WEIGHTS), "cut").unwrap();
    }
    let error = run::load(out.path(), &device()).unwrap_err();
    assert!(matches!(error, TrainError::Checkpoint(CheckpointError::AllBroken { .. })), "{error}");
}

#[cfg(unix)]
#[test]
fn a_folder_that_cannot_be_written_is_an_error() {
    let [run, out] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    train(&recipe(3, &[]), run.path());
    let file = out.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let error = export(run.path(), &file, &device()).unwrap_err();
    assert!(matches!(error, TrainError::Io { .. }), "{error}");
    assert_eq!(fs::read(&file).unwrap(), b"in the way");
}
