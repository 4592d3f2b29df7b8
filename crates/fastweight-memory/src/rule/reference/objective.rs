//! The objective of one step, written from its definition and not from the closed form.

use super::super::{Bias, Learner, Retention, Rule};
use super::retention::anchor;
use super::{Layer, State, Token, direction, inner_product, loss, lq_norm};

fn entries(layers: &[Layer]) -> impl Iterator<Item = f64> {
    layers.iter().flat_map(|layer| &layer.values).copied()
}

/// The learning-retaining objective of one token at a candidate memory, given the state before the token:
///
/// - loss: the learner's linearised loss `-<D, W>` (`D = -eta grad` or the momentum), or for
///   [`Learner::Proximal`] the exact `eta loss(W; k, v)`;
/// - retention: that of [`Retention`], with constants that do not depend on `W` left out.
///
/// Its minimiser over all memories (for [`Retention::Kl`] over those with positive rows of sum one) is the memory
/// after [`step`](super::step). None where the step is no exact minimiser: Newton-Schulz, which approximates the
/// minimiser of a linear loss in a ball of the spectral norm, and the printed `l_q` rule.
pub fn objective(rule: &Rule, before: &State, token: &Token, candidate: &[Layer]) -> Option<f64> {
    if rule.learner == Learner::NewtonSchulz || (rule.retention == Retention::Lq && !rule.mirror) {
        return None;
    }
    let learning = match rule.learner {
        Learner::Proximal => token.rate * loss(rule, candidate, &token.k, &token.v),
        _ => -inner_product(&direction(rule, before, token).0, candidate),
    };
    let anchor = anchor(rule, before, token);
    let retaining = match rule.retention {
        Retention::None | Retention::ScalarDecay | Retention::ChannelDecay | Retention::Directed => {
            half_square_distance(candidate, &anchor)
        }
        Retention::ElasticNet => {
            let l1: f64 = entries(candidate).map(f64::abs).sum();
            half_square_distance(candidate, &anchor) + token.rate * rule.l1 * l1
        }
        Retention::Lq => {
            let norms: f64 = candidate.iter().map(|layer| 0.5 * lq_norm(layer, rule.q).powi(2)).sum();
            norms - inner_product(&anchor, candidate)
        }
        Retention::Kl => {
            let entropy: f64 = entries(candidate).map(|w| w * w.ln()).sum();
            entropy - inner_product(&anchor, candidate)
        }
        Retention::Bregman if rule.bias == Bias::DotProduct => half_square_distance(candidate, &anchor),
        Retention::Bregman => bregman(before, candidate),
    };
    Some(learning + retaining)
}

fn half_square_distance(a: &[Layer], b: &[Layer]) -> f64 {
    0.5 * entries(a).zip(entries(b)).map(|(a, b)| (a - b).powi(2)).sum::<f64>()
}

/// `1/2 <W - W_{t-1}, H (W - W_{t-1})>`: the divergence of a quadratic history with the Hessian `H`.
fn bregman(before: &State, candidate: &[Layer]) -> f64 {
    let (history, memory) = (&before.history, &before.memory[0]);
    let change = |i: usize, j: usize| candidate[0].at(i, j) - memory.at(i, j);
    let mut sum = 0.0;
    for i in 0..memory.rows {
        for j in 0..memory.cols {
            let curved: f64 = if history.cols == 1 {
                history.values[i] * change(i, j)
            } else {
                (0..memory.rows).map(|l| history.at(i, l) * change(l, j)).sum()
            };
            sum += 0.5 * change(i, j) * curved;
        }
    }
    sum
}
