//! Comba: a delta rule whose correction reads the memory before its decay, and whose query is corrected too.
//!
//! `S_t = (exp(g_t) I - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`, `o_t = scale * S_t^T (q_t - d k_t)` with one
//! learned `b` and one learned `d` a head (Hu et al. 2025, arXiv 2506.02475). It runs as the
//! [diagonal-plus-low-rank recurrence](crate::dplr) with `a = k`, `b -> -b beta k`, `v -> beta v`, `q -> q - d k`.

pub mod reference;

use burn::tensor::Tensor;

use crate::check::Arguments;
use crate::dplr::{dplr, dplr_step};
use crate::{OpError, SequenceOptions};

const NAME: &str = "comba";

/// Comba over a sequence.
///
/// `q, k [B,T,H,K]`, `v [B,T,H,V]`, `beta [B,T,H]`, `gate [B,T,H]` (log decay `<= 0`), `b, d [H]`, `initial
/// [N,H,K,V]` (zero when absent). `N` is the batch, or the number of documents when
/// [`SequenceOptions::offsets`] pack them into one row.
/// Returns the output `[B,T,H,V]` and the final states `[N,H,K,V]`; both carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Gate`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
#[allow(clippy::too_many_arguments)]
pub fn comba(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    beta: Tensor<3>,
    gate: Tensor<3>,
    b: Tensor<1>,
    d: Tensor<1>,
    initial: Option<Tensor<4>>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.sequence(&q, &k, &v, options.scale, options.offsets.as_ref())?;
    let per_token = [dims.batch, dims.time, dims.heads];
    arguments.tensor("beta", &beta, per_token)?;
    arguments.gate("gate", &gate, per_token)?;
    arguments.tensor("b", &b, [dims.heads])?;
    arguments.tensor("d", &d, [dims.heads])?;
    let initial =
        arguments.state("initial", initial, [dims.states(), dims.heads, dims.key, dims.value], &q)?;
    options.path.is_fused(NAME, &q)?;
    let of_head = |x: Tensor<1>| x.reshape([1, 1, dims.heads, 1]);
    let beta = beta.unsqueeze_dim::<4>(3);
    let gate = gate.unsqueeze_dim::<4>(3).expand(q.dims());
    let q = q - k.clone() * of_head(d);
    let correction = k.clone() * (beta.clone() * of_head(b)).neg();
    dplr(q, gate, k.clone(), v * beta, k, correction, Some(initial), options)
}

/// One token of Comba, for every row of the batch.
///
/// `q, k [B,H,K]`, `v [B,H,V]`, `beta, gate [B,H]`, `b, d [H]`, `state [B,H,K,V]`, `scale` `1 / sqrt(K)` when absent.
/// Returns the output `[B,H,V]` and the next state. The state is updated in place when nobody else holds it
/// and no gradient is needed.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] or [`OpError::Gate`] name the argument at fault.
#[allow(clippy::too_many_arguments)]
pub fn comba_step(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    beta: Tensor<2>,
    gate: Tensor<2>,
    b: Tensor<1>,
    d: Tensor<1>,
    state: Tensor<4>,
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.token(&q, &k, &v, scale)?;
    arguments.tensor("beta", &beta, [dims.batch, dims.heads])?;
    arguments.gate("gate", &gate, [dims.batch, dims.heads])?;
    arguments.tensor("b", &b, [dims.heads])?;
    arguments.tensor("d", &d, [dims.heads])?;
    arguments.tensor("state", &state, [dims.batch, dims.heads, dims.key, dims.value])?;
    let of_head = |x: Tensor<1>| x.reshape([1, dims.heads, 1]);
    let beta = beta.unsqueeze_dim::<3>(2);
    let gate = gate.unsqueeze_dim::<3>(2).expand(q.dims());
    let q = q - k.clone() * of_head(d);
    let correction = k.clone() * (beta.clone() * of_head(b)).neg();
    dplr_step(q, gate, k.clone(), v * beta, k, correction, state, scale)
}
