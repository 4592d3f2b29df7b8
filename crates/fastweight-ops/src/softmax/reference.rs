//! The definition of softmax attention: one token after the other, in float64.

use super::Sizes;
use crate::reference::{add_scaled, dot, multiply, sequences};

/// Inputs, row-major in the layout of [`softmax_attention`](super::softmax_attention).
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Sizes, documents, window and cache lengths.
    pub sizes: &'a Sizes,
    /// Factor on the scores, in float64 (the one of `sizes` is rounded).
    pub scale: f64,
    /// Queries `[B,T,H,K]`.
    pub q: &'a [f64],
    /// Keys `[B,T,G,K]`.
    pub k: &'a [f64],
    /// Values `[B,T,G,V]`.
    pub v: &'a [f64],
    /// Cached keys `[N,P,G,K]` and values `[N,P,G,V]`.
    pub cache: Option<(&'a [f64], &'a [f64])>,
}

/// Gradients, each in the layout of its input.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Of the queries.
    pub q: Vec<f64>,
    /// Of the keys.
    pub k: Vec<f64>,
    /// Of the values.
    pub v: Vec<f64>,
    /// Of the cached keys; empty without a cache.
    pub k_cache: Vec<f64>,
    /// Of the cached values; empty without a cache.
    pub v_cache: Vec<f64>,
}

/// One key that a query sees: in the cache or among the tokens, as a row of `[*,G,size]`.
#[derive(Clone, Copy)]
struct Seen {
    cached: bool,
    row: usize,
}

impl Seen {
    fn of<'a>(self, tokens: &'a [f64], cache: &'a [f64], size: usize) -> &'a [f64] {
        &(if self.cached { cache } else { tokens })[self.row * size..][..size]
    }

    fn of_mut<'a>(self, tokens: &'a mut [f64], cache: &'a mut [f64], size: usize) -> &'a mut [f64] {
        &mut (if self.cached { cache } else { tokens })[self.row * size..][..size]
    }
}

impl Inputs<'_> {
    /// Calls `visit` with the row of each query in `[B,T,H]`, the keys it sees and its weights on them.
    fn each_query(&self, mut visit: impl FnMut(usize, &[Seen], &[f64])) {
        let Sizes { batch, time, heads, groups, window, .. } = *self.sizes;
        let (held, lengths) = &self.sizes.cache;
        let sequences = sequences(batch, time, self.sizes.offsets.as_ref());
        for (n, (row, tokens)) in sequences.into_iter().enumerate() {
            let cached = lengths.get(n).copied().unwrap_or(0);
            for head in 0..heads {
                let group = head / (heads / groups);
                for t in tokens.clone() {
                    let position = cached + t - tokens.start;
                    let first = (position + 1).saturating_sub(window);
                    let seen: Vec<Seen> = (first..=position)
                        .map(|i| match i < cached {
                            true => Seen { cached: true, row: (n * held + i) * groups + group },
                            false => {
                                let s = tokens.start + i - cached;
                                Seen { cached: false, row: (row * time + s) * groups + group }
                            }
                        })
                        .collect();
                    let query = (row * time + t) * heads + head;
                    visit(query, &seen, &self.weights(query, &seen));
                }
            }
        }
    }

    /// Softmax of the scaled scores of one query.
    fn weights(&self, query: usize, seen: &[Seen]) -> Vec<f64> {
        let key = self.sizes.key;
        let q = &self.q[query * key..][..key];
        let cache = self.cache.map_or(&[][..], |(k, _)| k);
        let mut weights: Vec<f64> =
            seen.iter().map(|s| self.scale * dot(q, s.of(self.k, cache, key))).collect();
        let largest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        weights.iter_mut().for_each(|w| *w = (*w - largest).exp());
        let total: f64 = weights.iter().sum();
        multiply(&mut weights, 1.0 / total);
        weights
    }
}

/// `o_t = sum_i softmax_i(scale q_t . k_i) v_i` over the positions that token `t` sees; `[B,T,H,V]`.
pub fn forward(x: &Inputs) -> Vec<f64> {
    let Sizes { batch, time, heads, value, .. } = *x.sizes;
    let cache = x.cache.map_or(&[][..], |(_, v)| v);
    let mut o = vec![0.0; batch * time * heads * value];
    x.each_query(|query, seen, weights| {
        for (s, &weight) in seen.iter().zip(weights) {
            add_scaled(&mut o[query * value..][..value], weight, s.of(x.v, cache, value));
        }
    });
    o
}

/// Gradients of `sum(o * grad_o)`.
pub fn backward(x: &Inputs, grad_o: &[f64]) -> Gradients {
    let Sizes { key, value, .. } = *x.sizes;
    let (k_cache, v_cache) = x.cache.unwrap_or_default();
    let zeros = |like: &[f64]| vec![0.0; like.len()];
    let mut grads = Gradients {
        q: zeros(x.q),
        k: zeros(x.k),
        v: zeros(x.v),
        k_cache: zeros(k_cache),
        v_cache: zeros(v_cache),
    };
    x.each_query(|query, seen, weights| {
        let d_out = &grad_o[query * value..][..value];
        let d_weights: Vec<f64> = seen.iter().map(|s| dot(d_out, s.of(x.v, v_cache, value))).collect();
        let mean = dot(weights, &d_weights);
        let q = &x.q[query * key..][..key];
        let dq = &mut grads.q[query * key..][..key];
        for ((s, &weight), d_weight) in seen.iter().zip(weights).zip(d_weights) {
            let d_score = x.scale * weight * (d_weight - mean);
            add_scaled(dq, d_score, s.of(x.k, k_cache, key));
            add_scaled(s.of_mut(&mut grads.k, &mut grads.k_cache, key), d_score, q);
            add_scaled(s.of_mut(&mut grads.v, &mut grads.v_cache, value), weight, d_out);
        }
    });
    grads
}
