//! The diagonal-plus-low-rank (DPLR) recurrence: a state matrix that is multiplied by a diagonal and by a
//! rank-one matrix at every token.
//!
//! `S_t = diag(exp(w_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T`, `o_t = scale * S_t^T q_t`; `a` reads the state
//! before its decay. RWKV-7 (Peng et al. 2025, arXiv 2503.14456) is `a = -kk`, `b = kk * a_lr` with a unit vector
//! `kk`. [KDA](crate::kda) is `a = k exp(g)`, `b = -beta k`, `v -> beta v`. Whether the state stays bounded is up to
//! `w`, `a` and `b`.
//!
//! The fused kernel keeps what [`cpu`] says for the backward pass. On tensor operations a forward and backward pass
//! takes about 22 kB a token and head of 64 by 64, in float32 (at most; linear in the tokens).

mod composed;
pub mod cpu;
pub mod reference;

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::check::{Arguments, default_scale, tracked};
use crate::fused::{apply, step_in_place};
use crate::{OpError, Path, SequenceOptions};

const NAME: &str = "dplr";

/// The diagonal-plus-low-rank recurrence over a sequence.
///
/// `q, k, a, b [B,T,H,K]`, `v [B,T,H,V]`, `w [B,T,H,K]` (log decay `<= 0` of each key channel; `-inf` forgets it),
/// `initial [N,H,K,V]` (zero when absent). `N` is the batch, or the number of documents when
/// [`SequenceOptions::offsets`] pack them into one row.
/// Returns the output `[B,T,H,V]` and the final states `[N,H,K,V]`; both carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Gate`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
#[allow(clippy::too_many_arguments)]
pub fn dplr(
    q: Tensor<4>,
    w: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    a: Tensor<4>,
    b: Tensor<4>,
    initial: Option<Tensor<4>>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.sequence(&q, &k, &v, options.scale, options.offsets.as_ref())?;
    arguments.gate("w", &w, q.dims())?;
    arguments.tensor("a", &a, q.dims())?;
    arguments.tensor("b", &b, q.dims())?;
    let initial =
        arguments.state("initial", initial, [dims.states(), dims.heads, dims.key, dims.value], &q)?;
    let fused = options.path.is_fused(NAME, &q)?;
    if dims.time == 0 {
        return Ok((v, initial));
    }
    if fused {
        let inputs = [q, w, k, v, a, b, initial].map(Tensor::into_dispatch);
        let [o, state, _] = apply(Arc::new(cpu::FusedDplr { dims }), inputs.into());
        return Ok((Tensor::from_dispatch(o), Tensor::from_dispatch(state)));
    }
    let scale = options.scale.map_or_else(|| default_scale(dims.key), f64::from);
    Ok(composed::run([q, w, k, v, a, b], initial, options.offsets.as_ref(), scale))
}

/// One token of the diagonal-plus-low-rank recurrence, for every row of the batch.
///
/// `q, w, k, a, b [B,H,K]`, `v [B,H,V]`, `state [B,H,K,V]`, `scale` `1 / sqrt(K)` when absent.
/// Returns the output `[B,H,V]` and the next state. The state is updated in place when nobody else holds it
/// and no gradient is needed.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] or [`OpError::Gate`] name the argument at fault.
#[allow(clippy::too_many_arguments)]
pub fn dplr_step(
    q: Tensor<3>,
    w: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    a: Tensor<3>,
    b: Tensor<3>,
    state: Tensor<4>,
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.token(&q, &k, &v, scale)?;
    arguments.gate("w", &w, q.dims())?;
    arguments.tensor("a", &a, q.dims())?;
    arguments.tensor("b", &b, q.dims())?;
    arguments.tensor("state", &state, [dims.batch, dims.heads, dims.key, dims.value])?;
    let gradients = tracked([&q, &w, &k, &v, &a, &b]) || tracked([&state]);
    if Path::Auto.is_fused(NAME, &q)? && !gradients {
        let shape = v.dims();
        let inputs = [q, w, k, v, a, b].map(Tensor::into_dispatch);
        let (o, state) = step_in_place(state, inputs.into(), &shape, |state, x, out| {
            cpu::step(&dims, state, x[0], x[1], x[2], x[3], x[4], x[5], out);
        });
        return Ok((Tensor::from_dispatch(o), state));
    }
    let options = SequenceOptions { scale, ..SequenceOptions::default() };
    let [q, w, k, v, a, b] = [q, w, k, v, a, b].map(|x| x.unsqueeze_dim(1));
    let (o, state) = dplr(q, w, k, v, a, b, Some(state), &options)?;
    Ok((o.squeeze_dim(1), state))
}
