//! The sum without a direction, on tensor operations of any device and float type.

use burn::tensor::Tensor;

use crate::Offsets;

/// Shapes as in [`linear_attention_noncausal`](super::linear_attention_noncausal).
pub(super) fn noncausal(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    offsets: Option<&Offsets>,
    scale: f64,
) -> Tensor<4> {
    let [q, k, v] = [q.mul_scalar(scale), k, v].map(|x| x.swap_dims(1, 2));
    let read = |q: Tensor<4>, k: Tensor<4>, v: Tensor<4>| q.matmul(k.swap_dims(2, 3).matmul(v));
    let o = match offsets {
        None => read(q, k, v),
        Some(offsets) => {
            let documents = offsets.ranges().filter(|range| !range.is_empty()).map(|range| {
                let cut = |x: &Tensor<4>| x.clone().narrow(2, range.start, range.len());
                read(cut(&q), cut(&k), cut(&v))
            });
            Tensor::cat(documents.collect(), 2)
        }
    };
    o.swap_dims(1, 2)
}
