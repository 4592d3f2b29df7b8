//! What the layer tests share: every mixer with its variants, small sizes, seeded inputs.
#![allow(dead_code)]

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use fastweight_memory::parameters::{PathTracker, export, import};
use fastweight_memory::{
    LayerContext, MemoryError, Mixer, MixerConfig, MixerState, Shared, State, TokenVectors,
};
use fastweight_ops::Offsets;

pub const WIDTH: usize = 12;
pub const CHUNK: usize = 32;
pub const VOCAB: usize = 11;

/// Two heads with K = 6 and V = 5, or K = V = 6 for a layer that needs it; second of three layers.
pub fn context(config: &MixerConfig) -> LayerContext {
    let ctx = LayerContext {
        head_dim: 6,
        value_dim: 5,
        layer: 1,
        layers: 3,
        seed: 3,
        vocab: VOCAB,
        ..LayerContext::new(WIDTH, 2)
    };
    if config.validate(&ctx).is_ok() { ctx } else { LayerContext { value_dim: 6, ..ctx } }
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
        "kind = 'rwkv7'\ntoken_keys_values = true",
        "kind = 'rwkv7_dea'",
        "kind = 'rwkv7_dea'\nquery_dim = 5\ncache_rank = 3\ndecay_rank = 2",
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
        "kind = 'ttt_mlp'",
        "kind = 'ttt_mlp'\nconv_width = 0\nmini_batch = 5\neta_base = 0.5\nexpansion = 2",
        "kind = 'titans_mlp'",
        "kind = 'titans_mlp'\nconv_width = 0\ntheta_max = 0.05\nchunk = 5\nexpansion = 2",
        "kind = 'titans_mlp'\ndepth = 1\nchunk = 1\nforget_shift = 6.0",
        // Larger rates blow the rounding errors of float32 up to 1e-4 within 65 tokens, in tensor operations too.
        "kind = 'titans_mlp'\ndepth = 3\nexpansion = 1\ntheta_max = 0.02",
        "kind = 'dla'",
        "kind = 'dla'\nconv_width = 2\ndepth = 3\nchunk = 3",
        "kind = 'titans_mac'\nsegment = 6\npersistent = 3\nconv_width = 3",
        "kind = 'titans_mac'\nmemory = 'matrix'\nsegment = 2\npersistent = 0\nconv_width = 0\nrope = false",
        "kind = 'titans_mac'\nsegment = 40\npersistent = 1\nchunk = 5\nexpansion = 2\nconv_width = 2",
        "kind = 'titans_mag'\nwindow = 5\npersistent = 3",
        "kind = 'titans_mag'\nmemory = 'matrix'\nwindow = 1\npersistent = 2\nrope = false",
        "kind = 'titans_mag'\nmemory = 'matrix'\nwindow = 40\npersistent = 0\nconv_width = 0",
        "kind = 'titans_mal'\nwindow = 5\npersistent = 3",
        "kind = 'titans_mal'\nmemory = 'matrix'\nwindow = 20\npersistent = 0\nconv_width = 0",
        "kind = 'lstm'",
        "kind = 'lstm'\nhidden = 7",
        "kind = 'srwm'",
        "kind = 'mixture_of_memories'",
        "kind = 'mixture_of_memories'\nconv_width = 0\nmemories = 3\nchunk = 3\nadd_key = true\neta_max = 0.5",
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

/// Ids that depend on the input of each token only, so that they go with it however it is cut, packed or batched.
pub fn tokens(x: &Tensor<3>) -> Tensor<2, Int> {
    let [batch, time, width] = x.dims();
    let id = |token: &[f32]| (token[0].abs() * 1e4) as i64 % VOCAB as i64;
    let ids: Vec<i64> = values(x).chunks(width).map(id).collect();
    Tensor::from_data(TensorData::new(ids, [batch, time]), &x.device())
}

/// What a model with these tokens shares with its layers.
pub fn shared(x: &Tensor<3>) -> Shared {
    let tokens = tokens(x);
    let vectors = TokenVectors { weight: input([VOCAB, x.dims()[2]], 77, &x.device()), norm: None };
    Shared {
        first_value: None,
        embedded: Some(vectors.of(tokens.clone()).unwrap()),
        tokens: Some(tokens),
        residual: Some(x.clone() * 1.5),
        vectors: Some(vectors),
        balance: Vec::new(),
    }
}

/// A mixer that reads as a model would have it read.
pub trait Reads {
    /// As `Mixer::forward`.
    fn read(
        &self,
        x: Tensor<3>,
        state: Option<MixerState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MixerState), MemoryError>;

    /// As `Mixer::step`.
    fn read_token(&self, x: Tensor<2>, state: MixerState) -> Result<(Tensor<2>, MixerState), MemoryError>;
}

impl Reads for Mixer {
    fn read(
        &self,
        x: Tensor<3>,
        state: Option<MixerState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MixerState), MemoryError> {
        let mut shared = shared(&x);
        self.forward_shared(x, state, offsets, &mut shared)
    }

    fn read_token(&self, x: Tensor<2>, state: MixerState) -> Result<(Tensor<2>, MixerState), MemoryError> {
        let mut shared = shared(&x.clone().unsqueeze_dim(1));
        self.step_shared(x, state, &mut shared)
    }
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
