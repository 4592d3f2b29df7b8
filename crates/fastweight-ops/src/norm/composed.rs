//! The normalisations as tensor operations, on any device.

use burn::tensor::Tensor;
use burn::tensor::activation::silu;

/// See [`super::l2_normalise`].
pub fn l2_normalise(x: Tensor<4>, eps: f32) -> Tensor<4> {
    let norm = (x.clone().square().sum_dim(3) + eps).sqrt();
    x / norm
}

/// See [`super::gated_rms_norm`].
pub fn gated_rms_norm(x: Tensor<3>, gate: Option<Tensor<3>>, weight: Tensor<1>, eps: f32) -> Tensor<3> {
    let shape @ [batch, time, width] = x.dims();
    let [value] = weight.dims();
    let x = x.reshape([batch, time, width / value, value]);
    let norm = (x.clone().square().mean_dim(3) + eps).sqrt();
    let y = (x / norm * weight.reshape([1, 1, 1, value])).reshape(shape);
    match gate {
        Some(gate) => y * silu(gate),
        None => y,
    }
}
