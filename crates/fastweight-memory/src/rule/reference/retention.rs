//! What a write keeps, and the exact steps.

use super::super::{Bias, Memory, Retention, Rule};
use super::{Layer, State, Token, Weights, read};

/// `|A|_q = (sum |A_ij|^q)^(1/q)` over all entries.
pub fn lq_norm(a: &Layer, q: f64) -> f64 {
    a.values.iter().map(|a| a.abs().powf(q)).sum::<f64>().powf(1.0 / q)
}

/// The rule printed for Moneta, `A / |A|_q^(q-2)`.
pub fn normalise_lq(a: &Layer, q: f64) -> Layer {
    let divisor = lq_norm(a, q).powf(q - 2.0);
    Layer { values: a.values.iter().map(|a| a / divisor).collect(), ..a.clone() }
}

/// The mirror map of `1/2 |W|_q^2`: `sign(A) |A|^(r-1) / |A|_r^(r-2)`, `r = q / (q - 1)`.
pub fn mirror_lq(a: &Layer, q: f64) -> Layer {
    let r = q / (q - 1.0);
    let divisor = lq_norm(a, r).powf(r - 2.0);
    let entry = |a: &f64| if *a == 0.0 { 0.0 } else { a.signum() * a.abs().powf(r - 1.0) / divisor };
    Layer { values: a.values.iter().map(entry).collect(), ..a.clone() }
}

/// The memory of a dual memory.
pub(super) fn primal(rule: &Rule, dual: &[Layer]) -> Weights {
    let map = if rule.mirror { mirror_lq } else { normalise_lq };
    dual.iter().map(|a| map(a, rule.q)).collect()
}

/// Softmax over the rows of every column of `logits`.
pub(super) fn softmax(logits: Layer) -> Layer {
    let mut layer = logits;
    for j in 0..layer.cols {
        let top = (0..layer.rows).map(|i| layer.at(i, j)).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = (0..layer.rows).map(|i| (layer.at(i, j) - top).exp()).sum();
        for i in 0..layer.rows {
            layer.values[i * layer.cols + j] = (layer.at(i, j) - top).exp() / sum;
        }
    }
    layer
}

fn map(layer: &Layer, f: impl Fn(usize, usize, f64) -> f64) -> Layer {
    let cols = layer.cols;
    let values = layer.values.iter().enumerate().map(|(i, w)| f(i / cols, i % cols, *w)).collect();
    Layer { values, ..layer.clone() }
}

fn soft_threshold(x: f64, by: f64) -> f64 {
    x.signum() * (x.abs() - by).max(0.0)
}

/// The anchor of the retention: the decayed memory, in the space where the retention adds gradients (the dual `A`,
/// the logarithm of a normalised memory, otherwise the weights).
pub(super) fn anchor(rule: &Rule, state: &State, token: &Token) -> Weights {
    let decay = |i: usize| token.decay[if rule.retention == Retention::ChannelDecay { i } else { 0 }];
    let kept = match rule.retention {
        Retention::Lq => &state.dual,
        _ => &state.memory,
    };
    let layer = |(index, layer): (usize, &Layer)| match rule.retention {
        Retention::None | Retention::Bregman => layer.clone(),
        Retention::ChannelDecay => map(layer, |i, j, w| if index == 0 { decay(i) * w } else { decay(j) * w }),
        Retention::Kl => map(layer, |_, _, w| decay(0) * w.ln()),
        Retention::ScalarDecay | Retention::ElasticNet | Retention::Lq => map(layer, |_, _, w| decay(0) * w),
        Retention::Directed => {
            let reading = read(rule, &state.memory, &token.k);
            map(layer, |i, j, w| {
                let read = reading[if rule.memory == Memory::Vector { i } else { j }];
                decay(0) * w - token.rate * token.k[i] * read
            })
        }
    };
    kept.iter().enumerate().map(layer).collect()
}

/// The memory that a token finds once it has decayed.
pub(super) fn decayed(rule: &Rule, state: &State, token: &Token) -> Weights {
    let anchor = anchor(rule, state, token);
    match rule.retention {
        Retention::Lq => primal(rule, &anchor),
        Retention::Kl => anchor.into_iter().map(softmax).collect(),
        _ => anchor,
    }
}

/// The memory after a step along `direction`, and its dual.
pub(super) fn retain(rule: &Rule, state: &State, token: &Token, direction: &[Layer]) -> (Weights, Weights) {
    let sum = super::add(&anchor(rule, state, token), 1.0, direction);
    match rule.retention {
        Retention::Lq => (primal(rule, &sum), sum),
        Retention::Kl => (sum.into_iter().map(softmax).collect(), Vec::new()),
        Retention::ElasticNet => {
            let threshold = token.rate * rule.l1;
            (sum.iter().map(|w| map(w, |_, _, w| soft_threshold(w, threshold))).collect(), Vec::new())
        }
        _ => (sum, Vec::new()),
    }
}

/// `H + eta k k^T`, or its diagonal.
pub(super) fn history_of(state: &State, token: &Token) -> Layer {
    let k = &token.k;
    map(&state.history, |i, j, h| h + token.rate * k[i] * k[if state.history.cols == 1 { i } else { j }])
}

/// The exact minimiser of loss and retention.
pub(super) fn proximal(rule: &Rule, state: &State, token: &Token) -> Weights {
    let anchor = &anchor(rule, state, token);
    let (eta, k) = (token.rate, &token.k);
    let error: Vec<f64> = read(rule, anchor, k).iter().zip(&token.v).map(|(y, v)| y - v).collect();
    // What the error at the anchor is multiplied by, and the direction of the write.
    let square: f64 = k.iter().map(|k| k * k).sum();
    let layer = match (rule.memory, rule.retention) {
        (Memory::Vector, Retention::Bregman) => {
            let history = history_of(state, token);
            map(&anchor[0], |i, _, w| w - eta * k[i] * error[i] / history.values[i])
        }
        (Memory::Vector, Retention::ElasticNet) => map(&anchor[0], |i, _, w| {
            soft_threshold(w + eta * k[i] * token.v[i], eta * rule.l1) / (1.0 + eta * k[i] * k[i])
        }),
        (Memory::Vector, _) => {
            map(&anchor[0], |i, _, w| w - eta * k[i] * error[i] / (1.0 + eta * k[i] * k[i]))
        }
        (_, Retention::Bregman) => {
            let direction = solve(&history_of(state, token), k);
            map(&anchor[0], |i, j, w| w - eta * direction[i] * error[j])
        }
        _ => {
            let length = error.iter().map(|e| e * e).sum::<f64>().sqrt();
            let bound = rule.huber_delta * (1.0 + eta * square);
            let factor = if rule.bias == Bias::Huber && length > bound {
                eta * rule.huber_delta / length
            } else {
                eta / (1.0 + eta * square)
            };
            map(&anchor[0], |i, j, w| w - factor * k[i] * error[j])
        }
    };
    vec![layer]
}

/// `H^-1 x` for a symmetric positive definite `H`, by elimination.
fn solve(h: &Layer, x: &[f64]) -> Vec<f64> {
    let n = x.len();
    let (mut h, mut x) = (h.clone(), x.to_vec());
    for pivot in 0..n {
        for row in pivot + 1..n {
            let factor = h.at(row, pivot) / h.at(pivot, pivot);
            for col in pivot..n {
                h.values[row * n + col] -= factor * h.at(pivot, col);
            }
            x[row] -= factor * x[pivot];
        }
    }
    for row in (0..n).rev() {
        let known: f64 = (row + 1..n).map(|col| h.at(row, col) * x[col]).sum();
        x[row] = (x[row] - known) / h.at(row, row);
    }
    x
}
