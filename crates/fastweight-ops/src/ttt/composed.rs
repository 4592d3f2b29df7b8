//! TTT-Linear on tensor operations: a mini-batch at a time, all its tokens at once.

use std::ops::Range;

use burn::tensor::Tensor;

use crate::Offsets;

use super::EPSILON;

/// What each token brings: `q, k [B,T,H,K]`, `v [B,T,H,V]`, `eta [B,T,H]`; the normalisation `[H,V]`.
#[derive(Clone)]
pub(super) struct Tokens {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub v: Tensor<4>,
    pub eta: Tensor<3>,
    pub ln_w: Tensor<2>,
    pub ln_b: Tensor<2>,
}

/// Weights and gathered updates `[N,H,K+1,V]`, the bias as last row, and the position of each sequence.
pub(super) struct Memory {
    pub weights: Tensor<4>,
    pub gathered: Tensor<4>,
    pub position: Vec<usize>,
}

/// Runs every sequence from its own state; returns the output `[B,T,H,V]` and the final states.
pub(super) fn ttt_linear(
    tokens: Tokens,
    initial: Memory,
    offsets: Option<&Offsets>,
    mini_batch: usize,
    scale: f64,
) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
    let [_, time, ..] = tokens.q.dims();
    let part = |rows: Range<usize>, times: Range<usize>, states: Range<usize>| {
        let of4 = |x: &Tensor<4>| x.clone().slice([rows.clone(), times.clone()]);
        let tokens = Tokens {
            q: of4(&tokens.q),
            k: of4(&tokens.k),
            v: of4(&tokens.v),
            eta: tokens.eta.clone().slice([rows.clone(), times.clone()]),
            ..tokens.clone()
        };
        let of_state = |x: &Tensor<4>| x.clone().slice([states.clone()]);
        let (weights, gathered) = (of_state(&initial.weights), of_state(&initial.gathered));
        sequences(tokens, weights, gathered, initial.position[states.start], mini_batch, scale)
    };
    // Neighbours at the same position run together; others, and documents, one after the other.
    let (axis, parts): (usize, Vec<_>) = match offsets {
        Some(offsets) => (1, offsets.ranges().enumerate().map(|(n, t)| part(0..1, t, n..n + 1)).collect()),
        None => {
            let together = initial.position.chunk_by(|a, b| a == b).scan(0, |start, group| {
                let rows = *start..*start + group.len();
                *start = rows.end;
                Some(rows)
            });
            (0, together.map(|rows| part(rows.clone(), 0..time, rows)).collect())
        }
    };
    let (mut outputs, mut weights, mut gathered) = (Vec::new(), Vec::new(), Vec::new());
    for (o, w, g) in parts {
        outputs.extend(o);
        weights.push(w);
        gathered.push(g);
    }
    (Tensor::cat(outputs, axis), Tensor::cat(weights, 0), Tensor::cat(gathered, 0))
}

/// Sequences at one position; no output where there is no token.
fn sequences(
    x: Tokens,
    mut weights: Tensor<4>,
    mut gathered: Tensor<4>,
    position: usize,
    mini_batch: usize,
    scale: f64,
) -> (Option<Tensor<4>>, Tensor<4>, Tensor<4>) {
    let [batch, time, heads, size] = x.q.dims();
    if time == 0 {
        return (None, weights, gathered);
    }
    if position == 0 {
        gathered = gathered.zeros_like();
    }
    let one = Tensor::ones([batch, heads, time, 1], (&x.q.device(), x.q.dtype()));
    let by_head = |x: Tensor<4>| x.swap_dims(1, 2);
    let extended = |x: Tensor<4>| Tensor::cat(vec![by_head(x), one.clone()], 3);
    let q = extended(x.q.mul_scalar(scale));
    let targets = by_head(x.v - x.k.clone());
    let k = extended(x.k);
    let eta = by_head(x.eta.unsqueeze_dim(3));
    let ln_w = x.ln_w.reshape([1, heads, 1, size]);
    let ln_b = x.ln_b.reshape([1, heads, 1, size]);

    let mut outputs = Vec::new();
    let (mut start, mut position) = (0, position);
    while start < time {
        let count = (mini_batch - position).min(time - start);
        let cut = |x: &Tensor<4>| x.clone().narrow(2, start, count);
        let (q, k, eta) = (cut(&q), cut(&k), cut(&eta));
        let (xh, d) = normalised(k.clone().matmul(weights.clone()));
        let y = ln_w.clone() * (ln_w.clone() * xh.clone() + ln_b.clone() - cut(&targets));
        let slope = (y.clone() * xh.clone()).mean_dim(3);
        let u = (y.clone() - y.mean_dim(3) - xh * slope) / d;
        let mut correction = q.clone().matmul(k.clone().swap_dims(2, 3)).tril(0).matmul(u.clone());
        if position > 0 {
            correction = correction + q.clone().matmul(gathered.clone());
        }
        let z = q.matmul(weights.clone()) - eta.clone() * correction;
        let (zh, _) = normalised(z.clone());
        outputs.push(z + ln_w.clone() * zh + ln_b.clone());
        let written = k.swap_dims(2, 3).matmul(u);
        gathered = if position > 0 { gathered + written } else { written };
        (start, position) = (start + count, position + count);
        if position == mini_batch {
            weights = weights - gathered.clone() * eta.narrow(2, count - 1, 1);
            gathered = gathered.zeros_like();
            position = 0;
        }
    }
    (Some(Tensor::cat(outputs, 2).swap_dims(1, 2)), weights, gathered)
}

/// `(x - mean) / d` over the last axis, and `d = sqrt(var + eps)`.
fn normalised(x: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let centred = x.clone() - x.mean_dim(3);
    let d = (centred.clone() * centred.clone()).mean_dim(3).add_scalar(EPSILON).sqrt();
    (centred / d.clone(), d)
}
