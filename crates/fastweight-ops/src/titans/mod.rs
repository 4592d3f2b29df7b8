//! The matrix memory of Titans: gradient descent with momentum and forgetting on `1/2 |M^T k - v|^2`.
//!
//! `G_t = k_t (M_{t-1}^T k_t - v_t)^T`, `S_t = eta_t S_{t-1} - theta_t G_t`, `M_t = (1 - alpha_t) M_{t-1} + S_t`,
//! `o_t = scale * M_t^T q_t`: memory `M`, momentum ("surprise") `S`, rate `theta`, momentum factor `eta`, forgetting
//! `alpha` (Behrouz et al. 2025, arXiv 2501.00663; double `theta` for a loss without the half). The recurrence is
//! the one of [`momentum_delta`](crate::momentum_delta).

pub mod reference;

use burn::tensor::Tensor;

use crate::check::Arguments;
use crate::momentum_delta::{Multipliers, run, run_step};
use crate::{OpError, SequenceOptions};

const NAME: &str = "titans_memory";

/// The matrix memory of Titans over a sequence; a token's output sees the token itself.
///
/// `q, k [B,T,H,K]`, `v [B,T,H,V]`, `theta, eta, alpha [B,T,H]` (plain numbers: rate, momentum in `[0, 1]`, forgetting in
/// `[0, 1]`, where 1 forgets everything), `initial` memory and momentum `[N,H,K,V]` each (zero when absent). `N` is
/// the batch, or the number of documents when [`SequenceOptions::offsets`] pack them into one row.
/// Returns the output `[B,T,H,V]`, the final memories and the final momenta; all carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Gate`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
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
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.sequence(&q, &k, &v, options.scale, options.offsets.as_ref())?;
    for (name, numbers) in [("theta", &theta), ("eta", &eta), ("alpha", &alpha)] {
        arguments.tensor(name, numbers, [dims.batch, dims.time, dims.heads])?;
    }
    let (memory, momentum) = initial.unzip();
    let shape = [dims.states(), dims.heads, dims.key, dims.value];
    let memory = arguments.state("initial memory", memory, shape, &q)?;
    let momentum = arguments.state("initial momentum", momentum, shape, &q)?;
    run(NAME, [q, k.clone(), k, v], multipliers(theta, eta, alpha), [memory, momentum], dims, options)
}

fn multipliers<const D: usize>(theta: Tensor<D>, eta: Tensor<D>, alpha: Tensor<D>) -> Multipliers<D> {
    let write = alpha.ones_like();
    Multipliers { retain: alpha.neg().add_scalar(1.0), momentum: eta, write, rate: theta }
}

/// One token of the matrix memory of Titans, for every row of the batch.
///
/// `q, k [B,H,K]`, `v [B,H,V]`, `theta, eta, alpha [B,H]`, `state` memory and momentum `[B,H,K,V]` each, `scale`
/// `1 / sqrt(K)` when absent. Returns the output `[B,H,V]`, the next memory and the next momentum. They are updated
/// in place when nobody else holds them and no gradient is needed.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] or [`OpError::Gate`] name the argument at fault.
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
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.token(&q, &k, &v, scale)?;
    for (name, numbers) in [("theta", &theta), ("eta", &eta), ("alpha", &alpha)] {
        arguments.tensor(name, numbers, [dims.batch, dims.heads])?;
    }
    let shape = [dims.batch, dims.heads, dims.key, dims.value];
    arguments.tensor("memory", &state.0, shape)?;
    arguments.tensor("momentum", &state.1, shape)?;
    run_step(NAME, [q, k.clone(), k, v], multipliers(theta, eta, alpha), state.into(), dims, scale)
}
