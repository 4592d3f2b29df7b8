//! Mixers as recipes write them.

use fastweight_memory::layers::{DlaConfig, SoftmaxAttentionConfig};
use fastweight_memory::names::types_in_words;
use fastweight_memory::{LayerConfig, LayerContext, MixerConfig};
use serde::{Deserialize, Serialize};

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Recipe {
    mixer: MixerConfig,
}

fn error(recipe: &str) -> String {
    toml::from_str::<Recipe>(recipe).unwrap_err().to_string()
}

#[test]
fn a_name_or_a_table_names_a_mixer() {
    for name in MixerConfig::NAMES {
        let short: Recipe = toml::from_str(&format!("mixer = {name:?}")).unwrap();
        let long: Recipe = toml::from_str(&format!("mixer = {{ kind = {name:?} }}")).unwrap();
        assert_eq!(short, long);
        assert_eq!(short.mixer.name(), name);
        assert_eq!(short, toml::from_str(&toml::to_string(&short).unwrap()).unwrap());
        assert_eq!(short, serde_json::from_str(&serde_json::to_string(&short).unwrap()).unwrap());
    }
    let recipe: Recipe =
        toml::from_str("mixer = { window = 64, kind = 'softmax_attention', rope_base = 500.0 }").unwrap();
    let expected =
        SoftmaxAttentionConfig { window: Some(64), rope_base: 500.0, ..SoftmaxAttentionConfig::default() };
    assert_eq!(recipe.mixer, MixerConfig::SoftmaxAttention(expected));
    assert_eq!(recipe, toml::from_str(&toml::to_string(&recipe).unwrap()).unwrap());
}

#[test]
fn a_slip_in_a_recipe_is_named_and_corrected() {
    let cases = [
        ("mixer = 'delta-net'", "did you mean \"delta_net\""),
        ("mixer = 'xyz'", "known are softmax_attention"),
        ("mixer = { kind = 'gated_deltanet' }", "did you mean \"gated_delta_net\""),
        (
            "mixer = { kind = 'softmax_attention', window = nan }",
            "an option is NaN, expected a finite number",
        ),
        ("mixer = { kind = 'lstm', hidden = inf }", "an option is inf, expected a finite number"),
        ("mixer = { kind = 'softmax_attention', windw = 3 }", "did you mean \"window\""),
        ("mixer = { kind = 'delta_net', window = 3 }", "unknown option of delta_net \"window\""),
        ("mixer = { kind = 'softmax_attention', window = 'wide' }", "window of softmax_attention"),
        ("mixer = { kind = 'softmax_attention', window = -1 }", "window of softmax_attention"),
        ("mixer = { kind = 'titans_mac', memry = 'mlp' }", "did you mean \"memory\""),
        ("mixer = { kind = 'titans_mac', memory = 'vector' }", "memory of titans_mac"),
        ("mixer = { window = 3 }", "needs its kind"),
        ("mixer = { kind = 3 }", "kind is 3"),
        ("mixer = 3", "a mixer's name or a table"),
    ];
    for (recipe, words) in cases {
        let message = error(recipe);
        assert!(message.contains(words), "{recipe}: {message}");
        assert!(message.contains("line 1"), "{recipe}: {message}");
    }
}

#[test]
fn sizes_that_do_not_fit_say_what_to_change() {
    let ctx = || LayerContext::new(24, 2);
    let check = |recipe: &str, ctx: LayerContext| {
        let mixer: MixerConfig = toml::from_str(recipe).unwrap();
        mixer.validate(&ctx).unwrap_err().to_string()
    };
    let cases = [
        (
            check("kind = 'softmax_attention'\nkv_heads = 3", ctx()),
            "kv_heads is 3, expected a divisor of heads = 2",
        ),
        (check("kind = 'softmax_attention'\nkv_heads = 0", ctx()), "kv_heads is 0"),
        (check("kind = 'softmax_attention'\nwindow = 0", ctx()), "window is 0"),
        (
            check("kind = 'softmax_attention'", LayerContext { head_dim: 5, ..ctx() }),
            "head_dim is 5, expected an even",
        ),
        (check("kind = 'retnet'\nrope_base = 0.0", ctx()), "rope_base is 0"),
        (check("kind = 'delta_net'\nconv_width = 1", ctx()), "conv_width is 1"),
        (check("kind = 'gla'\nrank = 0", ctx()), "gla: rank is 0"),
        (check("kind = 'gla'\nrank = 9000000", ctx()), "gla: rank is 9000000"),
        (check("kind = 'hgrn2'\nlower_bound = 1.0", ctx()), "lower_bound is 1, expected from 0 to below 1"),
        (check("kind = 'kda'\nconv_width = 1", ctx()), "kda: conv_width is 1"),
        (check("kind = 'comba'\nconv_width = 1", ctx()), "comba: conv_width is 1"),
        (check("kind = 'delta_product'\nsteps = 0", ctx()), "delta_product: steps is 0"),
        (check("kind = 'titans'\ntheta_max = 0.0", ctx()), "titans: theta_max is 0"),
        (check("kind = 'lstm'\nhidden = 0", ctx()), "lstm: hidden is 0"),
        (check("kind = 'ttt_linear'\nmini_batch = 0", ctx()), "ttt_linear: mini_batch is 0"),
        (check("kind = 'ttt_linear'\neta_base = -1.0", ctx()), "ttt_linear: eta_base is -1"),
        (
            check("kind = 'ttt_linear'", LayerContext { value_dim: 5, ..ctx() }),
            "value_dim is 5, expected head_dim = 12",
        ),
        (check("kind = 'ttt_mlp'\nmini_batch = 0", ctx()), "ttt_mlp: mini_batch is 0"),
        (check("kind = 'ttt_mlp'\nexpansion = 65", ctx()), "ttt_mlp: expansion is 65"),
        (
            check("kind = 'ttt_mlp'", LayerContext { value_dim: 5, ..ctx() }),
            "value_dim is 5, expected head_dim = 12",
        ),
        (check("kind = 'titans_mlp'\ndepth = 5", ctx()), "titans_mlp: depth is 5, expected 1 to 4"),
        (check("kind = 'titans_mlp'\ntheta_max = -0.1", ctx()), "titans_mlp: theta_max is -0.1"),
        (check("kind = 'dla'\nchunk = 0", ctx()), "dla: chunk is 0"),
        (check("kind = 'titans_mac'\nsegment = 0", ctx()), "titans_mac: segment is 0"),
        (check("kind = 'titans_mag'\nwindow = 0", ctx()), "titans_mag: window is 0"),
        (check("kind = 'titans_mal'\npersistent = 100000", ctx()), "titans_mal: persistent is 100000"),
        (check("kind = 'titans_mal'\ndepth = 5", ctx()), "titans_mal: depth is 5"),
        (
            check("kind = 'titans_mag'\nmemory = 'matrix'\nchunk = 4", ctx()),
            "chunk is 4, expected left out: it belongs to memory = \"mlp\"",
        ),
        (
            check("kind = 'titans_mac'\nmemory = 'matrix'\ntheta_max = 0.0", ctx()),
            "titans_mac: theta_max is 0",
        ),
        (
            check("kind = 'titans_mac'", LayerContext { value_dim: 5, ..ctx() }),
            "value_dim is 5, expected head_dim = 12",
        ),
        (
            check("kind = 'titans_mag'", LayerContext { head_dim: 5, value_dim: 5, ..ctx() }),
            "titans_mag: head_dim is 5, expected an even",
        ),
        (check("kind = 'moneta'\nrank = 0", ctx()), "moneta: rank is 0"),
        (check("kind = 'moneta'\np = 0.5", ctx()), "moneta: p is 0.5"),
        (check("kind = 'moneta'\nq = 1.0", ctx()), "moneta: q is 1"),
        (check("kind = 'yaad'\nmemory = 'vector'", ctx()), "yaad: memory is vector, expected \"mlp\""),
        (check("kind = 'yaad'\nchunk = 0", ctx()), "yaad: chunk is 0"),
        (check("kind = 'memora'\nexpansion = 65", ctx()), "memora: expansion is 65"),
        (check("kind = 'memora'\nrate_max = 0.0", ctx()), "memora: rate_max is 0"),
        (check("kind = 'memora'", LayerContext { value_dim: 5, ..ctx() }), "memora: value_dim is 5"),
        (check("kind = 'mamba2'", LayerContext { heads: 0, ..ctx() }), "mamba2: heads is 0"),
        (
            check("kind = 'mamba2'", LayerContext { layer: 1, ..ctx() }),
            "layer is 1, expected below layers = 1",
        ),
        (check("kind = 'mamba2'", LayerContext { norm_eps: 0.0, ..ctx() }), "norm_eps is 0"),
    ];
    for (message, words) in cases {
        assert!(message.contains(words), "{message}");
    }
    let config = DlaConfig { forget_shift: f32::NAN, ..DlaConfig::default() };
    let message = config.validate(&ctx()).unwrap_err().to_string();
    assert!(message.contains("dla: forget_shift is NaN"), "{message}");
}

/// A map of 24 numbers to a gate for each of 2 heads' 4 * 12 hidden and 12 value channels, in place of one a head.
#[test]
fn channel_gates_are_counted() {
    let ctx = LayerContext::new(24, 2);
    for kind in ["titans_mlp", "titans_mac", "titans_mag", "titans_mal"] {
        let [heads, channels] = [false, true].map(|gates| -> MixerConfig {
            toml::from_str(&format!("kind = '{kind}'\nchannel_gates = {gates}")).unwrap()
        });
        let more = channels.parameter_count(&ctx) - heads.parameter_count(&ctx);
        assert_eq!(more, 3 * 24 * 2 * (4 * 12 + 12 - 1), "{kind}");
        assert_eq!(channels.state_size(&ctx, 9), heads.state_size(&ctx, 9), "{kind}");
        // Tensor operations: weights and momentum every 16 tokens, 10 copies of the vectors, the chunk's factors, the gates.
        let numbers = 2 * 2 * 12 * 48 / 16 + 10 * (12 + 48 + 48 + 12 + 24) + 24 * 16 + 16 * (4 * 12 + 12);
        assert_eq!(channels.deep_training_bytes(&ctx), Some(2 * 4 * numbers), "{kind}");
        assert!(heads.deep_training_bytes(&ctx).unwrap() < 2 * 4 * numbers, "{kind}");
    }
}

#[test]
fn a_size_that_is_refused_is_not_multiplied_out() {
    for recipe in [
        "kind = 'gla'\nrank = 9000000000000000000",
        "kind = 'delta_product'\nsteps = 9000000000000000000",
        "kind = 'ttt_mlp'\nexpansion = 9000000000000000000",
        "kind = 'titans_mlp'\ndepth = 9000000000000000000",
        "kind = 'dla'\nexpansion = 9000000000000000000",
        "kind = 'titans_mac'\nsegment = 9000000000000000000",
        "kind = 'titans_mag'\npersistent = 9000000000000000000",
        "kind = 'titans_mal'\ndepth = 9000000000000000000",
        "kind = 'lstm'\nhidden = 9000000000000000000",
        "kind = 'mixture_of_memories'\nmemories = 9000000000000000000",
        "kind = 'moneta'\nexpansion = 9000000000000000000",
        "kind = 'yaad'\nrank = 9000000000000000000",
        "kind = 'memora'\nexpansion = 9000000000000000000",
    ] {
        let mixer: MixerConfig = toml::from_str(recipe).unwrap();
        let ctx = LayerContext::new(24, 2);
        assert_eq!(mixer.parameter_count(&ctx), usize::MAX, "{recipe}");
        assert_eq!(mixer.state_size(&ctx, 1).total(), usize::MAX, "{recipe}");
    }
}

#[test]
fn a_message_has_no_types_of_this_language() {
    for (theirs, ours) in [
        ("invalid value: integer `-1`, expected usize", "found `-1`, expected a whole number of 0 or more"),
        ("invalid type: string \"x, y\", expected f64", "found the text \"x, y\", expected a number"),
        ("invalid type: floating point `3.5`, expected a boolean", "found `3.5`, expected true or false"),
        (
            "invalid type: string \"x\", expected a sequence",
            "found the text \"x\", expected a list, such as [\"x\"]",
        ),
        ("invalid type: integer `3`, expected a sequence", "found `3`, expected a list, such as [3]"),
        ("invalid type: map, expected a sequence", "found a table, expected a list"),
        ("invalid type: sequence, expected struct TaskRecipe", "found a list, expected a table"),
        ("invalid length 3, expected two numbers", "found a list of 3, expected two numbers"),
        ("unknown variant `x`, expected `y` or `z`", "unknown name `x`, expected `y` or `z`"),
        ("unknown field `usize`, expected `y`", "unknown key `usize`, expected `y`"),
        ("missing field `kind`", "`kind` is missing"),
        (
            "invalid type: null, expected a map at line 1 column 2",
            "found nothing, expected a table at line 1 column 2",
        ),
    ] {
        assert_eq!(types_in_words(theirs), ours);
    }
    for other in [
        "expected usize",
        "a number, expected usize",
        "string values must be quoted, expected literal string",
    ] {
        assert_eq!(types_in_words(other), other);
    }
}
