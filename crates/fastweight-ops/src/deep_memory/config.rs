//! What a deep memory is: its network, its inner loss and how it learns.

use crate::OpError;

use super::{NAME, kernel};

/// Nonlinearity between the layers of the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Activation {
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, the tanh form of GELU (1606.08415), as TTT uses it.
    #[default]
    Gelu,
    /// `x / (1 + e^-x)` (SiLU, Swish).
    Silu,
}

/// What a token asks of the memory; `e = M(k) - v`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum InnerLoss {
    /// `1/2 |e|^2` (Titans, TTT). With a residual, `M(k) = k + LN(f(k))`, so that `LN(f(k))` learns `v - k`.
    #[default]
    Squared,
    /// `-<M(k), v>` (DLA, Hebb).
    DotProduct,
    /// `1/2 |e|^2` where `|e| <= delta`, else `delta |e| - delta^2/2`, with the norm of the whole error and the
    /// token's threshold delta, 1 when there is none (Yaad, 2504.13173).
    Huber,
    /// `sum |e_j|^p` (Moneta, 2504.13173). Not halved: its gradient keeps the factor `p`.
    Power {
        /// The exponent, at least 1.
        p: f64,
        /// Gradient `p tanh(10 e) (e^2 + 1e-6)^((p-1)/2)` instead of `p sign(e) |e|^(p-1)`.
        smooth: bool,
    },
}

/// Which token's rate weighs a gradient.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RateOf {
    /// The written token's own, `theta_s` (Titans, Miras).
    #[default]
    Written,
    /// The reading token's, `W_t = W_start - theta_t sum_{s <= t} G_s` (TTT, 2407.04620); the chunk's last token
    /// gives the rate that lasts. Excludes momentum, decay, a window, proximal or Newton-Schulz steps and
    /// reading before writing.
    Reading,
}

/// A deep memory: `M(x) = x + LN(f(x))`, `f` a perceptron of [`depth`](Self::depth) linear layers per head that is
/// trained by every token it reads.
///
/// Keys have K numbers, values V, hidden layers `expansion * K`. The LayerNorm is there when its weight and bias
/// are given with the call; it does not learn while reading.
#[derive(Debug, Clone, PartialEq)]
pub struct DeepMemory {
    /// Linear layers, 1 to 4; one is a matrix memory.
    pub depth: usize,
    /// Hidden numbers for each key number.
    pub expansion: usize,
    /// Nonlinearity between the layers.
    pub activation: Activation,
    /// Whether the input is added to what the network returns; needs K = V.
    pub residual: bool,
    /// Added to the variance inside the LayerNorm.
    pub norm_eps: f64,
    /// Whether layers have a bias, kept as the last row of their weight; it learns and decays as the weight does.
    pub bias: bool,
    /// The inner loss.
    pub loss: InnerLoss,
    /// Which token's rate weighs a gradient.
    pub rate: RateOf,
    /// Whether each layer takes the exact proximal step for its own input, the rate `theta / (1 + theta |h|^2)` in
    /// place of theta (the DGD step of Hope, 2512.24695): no single token then overshoots what a layer gives.
    pub proximal: bool,
    /// Tokens between two points where gradients are taken, counted from the document's start.
    pub chunk: usize,
    /// Whether a token reads before it writes.
    pub read_before_write: bool,
    /// Tokens whose gradients a token's momentum takes up: itself and those before it, all at the weights of its
    /// own chunk's start (Omega rule, Atlas, 2505.23735); 1 for itself alone.
    pub window: usize,
    /// Whether the momentum enters the weights through five Newton-Schulz steps,
    /// `W_t = (1 - decay_t) W_{t-1} + NS5(P_t)` (Atlas). It forms the weights of every token of a chunk.
    pub newton_schulz: bool,
}

impl Default for DeepMemory {
    /// Two layers, expansion 4, GELU, residual, no bias, squared loss, chunks of 16 tokens, write then read.
    fn default() -> Self {
        Self {
            depth: 2,
            expansion: 4,
            activation: Activation::Gelu,
            residual: true,
            norm_eps: 1e-6,
            bias: false,
            loss: InnerLoss::Squared,
            rate: RateOf::Written,
            proximal: false,
            chunk: 16,
            read_before_write: false,
            window: 1,
            newton_schulz: false,
        }
    }
}

pub(super) fn wrong(argument: &'static str, found: impl ToString, expected: impl Into<String>) -> OpError {
    OpError::Value { operator: NAME, argument, found: found.to_string(), expected: expected.into() }
}

impl DeepMemory {
    /// Shapes `[in, out]` of the layers' weights, from the key on; with a bias `in` is one larger.
    pub fn weight_shapes(&self, key: usize, value: usize) -> Vec<[usize; 2]> {
        let hidden = self.expansion * key;
        let bias = usize::from(self.bias);
        let width = |layer: usize| match layer {
            0 => key,
            layer if layer == self.depth => value,
            _ => hidden,
        };
        (0..self.depth).map(|layer| [width(layer) + bias, width(layer + 1)]).collect()
    }

    /// Outputs of all of a head's weights together: gates of a head and token when every output has its own.
    pub fn output_count(&self, key: usize, value: usize) -> usize {
        self.weight_shapes(key, value).iter().map(|[_, columns]| columns).sum()
    }

    /// Numbers in the weights of one head.
    pub fn weight_count(&self, key: usize, value: usize) -> usize {
        self.weight_shapes(key, value).iter().map(|[rows, columns]| rows * columns).sum()
    }

    /// Upper bound of the bytes that a forward and a backward pass hold for each token and head of a long sequence,
    /// in float32 and whole chunks, with the fused kernel where there is one.
    ///
    /// The kernel keeps the weights (and momentum) of every fourth chunk, fewer where chunks are longer than 64 tokens,
    /// the output, and the gradients of the arguments and of the output. Tensor operations keep those of every chunk, about 10
    /// copies of every layer's input and error, and 24 rows of the chunk's factors; a window of more than 1 and
    /// Newton-Schulz steps take more. All is linear in the tokens, whatever their number.
    pub fn training_bytes(&self, key: usize, value: usize, momentum: bool) -> usize {
        let weights = self.weight_count(key, value) * (1 + usize::from(momentum));
        match kernel::saved_every(self) {
            Some(tokens) => size_of::<f32>() * (weights / tokens + 2 * key + 3 * value + 16),
            None => self.composed_training_bytes(key, value, weights),
        }
    }

    /// [`training_bytes`](Self::training_bytes) with gates for every output, which run on tensor operations: 16 numbers for each
    /// output more than these take with a gate a head.
    pub fn training_bytes_with_output_gates(&self, key: usize, value: usize, momentum: bool) -> usize {
        let weights = self.weight_count(key, value) * (1 + usize::from(momentum));
        let gates = size_of::<f32>() * 16 * self.output_count(key, value);
        self.composed_training_bytes(key, value, weights) + gates
    }

    fn composed_training_bytes(&self, key: usize, value: usize, weights: usize) -> usize {
        let vectors: usize = self.weight_shapes(key, value).iter().flatten().sum();
        size_of::<f32>() * (weights / self.chunk + 10 * (vectors + key + value) + 24 * self.chunk)
    }

    /// Numbers of a token that a window keeps: its key, its value, its rate and its threshold.
    pub(super) fn recent_columns(key: usize, value: usize) -> usize {
        key + value + 2
    }

    /// Checks the numbers against each other and against the sizes of a head.
    ///
    /// # Errors
    /// [`OpError::Value`] names the field at fault.
    pub fn check(&self, key: usize, value: usize) -> Result<(), OpError> {
        if !(1..=4).contains(&self.depth) {
            return Err(wrong("depth", self.depth, "1 to 4 linear layers"));
        }
        if self.expansion == 0 {
            return Err(wrong("expansion", 0, "at least 1"));
        }
        if self.chunk == 0 {
            return Err(wrong("chunk", 0, "at least 1 token"));
        }
        if self.window == 0 {
            return Err(wrong("window", 0, "at least 1 token"));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps.is_finite()) {
            return Err(wrong("norm_eps", self.norm_eps, "a positive number"));
        }
        if self.residual && key != value {
            let expected = format!("false, or values of the keys' {key} numbers (they have {value})");
            return Err(wrong("residual", true, expected));
        }
        match self.loss {
            InnerLoss::Power { p, .. } if !(p >= 1.0 && p.is_finite()) => {
                Err(wrong("loss", format!("Power with p = {p}"), "an exponent of at least 1"))
            }
            _ if self.rate == RateOf::Reading && self.proximal => {
                Err(wrong("proximal", true, "false where the reading token's rate counts"))
            }
            _ if self.rate == RateOf::Reading && self.window > 1 => {
                Err(wrong("window", self.window, "1 where the reading token's rate counts"))
            }
            _ if self.rate == RateOf::Reading && self.newton_schulz => {
                Err(wrong("newton_schulz", true, "false where the reading token's rate counts"))
            }
            _ if self.rate == RateOf::Reading && self.read_before_write => {
                Err(wrong("read_before_write", true, "false where the reading token's rate counts"))
            }
            _ => Ok(()),
        }
    }
}
