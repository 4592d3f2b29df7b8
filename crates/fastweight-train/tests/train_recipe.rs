//! Recipes: what is accepted, and how faults are told.

use fastweight_models::NormKind;
use fastweight_train::Recipe;
use fastweight_train::recipe::{ParameterMatch, RecipeError, Warmup};

const RECALL: &str = r#"
name = "four pairs"

[task]
kind = "recall"
vocab = 64
length = 32
pairs = 4

[train]
steps = 10
batch = 2
learning_rate = 1e-3
warmup = 3

[model]
width = 16
layers = 1
heads = 2

[[models]]
name = "attention"
mixers = ["softmax_attention"]

[[models]]
name = "delta"
mixers = [{ kind = "delta_net" }]
"#;

fn fault(from: &str, to: &str) -> RecipeError {
    assert!(RECALL.contains(from), "{from}");
    Recipe::parse(&RECALL.replacen(from, to, 1)).expect_err(to)
}

#[test]
fn a_recipe_is_read_with_its_defaults() {
    let recipe = Recipe::parse(RECALL).unwrap();
    assert_eq!(recipe.name, "four pairs");
    assert_eq!(recipe.train.warmup, Warmup::Steps(3));
    assert_eq!(recipe.train.accumulate, 1);
    assert!(recipe.compare.match_parameters);
    assert_eq!(recipe.source, RECALL);
    let models = recipe.resolve(64).unwrap();
    assert_eq!([models[0].name.as_str(), &models[1].name], ["attention", "delta"]);
    assert!(models.iter().all(|model| model.config.vocab == 64 && model.config.width == 16));
}

#[test]
fn faults_name_line_and_column_and_show_the_line() {
    // (what is changed, into what, line, column, parts of the message)
    let cases: &[(&str, &str, usize, usize, &[&str])] = &[
        (
            "batch = 2",
            "bacth = 2",
            12,
            1,
            &["unknown key `bacth`", "did you mean `batch`?", "12 | bacth = 2"],
        ),
        ("width = 16", "widht = 16", 17, 1, &["unknown key `widht`", "did you mean `width`?"]),
        ("steps = 10", "steps = \"ten\"", 11, 9, &["found the text \"ten\", expected a whole number"]),
        ("steps = 10", "steps = ", 11, 9, &["11 | steps ="]),
        ("steps = 10", "", 10, 1, &["no budget", "10 | [train]"]),
        ("steps = 10", "steps = 10\nseconds = 3.0", 12, 1, &["more than one budget"]),
        ("steps = 10", "steps = 0", 11, 1, &["above zero"]),
        ("warmup = 3", "warmup = 1.5", 14, 1, &["fraction of the budget in [0, 1)"]),
        ("warmup = 3", "warmup = 11", 14, 1, &["warm-up of 11 steps", "budget of 10"]),
        ("warmup = 3", "warmup = \"x\"", 14, 10, &["number of steps such as 50"]),
        ("learning_rate = 1e-3", "learning_rate = -1.0", 13, 1, &["positive"]),
        ("kind = \"recall\"", "kind = \"recal\"", 5, 8, &["recal", "did you mean `recall`?"]),
        ("pairs = 4", "pairs = 4\ncontext = 8", 9, 1, &["not an option of a recall task", "`pairs`"]),
        ("pairs = 4", "", 5, 1, &["needs `pairs`"]),
        ("name = \"delta\"", "name = \"attention\"", 26, 1, &["two models", "attention"]),
        ("name = \"delta\"\n", "", 26, 1, &["no `name`"]),
        ("layers = 1", "", 21, 1, &["`layers` is missing"]),
        ("layers = 1", "layers = 1\nlearning_rate = 1e-3", 19, 1, &["belongs in [train]"]),
        (
            "[model]",
            "[compare]\nmatch_by = \"seconds\"\n[model]",
            17,
            1,
            &["needs the budget `seconds = ...`"],
        ),
        ("\"softmax_attention\"", "\"softmax_atention\"", 23, 0, &["softmax_atention"]),
        ("warmup = 3", "betas = [0.9, 0.95, 0.99]", 14, 0, &["two numbers"]),
        ("warmup = 3", "betas = [0.9]", 14, 0, &["two numbers"]),
        ("steps = 10", "steps = 2_000_000_000", 11, 1, &["too large"]),
        ("steps = 10", "tokens = 20_000_000_000_000", 11, 1, &["too large"]),
        ("steps = 10", "seconds = 1e300", 11, 1, &["too large"]),
        ("name = \"delta\"", "name = \" \"", 26, 1, &["name is empty"]),
        ("name = \"delta\"", "name = \"a\\u001b[31m\"", 26, 1, &["control character"]),
        ("name = \"four pairs\"", "name = \"a\\nb\"", 2, 1, &["control character"]),
        ("heads = 2", "heads = 2\nnorm_eps = 0.0", 20, 1, &["(0, 0.1]"]),
        ("heads = 2", "heads = 2\nnorm_eps = nan", 20, 1, &["(0, 0.1]"]),
        ("heads = 2", "heads = 2\nnorm_eps = 1.0", 20, 1, &["(0, 0.1]"]),
        ("heads = 2", "heads = 2\nnorm = \"batch\"", 20, 8, &["batch", "rms"]),
        ("heads = 2", "heads = 2\nrounds = 0", 20, 1, &["rounds is 0"]),
        ("heads = 2", "heads = 2\nhalting = {}", 20, 1, &["halting is given for 1 round"]),
        (
            "heads = 2",
            "heads = 2\nrounds = 2\nhalting = { threshold = 2.0 }",
            21,
            1,
            &["threshold = 2", "in (0, 1]", "21 | halting"],
        ),
        (
            "heads = 2",
            "heads = 2\nrounds = 2\nhalting = { treshold = 0.9 }",
            21,
            13,
            &["did you mean `threshold`?"],
        ),
        ("warmup = 3", "balance = -1.0", 14, 1, &["expected 0 or more"]),
        ("warmup = 3", "balance = 0.5", 14, 1, &["routes tokens", "leave `balance` out"]),
        (
            "heads = 2",
            "heads = 2\nhalting = true",
            20,
            11,
            &["found `true`, expected a table such as { threshold = 0.99, ponder_cost = 0.01 }"],
        ),
        ("width = 16", "width = -1", 17, 9, &["-1", "expected a whole number of 0 or more"]),
        (
            "\"softmax_attention\"",
            "{ kind = \"lstm\", hidden = -1 }",
            23,
            0,
            &["a whole number of 0 or more"],
        ),
        (
            "\"softmax_attention\"",
            "{ kind = \"srwm\", rate = 1 }",
            23,
            0,
            &["\"rate\"", "srwm has no options"],
        ),
        (
            "\"softmax_attention\"",
            "{ kind = \"moneta\", rate_max = 1e38 }",
            23,
            30,
            &["rate_max is 1", "at most 1000, such as 0.1"],
        ),
        ("vocab = 64", "vocab = 6", 6, 1, &["vocab is 6"]),
        ("length = 32", "length = 8", 7, 1, &["length is 8"]),
        ("pairs = 4", "pairs = 0", 8, 1, &["pairs is 0"]),
        ("pairs = 4", "pairs = 4\npower = inf", 9, 1, &["power is inf"]),
        ("width = 16", "width = 0", 17, 1, &["`width` must be at least 1", "17 | width = 0"]),
        ("heads = 2", "heads = 3", 19, 1, &["heads is 3"]),
        ("heads = 2", "heads = 2\nhead_dim = 0", 20, 1, &["head_dim"]),
        ("name = \"delta\"", "name = \"delta\"\nheads = 5", 27, 1, &["heads is 5"]),
        ("\"softmax_attention\"", "{ kind = \"softmax_attention\", window = 0 }", 23, 41, &["window"]),
        (
            "layers = 1",
            "layers = 3\nmixers = [\n  \"delta_net\",\n  { kind = \"gated_delta_net\", conv_width = 4 },\n  \
             { kind = \"mamba2\", conv_width = 1 },\n]\nnorm_eps = 1e-5\n[[models]]\nname = \"first\"\n#",
            22,
            22,
            &["mamba2", "conv_width is 1", "22 |   { kind = \"mamba2\", conv_width = 1 },"],
        ),
        (
            "mixers = [{ kind = \"delta_net\" }]",
            "mixers = [{ kind = \"delta_net\", conv_width = 4 }, { conv_width = 2, kind = \"softmax_attention\", \
             kv_heads = 3 }]\nlayers = 2\n# kv_heads = 3",
            27,
            97,
            &["kv_heads is 3"],
        ),
        ("batch = 2", "# batch = 1\n\"batch\" = 0", 13, 1, &["at least 1 sequence"]),
        (
            "\"softmax_attention\"",
            "\"softmax_attention\"]\npreset = \"delta_net-tin\" # [",
            24,
            1,
            &["delta_net-tiny"],
        ),
        ("[model]", "[compare.quick]\nsteps = 0\n[model]", 17, 1, &["[compare.quick]", "above zero"]),
        (
            "[model]",
            "[compare.quick]\nbatch = 0\n[model]",
            17,
            1,
            &["[compare.quick]", "at least 1 sequence"],
        ),
        ("[model]", "[compare.quick]\npairs = 40\n[model]", 17, 1, &["[compare.quick]", "length is 32"]),
        ("[model]", "[compare]\nquick = { seeds = [] }\n[model]", 17, 11, &["[compare.quick]", "one seed"]),
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
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.toml");
    let message = Recipe::load(&missing).unwrap_err().to_string();
    assert!(message.contains("missing.toml") && message.contains("check the path"), "{message}");
    assert!(Recipe::load(folder.path()).unwrap_err().to_string().contains("read the recipe"));
    let binary = folder.path().join("binary.toml");
    std::fs::write(&binary, [0xff, 0xfe]).unwrap();
    std::fs::write(&binary, b"name = \"\xff\"").unwrap();
    let message = Recipe::load(&binary).unwrap_err().to_string();
    assert!(message.contains("not UTF-8") && message.contains("0xff at offset 8"), "{message}");
    let good = folder.path().join("good.toml");
    std::fs::write(&good, RECALL.replacen("name = \"four pairs\"", "", 1)).unwrap();
    assert_eq!(Recipe::load(&good).unwrap().name, "good");
}

#[test]
fn parameter_counts_are_matched_within_five_percent_or_said_not_to_be() {
    let bigger = RECALL.replacen("name = \"delta\"", "name = \"delta\"\nwidth = 20\nvalue_dim = 12", 1);
    let matched = Recipe::parse(&bigger).unwrap().resolve(64).unwrap();
    assert_eq!(matched[0].matching, ParameterMatch::Reference);
    assert_eq!(matched[1].matching, ParameterMatch::Adjusted, "{matched:?}");
    let share = matched[1].parameters as f64 / matched[0].parameters as f64;
    assert!((share - 1.0).abs() < 0.05, "{share}");
    let device = burn::tensor::Device::flex();
    for model in &matched {
        let built: usize = model
            .config
            .init(0, &device)
            .unwrap()
            .parameters()
            .iter()
            .map(|p| p.shape.iter().product::<usize>())
            .sum();
        assert_eq!(built, model.parameters);
    }

    let fixed = bigger.replacen("value_dim = 12", "value_dim = 12\nmlp_hidden = 200", 1);
    assert_eq!(Recipe::parse(&fixed).unwrap().resolve(64).unwrap()[1].matching, ParameterMatch::Apart);
    let off = format!("{bigger}\n[compare]\nmatch_parameters = false\n");
    assert_eq!(Recipe::parse(&off).unwrap().resolve(64).unwrap()[1].matching, ParameterMatch::Apart);
}

#[test]
fn norms_and_channel_mixers_are_chosen_for_all_models_or_for_one() {
    let text = RECALL
        .replacen(
            "heads = 2",
            "heads = 2\nnorm = \"layer\"\nembedding_norm = true\nchannel_mixers = [\"rwkv7_channel_mix\"]",
            1,
        )
        .replacen("name = \"delta\"", "name = \"delta\"\nnorm = \"rms\"\nembedding_norm = false", 1);
    let models = Recipe::parse(&text).unwrap().resolve(64).unwrap();
    let found: Vec<_> = models.iter().map(|model| (model.config.norm, model.config.embedding_norm)).collect();
    assert_eq!(found[..2], [(NormKind::Layer, true), (NormKind::Rms, false)]);
    assert!(models.iter().all(|model| model.config.channel_mixer(0).name() == "rwkv7_channel_mix"));
    let preset = text.replacen("mixers = [\"softmax_attention\"]", "preset = \"rwkv7_full-tiny\"", 1);
    let preset = preset.replacen("norm = \"layer\"\nembedding_norm = true\n", "", 1);
    let config = Recipe::parse(&preset).unwrap().resolve(64).unwrap()[0].config.clone();
    assert_eq!((config.norm, config.embedding_norm), (NormKind::Layer, true), "those of the preset");
}

#[test]
fn quick_and_seed_change_the_recipe_and_say_so() {
    let text = format!("{RECALL}\n[compare.quick]\nsteps = 3\nseeds = [7]\npairs = 2\n");
    let recipe = Recipe::parse(&text).unwrap().quick().unwrap();
    assert_eq!(
        (recipe.train.steps, &recipe.train.seeds[..], recipe.task.pairs),
        (Some(3), &[7][..], Some(2))
    );
    assert_eq!(recipe.parts()[0].train.warmup, Warmup::Steps(0), "3 of 10 steps, of 3 steps less than one");
    let longer = Recipe::parse(&text.replace("\nsteps = 3", "\nsteps = 7")).unwrap().quick().unwrap();
    assert_eq!(longer.parts()[0].train.warmup, Warmup::Steps(2));
    let tokens = text.replace("steps = 10", "tokens = 1000").replace("\nsteps = 3", "\nsteps = 4");
    let tokens = Recipe::parse(&tokens).unwrap().quick().unwrap();
    assert_eq!(tokens.parts()[0].train.warmup, Warmup::Steps(2));
    assert!(Recipe::parse(RECALL).unwrap().quick().unwrap_err().to_string().contains("[compare.quick]"));
    let recipe = recipe.with_seed(9);
    assert_eq!(recipe.train.seeds, [9]);
    let source = recipe.annotated_source();
    assert!(source.starts_with("# changed for this run: ") && source.ends_with(&text), "{source}");
    let again = Recipe::parse(&source).unwrap();
    assert_eq!(again.train.steps, Some(10), "comments change nothing");
}

#[test]
fn an_unknown_preset_is_an_error_with_a_suggestion() {
    let text = RECALL.replacen("mixers = [\"softmax_attention\"]", "preset = \"delta_net-tin\"", 1);
    let message = Recipe::parse(&text).unwrap_err().to_string();
    assert!(message.contains("delta_net-tiny"), "{message}");
}

#[test]
fn long_lines_are_cut_around_the_fault() {
    let note = "x".repeat(500);
    let error = fault("warmup = 3", &format!("betas = {{ note = \"{note}\", bad }} # {note}"));
    let message = error.to_string();
    let shown: Vec<&str> = message.lines().rev().take(2).collect();
    assert!(shown.iter().all(|line| line.chars().count() < 140), "{message}");
    let (_, column) = error.place.unwrap();
    let caret = shown[0].find('^').unwrap();
    let fault = error.line.unwrap().chars().nth(column - 1);
    assert_eq!(shown[1].chars().nth(caret), fault, "{message}");
}
