//! Linear attention with no decay, a fixed decay per head, or a decay per head and token.
//!
//! `S_t = exp(g_t) S_{t-1} + k_t v_t^T`, `o_t = scale * S_t^T q_t`. Without a gate it is linear attention (the
//! Hebbian rule), with a fixed gate per head RetNet (arXiv 2307.08621) or Lightning Attention, with a
//! gate per token the scalar-gated form of Mamba-2 (2405.21060).

mod composed;
pub mod cpu;
pub mod reference;

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::check::{Arguments, default_scale, tracked};
use crate::chunked::{self, Tokens};
use crate::fused::{apply, step_in_place};
use crate::{OpError, Path, SequenceOptions};
use cpu::{FusedLinear, GateKind};

const NAME: &str = "linear_attention";

/// Log decay of a linear memory, `<= 0`; `-inf` forgets everything.
#[derive(Debug, Clone)]
pub enum LinearGate {
    /// Nothing is forgotten.
    None,
    /// A fixed log decay for each head, `[H]`.
    PerHead(Tensor<1>),
    /// A log decay for each token and head, `[B,T,H]`.
    PerToken(Tensor<3>),
}

/// Causal linear attention over a sequence; a token's output sees the token itself.
///
/// `q, k [B,T,H,K]`, `v [B,T,H,V]`, `initial [N,H,K,V]` (zero when absent). `N` is the batch, or the number of
/// documents when [`SequenceOptions::offsets`] pack them into one row.
/// Returns the output `[B,T,H,V]` and the final states `[N,H,K,V]`; both carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Gate`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
pub fn linear_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    gate: LinearGate,
    initial: Option<Tensor<4>>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.sequence(&q, &k, &v, options.scale, options.offsets.as_ref())?;
    let per_token = [dims.batch, dims.time, dims.heads];
    match &gate {
        LinearGate::None => {}
        LinearGate::PerHead(gate) => arguments.gate("gate", gate, [dims.heads])?,
        LinearGate::PerToken(gate) => arguments.gate("gate", gate, per_token)?,
    }
    let initial =
        arguments.state("initial", initial, [dims.states(), dims.heads, dims.key, dims.value], &q)?;
    let fused = options.path.is_fused(NAME, &q)?;
    if dims.time == 0 {
        return Ok((v, initial));
    }
    if fused {
        let mut inputs =
            vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), initial.into_dispatch()];
        let (kind, gate) = match gate {
            LinearGate::None => (GateKind::None, None),
            LinearGate::PerHead(gate) => (GateKind::PerHead, Some(gate.into_dispatch())),
            LinearGate::PerToken(gate) => (GateKind::PerToken, Some(gate.into_dispatch())),
        };
        inputs.extend(gate);
        let [o, state, _] = apply(Arc::new(FusedLinear { dims, gate: kind }), inputs);
        return Ok((Tensor::from_dispatch(o), Tensor::from_dispatch(state)));
    }
    let gate = match gate {
        LinearGate::None => None,
        LinearGate::PerHead(gate) => Some(gate.reshape([1, 1, dims.heads]).expand(per_token)),
        LinearGate::PerToken(gate) => Some(gate),
    };
    let scale = options.scale.map_or_else(|| default_scale(dims.key), f64::from);
    Ok(chunked::run(Tokens { q, k, v, beta: None, gate }, initial, options.offsets.as_ref(), scale))
}

/// One token of linear attention, for every row of the batch.
///
/// `q, k [B,H,K]`, `v [B,H,V]`, `gate [B,H]`, `state [B,H,K,V]`, `scale` `1 / sqrt(K)` when absent.
/// Returns the output `[B,H,V]` and the next state. The state is updated in place when nobody else holds it
/// and no gradient is needed.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] or [`OpError::Gate`] name the argument at fault.
pub fn linear_attention_step(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    gate: Option<Tensor<2>>,
    state: Tensor<4>,
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.token(&q, &k, &v, scale)?;
    if let Some(gate) = &gate {
        arguments.gate("gate", gate, [dims.batch, dims.heads])?;
    }
    arguments.tensor("state", &state, [dims.batch, dims.heads, dims.key, dims.value])?;
    let gradients = tracked([&q, &k, &v]) || tracked(&gate) || tracked([&state]);
    if Path::Auto.is_fused(NAME, &q)? && !gradients {
        let shape = v.dims();
        let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch()];
        inputs.extend(gate.map(Tensor::into_dispatch));
        let (o, state) = step_in_place(state, inputs, &shape, |state, x, out| {
            cpu::step(&dims, state, x[0], x[1], x[2], x.get(3).copied(), out);
        });
        return Ok((Tensor::from_dispatch(o), state));
    }
    let options = SequenceOptions { scale, ..SequenceOptions::default() };
    let gate = gate.map_or(LinearGate::None, |gate| LinearGate::PerToken(gate.unsqueeze_dim(1)));
    let (q, k, v) = (q.unsqueeze_dim(1), k.unsqueeze_dim(1), v.unsqueeze_dim(1));
    let (o, state) = linear_attention(q, k, v, gate, Some(state), &options)?;
    Ok((o.squeeze_dim(1), state))
}

/// Linear attention without a direction: every token reads the sum over its whole document.
///
/// `o_t = scale * (sum_s k_s v_s^T)^T q_t`; `q, k [B,T,H,K]`, `v [B,T,H,V]`. Returns `[B,T,H,V]`.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Offsets`], [`OpError::PackedBatch`], or
/// [`OpError::NoFusedKernel`] for [`Path::Fused`]: two matrix products need no kernel.
pub fn linear_attention_noncausal(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &SequenceOptions,
) -> Result<Tensor<4>, OpError> {
    const NAME: &str = "linear_attention_noncausal";
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.sequence(&q, &k, &v, options.scale, options.offsets.as_ref())?;
    if options.path == Path::Fused {
        return Err(OpError::NoFusedKernel { operator: NAME, found: "any".into() });
    }
    if dims.time == 0 {
        return Ok(v);
    }
    let scale = options.scale.map_or_else(|| default_scale(dims.key), f64::from);
    Ok(composed::noncausal(q, k, v, options.offsets.as_ref(), scale))
}
