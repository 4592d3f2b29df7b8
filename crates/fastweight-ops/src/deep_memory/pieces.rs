//! Pieces of the network that are one pass over memory on the flex device, tensor operations elsewhere.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;

use super::Activation;
use super::cpu::FusedActivation;
use super::cpu_blend::FusedBlend;
use super::cpu_norm::{FusedNormalise, FusedNormaliseBack};
use crate::fused::apply;

/// The activation and its derivative.
pub(super) fn activate(activation: Activation, z: Tensor<3>, fused: bool) -> (Tensor<3>, Tensor<3>) {
    if fused {
        let op = FusedActivation { shape: z.dims().to_vec(), activation };
        let [value, slope, _] = apply(Arc::new(op), vec![z.into_dispatch()]);
        return (Tensor::from_dispatch(value), Tensor::from_dispatch(slope));
    }
    match activation {
        Activation::Gelu => {
            let c = (2.0 / std::f64::consts::PI).sqrt();
            let square = z.clone().square();
            let t = (z.clone() * (square.clone().mul_scalar(0.044715 * c) + c)).tanh();
            let half = (t.clone() + 1.0).mul_scalar(0.5);
            let slope = (t.square().neg() + 1.0).mul_scalar(0.5)
                * z.clone()
                * (square.mul_scalar(3.0 * 0.044715 * c) + c);
            (z * half.clone(), half + slope)
        }
        Activation::Silu => {
            let s = sigmoid(z.clone());
            let value = z * s.clone();
            (value.clone(), s.clone() + value * (s.neg() + 1.0))
        }
    }
}

/// A LayerNorm before its weight and bias: the normalised rows and one over their deviation `[M,S,1]`.
pub(super) fn normalise(x: Tensor<3>, eps: f64, fused: bool) -> (Tensor<3>, Tensor<3>) {
    if fused {
        let op = FusedNormalise { shape: x.dims(), eps: eps as f32 };
        let [hat, inverse, _] = apply(Arc::new(op), vec![x.into_dispatch()]);
        return (Tensor::from_dispatch(hat), Tensor::from_dispatch(inverse));
    }
    let centred = x.clone() - x.mean_dim(2);
    let inverse = (centred.clone().square().mean_dim(2) + eps).sqrt().recip();
    (centred * inverse.clone(), inverse)
}

/// The gradient of a LayerNorm's input from that of its normalised rows.
pub(super) fn normalise_back(d: Tensor<3>, hat: Tensor<3>, inverse: Tensor<3>, fused: bool) -> Tensor<3> {
    if fused {
        let op = FusedNormaliseBack { shape: d.dims() };
        let inputs = vec![d.into_dispatch(), hat.into_dispatch(), inverse.into_dispatch()];
        let [u, ..] = apply(Arc::new(op), inputs);
        return Tensor::from_dispatch(u);
    }
    let along = (d.clone() * hat.clone()).mean_dim(2);
    (d.clone() - d.mean_dim(2) - hat * along) * inverse
}

/// `a keep + b carry`, where a and b are `[M,S,V]` and a factor is `[M,S,1]` or `[M,1,1]`, one when absent; with a number for
/// every column `[M,S,V]` or `[M,1,V]`.
pub(super) fn blend(
    a: Tensor<3>,
    keep: Option<Tensor<3>>,
    carried: Option<(Tensor<3>, Tensor<3>)>,
    fused: bool,
) -> Tensor<3> {
    let Some(factor) = keep.as_ref().or(carried.as_ref().map(|(_, carry)| carry)) else { return a };
    if fused && factor.dims()[2] == 1 {
        let [rows, tokens, size] = a.dims();
        let op = FusedBlend {
            shape: vec![rows, tokens, size],
            size: if factor.dims()[1] == tokens { size } else { tokens * size },
            keep: keep.is_some(),
            carry: carried.is_some(),
        };
        let mut inputs = vec![a.into_dispatch()];
        inputs.extend(keep.map(Tensor::into_dispatch));
        inputs.extend(carried.into_iter().flat_map(|(b, carry)| [b.into_dispatch(), carry.into_dispatch()]));
        let [out, ..] = apply(Arc::new(op), inputs);
        return Tensor::from_dispatch(out);
    }
    let kept = match keep {
        Some(keep) => a * keep,
        None => a,
    };
    match carried {
        Some((b, carry)) => kept + b * carry,
        None => kept,
    }
}
