//! What the layer tests share: every mixer with its variants, small sizes, seeded inputs.
#![allow(dead_code)]

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use fastweight_memory::parameters::{PathTracker, export, import};
use fastweight_memory::{LayerContext, Mixer, MixerConfig, MixerState, State};

pub const WIDTH: usize = 12;
pub const CHUNK: usize = 32;

/// Two heads with K = 6 and V = 5, or K = V = 6 for a layer that needs it; second of three layers.
pub fn context(config: &MixerConfig) -> LayerContext {
    let square = ["ttt_linear", "moneta", "yaad", "memora"].contains(&config.name());
    let value_dim = if square { 6 } else { 5 };
    LayerContext { head_dim: 6, value_dim, layer: 1, layers: 3, seed: 3, ..LayerContext::new(WIDTH, 2) }
}

/// Every mixer, with the options that change its way through the code.
pub fn mixers() -> Vec<(&'static str, MixerConfig)> {
    let recipes = [
        "kind = 'softmax_attention'",
        "kind = 'softmax_attention'\nwindow = 5\nkv_heads = 1",
        "kind = 'softmax_attention'\nwindow = 1\nrope = false",
        "kind = 'softmax_attention'\nkv_heads = 1\nconv_width = 4",
        "kind = 'linear_attention'",
        "kind = 'linear_attention'\noutput_norm = false\nconv_width = 2",
        "kind = 'elu1_linear_attention'",
        "kind = 'elu1_linear_attention'\nconv_width = 4",
        "kind = 'retnet'",
        "kind = 'retnet'\nrope = false\nconv_width = 3",
        "kind = 'lightning_attention'",
        "kind = 'lightning_attention'\nconv_width = 4",
        "kind = 'mamba2'",
        "kind = 'mamba2'\nconv_width = 0",
        "kind = 'delta_net'",
        "kind = 'delta_net'\nconv_width = 0\nallow_negative_eigenvalues = true",
        "kind = 'gated_delta_net'",
        "kind = 'gated_delta_net'\nconv_width = 0\nallow_negative_eigenvalues = true",
        "kind = 'rwkv7'",
        "kind = 'rwkv7'\ndecay_rank = 3\nrate_rank = 2\nvalue_rank = 1\ngate_rank = 5",
        "kind = 'gla'",
        "kind = 'gla'\nconv_width = 3\nrank = 2",
        "kind = 'hgrn2'",
        "kind = 'hgrn2'\nconv_width = 4\nlower_bound = 0.0",
        "kind = 'kda'",
        "kind = 'kda'\nconv_width = 0\nallow_negative_eigenvalues = true",
        "kind = 'comba'",
        "kind = 'delta_product'",
        "kind = 'delta_product'\nconv_width = 0\nsteps = 3\ngated = true\nallow_negative_eigenvalues = false",
        "kind = 'titans'",
        "kind = 'titans'\nconv_width = 0\ntheta_max = 0.5",
        "kind = 'ttt_linear'",
        "kind = 'ttt_linear'\nconv_width = 0\nmini_batch = 5\neta_base = 0.5",
        "kind = 'moneta'",
        "kind = 'moneta'\nmemory = 'matrix'\nconv_width = 0\nchunk = 3\np = 2.5\nq = 3.0",
        "kind = 'yaad'",
        "kind = 'yaad'\nmemory = 'matrix'\nchunk = 1\nrank = 3",
        "kind = 'memora'\nexpansion = 2",
        "kind = 'memora'\nmemory = 'matrix'\nconv_width = 2\nchunk = 5\nrate_max = 0.5",
        "kind = 'rule'\nretention = 'scalar_decay'\nlearner = 'momentum'",
        "kind = 'rule'\nbias = 'huber'\nretention = 'kl'\nwindow = 2\nchunk = 3",
        "kind = 'rule'\nretention = 'bregman'\nlearner = 'proximal'\nconv_width = 0",
    ];
    recipes.map(|recipe| (recipe, toml::from_str(recipe).unwrap())).into()
}

pub fn build(config: &MixerConfig, device: &Device) -> Mixer {
    config.init(&context(config), device).unwrap()
}

/// Numbers in (-1, 1) that depend on the seed only.
pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 + 0.5) / (1u64 << 23) as f32 - 1.0
    };
    (0..count + 16).map(|_| next()).skip(16).collect()
}

pub fn input<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(numbers(shape.iter().product(), seed), shape), device)
}

pub fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.to_data().try_to_vec().unwrap()
}

#[track_caller]
pub fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}: number of values");
    let scale = expected.iter().fold(1.0f32, |m, v| m.max(v.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * scale, "{what}: value {i} is {a}, expected {b}");
    }
}

/// Every tensor of a state by name.
pub fn state_values(state: &MixerState) -> Vec<(String, Vec<f64>)> {
    state.named_tensors().into_iter().map(|(name, data)| (name, data.iter::<f64>().collect())).collect()
}

#[track_caller]
pub fn assert_states_close(what: &str, found: &MixerState, expected: &MixerState, tolerance: f64) {
    let (found, expected) = (state_values(found), state_values(expected));
    assert_eq!(found.len(), expected.len(), "{what}: number of state tensors");
    for ((name, a), (expected_name, b)) in found.iter().zip(&expected) {
        assert_eq!(name, expected_name, "{what}");
        assert_eq!(a.len(), b.len(), "{what}: size of {name}");
        let scale = b.iter().fold(1.0f64, |m, v| m.max(v.abs()));
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((a - b).abs() <= tolerance * scale, "{what}: {name}[{i}] is {a}, expected {b}");
        }
    }
}

/// Name, gradient values of every parameter that has one.
pub fn gradients<M: Module>(module: &M, gradients: &Gradients) -> Vec<(String, Option<Vec<f32>>)> {
    struct Reader<'a>(PathTracker, &'a Gradients, Vec<(String, Option<Vec<f32>>)>);
    impl ModuleVisitor for Reader<'_> {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            self.0.exit(container);
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.2.push((self.0.name(), param.val().grad(self.1).map(|grad| values(&grad))));
        }
    }
    let mut reader = Reader(PathTracker::default(), gradients, Vec::new());
    module.visit(&mut reader);
    reader.2
}

/// The module with `factor * direction` added to the parameters; `direction` in the order of `export`.
pub fn moved<M: Module>(module: &M, direction: &[Vec<f32>], factor: f32) -> M {
    let values = export(module);
    import(module.clone(), |info| {
        let index = values.iter().position(|(name, _)| *name == info.name)?;
        let old: Vec<f32> = values[index].1.clone().try_to_vec().ok()?;
        let new: Vec<f32> = old.iter().zip(&direction[index]).map(|(o, d)| o + factor * d).collect();
        Some(TensorData::new(new, info.shape.clone()))
    })
    .unwrap()
}
