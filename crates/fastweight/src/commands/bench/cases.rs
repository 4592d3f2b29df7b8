//! The operators `bench` times, and the arguments it times them with.

mod sequence;
mod step;

use burn::tensor::{Device, Distribution, Tensor};
use fastweight::ops::deep_memory::{DeepMemory, DeepNorm};
use fastweight::ops::norm::l2_normalise;
use serde::Serialize;

pub use sequence::sequence;
pub use step::step;

/// Taps of the short convolution.
const TAPS: usize = 4;
/// Steps of DeltaProduct a token.
const STEPS: usize = 2;
const L2_EPS: f32 = 1e-6;

/// Sizes of the timed tensors.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Shape {
    /// Sequences in the batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub time: usize,
    /// Heads.
    pub heads: usize,
    /// Key dimension of a head.
    pub key: usize,
    /// Value dimension of a head.
    pub value: usize,
    /// Sequences that take one step together.
    pub sessions: usize,
}

/// How fast the state is forgotten. Strong gates are where exponentials turn into denormal numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Gate {
    /// The operator has no gate.
    None,
    /// Log gates in [-0.1, 0].
    Weak,
    /// Log gates in [-60, 0].
    Strong,
}

/// A timed operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Operator {
    /// Causal softmax attention; the step reads a cache of `time` tokens.
    Softmax,
    /// Linear attention.
    Linear,
    /// ELU+1 linear attention with a normaliser.
    #[value(alias = "elu1_linear")]
    NormalisedLinear,
    /// The delta rule; with a gate, the gated delta rule.
    #[value(alias = "gated_delta")]
    Delta,
    /// Gated linear attention: a gate for each key channel.
    Gla,
    /// Kimi delta attention: the delta rule with a gate for each key channel.
    Kda,
    /// Diagonal plus low rank, the recurrence of RWKV-7.
    #[value(alias = "rwkv7")]
    Dplr,
    /// Comba: the gated delta rule with a strength of removal.
    Comba,
    /// DeltaProduct, two steps of the delta rule a token; with a gate too.
    DeltaProduct,
    /// The matrix memory of Titans; the gate is its forgetting.
    Titans,
    /// TTT-Linear in mini-batches of 16; values are as wide as keys.
    TttLinear,
    /// A deep memory with momentum (Titans): two layers, expansion 4, chunks of 16; values are as wide as keys.
    DeepMemory,
    /// Short depthwise convolution over heads * key channels.
    ShortConvolution,
}

impl Operator {
    /// The gates the operator can have.
    pub fn gates(self) -> &'static [Gate] {
        match self {
            Self::Softmax | Self::TttLinear | Self::DeepMemory | Self::ShortConvolution => &[Gate::None],
            Self::Gla | Self::Kda | Self::Dplr | Self::Comba | Self::Titans => &[Gate::Weak, Gate::Strong],
            Self::Linear | Self::NormalisedLinear | Self::Delta | Self::DeltaProduct => {
                &[Gate::None, Gate::Weak, Gate::Strong]
            }
        }
    }

    /// The operator in words.
    pub fn title(self) -> &'static str {
        match self {
            Self::Softmax => "softmax attention",
            Self::Linear => "linear attention",
            Self::NormalisedLinear => "ELU+1 linear attention",
            Self::Delta => "delta rule",
            Self::Gla => "gated linear attention",
            Self::Kda => "Kimi delta attention",
            Self::Dplr => "diagonal plus low rank",
            Self::Comba => "Comba",
            Self::DeltaProduct => "DeltaProduct, 2 steps",
            Self::Titans => "Titans, matrix memory",
            Self::TttLinear => "TTT-Linear",
            Self::DeepMemory => "deep memory, momentum",
            Self::ShortConvolution => "short convolution",
        }
    }
}

/// Draws random arguments; on an autodiff device all of them take gradients.
struct Draw<'a> {
    gate: Gate,
    device: &'a Device,
}

impl Draw<'_> {
    fn leaf<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        if self.device.is_autodiff() { x.detach().require_grad() } else { x }
    }

    fn normal<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.leaf(Tensor::random(shape, Distribution::Normal(0.0, 1.0), self.device))
    }

    /// Vectors of length one, `[.., dim]`.
    fn unit(&self, shape: [usize; 4]) -> Tensor<4> {
        let x = Tensor::random(shape, Distribution::Normal(0.0, 1.0), self.device);
        self.leaf(l2_normalise(x, L2_EPS))
    }

    /// Vectors of length one of one token, `[rows, heads, dim]`.
    fn unit_token(&self, [rows, heads, dim]: [usize; 3]) -> Tensor<3> {
        self.unit([rows, 1, heads, dim]).squeeze_dim(1)
    }

    /// Uniform in [0, 1].
    fn share<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.leaf(Tensor::random(shape, Distribution::Uniform(0.0, 1.0), self.device))
    }

    /// Log gates; zero without a gate.
    fn gates<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let lowest = match self.gate {
            Gate::None => return self.leaf(Tensor::zeros(shape, self.device)),
            Gate::Weak => -0.1,
            Gate::Strong => -60.0,
        };
        self.leaf(Tensor::random(shape, Distribution::Uniform(lowest, 0.0), self.device))
    }

    fn some_gates<const D: usize>(&self, shape: [usize; D]) -> Option<Tensor<D>> {
        (self.gate != Gate::None).then(|| self.gates(shape))
    }

    /// What the gates forget, `1 - e^gate`.
    fn forgotten<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let gates = self.gates(shape).detach();
        self.leaf(gates.exp().neg().add_scalar(1.0))
    }

    /// Uniform in [0, most].
    fn up_to<const D: usize>(&self, most: f64, shape: [usize; D]) -> Tensor<D> {
        self.leaf(Tensor::random(shape, Distribution::Uniform(0.0, most), self.device))
    }

    /// Weights and LayerNorm of a deep memory.
    fn deep(&self, memory: &DeepMemory, heads: usize, key: usize) -> (Vec<Tensor<3>>, DeepNorm) {
        let weight = |[from, to]: [usize; 2]| {
            let spread = Distribution::Normal(0.0, (from as f64).powf(-0.5));
            self.leaf(Tensor::random([heads, from, to], spread, self.device))
        };
        let weights = memory.weight_shapes(key, key).into_iter().map(weight).collect();
        (weights, DeepNorm { weight: self.share([heads, key]), bias: self.normal([heads, key]) })
    }
}
