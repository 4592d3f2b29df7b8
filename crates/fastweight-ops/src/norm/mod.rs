//! Normalisations: L2 over a head's keys, RMS over a head's values or a layer's width.

mod composed;
mod cpu;

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::check::Arguments;
use crate::fused::apply;
use crate::{OpError, Path};
use cpu::{After, FusedNorm};

const L2: &str = "l2_normalise";
const RMS: &str = "rms_norm";
const GATED_RMS: &str = "gated_rms_norm";

/// `x / sqrt(sum x^2 + eps)` over the last dimension of `x [B, T, H, K]`; `eps` is usually 1e-6.
///
/// A zero vector stays zero, and its gradient is finite (`1 / sqrt(eps)` times the incoming one).
pub fn l2_normalise(x: Tensor<4>, eps: f32) -> Tensor<4> {
    l2_normalise_on(x.clone(), eps, Path::Auto).unwrap_or_else(|_| composed::l2_normalise(x, eps))
}

/// [`l2_normalise`] on a chosen path.
///
/// # Errors
/// A path that does not exist for the tensor.
pub fn l2_normalise_on(x: Tensor<4>, eps: f32, path: Path) -> Result<Tensor<4>, OpError> {
    let shape @ [.., size] = x.dims();
    if size == 0 || !path.is_fused(L2, &x)? {
        return Ok(composed::l2_normalise(x, eps));
    }
    let op = FusedNorm { operator: L2, shape: shape.to_vec(), size, eps, after: After::Nothing };
    let [y, ..] = apply(Arc::new(op), vec![x.into_dispatch()]);
    Ok(Tensor::from_dispatch(y))
}

/// `x / sqrt(mean x^2 + eps) * weight` over the last dimension, with `weight` of its size.
///
/// Source: Zhang and Sennrich 2019 (1910.07467).
///
/// # Errors
/// A weight of another size than the last dimension.
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f32) -> Result<Tensor<D>, OpError> {
    rms_norm_on(x, weight, eps, Path::Auto)
}

/// [`rms_norm`] on a chosen path.
///
/// # Errors
/// Those of [`rms_norm`], and a path that does not exist for the tensor.
pub fn rms_norm_on<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    eps: f32,
    path: Path,
) -> Result<Tensor<D>, OpError> {
    let shape = x.dims();
    let size = shape[D - 1];
    Arguments::new(RMS, &x).tensor("weight", &weight, [size])?;
    if size == 0 || !path.is_fused(RMS, &x)? {
        return Ok(composed::rms_norm(x, weight, eps));
    }
    let op = FusedNorm { operator: RMS, shape: shape.to_vec(), size, eps, after: After::Weight };
    let [y, ..] = apply(Arc::new(op), vec![x.into_dispatch(), weight.into_dispatch()]);
    Ok(Tensor::from_dispatch(y))
}

/// RMS norm of each head of `x [B, T, H * V]`, times `weight [V]`, times `silu(gate)` where a gate of `x`'s
/// shape is given: the output norm of the gated delta network (2412.06464).
///
/// # Errors
/// A weight whose size does not divide the last dimension, a gate of another shape.
pub fn gated_rms_norm(
    x: Tensor<3>,
    gate: Option<Tensor<3>>,
    weight: Tensor<1>,
    eps: f32,
) -> Result<Tensor<3>, OpError> {
    gated_rms_norm_on(x, gate, weight, eps, Path::Auto)
}

/// [`gated_rms_norm`] on a chosen path.
///
/// # Errors
/// Those of [`gated_rms_norm`], and a path that does not exist for the tensor.
pub fn gated_rms_norm_on(
    x: Tensor<3>,
    gate: Option<Tensor<3>>,
    weight: Tensor<1>,
    eps: f32,
    path: Path,
) -> Result<Tensor<3>, OpError> {
    let arguments = Arguments::new(GATED_RMS, &x);
    let (shape @ [.., width], [size]) = (x.dims(), weight.dims());
    if size == 0 || !width.is_multiple_of(size) {
        let expected = format!("[V] with V a divisor of the {width} channels");
        return Err(OpError::Shape { operator: GATED_RMS, argument: "weight", found: vec![size], expected });
    }
    arguments.tensor("weight", &weight, [size])?;
    if let Some(gate) = &gate {
        arguments.tensor("gate", gate, shape)?;
    }
    if !path.is_fused(GATED_RMS, &x)? {
        return Ok(composed::gated_rms_norm(x, gate, weight, eps));
    }
    let after = if gate.is_some() { After::Gate } else { After::Weight };
    let op = FusedNorm { operator: GATED_RMS, shape: shape.to_vec(), size, eps, after };
    let mut inputs = vec![x.into_dispatch(), weight.into_dispatch()];
    inputs.extend(gate.map(Tensor::into_dispatch));
    let [y, ..] = apply(Arc::new(op), inputs);
    Ok(Tensor::from_dispatch(y))
}
