//! The normalisations as tensor operations, on any device.

use burn::tensor::Tensor;
use burn::tensor::activation::silu;

pub(super) fn l2_normalise(x: Tensor<4>, eps: f32) -> Tensor<4> {
    let norm = (x.clone().square().sum_dim(3) + eps).sqrt();
    x / norm
}

pub(super) fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f32) -> Tensor<D> {
    let norm = (x.clone().square().mean_dim(D - 1) + eps).sqrt();
    x / norm * weight.unsqueeze()
}

pub(super) fn gated_rms_norm(
    x: Tensor<3>,
    gate: Option<Tensor<3>>,
    weight: Tensor<1>,
    eps: f32,
) -> Tensor<3> {
    let shape @ [batch, time, width] = x.dims();
    let [size] = weight.dims();
    let y = rms_norm(x.reshape([batch, time, width / size, size]), weight, eps).reshape(shape);
    match gate {
        Some(gate) => y * silu(gate),
        None => y,
    }
}
