//! Deep memories: a perceptron per head that every token it reads trains a little.
//!
//! The memory is `M(x) = x + LN(f(x))`, `f(x) = W_L^T s(... s(W_1^T x))`. Token t asks `M(k_t) = v_t`; with
//! `G_t` the gradient of that inner loss at the weights of the chunk's start,
//!
//! ```text
//! P_t = momentum_t P_{t-1} - rate_t G_t
//! W_t = (1 - decay_t) W_{t-1} + P_t
//! o_t = M_{W_t}(q_t)
//! ```
//!
//! with a chunk of one token the plain recurrence. A gate is one number a head, or one for every output of every
//! weight ([`DeepGate`]): column j of a weight then has its own `momentum_t[j]`, `rate_t[j]` and `decay_t[j]`. Chunks begin at absolute positions of a document, so that any
//! cut of the input gives the same result. Sources: TTT-MLP (2407.04620), Titans (2501.00663), Miras (2504.13173).
//!
//! Inside a chunk the weights are never formed: a layer's value at token t is
//! `keep_t h W + carry_t h P - sum_{s <= t} mix[t,s] (h . h_s) d_s`, with `h_s`, `d_s` the layer's input and error
//! at token s, an attention of the query's hidden vector over those of the chunk. The inner gradient is written out, so
//! that outer gradients flow through the updates: in a fused kernel on the flex device, else in tensor operations, which
//! also run windows and Newton-Schulz steps.
//!
//! A training pass keeps weights at chunk starts: memory grows linearly with the tokens, with the slope of
//! [`DeepMemory::training_bytes`].
//!
//! # What keeps it stable
//! A chunk adds up its tokens' gradients, and a layer that reads `h` answers a rate theta with `theta |h|^2`, behind
//! a LayerNorm over the variance of what it normalises: keep `chunk * theta * |h|^2 / variance` near or below one. A
//! decay towards zero that outruns the rate lets that variance fall to nothing, and gradients of the outer loss then
//! grow from chunk to chunk until they overflow; let decays begin near `1 / context`. [`DeepMemory::proximal`] bounds
//! `theta |h|^2` layer by layer.

mod check;
mod chunked;
mod config;
mod cpu;
mod cpu_blend;
mod cpu_mix;
mod cpu_norm;
mod factors;
mod gates;
mod kernel;
mod network;
mod orthogonal;
mod output_factors;
mod pieces;
pub mod reference;
mod sequences;
mod state;

use burn::tensor::Tensor;

use crate::check::Arguments;
use crate::{Offsets, OpError, Path};
use network::Network;

pub use config::{Activation, DeepMemory, InnerLoss, RateOf};
pub use gates::DeepGate;
pub use state::DeepState;

const NAME: &str = "deep_memory";

/// What the tokens of a sequence bring.
#[derive(Debug, Clone)]
pub struct DeepTokens {
    /// Queries `[B,T,H,K]`.
    pub q: Tensor<4>,
    /// Keys `[B,T,H,K]`.
    pub k: Tensor<4>,
    /// Values `[B,T,H,V]`.
    pub v: Tensor<4>,
    /// Rates, finite and not negative; 1 when absent.
    pub rate: Option<DeepGate>,
    /// Momentum factors in `[0, 1]`; no momentum when absent.
    pub momentum: Option<DeepGate>,
    /// Forgotten shares in `[0, 1]`; nothing is forgotten when absent.
    pub decay: Option<DeepGate>,
    /// Thresholds of the Huber loss `[B,T,H]`, above zero; 1 when absent.
    pub threshold: Option<Tensor<3>>,
}

/// What one token of each row brings: [`DeepTokens`] without the time axis.
#[derive(Debug, Clone)]
pub struct DeepToken {
    /// Queries `[B,H,K]`.
    pub q: Tensor<3>,
    /// Keys `[B,H,K]`.
    pub k: Tensor<3>,
    /// Values `[B,H,V]`.
    pub v: Tensor<3>,
    /// Rates.
    pub rate: Option<DeepGate<2, 3>>,
    /// Momentum factors.
    pub momentum: Option<DeepGate<2, 3>>,
    /// Forgotten shares.
    pub decay: Option<DeepGate<2, 3>>,
    /// Thresholds of the Huber loss `[B,H]`.
    pub threshold: Option<Tensor<2>>,
}

/// Weight and bias of the LayerNorm, `[H,V]` each.
#[derive(Debug, Clone)]
pub struct DeepNorm {
    /// Factor on the normalised numbers.
    pub weight: Tensor<2>,
    /// Added after it.
    pub bias: Tensor<2>,
}

/// A deep memory over a sequence.
///
/// `state` holds a row for each row of the batch, or for each document that `offsets` pack into the one row; see
/// [`DeepState::shared`] for the start of a document. Returns the output `[B,T,H,V]` and the states after the last
/// token; both carry gradients to every input and to the state given.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
pub fn deep_memory(
    memory: &DeepMemory,
    tokens: DeepTokens,
    norm: Option<&DeepNorm>,
    state: DeepState,
    offsets: Option<&Offsets>,
    path: Path,
) -> Result<(Tensor<4>, DeepState), OpError> {
    check::check(memory, &tokens, norm, &state, offsets)?;
    let fused = path.is_fused(NAME, &tokens.q)?;
    let moving = tokens.momentum.is_some() || memory.rate == RateOf::Reading;
    let [.., heads, key] = tokens.q.dims();
    let [.., value] = tokens.v.dims();
    let state = if moving { state.with_momentum() } else { state }.with_window(memory, [heads, key, value]);
    if tokens.q.dims()[1] == 0 {
        return Ok((tokens.v, state));
    }
    if fused && kernel::supports(memory) && !tokens.has_output_gates() {
        return Ok(kernel::run(memory, norm, tokens, state, offsets));
    }
    Ok(sequences::run_all(memory, norm, fused, tokens, state, offsets))
}

/// One token of a deep memory, for every row of the batch; rows may be at different positions.
///
/// Returns the output `[B,H,V]` and the next state.
///
/// # Errors
/// [`OpError::Shape`] or [`OpError::Value`] name the argument at fault.
pub fn deep_memory_step(
    memory: &DeepMemory,
    token: DeepToken,
    norm: Option<&DeepNorm>,
    state: DeepState,
) -> Result<(Tensor<3>, DeepState), OpError> {
    let vector = |x: Tensor<3>| x.unsqueeze_dim::<4>(1);
    let gate = |gate: Option<DeepGate<2, 3>>| {
        gate.map(|gate| gate.map(|x| x.clone().unsqueeze_dim(1), |x| vector(x.clone())))
    };
    let DeepToken { q, k, v, rate, momentum, decay, threshold } = token;
    let tokens = DeepTokens {
        q: vector(q),
        k: vector(k),
        v: vector(v),
        rate: gate(rate),
        momentum: gate(momentum),
        decay: gate(decay),
        threshold: threshold.map(|x| x.unsqueeze_dim(1)),
    };
    let (o, state) = deep_memory(memory, tokens, norm, state, None, Path::Auto)?;
    Ok((o.squeeze_dim(1), state))
}

/// What the memory returns for `q [N,T,H,K]` as it is now, `[N,T,H,V]`; nothing is written.
///
/// # Errors
/// [`OpError::Shape`] or [`OpError::Value`] name the argument at fault.
pub fn deep_memory_read(
    memory: &DeepMemory,
    q: Tensor<4>,
    norm: Option<&DeepNorm>,
    state: &DeepState,
) -> Result<Tensor<4>, OpError> {
    let [rows, time, heads, key] = q.dims();
    let value = state.current.last().map_or(0, |weight| weight.dims()[3]);
    let arguments = Arguments::new(NAME, &q);
    memory.check(key, value)?;
    check::check_norm(&arguments, norm, heads, value)?;
    state
        .check(memory, [rows, heads, key, value], |weight, shape| arguments.tensor("state", weight, shape))?;
    let network =
        Network { memory, norm: norm.map(|norm| norm.spread(rows)), fused: Path::Auto.is_fused(NAME, &q)? };
    let flat = |weight: &Tensor<4>| {
        let [rows, heads, from, to] = weight.dims();
        weight.clone().reshape([rows * heads, from, to])
    };
    let x = q.swap_dims(1, 2).reshape([rows * heads, time, key]);
    let y = network.value(x, |layer, h| h.matmul(flat(&state.current[layer])));
    Ok(y.reshape([rows, heads, time, value]).swap_dims(1, 2))
}
