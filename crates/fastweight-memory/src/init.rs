//! Seeded initial weights.
//!
//! Every parameter is drawn from its own ChaCha8 stream, keyed by the seed and the parameter's name, so that its
//! value depends on nothing else: neither on other parameters nor on any global random state.

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::parameters::{PathTracker, replace};

/// Standard deviation of embedding and output-head weights.
pub const EMBEDDING_STD: f64 = 0.02;

/// A parameter that is zero until [`initialise`] or a checkpoint gives it a value.
pub fn placeholder<const D: usize>(shape: [usize; D], device: &burn::tensor::Device) -> Param<Tensor<D>> {
    Param::uninitialized(
        ParamId::new(),
        move |device, require_grad| Tensor::zeros(shape, device).set_require_grad(require_grad),
        device.clone(),
        true,
        shape.into(),
    )
}

/// A parameter `[H]` of step sizes with the given softplus, even in the logarithm over `[smallest, largest)`, smallest
/// first. [`initialise`] leaves it as it is.
pub fn step_sizes(
    heads: usize,
    [smallest, largest]: [f64; 2],
    device: &burn::tensor::Device,
) -> Param<Tensor<1>> {
    let values = TensorData::new(step_size_bias(heads, smallest, largest), [heads]);
    Param::initialized(ParamId::new(), Tensor::from_data(values, device)).set_require_grad(true)
}

/// `softplus^-1(dt)`, dt even in the logarithm over `[smallest, largest)`.
fn step_size_bias(heads: usize, smallest: f64, largest: f64) -> Vec<f32> {
    spread(heads, |part| {
        let dt = (smallest.ln() + part * (largest / smallest).ln()).exp();
        dt + (-(-dt).exp_m1()).ln()
    })
}

/// Draws every float parameter of `module` that has no value yet and gives each it an identity that depends on its name only.
///
/// `layers` is the depth of the model: maps that write to the residual stream (`o`, `down`, `value`) are divided by
/// `sqrt(2 * layers)`. What a parameter is follows from its name:
///
/// | name | value |
/// |---|---|
/// | `embedding.weight`, `head.weight`, `table` | normal, standard deviation 0.02 |
/// | `key.weight` of RWKV-7's channel mix | uniform in `+-0.5 / sqrt(inputs)` |
/// | other matrices | normal, standard deviation `1 / sqrt(inputs)` |
/// | `start`, `start_in`, `start_out` (`[heads, inputs, outputs]`) | normal, standard deviation `1 / sqrt(inputs)` |
/// | `conv` | uniform in `+-1 / sqrt(width)` |
/// | `a_log` | `ln A`, A even over [1, 16), the range of Mamba-2 and Gated DeltaNet |
/// | `dt_bias` | `softplus^-1(dt)`, dt even in the logarithm over [0.001, 0.1), unless the layer chose it ([`step_sizes`]) |
/// | `decay_bias` | even over (0, 4], the largest first: `logsigmoid(b) / 16` remembers 900 to 23 tokens |
/// | `start_bias`, `ln_bias` | normal, standard deviation 0.02 |
/// | `persistent` | normal, standard deviation 1, as normalised tokens have it |
/// | `d` | 0.02 |
/// | norms, `ln_weight`, `d_skip`, `b_logit`, `token_table` | 1 |
/// | `bias` | 0; of an LSTM's forget gate and of the halting of tokens 1 |
/// | `maps.token_table` of DeepEmbed | normal, standard deviation 0.02 |
/// | `lora_a`, `lora_b`, `from_embedding` | normal, standard deviation `0.1 / sqrt(larger side)` |
/// | RWKV-7's `shift`, `start`, `removal`, `replacement`, `bonus`, `norm_shift` | as RWKV-LM starts them, see `rwkv7_start` |
///
/// The decays are spread over the heads, slowest first, where the papers draw them at random: a layer of one
/// or two heads would otherwise often start without a long memory and need many more steps to find one.
pub fn initialise<M: Module>(module: M, seed: u64, layers: usize) -> M {
    struct Initialiser(PathTracker, u64, usize);
    impl ModuleMapper for Initialiser {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.enter(name, container);
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            self.0.exit(container);
        }
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let name = self.0.name();
            let shape = param.lazy_shape().to_vec();
            let values = if param.is_initialized() {
                param.val().to_data()
            } else {
                TensorData::new(draw(&name, &shape, self.1, self.2), shape)
            };
            replace(param, ParamId::from(name_hash(&name)), values)
        }
    }
    module.map(&mut Initialiser(PathTracker::default(), seed, layers))
}

fn draw(name: &str, shape: &[usize], seed: u64, layers: usize) -> Vec<f32> {
    let mut stream = Stream::new(seed, name);
    let count = shape.iter().product();
    let mut fill = |sample: &mut dyn FnMut(&mut Stream) -> f64| -> Vec<f32> {
        (0..count).map(|_| sample(&mut stream) as f32).collect()
    };
    let mut parts = name.rsplit('.');
    let (leaf, parent) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
    if let Some(values) = rwkv7_start(name, shape, layers) {
        return values;
    }
    match (leaf, parent) {
        ("a_log", _) => spread(count, |part| (1.0 + 15.0 * part).ln()),
        ("dt_bias", _) => step_size_bias(count, 1e-3, 0.1),
        ("decay_bias", _) => spread(count, |part| 4.0 * (1.0 - part)),
        ("conv", _) => {
            let bound = 1.0 / (shape[shape.len() - 1] as f64).sqrt();
            fill(&mut |s| bound * (2.0 * s.uniform() - 1.0))
        }
        ("start_bias" | "ln_bias", _) => fill(&mut |s| EMBEDDING_STD * s.normal()),
        ("d", _) => vec![0.02; count],
        ("bias", _) => vec![if name.contains("forget_gate.") || parent == "halt" { 1.0 } else { 0.0 }; count],
        ("persistent", _) => fill(&mut |s| s.normal()),
        ("token_table", "maps") => fill(&mut |s| EMBEDDING_STD * s.normal()),
        ("ln_weight" | "token_table", _) => vec![1.0; count],
        _ if shape.len() == 1 => vec![1.0; count],
        ("lora_a" | "lora_b" | "from_embedding", _) => {
            let std = 0.1 / (shape[0].max(shape[1]) as f64).sqrt();
            fill(&mut |s| std * s.normal())
        }
        ("start" | "start_in" | "start_out", _) => {
            let std = 1.0 / (shape[1] as f64).sqrt();
            fill(&mut |s| std * s.normal())
        }
        ("table", _) | (_, "embedding" | "head") => fill(&mut |s| EMBEDDING_STD * s.normal()),
        ("weight", "key") => {
            let bound = 0.5 / (shape[0] as f64).sqrt();
            fill(&mut |s| bound * (2.0 * s.uniform() - 1.0))
        }
        (_, parent) => {
            let residual = if matches!(parent, "o" | "down" | "value") { 2.0 * layers as f64 } else { 1.0 };
            let std = 1.0 / (shape[0] as f64 * residual).sqrt();
            fill(&mut |s| std * s.normal())
        }
    }
}

/// Initial values of RWKV-7's own parameters (RWKV-LM, `RWKV-v7`): decays spread over the channels from slow to
/// fast, more of the token before in the deeper layers. Low-rank maps start near their bias; here not at it, so
/// that all of them learn from the first step.
fn rwkv7_start(name: &str, shape: &[usize], layers: usize) -> Option<Vec<f32>> {
    let parts: Vec<&str> = name.split('.').collect();
    let (&leaf, parent) = (parts.last()?, parts.len().checked_sub(2).map_or("", |i| parts[i]));
    let layer = parts.iter().position(|part| *part == "blocks").and_then(|i| parts.get(i + 1)?.parse().ok());
    let depth = layer.unwrap_or(0) as f64;
    let left = 1.0 - depth / layers.max(1) as f64;
    let ratio = depth / layers.saturating_sub(1).max(1) as f64;
    let count: usize = shape.iter().product();
    let last = count.saturating_sub(1).max(1) as f64;
    let over = |of: &dyn Fn(f64) -> f64| Some((0..count).map(|i| of(i as f64 / last) as f32).collect());
    match (leaf, parent) {
        ("r" | "g" | "q", "shift") => over(&|part| 1.0 - part.powf(0.2 * left)),
        ("w" | "a", "shift") => over(&|part| 1.0 - part.powf(0.9 * left)),
        ("k" | "v", "shift") => over(&|part| 1.0 - part.powf(0.7 * left)),
        // The channel mix has one, of its own slope.
        ("shift", _) => over(&|part| 1.0 - part.powf(left.powi(4))),
        ("start", "decay") => over(&|part| 5.0 * part.powf(0.85 + ratio.sqrt()) - 5.5),
        ("start", "rate") => over(&|part| 0.4 * (part - 0.5) - 0.19),
        ("start", "first_value") => over(&|part| 0.73 - 0.4 * (part - 0.5)),
        ("removal", _) => over(&|part| 0.71 - 0.1 * (part - 0.5)),
        ("replacement", _) => over(&|_| 1.02),
        ("bonus", _) => over(&|_| -0.04),
        ("norm_shift", _) => over(&|_| 0.0),
        _ => None,
    }
}

/// The values of `of` at `0, 1/count, 2/count, ...`.
fn spread(count: usize, of: impl Fn(f64) -> f64) -> Vec<f32> {
    (0..count).map(|i| of(i as f64 / count as f64) as f32).collect()
}

/// FNV-1a of the name, 64 bits.
fn name_hash(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Random numbers of one parameter.
struct Stream {
    rng: ChaCha8Rng,
    spare: Option<f64>,
}

impl Stream {
    fn new(seed: u64, name: &str) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&name_hash(name).to_le_bytes());
        key[16..24].copy_from_slice(b"init0001");
        Self { rng: ChaCha8Rng::from_seed(key), spare: None }
    }

    /// Uniform in (0, 1).
    fn uniform(&mut self) -> f64 {
        ((self.rng.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller).
    fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.uniform()).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_stated_distribution_and_depend_on_seed_and_name() {
        let weights = draw("q.weight", &[64, 256], 7, 1);
        let mean = weights.iter().map(|w| f64::from(*w)).sum::<f64>() / weights.len() as f64;
        let variance = weights.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>() / weights.len() as f64;
        assert!(mean.abs() < 5e-3, "{mean}");
        assert!((variance * 64.0 - 1.0).abs() < 0.05, "{variance}");
        assert_eq!(weights, draw("q.weight", &[64, 256], 7, 1));
        assert_ne!(weights, draw("q.weight", &[64, 256], 8, 1));
        assert_ne!(weights, draw("k.weight", &[64, 256], 7, 1));
        let residual = draw("o.weight", &[64, 256], 7, 8);
        let variance = residual.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>() / residual.len() as f64;
        assert!((variance * 64.0 * 16.0 - 1.0).abs() < 0.05, "{variance}");
        for dt in draw("dt_bias", &[1000], 0, 1).iter().map(|b| f64::from(*b).exp().ln_1p()) {
            assert!((0.99e-3..=0.101).contains(&dt), "{dt}");
        }
        for a in draw("a_log", &[1000], 0, 1).iter().map(|a| a.exp()) {
            assert!((0.99..=16.01).contains(&a), "{a}");
        }
        let [a, dt] = [draw("a_log", &[2], 0, 1), draw("dt_bias", &[2], 0, 1)];
        assert!(a[0].exp() * dt[0].exp().ln_1p() < 2e-3, "the first head must remember hundreds of tokens");
        assert!(a[0] < a[1] && dt[0] < dt[1]);
    }
}
