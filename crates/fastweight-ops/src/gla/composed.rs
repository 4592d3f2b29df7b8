//! Gated linear attention on tensor operations of any device and float type, in chunks.

use burn::tensor::Tensor;

use crate::Offsets;
use crate::chunked::{Chunks, chunks, documents, filled_chunks, pick};
use crate::decay::{Decay, chunk};

/// Shapes as in [`gated_linear_attention`](super::gated_linear_attention).
pub(super) fn run(
    [q, k, v, gate]: [Tensor<4>; 4],
    initial: Tensor<4>,
    offsets: Option<&Offsets>,
    scale: f64,
) -> (Tensor<4>, Tensor<4>) {
    documents([q.mul_scalar(scale), k, v, gate.exp()], initial, offsets, document)
}

fn document([q, k, v, factors]: [Tensor<4>; 4], initial: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let time = q.dims()[1];
    let chunk = chunk(time);
    let decay = Decay::new(filled_chunks(factors, chunk, 1.0));
    let [q, k, values] = [q, k, v].map(|x| chunks(x, chunk));
    let scores = decay.scores(q.clone(), k.clone());
    let reads = q * decay.from_start.clone();
    let ends = k * decay.to_end.clone();
    let whole = decay.whole().swap_dims(3, 4);
    let chunks = Chunks { reads, scores, ends, values, corrections: None };
    chunks.scan(initial, time, |state, n| state * pick(&whole, n))
}
