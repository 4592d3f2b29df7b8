//! Normalisations: L2 over a head's keys, RMS over a head's values or a layer's width.

pub mod composed;

use burn::tensor::Tensor;

use crate::OpError;
use crate::check::Arguments;

const RMS: &str = "rms_norm";
const GATED_RMS: &str = "gated_rms_norm";

/// `x / sqrt(sum x^2 + eps)` over the last dimension of `x [B, T, H, K]`; `eps` is usually 1e-6.
///
/// A zero vector stays zero, and its gradient is finite (`1 / sqrt(eps)` times the incoming one).
pub fn l2_normalise(x: Tensor<4>, eps: f32) -> Tensor<4> {
    composed::l2_normalise(x, eps)
}

/// `x / sqrt(mean x^2 + eps) * weight` over the last dimension, with `weight` of its size.
///
/// Source: Zhang and Sennrich 2019 (1910.07467).
///
/// # Errors
/// A weight of another size than the last dimension.
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f32) -> Result<Tensor<D>, OpError> {
    let size = x.dims()[D - 1];
    Arguments::new(RMS, &x).tensor("weight", &weight, [size])?;
    let shape = x.dims();
    Ok(composed::gated_rms_norm(x.reshape([1, -1, size as i64]), None, weight, eps).reshape(shape))
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
    let arguments = Arguments::new(GATED_RMS, &x);
    let ([.., width], [value]) = (x.dims(), weight.dims());
    if value == 0 || !width.is_multiple_of(value) {
        let expected = format!("[V] with V a divisor of the {width} channels");
        return Err(OpError::Shape { operator: GATED_RMS, argument: "weight", found: vec![value], expected });
    }
    arguments.tensor("weight", &weight, [value])?;
    if let Some(gate) = &gate {
        arguments.tensor("gate", gate, x.dims())?;
    }
    Ok(composed::gated_rms_norm(x, gate, weight, eps))
}
