//! One token after the other, where a token's step needs the memory after the one before.

use burn::tensor::Tensor;
use burn::tensor::activation::log_softmax;

use super::rows::Rows;
use super::step::{Factors, anchor, newton_schulz, primal, proximal, read, retain};
use super::{Bias, GradientAt, Learner, Retention, Rule, RuleState};

/// Reads a block; `start` are the weights where [`GradientAt::Previous`] takes gradients. Returns `[B, H, C, V]`.
pub(super) fn block(rule: &Rule, rows: &Rows, state: &mut RuleState, start: &[Tensor<4>]) -> Tensor<4> {
    let exact = rule.learner == Learner::Proximal && rule.bias != Bias::DotProduct;
    let pairs = rows.pairs(&mut state.past);
    let together =
        (rule.gradient_at == GradientAt::Previous && !exact).then(|| Factors::new(rule, start, &pairs));
    let readings = (0..rows.time()).map(|t| {
        let token = rows.narrow(t, 1);
        let anchor = anchor(rule, &state.memory, &token);
        if exact {
            let kept = anchor.into_iter().next().unwrap_or_else(|| token.k.clone());
            let (memory, history) = proximal(rule, kept, &token, state.history.take());
            (state.memory, state.history) = (vec![memory], history);
        } else {
            let near = pairs.narrow(t, rule.window);
            let gradient = match &together {
                Some(factors) => factors.gradient(rule, t, &near.rates),
                None => {
                    let at = primal(rule, &normalised(rule, &anchor));
                    Factors::new(rule, &at, &near).gradient(rule, 0, &near.rates)
                }
            };
            let direction = learn(rule, gradient, &token, &mut state.momentum);
            let sums = anchor.into_iter().zip(direction).map(|(anchor, direction)| anchor + direction);
            state.memory = sums.zip(&token.rates).map(|(sum, rate)| retain(rule, sum, rate)).collect();
        }
        read(rule, &primal(rule, &state.memory), token.q)
    });
    Tensor::cat(readings.collect(), 2)
}

/// The anchor as a memory of its retention: the logarithm of a KL memory must be normalised again.
fn normalised(rule: &Rule, anchor: &[Tensor<4>]) -> Vec<Tensor<4>> {
    match rule.retention {
        Retention::Kl => anchor.iter().map(|layer| log_softmax(layer.clone(), 2)).collect(),
        _ => anchor.to_vec(),
    }
}

/// The learner's direction of a gradient; advances the momentum.
fn learn(
    rule: &Rule,
    gradient: Vec<Tensor<4>>,
    token: &Rows,
    momentum: &mut Vec<Tensor<4>>,
) -> Vec<Tensor<4>> {
    if !rule.has_momentum() {
        return gradient.into_iter().map(Tensor::neg).collect();
    }
    let step = |(gradient, momentum): (Tensor<4>, Tensor<4>)| match &token.momentum {
        Some(mu) => momentum * mu.clone() - gradient,
        None => gradient.neg(),
    };
    *momentum = gradient.into_iter().zip(std::mem::take(momentum)).map(step).collect();
    match rule.learner {
        Learner::NewtonSchulz => momentum.iter().cloned().map(newton_schulz).collect(),
        _ => momentum.clone(),
    }
}
