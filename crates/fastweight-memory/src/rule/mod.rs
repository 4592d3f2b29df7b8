//! The algebra of memory rules: a rule is four choices, and every sound combination runs.
//!
//! A [`Rule`] names a memory architecture, an attentional bias (the inner loss of a write), a retention (what
//! a write keeps of the memory before it) and a learner (how a write lowers the loss), after Miras
//! (2504.13173) and the learning-retaining step
//!
//! ```text
//! W_t = argmin_W  loss_t(W; k_t, v_t) + retention(W, W_{t-1}),    o_t = scale M(W_t; q_t).
//! ```
//!
//! - [`soundness`] says which combinations have such a step, and why the others have none.
//! - [`reference`](mod@reference) is the definition of every sound one: a float64 token loop on slices, with the
//!   objective that the step minimises.
//! - [`run`] is the same on tensors, differentiable, with a typed state. It sends a rule that has a fused operator
//!   there ([`Fused`]) and runs every other one as tensor operations. [`run_outputs`] gives every output of a weight its own
//!   rate and decay.
//! - [`named`] lists the rules of the literature; [`explain`] computes each on a small example.

mod chunked;
mod describe;
pub mod explain;
mod fused;
mod generic;
mod mixing;
pub mod named;
mod outputs;
pub mod reference;
mod rows;
mod run;
pub mod soundness;
pub mod special;
mod state;
mod step;
mod tokenwise;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::MemoryError;
use crate::context::setting_error;

pub use fused::Fused;
pub use outputs::{OutputTokens, run_outputs};
pub use run::{Gate, RunOptions, Tokens, run};
pub use state::{Past, RuleState};

/// The name of the layer and of its errors.
pub(crate) const NAME: &str = "rule";

/// Most pairs of past tokens in the loss of one step.
pub const MOST_RULE_WINDOW: usize = 1024;
/// Most tokens of a chunk.
pub const MOST_CHUNK: usize = 1 << 20;
/// Most hidden channels of an MLP memory for each key channel.
pub const MOST_EXPANSION: usize = 64;

/// What the memory is, and how it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// A vector `s [K]`, one weight a channel (a diagonal memory): `M(x) = s * x`, so V = K.
    Vector,
    /// A matrix `S [K, V]`: `M(x) = S^T x`.
    Matrix,
    /// A residual MLP of two layers, `M(x) = x + W2^T silu(W1^T x)`, `W1 [K, E K]`, `W2 [E K, V]`, so V = K.
    Mlp,
}

/// The attentional bias: the inner loss of one key and value, with `y = M(k)` and `e = y - v`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    /// `-<y, v>`.
    DotProduct,
    /// `1/2 |e|^2`.
    Squared,
    /// `1/2 |e|^2` where `|e| <= delta`, beyond it `delta (|e| - delta / 2)`; `|e|` is the Euclidean norm.
    Huber,
    /// `sum |e_i|^p`, without `1/p`.
    Lp,
}

/// What a write keeps of the memory before it. Every retention with a decay takes the token's log gate `g <= 0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Retention {
    /// `1/2 |W - W_{t-1}|^2`.
    None,
    /// `1/2 |W - exp(g) W_{t-1}|^2`, one gate a head.
    ScalarDecay,
    /// `1/2 |W - diag(exp g) W_{t-1}|^2`, one gate a key channel (of an MLP: a row of `W1` and a column of `W2`).
    ChannelDecay,
    /// `1/2 |W - (exp(g) I - eta k k^T) W_{t-1}|^2`: also forgets along the key.
    Directed,
    /// `1/2 |W - exp(g) W_{t-1}|^2 + eta l1 |W|_1`.
    ElasticNet,
    /// The `l_q` norm of the memory, through its dual `A`: `A_t = exp(g) A_{t-1} + ...`, `W_t` from `A_t`.
    Lq,
    /// `KL(W || W_{t-1}^exp(g))` on memories whose values' rows are positive and sum to one over the keys.
    Kl,
    /// The Bregman divergence of the history, `sum_{i<t} eta_i loss_i + 1/2 |W|^2`: follow the regularised leader.
    Bregman,
}

/// How a write lowers the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Learner {
    /// One step along the gradient with the token's rate: the loss is linearised.
    Gradient,
    /// The same along a momentum, `P_t = mu P_{t-1} - eta grad`.
    Momentum,
    /// The exact minimiser of loss and retention together (delta gradient descent for the squared loss).
    Proximal,
    /// Newton-Schulz: the momentum made orthogonal in five iterations.
    NewtonSchulz,
}

/// Where the learner takes its gradient.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GradientAt {
    /// At the memory of the chunk's start; with chunk 1 the memory before the token (Titans, Miras).
    #[default]
    Previous,
    /// At the memory before the token, decayed by the token's gate (Gated DeltaNet, KDA); needs chunk 1.
    Decayed,
}

/// A memory rule: four choices and their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Rule {
    /// What the memory is.
    pub memory: Memory,
    /// The inner loss.
    pub bias: Bias,
    /// What a write keeps.
    pub retention: Retention,
    /// How a write lowers the loss.
    pub learner: Learner,
    /// Where the gradient is taken.
    pub gradient_at: GradientAt,
    /// Threshold of the Huber loss (`bias = "huber"`), in units of `|e|`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub huber_delta: f64,
    /// Exponent of the `l_p` loss (`bias = "lp"`), at least 1; below 2 only with `smooth = true`.
    #[schemars(range(min = 1, max = 16))]
    pub p: f64,
    /// Smooths the `l_p` gradient at zero: `tanh(10 e)` for the sign, `sqrt(e^2 + 1e-6)` for the absolute value.
    pub smooth: bool,
    /// Exponent of the `l_q` norm (`retention = "lq"`), above 1.
    #[schemars(range(max = 16), extend("exclusiveMinimum" = 1))]
    pub q: f64,
    /// Reads the `l_q` memory through the mirror map of `1/2 |W|_q^2`, whose step minimises its objective, in place
    /// of the rule printed for Moneta, `A / |A|_q^(q-2)`, which does not; in recipes `true` when absent with
    /// `learner = "proximal"`, which needs it.
    pub mirror: bool,
    /// Weight of the `l1` term of `retention = "elastic_net"`, for a rate of one.
    #[schemars(range(min = 0))]
    pub l1: f64,
    /// Past pairs in the loss of one step (the Omega rule); 1 for the token alone.
    #[schemars(range(min = 1, max = MOST_RULE_WINDOW))]
    pub window: usize,
    /// Tokens whose gradients are taken at one memory; 1 for every token at its own.
    #[schemars(range(min = 1, max = MOST_CHUNK))]
    pub chunk: usize,
    /// Hidden channels of the MLP (`memory = "mlp"`) for each key channel, E.
    #[schemars(range(min = 1, max = MOST_EXPANSION))]
    pub expansion: usize,
}

impl Default for Rule {
    /// The delta rule: a matrix, the squared loss, nothing forgotten, one gradient step.
    fn default() -> Self {
        Self {
            memory: Memory::Matrix,
            bias: Bias::Squared,
            retention: Retention::None,
            learner: Learner::Gradient,
            gradient_at: GradientAt::Previous,
            huber_delta: 1.0,
            p: 3.0,
            smooth: false,
            q: 4.0,
            mirror: false,
            l1: 1e-3,
            window: 1,
            chunk: 1,
            expansion: 4,
        }
    }
}

impl Rule {
    /// The rule of four choices with the default numbers; where only the mirror map of the `l_q` retention is
    /// sound (exact proximal steps), it is chosen.
    pub fn new(memory: Memory, bias: Bias, retention: Retention, learner: Learner) -> Self {
        let mirror = retention == Retention::Lq && learner == Learner::Proximal;
        Self { memory, bias, retention, learner, mirror, ..Self::default() }
    }

    /// Checks that the combination is sound and its numbers are in range.
    ///
    /// # Errors
    /// [`MemoryError::Unsound`] with the reason, or [`MemoryError::Setting`] naming the number at fault.
    pub fn validate(&self) -> Result<(), MemoryError> {
        soundness::check(self.memory, self.bias, self.retention, self.learner)?;
        let setting = |setting, found: &dyn ToString, expected: &str| {
            Err(setting_error(NAME, setting, found.to_string(), expected))
        };
        if !(self.huber_delta > 0.0 && self.huber_delta.is_finite()) {
            return setting("huber_delta", &self.huber_delta, "a number above 0");
        }
        if !(self.p >= 1.0 && self.p <= 16.0) {
            return setting("p", &self.p, "a number from 1 to 16");
        }
        if self.bias == Bias::Lp && self.p < 2.0 && !self.smooth {
            let expected =
                "at least 2, or smooth = true: below 2 the gradient has an infinite slope at e = 0";
            return setting("p", &self.p, expected);
        }
        if !(self.q > 1.0 && self.q <= 16.0) {
            return setting("q", &self.q, "a number above 1, at most 16");
        }
        if !(self.l1 >= 0.0 && self.l1.is_finite()) {
            return setting("l1", &self.l1, "a number of at least 0");
        }
        for (name, value, most) in [
            ("window", self.window, MOST_RULE_WINDOW),
            ("chunk", self.chunk, MOST_CHUNK),
            ("expansion", self.expansion, MOST_EXPANSION),
        ] {
            if value == 0 || value > most {
                return setting(name, &value, &format!("at least 1 and at most {most}"));
            }
        }
        if self.chunk > 1 && self.gradient_at == GradientAt::Decayed {
            return setting(
                "chunk",
                &self.chunk,
                "1 with gradient_at = \"decayed\", which is a memory a token",
            );
        }
        if self.learner == Learner::Proximal {
            let exact = "1 with learner = \"proximal\", which minimises one token's loss exactly";
            if self.chunk > 1 {
                return setting("chunk", &self.chunk, exact);
            }
            if self.window > 1 {
                return setting("window", &self.window, exact);
            }
            if self.retention == Retention::Lq && !self.mirror {
                let expected = "true with retention = \"lq\" and learner = \"proximal\": the printed rule is not a minimiser";
                return setting("mirror", &self.mirror, expected);
            }
        }
        Ok(())
    }

    /// Checks that every number other than the default has a part in the rule; [`run`] takes any, a layer does not.
    ///
    /// # Errors
    /// [`MemoryError::Setting`] naming one without, and the choice that it belongs to.
    pub fn validate_used(&self) -> Result<(), MemoryError> {
        let Self { memory, bias, retention, learner, .. } = *self;
        let decays = !matches!(retention, Retention::None | Retention::Bregman);
        let (huber, lp, lq) = (bias == Bias::Huber, bias == Bias::Lp, retention == Retention::Lq);
        let steps = decays && learner != Learner::Proximal && !self.is_linear_loss();
        let steps_at =
            "a retention that decays, a learner that takes gradients and a loss that is not linear";
        let usual = Self::default();
        let options: [(_, _, bool, String, _); 8] = [
            (
                "huber_delta",
                huber,
                self.huber_delta != usual.huber_delta,
                self.huber_delta.to_string(),
                "bias = \"huber\"",
            ),
            ("p", lp, self.p != usual.p, self.p.to_string(), "bias = \"lp\""),
            ("smooth", lp, self.smooth, self.smooth.to_string(), "bias = \"lp\""),
            ("q", lq, self.q != usual.q, self.q.to_string(), "retention = \"lq\""),
            ("mirror", lq, self.mirror, self.mirror.to_string(), "retention = \"lq\""),
            (
                "l1",
                retention == Retention::ElasticNet,
                self.l1 != usual.l1,
                self.l1.to_string(),
                "retention = \"elastic_net\"",
            ),
            (
                "expansion",
                memory == Memory::Mlp,
                self.expansion != usual.expansion,
                self.expansion.to_string(),
                "memory = \"mlp\"",
            ),
            ("gradient_at", steps, self.gradient_at == GradientAt::Decayed, "decayed".into(), steps_at),
        ];
        match options.into_iter().find(|(_, used, given, ..)| !used && *given) {
            Some((name, .., found, owner)) => {
                Err(setting_error(NAME, name, found, format!("left out: it belongs to {owner}")))
            }
            None => Ok(()),
        }
    }

    /// Rows and columns of each weight for `key` key and `value` value channels a head: `[K, 1]` for a vector,
    /// `[K, V]` for a matrix, `[K, E K]` and `[E K, V]` for an MLP.
    pub fn layer_shapes(&self, key: usize, value: usize) -> Vec<[usize; 2]> {
        let hidden = self.expansion * key;
        match self.memory {
            Memory::Vector => vec![[key, 1]],
            Memory::Matrix => vec![[key, value]],
            Memory::Mlp => vec![[key, hidden], [hidden, value]],
        }
    }

    /// Whether the memory must not start at zero: a zero MLP has a zero gradient, a zero `A` no `l_q` direction.
    pub fn needs_start(&self) -> bool {
        self.memory == Memory::Mlp || self.retention == Retention::Lq
    }

    /// Whether a momentum is carried.
    pub fn has_momentum(&self) -> bool {
        matches!(self.learner, Learner::Momentum | Learner::NewtonSchulz)
    }

    /// Whether the history's Hessian is carried.
    pub fn has_history(&self) -> bool {
        self.retention == Retention::Bregman && self.bias == Bias::Squared
    }

    /// Whether the gradient is the same at every memory: the dot product on a memory linear in its weights.
    pub fn is_linear_loss(&self) -> bool {
        self.bias == Bias::DotProduct && self.memory != Memory::Mlp
    }

    /// Whether tensor operations form the weights of every token, and a training pass keeps them: where tokens follow one
    /// another, and where a map that is not linear gives the weights or the step.
    pub fn forms_weights(&self) -> bool {
        generic::is_sequential(self) || !chunked::attends(self)
    }

    /// Elements of one head's state for one sequence.
    pub fn state_elements(&self, key: usize, value: usize) -> usize {
        let weights: usize = self.layer_shapes(key, value).iter().map(|[rows, cols]| rows * cols).sum();
        let copies = 1 + usize::from(self.chunk > 1) + usize::from(self.has_momentum());
        let history = match (self.has_history(), self.memory) {
            (false, _) => 0,
            (true, Memory::Vector) => key,
            (true, _) => key * key,
        };
        weights * copies + history + (self.window - 1) * (key + value + 1)
    }
}
