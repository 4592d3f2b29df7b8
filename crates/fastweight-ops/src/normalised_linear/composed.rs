//! Normalised linear attention on tensor operations of any device and float type.

use burn::tensor::Tensor;

use super::EPSILON;
use crate::Offsets;
use crate::chunked::{self, Tokens};

/// `elu(x) + 1`, without the exponential of a positive number.
fn feature_map(x: Tensor<4>) -> Tensor<4> {
    x.clone().clamp_min(0.0) + x.clamp_max(0.0).exp()
}

/// Linear attention on the features, with the normaliser as one more value column of ones.
pub(super) fn normalised_linear_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    gate: Option<Tensor<3>>,
    (s, z): (Tensor<4>, Tensor<3>),
    offsets: Option<&Offsets>,
) -> (Tensor<4>, Tensor<4>, Tensor<3>) {
    let [batch, time, heads, value] = v.dims();
    let ones = Tensor::ones([batch, time, heads, 1], (&v.device(), v.dtype()));
    let v = Tensor::cat(vec![v, ones], 3);
    let initial = Tensor::cat(vec![s, z.unsqueeze_dim(3)], 3);
    let tokens = Tokens { q: feature_map(q), k: feature_map(k), v, beta: None, gate };
    let (o, state) = chunked::run(tokens, initial, offsets, 1.0);
    let normaliser = o.clone().narrow(3, value, 1).add_scalar(EPSILON);
    let s = state.clone().narrow(3, 0, value);
    let z = state.narrow(3, value, 1).squeeze_dim(3);
    (o.narrow(3, 0, value) / normaliser, s, z)
}
