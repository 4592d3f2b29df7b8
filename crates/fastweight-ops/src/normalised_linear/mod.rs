//! Normalised linear attention with the feature map `phi = elu + 1`.
//!
//! `S_t = exp(g_t) S_{t-1} + phi(k_t) v_t^T`, `z_t = exp(g_t) z_{t-1} + phi(k_t)`,
//! `o_t = S_t^T phi(q_t) / (phi(q_t) . z_t + eps)` with `eps = 1e-6` and no scale
//! (Katharopoulos et al. 2020, arXiv 2006.16236).

mod composed;
pub mod cpu;
pub mod reference;

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::check::{Arguments, tracked};
use crate::fused::{apply, step_in_place};
use crate::{OpError, Path, SequenceOptions};

const NAME: &str = "normalised_linear_attention";

/// Added to the normaliser.
pub const EPSILON: f64 = 1e-6;

/// Causal normalised linear attention over a sequence; a token's output sees the token itself.
///
/// `q, k [B,T,H,K]` (before the feature map), `v [B,T,H,V]`, `gate [B,T,H]` (log decay `<= 0`, none when absent;
/// `-inf` forgets everything), `initial` the memory `S [N,H,K,V]` and the normaliser `z [N,H,K]` (zero when
/// absent). `N` is the batch, or the number of documents when [`SequenceOptions::offsets`] pack them into one row.
/// Returns the output `[B,T,H,V]`, the final `S` and the final `z`; all carry gradients to every input.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] (a scale other than 1 too), [`OpError::Gate`], [`OpError::Offsets`],
/// [`OpError::PackedBatch`] or [`OpError::NoFusedKernel`] name the argument at fault.
pub fn normalised_linear_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    gate: Option<Tensor<3>>,
    initial: Option<(Tensor<4>, Tensor<3>)>,
    options: &SequenceOptions,
) -> Result<(Tensor<4>, Tensor<4>, Tensor<3>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let scale = options.scale.unwrap_or(1.0);
    let dims = arguments.sequence(&q, &k, &v, Some(scale), options.offsets.as_ref())?;
    if scale != 1.0 {
        let (found, expected) = (scale.to_string(), "none: the output is normalised".into());
        return Err(OpError::Value { operator: NAME, argument: "scale", found, expected });
    }
    if let Some(gate) = &gate {
        arguments.gate("gate", gate, [dims.batch, dims.time, dims.heads])?;
    }
    let (s, z) = initial.unzip();
    let s = arguments.state("initial memory", s, [dims.states(), dims.heads, dims.key, dims.value], &q)?;
    let z = arguments.state("initial normaliser", z, [dims.states(), dims.heads, dims.key], &q)?;
    let fused = options.path.is_fused(NAME, &q)?;
    if dims.time == 0 {
        return Ok((v, s, z));
    }
    if fused {
        let op = cpu::FusedNormalisedLinear { dims, gated: gate.is_some() };
        let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch()];
        inputs.extend([s.into_dispatch(), z.into_dispatch()]);
        inputs.extend(gate.map(Tensor::into_dispatch));
        let [o, s, z] = apply(Arc::new(op), inputs);
        return Ok((Tensor::from_dispatch(o), Tensor::from_dispatch(s), Tensor::from_dispatch(z)));
    }
    Ok(composed::normalised_linear_attention(q, k, v, gate, (s, z), options.offsets.as_ref()))
}

/// One token of normalised linear attention, for every row of the batch.
///
/// `q, k [B,H,K]`, `v [B,H,V]`, `gate [B,H]`, memory `s [B,H,K,V]`, normaliser `z [B,H,K]`.
/// Returns the output `[B,H,V]`, the next memory and the next normaliser.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::Value`] or [`OpError::Gate`] name the argument at fault.
pub fn normalised_linear_attention_step(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    gate: Option<Tensor<2>>,
    s: Tensor<4>,
    z: Tensor<3>,
) -> Result<(Tensor<3>, Tensor<4>, Tensor<3>), OpError> {
    let arguments = Arguments::new(NAME, &q);
    let dims = arguments.token(&q, &k, &v, Some(1.0))?;
    if let Some(gate) = &gate {
        arguments.gate("gate", gate, [dims.batch, dims.heads])?;
    }
    arguments.tensor("memory", &s, [dims.batch, dims.heads, dims.key, dims.value])?;
    arguments.tensor("normaliser", &z, [dims.batch, dims.heads, dims.key])?;
    let gradients = tracked([&q, &k, &v, &z]) || tracked(&gate) || tracked([&s]);
    if Path::Auto.is_fused(NAME, &q)? && !gradients {
        // The normaliser is small: its next value leaves beside the output, only the memory stays in place.
        let (o_shape, z_shape) = (v.dims(), z.dims());
        let [o_length, z_length] = [o_shape, z_shape].map(|shape| shape.iter().product::<usize>());
        let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), z.into_dispatch()];
        inputs.extend(gate.map(Tensor::into_dispatch));
        let (out, s) = step_in_place(s, inputs, &[o_length + z_length], |s, x, out| {
            let (o, z) = out.split_at_mut(o_length);
            z.copy_from_slice(x[3]);
            cpu::step(&dims, s, z, x[0], x[1], x[2], x.get(4).copied(), o);
        });
        let out = Tensor::<1>::from_dispatch(out);
        let o = out.clone().narrow(0, 0, o_length).reshape(o_shape);
        return Ok((o, s, out.narrow(0, o_length, z_length).reshape(z_shape)));
    }
    let gate = gate.map(|gate| gate.unsqueeze_dim(1));
    let (q, k, v) = (q.unsqueeze_dim(1), k.unsqueeze_dim(1), v.unsqueeze_dim(1));
    let (o, s, z) = normalised_linear_attention(q, k, v, gate, Some((s, z)), &SequenceOptions::default())?;
    Ok((o.squeeze_dim(1), s, z))
}
