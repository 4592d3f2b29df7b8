//! The delta rule with momentum on tensor operations of any device and float type, in chunks.
//!
//! With the errors `e_t = v_t - S_{t-1}^T p_t` of a chunk, both matrices are linear in what came before:
//! `P_t = m_t0 P_0 + sum_j m_tj rate_j k_j e_j^T` and `S_t = a_t0 S_0 + c_t P_0 + sum_j w_tj rate_j k_j e_j^T`. Here
//! `m_tj` and `a_tj` are the products of the momenta and of the retentions from after token `j` to token `t`, and
//! `w_tj = sum_s a_ts write_s m_sj`, `c_t = sum_s a_ts write_s m_s0` are products of small matrices. So the errors
//! solve a unit lower triangular system, as in the WY form of the delta rule. The scanned state is `S` over `P`.
//!
//! With gates for each column of the states every column has a system of its own, and matrices between tokens would be as
//! many as columns. There tokens go one by one.

use burn::tensor::Tensor;

use crate::Offsets;
use crate::chunked::{Chunks, chunks, documents, filled_chunks, pick, unit_lower_inverse};
use crate::decay::{Decay, chunk, one_later};

/// The tokens; scalars are plain multipliers `[B,T,H,1]`, not logs, or without `write` `[B,T,H,V]`.
pub(crate) struct Tokens {
    pub(crate) q: Tensor<4>,
    /// The key that is written.
    pub(crate) k: Tensor<4>,
    /// The key that is read for the error.
    pub(crate) p: Tensor<4>,
    pub(crate) v: Tensor<4>,
    pub(crate) retain: Tensor<4>,
    pub(crate) momentum: Tensor<4>,
    pub(crate) rate: Tensor<4>,
    /// All of the momentum is written when absent.
    pub(crate) write: Option<Tensor<4>>,
}

/// `P_t = momentum P_{t-1} + rate k (v - S_{t-1}^T p)^T`, `S_t = retain S_{t-1} + write P_t`, `o = scale S_t^T q`.
///
/// `initial` holds `S` and `P`; returns the output and the final `S` and `P`.
pub(crate) fn run(
    tokens: Tokens,
    initial: [Tensor<4>; 2],
    offsets: Option<&Offsets>,
    scale: f64,
) -> (Tensor<4>, [Tensor<4>; 2]) {
    let Tokens { q, k, p, v, retain, momentum, rate, write } = tokens;
    let (q, initial) = (q.mul_scalar(scale), Tensor::cat(initial.into(), 2));
    let (o, state) = match write {
        Some(write) => documents([q, k, p, v, retain, momentum, write, rate], initial, offsets, document),
        None => documents([q, k, p, v, retain, momentum, rate], initial, offsets, token_by_token),
    };
    (o, halves(state))
}

/// `S` and `P` of a state.
fn halves(state: Tensor<4>) -> [Tensor<4>; 2] {
    let key = state.dims()[2] / 2;
    [0, key].map(|start| state.clone().narrow(2, start, key))
}

fn token_by_token(tokens: [Tensor<4>; 7], initial: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let time = tokens[0].dims()[1];
    let tokens = tokens.map(|x| x.swap_dims(1, 2));
    let [mut s, mut m] = halves(initial);
    let mut outputs = Vec::with_capacity(time);
    for t in 0..time {
        let [q, k, p, v, retain, momentum, rate] = tokens.each_ref().map(|x| x.clone().narrow(2, t, 1));
        let written = (v - p.matmul(s.clone())) * rate;
        m = m * momentum + k.swap_dims(2, 3).matmul(written);
        s = s * retain + m.clone();
        outputs.push(q.matmul(s.clone()));
    }
    (Tensor::cat(outputs, 2).swap_dims(1, 2), Tensor::cat(vec![s, m], 2))
}

fn document(tokens: [Tensor<4>; 8], initial: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let time = tokens[0].dims()[1];
    let chunk = chunk(time);
    let [q, k, p, v, retain, momentum, write, rate] = tokens;
    let [retain, momentum] = [retain, momentum].map(|x| Decay::new(filled_chunks(x, chunk, 1.0)));
    let [q, k, p, values, write, rate] = [q, k, p, v, write, rate].map(|x| chunks(x, chunk));

    let into_memory = retain.between() * write.swap_dims(3, 4);
    let from_momentum = into_memory.clone().matmul(momentum.from_start.clone());
    let weights = into_memory.matmul(momentum.between());
    let k = k * rate;
    let keys = k.clone().swap_dims(3, 4);

    let solve = p.clone().matmul(keys.clone()) * one_later(weights.clone(), 0.0);
    let solve = unit_lower_inverse(solve);
    let read = Tensor::cat(vec![p.clone() * retain.before(), p * one_later(from_momentum.clone(), 0.0)], 4);
    let last = |x: &Tensor<5>| x.clone().narrow(3, chunk - 1, 1);
    let into_state = last(&weights).swap_dims(3, 4);
    let [kept, moved, slowed] = [retain.whole(), last(&from_momentum), momentum.whole()];
    let chunks = Chunks {
        scores: q.clone().matmul(keys) * weights,
        reads: Tensor::cat(vec![q.clone() * retain.from_start.clone(), q * from_momentum], 4),
        ends: Tensor::cat(vec![k.clone() * into_state, k * momentum.to_end], 4),
        values: solve.clone().matmul(values),
        corrections: Some(solve.matmul(read)),
    };
    chunks.scan(initial, time, |state, n| {
        let [s, p] = halves(state);
        let s = s * pick(&kept, n) + p.clone() * pick(&moved, n);
        Tensor::cat(vec![s, p * pick(&slowed, n)], 2)
    })
}
