//! DeltaProduct: several steps of the delta rule for each token.
//!
//! `S_{t,0} = exp(g_t) S_{t-1}`, then for `j = 1..N`: `u_j = beta_{t,j} (v_{t,j} - S_{t,j-1}^T k_{t,j})` and
//! `S_{t,j} = S_{t,j-1} + k_{t,j} u_j^T`; `S_t = S_{t,N}`, `o_t = scale * S_t^T q_t` (Siems et al. 2025, arXiv
//! 2502.10297). The product of `N` generalised Householder matrices reaches rotations, which one cannot.
//!
//! It runs as the [delta rule](crate::delta) over `T N` tokens: the gate acts at a token's first step, the
//! query reads after its last. With `N = 1` it is the delta rule, to the bit.

pub mod reference;

use burn::tensor::Tensor;

use crate::check::Arguments;
use crate::delta::{delta_rule, delta_rule_step};
use crate::{Offsets, OpError, SequenceOptions};

const NAME: &str = "delta_product";

/// DeltaProduct over a sequence.
///
/// `q [B,T,H,K]`, `k [B,T,N,H,K]`, `v [B,T,N,H,V]`, `beta [B,T,N,H]` with `N` steps a token, `gate [B,T,H]` (log
/// decay `<= 0`, none when absent), `initial [D,H,K,V]` (zero when absent; `D` is the batch, or the number of
/// documents when [`SequenceOptions::offsets`] pack them into one row). Offsets count tokens, not steps.
/// Returns the output `[B,T,H,V]` and the final states `[D,H,K,V]`; both carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`], [`OpError::Gate`], [`OpError::Offsets`], [`OpError::PackedBatch`] or
/// [`OpError::NoFusedKernel`] name the argument at fault.
pub fn delta_product(
    q: Tensor<4>,
    k: Tensor<5>,
    v: Tensor<5>,
    beta: Tensor<4>,
    gate: Option<Tensor<3>>,
    initial: Option<Tensor<4>>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let [batch, time, heads, key] = q.dims();
    let [_, _, steps, ..] = k.dims();
    let [.., value] = v.dims();
    arguments.tensor("k", &k, [batch, time, steps.max(1), heads, key])?;
    arguments.tensor("v", &v, [batch, time, steps, heads, value])?;
    arguments.tensor("beta", &beta, [batch, time, steps, heads])?;
    let last_k = k.clone().narrow(2, steps - 1, 1).squeeze_dim(2);
    let last_v = v.clone().narrow(2, steps - 1, 1).squeeze_dim(2);
    let dims = arguments.sequence(&q, &last_k, &last_v, options.scale, options.offsets.as_ref())?;
    if let Some(gate) = &gate {
        arguments.gate("gate", gate, [batch, time, heads])?;
    }
    let initial = arguments.state("initial", initial, [dims.states(), heads, key, value], &q)?;
    options.path.is_fused(NAME, &q)?;
    if time == 0 {
        return Ok((last_v, initial));
    }
    let offsets = options.offsets.as_ref().map(|offsets| scaled(offsets, steps));
    let options = SequenceOptions { scale: options.scale, offsets, path: options.path };
    let tokens = time * steps;
    let k = k.reshape([batch, tokens, heads, key]);
    let v = v.reshape([batch, tokens, heads, value]);
    let beta = beta.reshape([batch, tokens, heads]);
    let q = reading_last(q, steps);
    let gate = gate.map(|gate| decaying_first(gate, steps));
    let (o, state) = delta_rule(q, k, v, beta, gate, Some(initial), &options)?;
    let o = o.reshape([batch, time, steps, heads, value]).narrow(2, steps - 1, 1).squeeze_dim(2);
    Ok((o, state))
}

/// One token of DeltaProduct, for every row of the batch.
///
/// `q [B,H,K]`, `k [B,N,H,K]`, `v [B,N,H,V]`, `beta [B,N,H]`, `gate [B,H]`, `state [B,H,K,V]`, `scale` `1 / sqrt(K)`
/// when absent. Returns the output `[B,H,V]` and the next state. The state is updated in place when nobody
/// else holds it and no gradient is needed.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] or [`OpError::Gate`] name the argument at fault.
pub fn delta_product_step(
    q: Tensor<3>,
    k: Tensor<4>,
    v: Tensor<4>,
    beta: Tensor<3>,
    gate: Option<Tensor<2>>,
    state: Tensor<4>,
    scale: Option<f32>,
) -> Result<(Tensor<3>, Tensor<4>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let [batch, heads, key] = q.dims();
    let [_, steps, ..] = k.dims();
    let [.., value] = v.dims();
    arguments.tensor("k", &k, [batch, steps.max(1), heads, key])?;
    arguments.tensor("v", &v, [batch, steps, heads, value])?;
    arguments.tensor("beta", &beta, [batch, steps, heads])?;
    let step_of = |j: usize| {
        let k = k.clone().narrow(1, j, 1).squeeze_dim::<3>(1);
        let v = v.clone().narrow(1, j, 1).squeeze_dim::<3>(1);
        (k, v, beta.clone().narrow(1, j, 1).squeeze_dim::<2>(1))
    };
    let (k, v, beta) = step_of(0);
    arguments.token(&q, &k, &v, scale)?;
    if let Some(gate) = &gate {
        arguments.gate("gate", gate, [batch, heads])?;
    }
    arguments.tensor("state", &state, [batch, heads, key, value])?;
    let mut result = delta_rule_step(q.clone(), k, v, beta, gate, state, scale)?;
    for j in 1..steps {
        let (k, v, beta) = step_of(j);
        result = delta_rule_step(q.clone(), k, v, beta, None, result.1, scale)?;
    }
    Ok(result)
}

/// Offsets of the documents when each token takes `steps` steps.
fn scaled(offsets: &Offsets, steps: usize) -> Offsets {
    let lengths: Vec<usize> = offsets.ranges().map(|range| range.len() * steps).collect();
    Offsets::from_lengths(&lengths)
}

/// `[B,T,H,K]` to `[B,T N,H,K]`: the query at a token's last step, zeros before it.
fn reading_last(q: Tensor<4>, steps: usize) -> Tensor<4> {
    if steps == 1 {
        return q;
    }
    let [batch, time, heads, key] = q.dims();
    let silent = Tensor::<5>::zeros([batch, time, steps - 1, heads, key], (&q.device(), q.dtype()));
    Tensor::cat(vec![silent, q.unsqueeze_dim(2)], 2).reshape([batch, time * steps, heads, key])
}

/// `[B,T,H]` to `[B,T N,H]`: the log gate at a token's first step, zeros after it.
fn decaying_first(gate: Tensor<3>, steps: usize) -> Tensor<3> {
    if steps == 1 {
        return gate;
    }
    let [batch, time, heads] = gate.dims();
    let none = Tensor::<4>::zeros([batch, time, steps - 1, heads], (&gate.device(), gate.dtype()));
    Tensor::cat(vec![gate.unsqueeze_dim(2), none], 2).reshape([batch, time * steps, heads])
}
