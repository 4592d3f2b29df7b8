//! `fastweight ledger` and `fastweight rules`, run as a person or a script runs them.

use std::fs;
use std::path::Path;
use std::process::Command;

use burn::tensor::{Device, Int, Tensor};
use fastweight::memory::{MixerConfig, State};
use fastweight::models::presets;
use serde_json::{Value, json};

struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn run(folder: &Path, args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastweight"));
    let output = command.args(args).current_dir(folder).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// The output of a run that must succeed.
fn output(args: &[&str]) -> String {
    let ran = run(Path::new("."), args);
    assert_eq!(ran.code, Some(0), "{args:?}: {}", ran.stderr);
    ran.stdout
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_example_is_32_mib_beside_16640_bytes() {
    for args in [&["ledger"][..], &["ledger", "--example"]] {
        let text = output(args);
        for figure in ["65,536 tokens", "33,554,432 B (32 MiB)", "16,640 B", "2,016.49"] {
            assert!(text.contains(figure), "{figure} is missing: {text}");
        }
    }
    let line = &lines(&output(&["ledger", "--example", "--json"]))[0];
    assert_eq!((&line["kv_cache_bytes"], &line["state_bytes"]), (&json!(33_554_432), &json!(16_640)));
    assert!((line["ratio"].as_f64().unwrap() - 2016.49).abs() < 0.005);
}

/// A ledger that drifts from what sessions hold is worse than none.
#[test]
fn the_ledger_equals_the_bytes_a_real_session_holds() {
    let device = Device::flex();
    for name in presets::names().iter().filter(|name| name.ends_with("-tiny")) {
        let model = presets::by_name(name).unwrap().init(1, &device).unwrap();
        for tokens in [1, 5, 37] {
            let batch = 3;
            let ids = Tensor::<2, Int>::zeros([batch, tokens], &device);
            let (_, state) = model.forward(ids, None, None).unwrap();
            let shown =
                output(&["ledger", name, "--json", "--sessions", "3", "--tokens", &tokens.to_string()]);
            let line = &lines(&shown)[0];
            assert_eq!(line["total_bytes"], json!(state.bytes()), "{name}, {tokens} tokens");
            for (layer, held) in line["layers"].as_array().unwrap().iter().zip(&state.layers) {
                let shown =
                    layer["state_bytes"].as_u64().unwrap() + layer["kv_cache_bytes"].as_u64().unwrap();
                assert_eq!(shown * batch as u64, held.bytes() as u64, "{name}, {layer}");
            }
        }
    }
}

#[test]
fn sums_add_up_and_scale_with_sessions_and_precision() {
    let args = ["ledger", "hybrid_3to1-small", "--json", "--tokens", "0,100,1000"];
    let base = lines(&output(&args));
    let scaled = lines(&output(&[&args[..], &["--sessions", "7", "--bytes-per-element", "2"]].concat()));
    let number = |line: &Value, key: &str| line[key].as_u64().unwrap();
    assert_eq!(base.len(), 3);
    for (line, scaled) in base.iter().zip(&scaled) {
        let sum = |key: &str| {
            line["layers"].as_array().unwrap().iter().map(|layer| number(layer, key)).sum::<u64>()
        };
        assert_eq!(number(line, "state_bytes"), sum("state_bytes"));
        assert_eq!(number(line, "kv_cache_bytes"), sum("kv_cache_bytes"));
        assert_eq!(number(line, "session_bytes"), sum("state_bytes") + sum("kv_cache_bytes"));
        assert_eq!(number(line, "total_bytes"), number(line, "session_bytes"));
        assert_eq!(number(scaled, "session_bytes") * 2, number(line, "session_bytes"));
        assert_eq!(number(scaled, "total_bytes"), number(scaled, "session_bytes") * 7);
    }
    assert_eq!(number(&base[0], "kv_cache_bytes"), 0);
    assert_eq!(number(&base[1], "kv_cache_bytes") * 10, number(&base[2], "kv_cache_bytes"));
    assert_eq!(number(&base[1], "state_bytes"), number(&base[2], "state_bytes"));
    assert_eq!(number(&base[2], "all_attention_session_bytes"), number(&base[2], "kv_cache_bytes") * 4);
}

#[test]
fn the_table_shows_layers_lengths_and_sessions() {
    let text = output(&["ledger", "hybrid_3to1-tiny", "--tokens", "1024,65536", "--sessions", "64"]);
    for word in [
        "delta_net",
        "softmax_attention",
        "1,024 tokens",
        "65,536 tokens",
        "64 sessions",
        "keys and values",
        "4 bytes a number",
    ] {
        assert!(text.contains(word), "{word} is missing: {text}");
    }
    let enormous =
        output(&["ledger", "softmax_attention-large", "--tokens", "68719476736", "--sessions", "4294967295"]);
    assert!(enormous.contains("4,294,967,295 sessions"), "{enormous}");
}

#[test]
fn a_recipe_shows_each_of_its_models() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = r#"
        [task]
        kind = "recall"
        vocab = 64
        length = 32
        pairs = 4
        [train]
        steps = 1
        batch = 1
        learning_rate = 0.001
        [model]
        width = 16
        layers = 1
        heads = 2
        [[models]]
        name = "first"
        mixers = ["softmax_attention"]
        [[models]]
        name = "second"
        mixers = ["delta_net"]
    "#;
    fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    let ran = run(folder.path(), &["ledger", "recipe.toml", "--json", "--tokens", "32"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let models = lines(&ran.stdout);
    assert_eq!([&models[0]["model"], &models[1]["model"]], [&json!("first"), &json!("second")]);
    assert_eq!(models[0]["kv_cache_bytes"], json!(32 * 2 * 16 * 4));
    assert_eq!(models[1]["kv_cache_bytes"], json!(0));
}

/// The ledger accepts what a training accepts.
#[test]
fn sizes_that_are_no_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (sizes, words) in [
        ("width = 16\nlayers = 1000000000\nheads = 2", ["layers", "at most"]),
        ("width = 9223372036854775807\nlayers = 1\nheads = 2", ["width", "at most"]),
        ("width = 16\nlayers = 1\nheads = 3", ["heads", "divisor of width = 16"]),
        ("width = 16\nlayers = 1\nheads = 2\nnorm_eps = -1.0", ["norm_eps", "such as 1e-5"]),
    ] {
        let recipe = format!(
            "[task]\nkind = \"recall\"\nvocab = 64\nlength = 32\npairs = 4\n[train]\nsteps = 1\nbatch = 1\n\
             learning_rate = 0.001\n[model]\nmixers = [\"delta_net\"]\n{sizes}\n"
        );
        fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
        let ran = run(folder.path(), &["ledger", "recipe.toml"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{sizes}: {}", ran.stderr);
        assert!(words.iter().all(|word| ran.stderr.contains(word)), "{sizes}: {}", ran.stderr);
    }
}

#[test]
fn one_of_something_is_singular() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = "[task]\nkind = \"recall\"\nvocab = 64\nlength = 32\npairs = 4\n[train]\nsteps = 1\nbatch = 1\n\
                  learning_rate = 0.001\n[model]\nmixers = [\"delta_net\"]\nwidth = 16\nlayers = 1\nheads = 1\n";
    fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    let ran = run(folder.path(), &["ledger", "recipe.toml", "--bytes-per-element", "1", "--tokens", "1"]);
    for words in ["1 layer,", "1 head,", "1 byte a number", "1 token "] {
        assert!(ran.stdout.contains(words), "{words}: {}", ran.stdout);
    }
}

#[test]
fn a_run_folder_shows_the_trained_model() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = r#"
        [task]
        kind = "recall"
        vocab = 64
        length = 32
        pairs = 4
        [train]
        steps = 1
        batch = 1
        learning_rate = 0.001
        [model]
        width = 16
        layers = 2
        heads = 2
        mixers = ["gated_delta_net", "softmax_attention"]
    "#;
    fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    let trained = run(folder.path(), &["train", "recipe.toml", "--out", "run", "--quiet"]);
    assert_eq!(trained.code, Some(0), "{}", trained.stderr);
    let shown = |name: &str| {
        let ran = run(folder.path(), &["ledger", name, "--json", "--tokens", "32"]);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        lines(&ran.stdout)[0]["layers"].clone()
    };
    assert_eq!(shown("run"), shown("recipe.toml"));
    assert_eq!(shown("run")[1]["kv_cache_bytes"], json!(32 * 2 * 16 * 4));
}

#[test]
fn a_model_that_cannot_be_found_is_named_with_the_nearest() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("broken.toml"), "[task]\nkind = 3\n").unwrap();
    fs::create_dir(folder.path().join("empty")).unwrap();
    for (args, words) in [
        (&["ledger", "delta_net-tinny"][..], &["delta_net-tiny", "no run folder"][..]),
        (&["ledger", "empty"], &["empty"]),
        (&["ledger", "broken.toml"], &["broken.toml", "2"]),
        (&["ledger", "delta_net-tiny", "--example"], &["--example"]),
        (&["ledger", "--example", "--tokens", "0"], &["--example", "--tokens", "cannot be used with"]),
        (&["ledger", "--tokens", "5"], &["PRESET|RUN|RECIPE"]),
        (&["ledger", "delta_net-tiny", "--tokens", "-1"], &["--tokens", "'-1'", "0..=68719476736"]),
        (&["ledger", "delta_net-tiny", "--tokens", "99999999999999"], &["--tokens"]),
        (&["ledger", "delta_net-tiny", "--sessions", "0"], &["--sessions"]),
        (&["ledger", "delta_net-tiny", "--bytes-per-element", "0"], &["--bytes-per-element"]),
        (&["rules", "gated_deltanet"], &["gated_delta_net", "did you mean"]),
        (&["rules", "xyz"], &["xyz", "retnet"]),
    ] {
        let ran = run(folder.path(), args);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{args:?}: {}", ran.stderr);
        assert!(words.iter().all(|word| ran.stderr.contains(word)), "{args:?}: {}", ran.stderr);
        assert!(!ran.stderr.contains("panicked"));
    }
}

#[test]
fn every_mixer_has_a_rule_with_its_four_choices() {
    let text = output(&["rules"]);
    let all = lines(&output(&["rules", "--json"]));
    // `rule` is any rule of the algebra, `rwkv7_dea` two at once; the others put attention beside the rules of `titans` and
    // `titans_mlp`.
    let others = ["rule", "rwkv7_dea", "titans_mac", "titans_mag", "titans_mal"];
    for mixer in MixerConfig::NAMES.iter().filter(|name| !others.contains(name)) {
        assert!(all.iter().any(|line| line["name"] == json!(mixer)), "{mixer} has no rule");
    }
    for line in &all {
        let name = line["name"].as_str().unwrap();
        assert!(text.contains(name), "{name} is missing");
        for part in
            ["architecture", "attentional_bias", "retention", "learner", "equation", "state_size", "source"]
        {
            assert!(!line[part].as_str().unwrap().is_empty(), "{name}: {part}");
        }
        assert_eq!(&lines(&output(&["rules", name, "--json"]))[0], line);
    }
    let one = output(&["rules", "delta_net"]);
    for word in ["DeltaNet", "attentional bias", "retention", "learner", "2406.06484"] {
        assert!(one.contains(word), "{word} is missing: {one}");
    }
    assert!(!one.contains("RetNet"));
}
