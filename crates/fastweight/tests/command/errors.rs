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
    for (from, to, words) in [
        ("heads = 2", "heads = 2\nhead_dim = 16384\nvalue_dim = 16384", ["matrix states", "head_dim"]),
        ("batch = 4", "batch = 1048576", ["activations", "batch"]),
    ] {
        let text = recipes::recall(4).replacen(from, to, 1).replace("length = 16", "length = 64");
        let recipe = folder.write("huge.toml", text);
        let words = ["GiB", "left", "smaller", words[0], words[1]];
        if cfg!(target_os = "linux") {
            run(&["train", &recipe, "--out", &folder.arg("out")]).refused(2, &words);
            run(&["compare", &recipe, "--out", &folder.arg("out")]).refused(2, &words);
        }
    }
    assert!(!folder.path("out").exists(), "nothing was begun");
}

/// Training fits, what is asked of the trained model does not.
#[cfg(target_os = "linux")]
#[test]
fn scoring_and_generating_that_no_memory_holds_are_refused() {
    let folder = Folder::new();
    let recall = folder.write("recall.toml", recipes::recall(2));
    let text = recipes::text(2).replacen("\"gated_delta_net\"", "\"softmax_attention\"", 1);
    assert!(text.contains("softmax_attention"), "{text}");
    let text = folder.write("text.toml", text);
    let data = folder.write("data.txt", "to be or not to be ".repeat(40));
    let [recalls, texts] = ["recalls", "texts"].map(|name| folder.arg(name));
    run(&["train", &recall, "--out", &recalls, "--quiet"]).ok();
    run(&["train", &text, "--data", &data, "--out", &texts, "--quiet"]).ok();

    let long = recipes::recall(2).replacen("length = 16", "length = 16777216", 1);
    let long = folder.write("long.toml", long);
    run(&["eval", &recalls, &long]).refused(2, &["scoring", "GiB", "activations", "left", "smaller"]);
    let generate = ["generate", &texts, "--prompt", "to", "--tokens"];
    run(&[&generate[..], &["1099511627776"]].concat())
        .refused(2, &["generating", "GiB", "session's state", "left", "number of tokens"]);
    run(&[&generate[..], &["3"]].concat()).ok();
}

#[test]
fn options_of_a_mixer_beyond_their_bounds_are_refused() {
    let folder = Folder::new();
    for (options, words) in [
        ("kind = \"delta_net\", conv_width = 9223372036854775807", ["conv_width", "at most 1024"]),
        ("kind = \"gated_delta_net\", conv_width = 1025", ["conv_width", "at most 1024"]),
        ("kind = \"softmax_attention\", window = 9223372036854775807", ["window", "at most"]),
        (
            "kind = \"softmax_attention\", kv_heads = 9223372036854775807",
            ["kv_heads", "divisor of heads = 2"],
        ),
        ("kind = \"retnet\", rope_base = -1.0", ["rope_base", "above 1"]),
    ] {
        let text = recipes::recall(4).replacen("\"softmax_attention\"", &format!("{{ {options} }}"), 1);
        let recipe = folder.write("options.toml", text);
        run(&["train", &recipe, "--out", &folder.arg("out")]).refused(2, &words);
        run(&["ledger", &recipe]).refused(2, &words);
    }
    assert!(!folder.path("out").exists(), "nothing was begun");
}

#[test]
fn numbers_outside_their_range_are_named_with_the_range() {
    for (args, words) in [
        (&["rules", "--threads", "10000"][..], &["--threads", "1..=1024"][..]),
        (&["rules", "--threads", "0"], &["--threads", "1..=1024"]),
        (&["rules", "--threads", "-1"], &["--threads", "'-1'", "1..=1024"]),
        (&["rules", "--seed", "-1"], &["--seed", "0..=18446744073709551615"]),
        (&["eval", "run", "--batches", "1048577"], &["--batches", "0..=1048576"]),
        (&["eval", "run", "--batches", "-1"], &["--batches", "0..=1048576"]),
        (&["rules", "--device", "nope"], &["--device", "nope"]),
        (&["ledger", "--device", "nope"], &["--device", "nope"]),
    ] {
        run(args).refused(2, words);
    }
}

#[cfg(unix)]
#[test]
fn an_argument_that_is_not_text_is_named() {
    use std::os::unix::ffi::OsStrExt;
    let mut command = command(&["generate", "run", "--prompt"]);
    let ran: crate::support::Ran =
        command.arg(std::ffi::OsStr::from_bytes(b"caf\xe9")).output().expect("the command starts").into();
    ran.refused(2, &["--prompt", "caf", "not UTF-8"]);
}

#[test]
fn a_reader_that_leaves_ends_every_command_quietly() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(2));
    let (out, figures) = (folder.arg("out"), folder.arg("figures"));
    for args in [
        &["demo", "--out", &figures][..],
        &["rules"],
        &["ledger", "delta_net-tiny"],
        &["train", &recipe, "--out", &out, "--quiet", "--json"],
        &["bench", "--time", "4", "--spend", "0", "--quiet", "--json"],
        &["--help"],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = command(args).stdout(writer).stderr(Stdio::piped()).spawn();
        let output = output.expect("the command starts").wait_with_output().expect("the command ends");
        assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{args:?}: {output:?}");
    }
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
        let ran = run(&["train", &recipe, "--out", &out, "--data", data]);
        assert!(!ran.stderr.contains("results go to"), "nothing was begun: {ran:#?}");
        ran.refused(2, words);
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
    run(&["compare", &recipe, "--out", &folder.arg("cmp")]).failed(1, &words);
}

#[test]
fn folders_that_are_not_runs_are_refused() {
    let folder = Folder::new();
    let here = folder.arg("");
    let file = folder.write("file", "not a run");
    for args in [&["eval"][..], &["generate", "--prompt", "a"]] {
        for (run_folder, word) in [("missing-run", "missing-run"), (&here, "no checkpoint"), (&file, "file")]
        {
            let advice = if run_folder == "missing-run" { "train a model into it" } else { "training run" };
            run(&[args, &[run_folder]].concat()).refused(2, &[word, advice]);
        }
    }
}

#[test]
fn folders_that_cannot_be_written_are_an_error_before_any_training() {
    let folder = Folder::new();
    let recipe = folder.write("tiny.toml", recipes::recall(4));
    let file = folder.write("file", "in the way");
    let inside = folder.arg("file/out");
    for args in [&["compare", &recipe][..], &["train", &recipe], &["demo"]] {
        for out in [&inside, &file] {
            let words = ["could not create the folder", out, "is a file, give a folder"];
            run(&[args, &["--out", out]].concat()).refused(2, &words);
        }
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
