//! The diagonal-plus-low-rank recurrence on tensor operations of any device and float type, in chunks.
//!
//! What the directions `a` read, `u_t = S_{t-1}^T a_t`, solves a unit lower triangular system inside a chunk. A
//! chunk writes two rows for each token: `b_t u_t^T`, which depends on the state at its start, and `k_t v_t^T`.

use burn::tensor::Tensor;

use crate::Offsets;
use crate::chunked::{Chunks, chunks, documents, filled_chunks, pick, unit_lower_inverse};
use crate::decay::{Decay, chunk};

/// Shapes as in [`dplr`](super::dplr).
pub(super) fn run(
    [q, w, k, v, a, b]: [Tensor<4>; 6],
    initial: Tensor<4>,
    offsets: Option<&Offsets>,
    scale: f64,
) -> (Tensor<4>, Tensor<4>) {
    documents([q.mul_scalar(scale), w.exp(), k, v, a, b], initial, offsets, document)
}

fn document([q, factors, k, v, a, b]: [Tensor<4>; 6], initial: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let time = q.dims()[1];
    let chunk = chunk(time);
    let decay = Decay::new(filled_chunks(factors, chunk, 1.0));
    let [q, k, v, a, b] = [q, k, v, a, b].map(|x| chunks(x, chunk));
    let solve = unit_lower_inverse(decay.scores_before(a.clone(), b.clone()).neg());
    let read_values = solve.clone().matmul(decay.scores_before(a.clone(), k.clone()).matmul(v.clone()));
    let read_state = solve.matmul(a * decay.before());
    let scores = [b.clone(), k.clone()].map(|written| decay.scores(q.clone(), written));
    let ends = [b, k].map(|written| written * decay.to_end.clone());
    let whole = decay.whole().swap_dims(3, 4);
    let chunks = Chunks {
        reads: q * decay.from_start,
        scores: Tensor::cat(scores.into(), 4),
        ends: Tensor::cat(ends.into(), 3),
        corrections: Some(Tensor::cat(vec![read_state.clone().neg(), read_state.zeros_like()], 3)),
        values: Tensor::cat(vec![read_values, v], 3),
    };
    chunks.scan(initial, time, |state, n| state * pick(&whole, n))
}
