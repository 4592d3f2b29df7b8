//! `fastweight export`, and what reads its result.

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use fastweight::memory::ChannelMixerConfig;
use fastweight::memory::channel::MoleConfig;
use fastweight::memory::parameters;
use fastweight::models::ModelConfig;
use fastweight::train::{checkpoint, run as runs};

use crate::recipes;
use crate::support::{Folder, Running, run};

const CHANNEL: &str = "channel_mixers = [{ kind = \"mole\", experts = 3, expert_hidden = 40 }]";

/// A model of text with lookup experts, trained in `folder/run`.
fn trained(folder: &Folder) -> String {
    let text = format!("{}{CHANNEL}\n", recipes::text(20));
    let recipe = folder.write("text.toml", text);
    let data = folder.write("data.txt", "to be or not to be that is the question ".repeat(40));
    let out = folder.arg("run");
    run(&["train", &recipe, "--data", &data, "--out", &out, "--quiet"]).ok();
    out
}

#[test]
fn eval_generate_and_ledger_read_the_export_as_the_run() {
    let folder = Folder::new();
    let (trained, out) = (trained(&folder), folder.arg("tables"));
    let made = run(&["export", &trained, "--out", &out, "--json"]).ok();
    let line = &made.json()[0];
    assert_eq!((&line["step"], &line["seed"], &line["model"]), (&20.into(), &1.into(), &"letters".into()));
    assert!(line["checkpoint"].as_str().expect("a path").starts_with(&out), "{line}");
    let experts = &line["lookup_experts"];
    // Three SwiGLUs of width 32 with 40 channels inside, and a norm; three rows of 32.
    let (networks, row) = ((3 * 3 * 32 * 40 + 32) * 4, 3 * 32 * 4);
    assert_eq!(experts["form"], "tables");
    assert_eq!(experts["networks_bytes_per_token"], networks);
    assert_eq!(experts["networks_bytes"], networks);
    assert_eq!(experts["tables_bytes_per_token"], row);
    assert_eq!(experts["tables_bytes"], 256 * row);
    let layer = &experts["layers"][0];
    assert_eq!((&layer["layer"], &layer["experts"]), (&0.into(), &3.into()));
    assert_eq!(layer["tables_bytes"], 256 * row);

    let eval = |of: &str| run(&["eval", of, "--json", "--quiet"]).ok().json().remove(0);
    let [before, after] = [&trained, &out].map(|of| eval(of));
    let number = |line: &serde_json::Value, key: &str| line[key].as_f64().expect("a number");
    for key in ["score", "loss"] {
        assert!((number(&before, key) - number(&after, key)).abs() < 1e-6, "{before} {after}");
    }
    assert_eq!(before["scored_tokens"], after["scored_tokens"]);
    let generate = |of: &str| {
        let args = ["generate", of, "--prompt", "to be", "--tokens", "80", "--temperature", "0"];
        run(&args).ok().stdout
    };
    assert_eq!(generate(&trained), generate(&out));

    for (of, form) in [(&trained, "networks"), (&out, "tables")] {
        let ledger = run(&["ledger", of, "--json", "--tokens", "7"]).ok().json().remove(0);
        let shown = &ledger["lookup_experts"];
        assert_eq!(shown["form"], form);
        for key in ["networks_bytes_per_token", "tables_bytes_per_token", "networks_bytes", "tables_bytes"] {
            assert_eq!(shown[key], experts[key], "{key}");
        }
        let text = run(&["ledger", of]).ok().stdout;
        for words in ["46,208 B", "384 B", "120.33 times less", "98,304 B (96 KiB)", &format!("as {form}.")] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let half = run(&["ledger", of, "--json", "--tokens", "7", "--bytes-per-element", "2"]).ok().json();
        assert_eq!(half[0]["lookup_experts"]["tables_bytes_per_token"], row / 2);
    }
    let plain = run(&["ledger", "delta_net-tiny", "--json", "--tokens", "7"]).ok().json();
    assert!(plain[0].get("lookup_experts").is_none(), "{}", plain[0]);

    // The same command again, in words.
    let text = run(&["export", &trained, "--out", &out, "--quiet"]).ok();
    for words in ["letters, seed 1, step 20", "step-00000020", "46,208 B", "384 B", "120.33 times less"] {
        assert!(text.stdout.contains(words), "{words}: {}", text.stdout);
    }
    assert_eq!(text.stderr, "");
    assert_eq!(after, eval(&out));
}

#[test]
fn what_cannot_be_exported_is_refused() {
    let folder = Folder::new();
    let (trained, out) = (trained(&folder), folder.arg("tables"));
    let recall = folder.write("recall.toml", recipes::recall(2));
    let plain = folder.arg("plain");
    run(&["train", &recall, "--out", &plain, "--quiet"]).ok();
    let text = folder.write("file", "text");
    let here = folder.arg("");
    run(&["export", &plain, "--out", &out]).refused(2, &["channel_mixers is swiglu", "mole"]);
    run(&["export", &folder.arg("missing"), "--out", &out]).refused(2, &["missing", "does not exist"]);
    run(&["export", &here, "--out", &out]).refused(2, &["not the folder of a training run"]);
    run(&["export", &text, "--out", &out]).refused(2, &["is a file"]);
    run(&["export", &trained]).refused(2, &["--out"]);
    assert!(!folder.path("tables").exists(), "nothing was begun");
    for other in [&trained, &plain] {
        run(&["export", &trained, "--out", other]).refused(2, &["holds a training", "choose another folder"]);
    }
    run(&["export", &trained, "--out", &text])
        .refused(2, &["could not create the folder", "is a file, give a folder", &text]);
    run(&["export", &trained, "--out", &out, "--quiet"]).ok();
    run(&["export", &out, "--out", &folder.arg("again")]).refused(2, &["mole with tables"]);

    let weights = folder.path("tables/checkpoints/step-00000020/weights.safetensors");
    let bytes = fs::read(&weights).expect("weights");
    fs::write(&weights, &bytes[..bytes.len() / 2]).expect("a file that can be written");
    for args in [&["eval", &out][..], &["generate", &out, "--prompt", "a"], &["ledger", &out]] {
        run(args).refused(2, &["weights.safetensors", "bytes, expected"]);
    }
    run(&["export", &out, "--out", &folder.arg("again")]).refused(2, &["weights.safetensors"]);
    for folder in fs::read_dir(folder.path("run/checkpoints")).expect("checkpoints") {
        fs::write(folder.expect("a checkpoint").path().join("state.json"), "{\"version\": 99}")
            .expect("a file");
    }
    run(&["export", &trained, "--out", &out]).refused(2, &["version 99", "newer"]);
}

#[test]
fn recipes_with_impossible_experts_are_shown_at_their_line() {
    let folder = Folder::new();
    for (options, words) in [
        ("experts = 0", ["experts is 0", "at least 1"]),
        ("experts = 99999", ["experts is 99999", "at most 4096"]),
        ("expert_hidden = 0", ["expert_hidden is 0", "at least 1"]),
        ("expert = 4", ["unknown option of mole", "experts"]),
        ("experts = -1", ["experts of mole", "-1"]),
    ] {
        let text = format!("{}channel_mixers = [{{ kind = \"mole\", {options} }}]\n", recipes::text(4));
        let line = format!("line {}", text.lines().count());
        let recipe = folder.write("experts.toml", text);
        let words = [words[0], words[1], &line];
        run(&["train", &recipe, "--out", &folder.arg("out")]).refused(2, &words);
    }
    assert!(!folder.path("out").exists(), "nothing was begun");
}

#[test]
fn a_training_that_diverges_names_step_and_place() {
    let folder = Folder::new();
    let text = format!("{}{CHANNEL}\n", recipes::text(20)).replacen("1e-2", "1e30", 1);
    let recipe = folder.write("hot.toml", text);
    let data = folder.write("data.txt", "to be or not to be that is the question ".repeat(40));
    let args = ["train", &recipe, "--data", &data, "--out", &folder.arg("out")];
    run(&args).refused(1, &["stopped at step", "not finite (first seen in", "learning rate"]);
}

/// Killed at any moment, the folder holds a whole export or none, and the same command finishes it.
#[test]
fn a_killed_export_leaves_a_whole_model_or_none() {
    let folder = Folder::new();
    let trained = trained(&folder);
    let whole = folder.arg("whole");
    run(&["export", &trained, "--out", &whole, "--quiet"]).ok();
    let read =
        |of: &str| fs::read(folder.path(of).join("checkpoints/step-00000020/weights.safetensors")).ok();
    let expected = read("whole");
    const PARTIAL: &str = "checkpoints/.step-00000020.partial";
    let weights = format!("{PARTIAL}/weights.safetensors");
    let moments = [("begun", ""), ("locked", "checkpoints"), ("writing", PARTIAL), ("written", &weights)];
    for (name, reached) in moments {
        let out = folder.arg(name);
        Running::start(&["export", &trained, "--out", &out])
            .kill_when(|| Path::new(&out).join(reached).exists());
        if let Some(found) = read(name) {
            assert!(Some(found) == expected, "{name}: half an export");
        }
        run(&["export", &trained, "--out", &out, "--quiet"]).ok();
        assert!(read(name) == expected, "{name}");
        let left: Vec<_> = fs::read_dir(folder.path(name).join("checkpoints")).expect("a folder").collect();
        assert_eq!(left.len(), 1, "{name}: {left:?}");
    }
}

/// The sizes are read before any weight, so that a model that does not fit is refused and not begun.
#[cfg(target_os = "linux")]
#[test]
fn tables_that_no_memory_holds_are_refused() {
    let folder = Folder::new();
    let trained = trained(&folder);
    let loaded = runs::load(Path::new(&trained), &Device::flex()).expect("a run");
    let weights = parameters::export(&loaded.model);
    for tables in [false, true] {
        let mole = MoleConfig { experts: 4096, expert_hidden: Some(1), shared: false, tables };
        let channel_mixers = vec![ChannelMixerConfig::Mole(mole)];
        let model = ModelConfig { vocab: 1 << 22, channel_mixers, ..loaded.state.model.clone() };
        let state = checkpoint::RunState { model, ..loaded.state.clone() };
        let out = folder.path(if tables { "huge-tables" } else { "huge" });
        checkpoint::save(&out, state, &weights, &[], 1).expect("a checkpoint");
        let out = out.to_str().expect("a path").to_owned();
        let words = ["GiB", "tables of the lookup experts", "left", "the number of experts smaller"];
        if tables {
            run(&["eval", &out]).refused(2, &[&["loading"], &words[..]].concat());
            run(&["ledger", &out]).refused(2, &[&["loading"], &words[..]].concat());
            run(&["generate", &out, "--prompt", "a"]).refused(2, &[&["loading"], &words[..]].concat());
        } else {
            let target = folder.arg("target");
            run(&["export", &out, "--out", &target]).refused(2, &[&["exporting"], &words[..]].concat());
            assert!(!Path::new(&target).exists(), "nothing was begun");
        }
    }
}
