//! The delta rule, plain and gated: a matrix memory that corrects what a key reads before it writes.
//!
//! `S~_t = exp(g_t) S_{t-1}`, `u_t = beta_t (v_t - S~_t^T k_t)`, `S_t = S~_t + k_t u_t^T`,
//! `o_t = scale * S_t^T q_t` (DeltaNet, Yang et al. 2024, arXiv 2406.06484; Gated DeltaNet, 2412.06464).
//! With unit keys and `beta` in `[0, 2]` the state stays bounded.

pub mod cpu;
pub mod reference;

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::check::{Arguments, default_scale, tracked};
use crate::chunked::{self, Tokens};
use crate::fused::{apply, step_in_place};
use crate::{OpError, Path, SequenceOptions};

const NAME: &str = "delta_rule";

/// The delta rule over a sequence.
///
/// `q, k [B,T,H,K]`, `v [B,T,H,V]`, `beta [B,T,H]`, `gate [B,T,H]` (log decay `<= 0`, none when absent; `-inf`
/// forgets everything), `initial [N,H,K,V]` (zero when absent). `N` is the batch, or the number of
/// documents when [`SequenceOptions::offsets`] pack them into one row.
/// Returns the output `[B,T,H,V]` and the final states `[N,H,K,V]`; both carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Gate`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
pub fn delta_rule(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    beta: Tensor<3>,
    gate: Option<Tensor<3>>,
    initial: Option<Tensor<4>>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.sequence(&q, &k, &v, options.scale, options.offsets.as_ref())?;
    let per_token = [dims.batch, dims.time, dims.heads];
    arguments.tensor("beta", &beta, per_token)?;
    if let Some(gate) = &gate {
        arguments.gate("gate", gate, per_token)?;
    }
    let initial =
        arguments.state("initial", initial, [dims.states(), dims.heads, dims.key, dims.value], &q)?;
    let fused = options.path.is_fused(NAME, &q)?;
    if dims.time == 0 {
        return Ok((v, initial));
    }
    if fused {
        let op = cpu::FusedDelta { dims, gated: gate.is_some() };
        let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch()];
        inputs.extend([beta.into_dispatch(), initial.into_dispatch()]);
        inputs.extend(gate.map(Tensor::into_dispatch));
        let [o, state, _] = apply(Arc::new(op), inputs);
        return Ok((Tensor::from_dispatch(o), Tensor::from_dispatch(state)));
    }
    let scale = options.scale.map_or_else(|| default_scale(dims.key), f64::from);
    Ok(chunked::run(Tokens { q, k, v, beta: Some(beta), gate }, initial, options.offsets.as_ref(), scale))
}

/// One token of the delta rule, for every row of the batch.
///
/// `q, k [B,H,K]`, `v [B,H,V]`, `beta, gate [B,H]`, `state [B,H,K,V]`, `scale` `1 / sqrt(K)` when absent.
/// Returns the output `[B,H,V]` and the next state. The state is updated in place when nobody else holds it
/// and no gradient is needed.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] or [`OpError::Gate`] name the argument at fault.
pub fn delta_rule_step(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    beta: Tensor<2>,
    gate: Option<Tensor<2>>,
    state: Tensor<4>,
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.token(&q, &k, &v, scale)?;
    arguments.tensor("beta", &beta, [dims.batch, dims.heads])?;
    if let Some(gate) = &gate {
        arguments.gate("gate", gate, [dims.batch, dims.heads])?;
    }
    arguments.tensor("state", &state, [dims.batch, dims.heads, dims.key, dims.value])?;
    let gradients = tracked([&q, &k, &v]) || tracked([&beta]) || tracked(&gate) || tracked([&state]);
    if Path::Auto.is_fused(NAME, &q)? && !gradients {
        let shape = v.dims();
        let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), beta.into_dispatch()];
        inputs.extend(gate.map(Tensor::into_dispatch));
        let (o, state) = step_in_place(state, inputs, &shape, |state, x, out| {
            cpu::step(&dims, state, x[0], x[1], x[2], x[3], x.get(4).copied(), out);
        });
        return Ok((Tensor::from_dispatch(o), state));
    }
    let options = SequenceOptions { scale, ..SequenceOptions::default() };
    let gate = gate.map(|gate| gate.unsqueeze_dim(1));
    let (q, k, v) = (q.unsqueeze_dim(1), k.unsqueeze_dim(1), v.unsqueeze_dim(1));
    let (o, state) = delta_rule(q, k, v, beta.unsqueeze_dim(1), gate, Some(state), &options)?;
    Ok((o.squeeze_dim(1), state))
}
