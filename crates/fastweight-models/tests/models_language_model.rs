//! The language model: cuts, rows, documents, seeds, names, gradients, errors.

use burn::tensor::{Device, Int, Tensor, TensorData};
use fastweight_memory::padding::{Padding, repad, unpad_tokens};
use fastweight_memory::parameters::{export, import};
use fastweight_models::{
    LanguageModel, MixerConfig, ModelConfig, ModelError, ModelState, ParameterGroup, State, presets,
};
use fastweight_ops::Offsets;

const VOCAB: usize = 40;

/// Every mixer in one model, and every mixer alone in a model of one layer.
fn configs() -> Vec<ModelConfig> {
    let mixers: Vec<MixerConfig> =
        MixerConfig::NAMES.into_iter().map(|name| MixerConfig::by_name(name).unwrap()).collect();
    let one = |mixer: &MixerConfig| ModelConfig::new(VOCAB, 16, 1, 2, mixer.clone());
    let mut configs: Vec<ModelConfig> = mixers.iter().map(one).collect();
    let sizes =
        ModelConfig { head_dim: Some(6), value_dim: Some(4), mlp_hidden: Some(20), ..one(&mixers[0]) };
    // Inner models and MLPs need as many value channels as key channels.
    let square = ["ttt_linear", "moneta", "yaad", "memora"];
    let mixers: Vec<MixerConfig> =
        mixers.into_iter().filter(|mixer| !square.contains(&mixer.name())).collect();
    // RWKV-7 first and again last, where it reads the values of the first.
    let mut mixers = mixers;
    mixers.rotate_right(1);
    assert_eq!(mixers[0].name(), "rwkv7");
    configs.push(ModelConfig { layers: mixers.len() + 1, mixers, tied: true, ..sizes });
    configs
}

fn tokens(batch: usize, time: usize, seed: usize) -> Tensor<2, Int> {
    let ids: Vec<i64> =
        (0..batch * time).map(|i| ((i * 7919 + seed * 104_729 + i * i) % VOCAB) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [batch, time]), &Device::flex())
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.to_data().try_to_vec().unwrap()
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 5e-5 * b.abs().max(1.0), "{what}: value {i} is {a}, expected {b}");
    }
}

fn label(config: &ModelConfig) -> String {
    format!("{} layers of {}", config.layers, config.mixers[0].name())
}

fn model(config: &ModelConfig) -> LanguageModel {
    config.init(5, &Device::flex()).unwrap()
}

#[test]
fn steps_after_a_prompt_equal_one_forward() {
    for config in configs() {
        let model = model(&config);
        for prompt in [1, 33] {
            let ids = tokens(2, prompt + 64, 1);
            let (whole, end) = model.forward(ids.clone(), None, None).unwrap();
            let (logits, mut state) = model.forward(ids.clone().narrow(1, 0, prompt), None, None).unwrap();
            let mut parts = vec![logits];
            for t in prompt..prompt + 64 {
                let (logits, next) = model.step(ids.clone().narrow(1, t, 1).squeeze_dim(1), state).unwrap();
                state = next;
                parts.push(logits.unsqueeze_dim(1));
            }
            let what = label(&config);
            assert_close(&what, &values(&Tensor::cat(parts, 1)), &values(&whole));
            let cut = state.select(&[0, 1]).unwrap();
            assert_eq!(cut.bytes(), end.bytes(), "{what}, without room to spare");
        }
    }
}

#[test]
fn packed_documents_and_rows_are_alone() {
    let offsets = Offsets::from_lengths(&[5, 33, 1]);
    for config in configs() {
        let model = model(&config);
        let what = label(&config);
        let ids = tokens(1, 39, 2);
        let (packed, state) = model.forward(ids.clone(), None, Some(&offsets)).unwrap();
        assert_eq!(state.batch(), 3);
        for range in offsets.ranges() {
            let own = ids.clone().narrow(1, range.start, range.len());
            let (alone, _) = model.forward(own.clone(), None, None).unwrap();
            let part = packed.clone().narrow(1, range.start, range.len());
            assert_close(&what, &values(&part), &values(&alone));
            let beside = Tensor::cat(vec![tokens(1, range.len(), 3), own], 0);
            let (rows, _) = model.forward(beside, None, None).unwrap();
            assert_close(&what, &values(&rows.narrow(0, 1, 1)), &values(&alone));
        }
    }
}

#[test]
fn a_padded_batch_gives_what_its_rows_give_alone() {
    let mask: Vec<bool> = "..xx.xxxxxx.xxxx..xxx...".bytes().map(|b| b == b'x').collect();
    let padding = Padding::from_mask(&mask, 3, 8).unwrap();
    for config in configs() {
        let model = model(&config);
        let ids = tokens(3, 8, 5);
        let packed = unpad_tokens(ids.clone(), &padding).unwrap();
        let (logits, _) = model.forward(packed, None, Some(padding.offsets())).unwrap();
        let logits = repad(logits, &padding).unwrap();
        for row in 0..3 {
            let real: Vec<usize> = (0..8).filter(|column| mask[row * 8 + column]).collect();
            let own = real.iter().map(|i| ids.clone().narrow(0, row, 1).narrow(1, *i, 1)).collect();
            let (alone, _) = model.forward(Tensor::cat(own, 1), None, None).unwrap();
            let part = real.iter().map(|i| logits.clone().narrow(0, row, 1).narrow(1, *i, 1)).collect();
            assert_close(&label(&config), &values(&Tensor::cat(part, 1)), &values(&alone));
        }
    }
}

#[test]
fn the_future_does_not_leak() {
    for config in configs() {
        let model = model(&config);
        let (first, second) = (tokens(1, 20, 4), tokens(1, 20, 9));
        let mixed = Tensor::cat(vec![first.clone().narrow(1, 0, 12), second.narrow(1, 12, 8)], 1);
        let [a, b] = [first, mixed].map(|ids| values(&model.forward(ids, None, None).unwrap().0));
        assert_eq!(a[..12 * VOCAB], b[..12 * VOCAB], "{}", label(&config));
        assert_ne!(a[12 * VOCAB..], b[12 * VOCAB..], "{}", label(&config));
    }
}

#[test]
fn the_same_seed_gives_the_same_weights() {
    let device = Device::flex();
    for config in configs() {
        let weights = export(&model(&config));
        device.seed(1234);
        let _noise = Tensor::<1>::random([3], burn::tensor::Distribution::Default, &device);
        assert!(weights == export(&model(&config)));
        assert!(weights != export(&config.init(6, &device).unwrap()));
        assert!(weights == export(&config.init(5, &device.clone().autodiff()).unwrap()));
        // Loading replaces every weight and re-initialises none.
        let ids = tokens(1, 10, 3);
        let expected = values(&model(&config).forward(ids.clone(), None, None).unwrap().0);
        let loaded = import(config.build(&device).unwrap(), |info| {
            weights.iter().find(|(name, _)| *name == info.name).map(|(_, data)| data.clone())
        });
        assert_eq!(values(&loaded.unwrap().forward(ids, None, None).unwrap().0), expected);
    }
}

#[test]
fn parameters_have_stable_names_and_groups() {
    let config = ModelConfig::new(VOCAB, 16, 1, 2, MixerConfig::by_name("gated_delta_net").unwrap());
    let decay =
        ["q", "k", "v", "beta", "decay", "gate", "o"].map(|name| format!("blocks.0.mixer.{name}.weight"));
    let parameters = model(&config).parameters();
    for info in &parameters {
        let matrix = decay.contains(&info.name) || info.name.contains(".mlp.") || info.name == "head.weight";
        let expected = if matrix { ParameterGroup::Decay } else { ParameterGroup::NoDecay };
        assert_eq!(info.group, expected, "{}", info.name);
    }
    let names: Vec<&str> = parameters.iter().map(|info| info.name.as_str()).collect();
    let expected = [
        "embedding.weight",
        "blocks.0.mixer_norm.weight",
        "blocks.0.mixer.q.weight",
        "blocks.0.mixer.q.conv",
        "blocks.0.mixer.k.weight",
        "blocks.0.mixer.k.conv",
        "blocks.0.mixer.v.weight",
        "blocks.0.mixer.v.conv",
        "blocks.0.mixer.beta.weight",
        "blocks.0.mixer.decay.weight",
        "blocks.0.mixer.dt_bias",
        "blocks.0.mixer.a_log",
        "blocks.0.mixer.gate.weight",
        "blocks.0.mixer.norm.weight",
        "blocks.0.mixer.o.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.gate.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "norm.weight",
        "head.weight",
    ];
    assert_eq!(names, expected);
    let tied = ModelConfig { tied: true, ..config };
    assert!(!model(&tied).parameters().iter().any(|info| info.name == "head.weight"));
}

#[test]
fn gradients_reach_every_parameter() {
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::tensor::Gradients;

    struct Check<'a>(&'a Gradients, usize);
    impl ModuleVisitor for Check<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = values(&param.val().grad(self.0).expect("a gradient"));
            assert!(gradient.iter().all(|g| g.is_finite()) && gradient.iter().any(|g| *g != 0.0));
            self.1 += 1;
        }
    }
    let device = Device::flex().autodiff();
    for config in configs() {
        let model = config.init(5, &device).unwrap();
        let ids = Tensor::from_data(tokens(2, 32, 6).to_data(), &device);
        let (logits, _) = model.forward(ids, None, None).unwrap();
        let weights = Tensor::<2>::from_data(tokens(2, 32 * VOCAB, 7).to_data().convert::<f32>(), &device);
        let loss = (logits * weights.reshape([2, 32, VOCAB])).sum();
        let gradients = loss.backward();
        let mut check = Check(&gradients, 0);
        model.visit(&mut check);
        assert_eq!(check.1, model.parameters().len(), "{}", label(&config));
    }
}

#[test]
fn what_does_not_fit_is_refused_with_a_reason() {
    let config = ModelConfig::new(VOCAB, 16, 2, 2, MixerConfig::by_name("delta_net").unwrap());
    let device = Device::flex();
    let model = model(&config);
    let ids = |ids: &[i64]| Tensor::from_data(TensorData::new(ids.to_vec(), [1, ids.len()]), &device);
    let forward = |ids, state| model.forward(ids, state, None).unwrap_err().to_string();
    let error = model.forward(ids(&[1, 2, VOCAB as i64]), None, None).unwrap_err();
    assert_eq!(error, ModelError::Token { id: VOCAB as i64, vocab: VOCAB });
    assert!(forward(ids(&[1, -1]), None).contains("token id -1"));
    let step = Tensor::<1, Int>::from_data(TensorData::new(vec![99i64], [1]), &device);
    assert!(model.step(step, model.zero_state(1, &device)).is_err());
    let short = ModelState { layers: model.zero_state(1, &device).layers[..1].to_vec() };
    assert!(forward(ids(&[1]), Some(short)).contains("holds 1 layers, the model has 2"));
    assert!(forward(ids(&[1]), Some(model.zero_state(2, &device))).contains("holds 2 sequences"));
    let other = presets::by_name("softmax_attention-tiny").unwrap().init(0, &device).unwrap();
    assert!(forward(ids(&[1]), Some(other.zero_state(1, &device))).contains("layer 0: a key-value state"));

    let cases = [
        (ModelConfig { vocab: 0, ..config.clone() }, "vocab is 0"),
        (ModelConfig { mixers: vec![], ..config.clone() }, "mixers is 0"),
        (ModelConfig { mlp_hidden: Some(0), ..config.clone() }, "mlp_hidden is 0"),
        (ModelConfig { heads: 3, ..config.clone() }, "heads is 3, expected a divisor of width = 16"),
        (ModelConfig { head_dim: Some(0), ..config.clone() }, "layer 0: delta_net: head_dim is 0"),
        (ModelConfig { value_dim: Some(0), ..config.clone() }, "value_dim is 0"),
        (ModelConfig { norm_eps: -1.0, ..config.clone() }, "norm_eps is -1"),
    ];
    for (config, words) in cases {
        let message = config.init(0, &device).unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }
}

/// Such sizes come from damaged run folders and mistyped recipes: they are counted and refused, not built.
#[test]
fn absurd_sizes_are_errors_without_overflow_or_endless_work() {
    let base = ModelConfig::default();
    let configs = [
        ("heads", ModelConfig { heads: 0, ..base.clone() }),
        ("layers", ModelConfig { layers: 1_000_000_000_000, ..base.clone() }),
        ("width", ModelConfig { width: usize::MAX, ..base.clone() }),
        ("vocab", ModelConfig { vocab: usize::MAX, ..base.clone() }),
        ("mlp_hidden", ModelConfig { mlp_hidden: Some(usize::MAX), ..base.clone() }),
        ("head_dim", ModelConfig { head_dim: Some(usize::MAX), ..base.clone() }),
        ("value_dim", ModelConfig { value_dim: Some(usize::MAX), ..base.clone() }),
    ];
    for (setting, config) in configs {
        let error = config.build(&Device::flex()).expect_err(setting).to_string();
        assert!(error.contains(setting), "{setting}: {error}");
        let small = base.parameter_count();
        assert!(setting == "heads" || config.parameter_count() > 1000 * small, "{setting}");
    }
    let wide = ModelConfig { head_dim: Some(usize::MAX), ..base };
    assert_eq!(wide.state_bytes(usize::MAX).total(), usize::MAX);
}
