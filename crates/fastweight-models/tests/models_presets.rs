//! Presets: all of them build and run, and weigh what the ledger says.

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fastweight_memory::parameters::export;
use fastweight_models::{ModelConfig, NormKind, State, presets};

fn tokens(device: &Device, count: usize) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..count).map(|i| (i * 37 % 256) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [1, count]), device)
}

#[test]
fn every_preset_counts_its_parameters() {
    for name in presets::names() {
        let config = presets::by_name(&name).unwrap();
        let other = ModelConfig { tied: true, value_dim: Some(24), ..config.clone() };
        // Some layers need as many value channels as key channels.
        let square = other.validate().is_err();
        let other = ModelConfig { head_dim: if square { Some(24) } else { config.head_dim }, ..other };
        for config in [config, other] {
            let model = config.build(&Device::flex()).unwrap();
            assert_eq!(model.num_params(), config.parameter_count(), "{name}");
            let listed: usize = model.parameters().iter().map(|p| p.shape.iter().product::<usize>()).sum();
            assert_eq!(listed, config.parameter_count(), "{name}");
        }
    }
}

#[test]
fn every_preset_runs_and_holds_the_bytes_of_its_ledger() {
    let device = Device::flex();
    let sizes = ["tiny", "small", "base"];
    for name in presets::names().iter().filter(|name| sizes.iter().any(|size| name.ends_with(size))) {
        let config = presets::by_name(name).unwrap();
        let model = config.init(0, &device).unwrap();
        assert_eq!(model.zero_state(1, &device).bytes(), config.state_bytes(0).total(), "{name}");
        let (logits, state) = model.forward(tokens(&device, 7), None, None).unwrap();
        assert_eq!(logits.dims(), [1, 7, config.vocab]);
        assert!(logits.to_data().iter::<f32>().all(f32::is_finite), "{name}");
        assert_eq!(state.bytes(), config.state_bytes(7).total(), "{name}");
        for (layer, bytes) in state.layers.iter().zip(config.state_bytes(7).layers) {
            assert_eq!(layer.bytes(), bytes.size.total(), "{name}, layer {}", bytes.layer);
        }
        let (_, state) = model.step(tokens(&device, 1).squeeze_dim(1), state).unwrap();
        assert!(state.bytes() >= config.state_bytes(8).total(), "{name}");
        assert_eq!(state.select(&[0]).unwrap().bytes(), config.state_bytes(8).total(), "{name}");
        // A window or a segment beside a memory is full long before.
        let grows = config.state_bytes(1 << 20).growing() > config.state_bytes(1 << 12).growing();
        assert_eq!(grows, config.state_grows(), "{name}");
    }
}

#[test]
fn hybrids_repeat_their_pattern() {
    let config = presets::by_name("hybrid_3to1-small").unwrap();
    let mixers: Vec<&str> = (0..config.layers).map(|layer| config.mixer(layer).name()).collect();
    assert_eq!(mixers, ["delta_net", "delta_net", "delta_net", "softmax_attention"]);
    let names: Vec<String> = config.state_bytes(3).layers.iter().map(|l| l.mixer.to_owned()).collect();
    assert_eq!(names, mixers);
}

#[test]
fn the_rwkv7_series_has_its_own_maps_and_norms() {
    for (family, mixer, map) in [
        ("rwkv7_full", "rwkv7", "rwkv7_channel_mix"),
        ("rwkv7_deep_embed", "rwkv7", "rwkv7_deep_embed"),
        ("rwkv7_dea", "rwkv7_dea", "rwkv7_deep_embed"),
    ] {
        let config = presets::by_name(&format!("{family}-small")).unwrap();
        assert_eq!((config.mixer(3).name(), config.channel_mixer(3).name()), (mixer, map));
        assert_eq!((config.norm, config.embedding_norm), (NormKind::Layer, true), "{family}");
        assert_eq!(config.mlp_hidden(), 512, "{family}");
        assert_eq!(presets::names().iter().filter(|name| **name == format!("{family}-small")).count(), 1);
    }
    let plain = presets::by_name("rwkv7-small").unwrap();
    assert_eq!((plain.norm, plain.channel_mixer(0).name()), (NormKind::Rms, "swiglu"));
    // What is as by default is not written, so that older descriptions stay as they are.
    let text = toml::to_string(&plain).unwrap();
    assert!(!text.contains("norm =") && !text.contains("embedding_norm"), "{text}");
}

/// Values of RWKV-LM: token shifts that depend on channel and depth, key maps even in a range; a table of ones is no table.
#[test]
fn the_rwkv7_series_starts_as_its_source_starts() {
    let config = presets::by_name("rwkv7_dea-small").unwrap();
    let weights: HashMap<String, Vec<f32>> = export(&config.init(0, &Device::flex()).unwrap())
        .into_iter()
        .map(|(name, data)| (name, data.try_to_vec().unwrap()))
        .collect();
    for layer in 0..4 {
        let get = |name: &str| &weights[&format!("blocks.{layer}.{name}")];
        for (channel, found) in get("mlp.mix.shift").iter().enumerate() {
            let expected = 1.0 - (channel as f64 / 127.0).powf((1.0 - layer as f64 / 4.0).powi(4));
            assert!((f64::from(*found) - expected).abs() < 1e-5, "layer {layer}, channel {channel}: {found}");
        }
        let bound = 0.5 / (config.width as f32).sqrt();
        let largest = get("mlp.mix.key.weight").iter().fold(0f32, |most, v| most.max(v.abs()));
        assert!(largest <= bound && largest > 0.99 * bound, "{largest} of {bound}");
        for (name, value) in [
            ("mlp.start", 1.0),
            ("mixer.dea.k_table.token_table", 1.0),
            ("mixer.dea.v_table.token_table", 1.0),
            ("mixer_norm.weight", 1.0),
            ("mixer_norm.bias", 0.0),
            ("mixer.dea.v_norm.bias", 0.0),
        ] {
            assert!(get(name).iter().all(|found| *found == value), "{name}");
        }
    }
}

#[test]
fn samba_takes_turns_of_mamba2_and_a_window() {
    let config = presets::by_name("samba-small").unwrap();
    let mixers: Vec<&str> = (0..config.layers).map(|layer| config.mixer(layer).name()).collect();
    assert_eq!(mixers, ["mamba2", "softmax_attention", "mamba2", "softmax_attention"]);
    let held = |tokens| config.state_bytes(tokens).growing();
    // A token sees itself without the cache.
    assert!(!config.state_grows() && held(2046) < held(2047) && held(2047) == held(9000));
}

#[test]
fn universal_applies_one_block_as_often_as_others_have_layers() {
    let config = presets::by_name("universal-small").unwrap();
    let plain = presets::by_name("softmax_attention-small").unwrap();
    assert_eq!((config.layers, config.rounds), (1, plain.layers));
    assert_eq!(config.state_bytes(9).total(), plain.state_bytes(9).total());
    let one = ModelConfig { layers: 1, ..plain };
    assert_eq!(config.parameter_count(), one.parameter_count() + 4 * 128);
}

#[test]
fn an_unknown_preset_is_corrected() {
    let message = |name| presets::by_name(name).unwrap_err().to_string();
    assert!(message("delta_net-tinny").contains("did you mean \"delta_net-tiny\"?"));
    assert!(message("hybrid-3to1-small").contains("did you mean \"hybrid_3to1-small\"?"));
    // A known family without such a size: its sizes, not another family's that looks like it.
    for name in ["delta_net-huge", "delta_net", "delta_net-"] {
        let message = message(name);
        let presets =
            "the presets of delta_net are delta_net-tiny, delta_net-small, delta_net-base, delta_net-large";
        assert!(message.contains(presets) && !message.contains("did you mean"), "{message}");
    }
    assert!(message("gpt").contains("FAMILY-SIZE"));
}

#[test]
fn a_model_is_written_as_a_recipe_writes_it() {
    let recipe = "vocab = 10\nwidth = 16\nlayers = 4\nheads = 2\n\
        mixers = ['delta_net', { kind = 'softmax_attention', window = 8 }]";
    let config: ModelConfig = toml::from_str(recipe).unwrap();
    assert_eq!(config.mlp_hidden(), 48);
    assert_eq!(config.mixer(3).name(), "softmax_attention");
    for name in presets::names() {
        let config = presets::by_name(&name).unwrap();
        assert_eq!(config, toml::from_str(&toml::to_string(&config).unwrap()).unwrap());
        assert_eq!(config, serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap());
    }
    let error = toml::from_str::<ModelConfig>("vocab = 10\nwidht = 16").unwrap_err().to_string();
    assert!(error.contains("widht") && error.contains("line 2"), "{error}");
}

#[test]
fn a_small_model_is_not_all_persistent_tokens() {
    for (size, few) in [("tiny", 4), ("small", 16), ("base", 32), ("large", 128)] {
        for family in ["titans_mac", "titans_mag", "titans_mal"] {
            let config = presets::by_name(&format!("{family}-{size}")).unwrap();
            let options = serde_json::to_value(config.mixer(0)).unwrap();
            assert_eq!(options["persistent"], few, "{family}-{size}");
            let span = if family == "titans_mac" { "segment" } else { "window" };
            assert!(options[span].as_u64().unwrap() >= 4 * few, "{family}-{size}");
        }
    }
}
