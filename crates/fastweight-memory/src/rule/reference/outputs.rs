//! The definition of rules with gates of their own for every output of every weight.

use super::super::{Retention, Rule};
use super::retention::{primal, softmax};
use super::{Layer, State, gradient, read};

/// One token with a rate and a decay for every output of every weight.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputToken {
    /// Query `[K]`.
    pub q: Vec<f64>,
    /// Key `[K]`.
    pub k: Vec<f64>,
    /// Value `[V]`.
    pub v: Vec<f64>,
    /// Rates of the writes, one number a column, for every weight.
    pub rates: Vec<Vec<f64>>,
    /// Decays `alpha = exp(g)` of the same sizes.
    pub decays: Vec<Vec<f64>>,
    /// Threshold of the Huber loss; [`Rule::huber_delta`] when absent.
    pub threshold: Option<f64>,
}

/// Reads one token: `D_t[i, j] = alpha_t[j] D_{t-1}[i, j] - eta_t[j] grad[i, j]` for every weight, with D the dual of the
/// `l_q` retention, the logarithm of a KL memory, otherwise the weights; returns the reading `M(W_t; q) [V]`.
///
/// The rule must be one of [`run_outputs`](super::super::run_outputs) and the sizes must fit.
pub fn step_outputs(rule: &Rule, state: &mut State, token: &OutputToken) -> Vec<f64> {
    if state.position.is_multiple_of(rule.chunk) {
        state.start = state.memory.clone();
    }
    let rule = Rule { huber_delta: token.threshold.unwrap_or(rule.huber_delta), ..*rule };
    let gradient = gradient(&rule, &state.start, &token.k, &token.v);
    let before = if rule.retention == Retention::Lq { &state.dual } else { &state.memory };
    let layers = before.iter().zip(&gradient).zip(token.decays.iter().zip(&token.rates));
    let sums = layers.map(|((before, gradient), (decay, rate))| {
        let entry = |(at, (d, g)): (usize, (&f64, &f64))| {
            let j = at % before.cols;
            let d = if rule.retention == Retention::Kl { d.ln() } else { *d };
            decay[j] * d - rate[j] * g
        };
        let values = before.values.iter().zip(&gradient.values).enumerate().map(entry).collect();
        Layer { values, ..before.clone() }
    });
    let sums: Vec<Layer> = sums.collect();
    match rule.retention {
        Retention::Lq => (state.memory, state.dual) = (primal(&rule, &sums), sums),
        Retention::Kl => state.memory = sums.into_iter().map(softmax).collect(),
        _ => state.memory = sums,
    }
    state.position += 1;
    read(&rule, &state.memory, &token.q)
}
