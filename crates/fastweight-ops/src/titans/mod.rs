//! The matrix memory of Titans: gradient descent with momentum and forgetting on `1/2 |M^T k - v|^2`.
//!
//! `G_t = k_t (M_{t-1}^T k_t - v_t)^T`, `S_t = eta_t S_{t-1} - theta_t G_t`, `M_t = (1 - alpha_t) M_{t-1} + S_t`,
//! `o_t = scale * M_t^T q_t`: memory `M`, momentum ("surprise") `S`, rate `theta`, momentum factor `eta`, forgetting
//! `alpha` (Behrouz et al. 2025, arXiv 2501.00663; double `theta` for a loss without the half). The recurrence is
//! the one of [`momentum_delta`](crate::momentum_delta).
//!
//! The gates are numbers for each head ([`titans_memory`]) or, as the paper allows, for each channel
//! ([`titans_memory_channelwise`]). A channel is an output of the memory: column `j` of `M` and `S [K,V]` has its own
//! `theta_t[j]`, `eta_t[j]` and `alpha_t[j]`. On tensor operations the channel form runs token after token, and a forward and
//! backward pass takes about 42 kB a token and head of 64 by 64 (in float32, linear in the tokens).

pub mod reference;

use burn::tensor::Tensor;

use crate::check::Arguments;
use crate::momentum_delta::{Multipliers, run, run_step};
use crate::{OpError, SequenceOptions};

const NAME: &str = "titans_memory";
const CHANNELWISE: &str = "titans_memory_channelwise";

/// The matrix memory of Titans over a sequence; a token's output sees the token itself.
///
/// `q, k [B,T,H,K]`, `v [B,T,H,V]`, `theta, eta, alpha [B,T,H]` (plain numbers: rate, momentum in `[0, 1]`, forgetting in
/// `[0, 1]`, where 1 forgets everything), `initial` memory and momentum `[N,H,K,V]` each (zero when absent). `N` is
/// the batch, or the number of documents when [`SequenceOptions::offsets`] pack them into one row.
/// Returns the output `[B,T,H,V]`, the final memories and the final momenta; all carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Offsets`], [`OpError::PackedBatch`] or [`OpError::NoFusedKernel`]
/// name the argument at fault.
#[allow(clippy::too_many_arguments)]
pub fn titans_memory(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    theta: Tensor<3>,
    eta: Tensor<3>,
    alpha: Tensor<3>,
    initial: Option<(Tensor<4>, Tensor<4>)>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>), OpError> {
    sequence(NAME, [q, k, v], [theta, eta, alpha], initial, options)
}

/// [`titans_memory`] with gates for each channel: `theta, eta, alpha [B,T,H,V]`, a number for each column of the memory.
///
/// # Errors
/// As [`titans_memory`].
#[allow(clippy::too_many_arguments)]
pub fn titans_memory_channelwise(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    theta: Tensor<4>,
    eta: Tensor<4>,
    alpha: Tensor<4>,
    initial: Option<(Tensor<4>, Tensor<4>)>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>), OpError> {
    sequence(CHANNELWISE, [q, k, v], [theta, eta, alpha], initial, options)
}

/// One token of the matrix memory of Titans, for every row of the batch.
///
/// `q, k [B,H,K]`, `v [B,H,V]`, `theta, eta, alpha [B,H]`, `state` memory and momentum `[B,H,K,V]` each, `scale`
/// `1 / sqrt(K)` when absent. Returns the output `[B,H,V]`, the next memory and the next momentum. They are updated
/// in place when nobody else holds them and no gradient is needed.
///
/// # Errors
/// [`OpError::Shape`] or [`OpError::Value`] name the argument at fault.
#[allow(clippy::too_many_arguments)]
pub fn titans_memory_step(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    theta: Tensor<2>,
    eta: Tensor<2>,
    alpha: Tensor<2>,
    state: (Tensor<4>, Tensor<4>),
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>, Tensor<4>), OpError> {
    step(NAME, [q, k, v], [theta, eta, alpha], state, scale)
}

/// [`titans_memory_step`] with gates for each channel, `theta, eta, alpha [B,H,V]`.
///
/// # Errors
/// As [`titans_memory_step`].
#[allow(clippy::too_many_arguments)]
pub fn titans_memory_channelwise_step(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    theta: Tensor<3>,
    eta: Tensor<3>,
    alpha: Tensor<3>,
    state: (Tensor<4>, Tensor<4>),
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>, Tensor<4>), OpError> {
    step(CHANNELWISE, [q, k, v], [theta, eta, alpha], state, scale)
}

/// Gates `[B,T,H]` or `[B,T,H,V]`.
fn sequence<const D: usize>(
    name: &'static str,
    [q, k, v]: [Tensor<4>; 3],
    gates: [Tensor<D>; 3],
    initial: Option<(Tensor<4>, Tensor<4>)>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<4>), OpError> {
    let arguments = Arguments::new(name, &q);
    let dims = arguments.sequence(&q, &k, &v, options.scale, options.offsets.as_ref())?;
    let multipliers = multipliers(&arguments, gates, [dims.batch, dims.time, dims.heads], dims.value)?;
    let (memory, momentum) = initial.unzip();
    let shape = [dims.states(), dims.heads, dims.key, dims.value];
    let memory = arguments.state("initial memory", memory, shape, &q)?;
    let momentum = arguments.state("initial momentum", momentum, shape, &q)?;
    run(name, [q, k.clone(), k, v], multipliers, [memory, momentum], dims, options)
}

/// Gates `[B,H]` or `[B,H,V]`.
fn step<const D: usize>(
    name: &'static str,
    [q, k, v]: [Tensor<3>; 3],
    gates: [Tensor<D>; 3],
    state: (Tensor<4>, Tensor<4>),
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>, Tensor<4>), OpError> {
    let arguments = Arguments::new(name, &q);
    let dims = arguments.token(&q, &k, &v, scale)?;
    let multipliers = multipliers(&arguments, gates, [dims.batch, dims.heads], dims.value)?;
    let shape = [dims.batch, dims.heads, dims.key, dims.value];
    arguments.tensor("memory", &state.0, shape)?;
    arguments.tensor("momentum", &state.1, shape)?;
    run_step(name, [q, k.clone(), k, v], multipliers, state.into(), dims, scale)
}

/// Checks the gates `theta, eta, alpha`: numbers `per_head`, or for each value channel of a head with one axis more.
fn multipliers<const D: usize, const H: usize>(
    arguments: &Arguments,
    gates: [Tensor<D>; 3],
    per_head: [usize; H],
    value: usize,
) -> Result<Multipliers<D>, OpError> {
    let shape = std::array::from_fn(|axis| per_head.get(axis).copied().unwrap_or(value));
    for (name, gate) in ["theta", "eta", "alpha"].into_iter().zip(&gates) {
        arguments.tensor(name, gate, shape)?;
    }
    let [theta, eta, alpha] = gates;
    let write = (D == H).then(|| alpha.ones_like());
    Ok(Multipliers { retain: alpha.neg().add_scalar(1.0), momentum: eta, rate: theta, write })
}
