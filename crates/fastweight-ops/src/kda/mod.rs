//! Kimi delta attention (KDA): the gated delta rule in which every key channel forgets at its own rate.
//!
//! `S~_t = diag(exp(g_t)) S_{t-1}`, `u_t = beta_t (v_t - S~_t^T k_t)`, `S_t = S~_t + k_t u_t^T`,
//! `o_t = scale * S_t^T q_t` with a log gate of `K` channels (Kimi Linear, 2025, arXiv 2510.26692). With equal
//! channels it is the [gated delta rule](crate::delta). With unit keys and `beta` in `[0, 2]` the state stays
//! bounded.
//!
//! The fused kernel keeps what [`cpu`] says for the backward pass. On tensor operations a forward and backward pass
//! takes about 14 kB a token and head of 64 by 64, in float32 (at most; linear in the tokens).

mod composed;
pub mod cpu;
pub mod reference;

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::check::{Arguments, default_scale, tracked};
use crate::fused::{apply, step_in_place};
use crate::{OpError, Path, SequenceOptions};

const NAME: &str = "kimi_delta_attention";

/// Kimi delta attention over a sequence.
///
/// `q, k [B,T,H,K]`, `v [B,T,H,V]`, `beta [B,T,H]`, `gate [B,T,H,K]` (log decay `<= 0` of each key channel; `-inf`
/// forgets it), `initial [N,H,K,V]` (zero when absent). `N` is the batch, or the number of documents when
/// [`SequenceOptions::offsets`] pack them into one row.
/// Returns the output `[B,T,H,V]` and the final states `[N,H,K,V]`; both carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Gate`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
pub fn kimi_delta_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    beta: Tensor<3>,
    gate: Tensor<4>,
    initial: Option<Tensor<4>>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.sequence(&q, &k, &v, options.scale, options.offsets.as_ref())?;
    arguments.tensor("beta", &beta, [dims.batch, dims.time, dims.heads])?;
    arguments.gate("gate", &gate, q.dims())?;
    let initial =
        arguments.state("initial", initial, [dims.states(), dims.heads, dims.key, dims.value], &q)?;
    let fused = options.path.is_fused(NAME, &q)?;
    if dims.time == 0 {
        return Ok((v, initial));
    }
    if fused {
        let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), beta.into_dispatch()];
        inputs.extend([gate.into_dispatch(), initial.into_dispatch()]);
        let [o, state, _] = apply(Arc::new(cpu::FusedKda { dims }), inputs);
        return Ok((Tensor::from_dispatch(o), Tensor::from_dispatch(state)));
    }
    let scale = options.scale.map_or_else(|| default_scale(dims.key), f64::from);
    let tokens = [q, k, v, beta.unsqueeze_dim(3), gate];
    Ok(composed::run(tokens, initial, options.offsets.as_ref(), scale))
}

/// One token of Kimi delta attention, for every row of the batch.
///
/// `q, k, gate [B,H,K]`, `v [B,H,V]`, `beta [B,H]`, `state [B,H,K,V]`, `scale` `1 / sqrt(K)` when absent.
/// Returns the output `[B,H,V]` and the next state. The state is updated in place when nobody else holds it
/// and no gradient is needed.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] or [`OpError::Gate`] name the argument at fault.
pub fn kimi_delta_attention_step(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    beta: Tensor<2>,
    gate: Tensor<3>,
    state: Tensor<4>,
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.token(&q, &k, &v, scale)?;
    arguments.tensor("beta", &beta, [dims.batch, dims.heads])?;
    arguments.gate("gate", &gate, q.dims())?;
    arguments.tensor("state", &state, [dims.batch, dims.heads, dims.key, dims.value])?;
    let gradients = tracked([&q, &k, &v, &gate]) || tracked([&beta]) || tracked([&state]);
    if Path::Auto.is_fused(NAME, &q)? && !gradients {
        let shape = v.dims();
        let inputs = [
            q.into_dispatch(),
            k.into_dispatch(),
            v.into_dispatch(),
            beta.into_dispatch(),
            gate.into_dispatch(),
        ];
        let (o, state) = step_in_place(state, inputs.into(), &shape, |state, x, out| {
            cpu::step(&dims, state, x[0], x[1], x[2], x[3], x[4], out);
        });
        return Ok((Tensor::from_dispatch(o), state));
    }
    let options = SequenceOptions { scale, ..SequenceOptions::default() };
    let [q, k, v, gate] = [q, k, v, gate].map(|x| x.unsqueeze_dim(1));
    let (o, state) = kimi_delta_attention(q, k, v, beta.unsqueeze_dim(1), gate, Some(state), &options)?;
    Ok((o.squeeze_dim(1), state))
}
