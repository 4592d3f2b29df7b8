//! Kimi delta attention on tensor operations of any device and float type, in chunks.
//!
//! The corrections `u_t = beta_t (v_t - S~_t^T k_t)` of a chunk solve a unit lower triangular system, as in the
//! WY form of the delta rule; its entries are `beta_i sum_c k_ic d_ijc k_jc` with the decay `d` of each channel.

use burn::tensor::Tensor;

use crate::Offsets;
use crate::chunked::{Chunks, chunks, documents, filled_chunks, pick, unit_lower_inverse};
use crate::decay::{Decay, chunk};

/// Shapes as in [`kimi_delta_attention`](super::kimi_delta_attention); `beta [B,T,H,1]`.
pub(super) fn run(
    [q, k, v, beta, gate]: [Tensor<4>; 5],
    initial: Tensor<4>,
    offsets: Option<&Offsets>,
    scale: f64,
) -> (Tensor<4>, Tensor<4>) {
    documents([q.mul_scalar(scale), k, v, beta, gate.exp()], initial, offsets, document)
}

fn document([q, k, v, beta, factors]: [Tensor<4>; 5], initial: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let time = q.dims()[1];
    let chunk = chunk(time);
    let decay = Decay::new(filled_chunks(factors, chunk, 1.0));
    let [q, k, v, beta] = [q, k, v, beta].map(|x| chunks(x, chunk));
    let scores = decay.scores(q.clone(), k.clone());
    let written = k.clone() * beta.clone();
    let solve = unit_lower_inverse(decay.scores(written.clone(), k.clone()).tril(-1));
    let values = solve.clone().matmul(v * beta);
    let corrections = Some(solve.matmul(written * decay.from_start.clone()));
    let reads = q * decay.from_start.clone();
    let ends = k * decay.to_end.clone();
    let whole = decay.whole().swap_dims(3, 4);
    let chunks = Chunks { reads, scores, ends, values, corrections };
    chunks.scan(initial, time, |state, n| state * pick(&whole, n))
}
