//! Presets: all of them build and run, and weigh what the ledger says.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fastweight_models::{ModelConfig, State, presets};

fn tokens(device: &Device, count: usize) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..count).map(|i| (i * 37 % 256) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [1, count]), device)
}

#[test]
fn every_preset_counts_its_parameters() {
    for name in presets::names() {
        let config = presets::by_name(&name).unwrap();
        // Inner models and MLPs need as many value channels as key channels.
        let square = ["ttt_linear", "moneta", "yaad", "memora"].iter().any(|mixer| name.starts_with(mixer));
        let head_dim = if square { Some(24) } else { config.head_dim };
        let other = ModelConfig { tied: true, head_dim, value_dim: Some(24), ..config.clone() };
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
        let grows = config.state_bytes(1000).growing() > config.state_bytes(10).growing();
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
fn an_unknown_preset_is_corrected() {
    let message = |name| presets::by_name(name).unwrap_err().to_string();
    assert!(message("delta_net-tinny").contains("did you mean \"delta_net-tiny\"?"));
    assert!(message("hybrid-3to1-small").contains("did you mean \"hybrid_3to1-small\"?"));
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
