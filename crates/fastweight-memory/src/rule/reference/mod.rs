//! The definition of every sound rule: a float64 token loop over one sequence of one head, on slices.
//!
//! A memory is a list of [`Layer`]s, key first: `[K, 1]` for a vector, `[K, V]` for a matrix, two for an MLP.
//! [`step`] is the closed form of one token, [`objective`] the learning-retaining objective that it minimises.

mod inner;
mod objective;
mod outputs;
mod retention;

pub(super) use inner::{NEWTON_SCHULZ, NEWTON_SCHULZ_EPS};
pub use inner::{gradient, loss, newton_schulz, read};
pub use objective::objective;
pub use outputs::{OutputToken, step_outputs};
pub use retention::{lq_norm, mirror_lq, normalise_lq};

use super::{Bias, GradientAt, Learner, Memory, Retention, Rule};
use retention::{decayed, history_of, primal, proximal, retain};

/// One weight of a memory, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Rows: the inputs of the weight.
    pub rows: usize,
    /// Columns: its outputs.
    pub cols: usize,
    /// `rows * cols` numbers, row by row.
    pub values: Vec<f64>,
}

/// All weights of a memory.
pub type Weights = Vec<Layer>;

impl Layer {
    /// A weight of zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, values: vec![0.0; rows * cols] }
    }

    /// A weight of the given numbers, row by row.
    ///
    /// # Panics
    /// When there are not `rows * cols` of them.
    pub fn new(rows: usize, cols: usize, values: Vec<f64>) -> Self {
        assert_eq!(values.len(), rows * cols, "numbers of a weight of {rows} rows and {cols} columns");
        Self { rows, cols, values }
    }

    pub(super) fn at(&self, row: usize, col: usize) -> f64 {
        self.values[row * self.cols + col]
    }
}

/// `a + factor * b`, weight by weight.
pub fn add(a: &[Layer], factor: f64, b: &[Layer]) -> Weights {
    let sum = |(a, b): (&Layer, &Layer)| Layer {
        values: a.values.iter().zip(&b.values).map(|(a, b)| a + factor * b).collect(),
        ..a.clone()
    };
    a.iter().zip(b).map(sum).collect()
}

/// `<a, b>`, summed over all weights.
pub fn inner_product(a: &[Layer], b: &[Layer]) -> f64 {
    a.iter().zip(b).flat_map(|(a, b)| a.values.iter().zip(&b.values)).map(|(a, b)| a * b).sum()
}

/// One token.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Query `[K]`.
    pub q: Vec<f64>,
    /// Key `[K]`.
    pub k: Vec<f64>,
    /// Value `[V]`.
    pub v: Vec<f64>,
    /// Rate `eta` of the write.
    pub rate: f64,
    /// Decay `alpha = exp(g)`: one number, or one a key channel for [`Retention::ChannelDecay`].
    pub decay: Vec<f64>,
    /// Momentum `mu`.
    pub momentum: f64,
}

/// What is carried from token to token.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// The memory that is read, `W`.
    pub memory: Weights,
    /// The dual memory `A` of the `l_q` retention, otherwise empty.
    pub dual: Weights,
    /// The memory at the chunk's start.
    pub start: Weights,
    /// The momentum `P`.
    pub momentum: Weights,
    /// `I + sum eta k k^T [K, K]` (of a vector memory its diagonal `[K, 1]`), for [`Retention::Bregman`].
    pub history: Layer,
    /// The last `window - 1` tokens, oldest first.
    pub past: Vec<Token>,
    /// Tokens read.
    pub position: usize,
}

impl State {
    /// The state before the first token of a memory that starts at `memory` (for the `l_q` retention: whose dual
    /// starts there).
    pub fn new(rule: &Rule, memory: Weights) -> Self {
        let key = memory[0].rows;
        let dual = if rule.retention == Retention::Lq { memory.clone() } else { Vec::new() };
        let memory = if rule.retention == Retention::Lq { primal(rule, &dual) } else { memory };
        let zero = add(&memory, -1.0, &memory);
        let history = match rule.memory {
            Memory::Vector => Layer::new(key, 1, vec![1.0; key]),
            _ => Layer::new(key, key, (0..key * key).map(|i| f64::from(i % (key + 1) == 0)).collect()),
        };
        Self { start: memory.clone(), momentum: zero, memory, dual, history, past: Vec::new(), position: 0 }
    }

    /// [`State::new`] from zero, or for [`Retention::Kl`] from rows that weigh every key alike.
    pub fn zero(rule: &Rule, key: usize, value: usize) -> Self {
        let layers = rule.layer_shapes(key, value).into_iter().map(|[rows, cols]| {
            let start = if rule.retention == Retention::Kl { 1.0 / rows as f64 } else { 0.0 };
            Layer::new(rows, cols, vec![start; rows * cols])
        });
        Self::new(rule, layers.collect())
    }
}

/// The learner's descent direction `D` of a token (the rate included), and the momentum after it.
fn direction(rule: &Rule, state: &State, token: &Token) -> (Weights, Weights) {
    let start = if state.position.is_multiple_of(rule.chunk) { &state.memory } else { &state.start };
    let at = match rule.gradient_at {
        GradientAt::Previous => start.clone(),
        GradientAt::Decayed => decayed(rule, state, token),
    };
    let zero = add(&at, -1.0, &at);
    let window = state.past.iter().chain([token]);
    let gradient =
        window.fold(zero, |sum, token| add(&sum, token.rate, &gradient(rule, &at, &token.k, &token.v)));
    let momentum = add(&add(&gradient, -2.0, &gradient), token.momentum, &state.momentum);
    match rule.learner {
        Learner::Momentum => (momentum.clone(), momentum),
        Learner::NewtonSchulz => (momentum.iter().map(newton_schulz).collect(), momentum),
        Learner::Gradient | Learner::Proximal => (add(&gradient, -2.0, &gradient), state.momentum.clone()),
    }
}

/// Reads one token: writes it to the memory and returns the reading `M(W_t; q) [V]`.
///
/// The rule must be valid and the sizes must fit.
pub fn step(rule: &Rule, state: &mut State, token: &Token) -> Vec<f64> {
    if state.position.is_multiple_of(rule.chunk) {
        state.start = state.memory.clone();
    }
    let (direction, momentum) = direction(rule, state, token);
    if rule.learner == Learner::Proximal && rule.bias != Bias::DotProduct {
        state.memory = proximal(rule, state, token);
        if rule.retention == Retention::Bregman {
            state.history = history_of(state, token);
        }
    } else {
        (state.memory, state.dual) = retain(rule, state, token, &direction);
    }
    state.momentum = momentum;
    state.past.push(token.clone());
    let first = state.past.len().saturating_sub(rule.window - 1);
    state.past.drain(..first);
    state.position += 1;
    read(rule, &state.memory, &token.q)
}

/// Reads a sequence; returns the readings `[T, V]`.
pub fn run(rule: &Rule, state: &mut State, tokens: &[Token]) -> Vec<Vec<f64>> {
    tokens.iter().map(|token| step(rule, state, token)).collect()
}
