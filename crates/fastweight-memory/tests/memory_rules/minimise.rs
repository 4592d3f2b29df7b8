//! Every closed form minimises its stated objective.

use fastweight_memory::rule::reference::{self, Layer, State, Weights, objective};
use fastweight_memory::rule::{Bias, Learner, Memory, Retention, Rule};

use crate::support::{Numbers, name, sizes, sound_rules, start, tokens};

/// Perturbations of one minimiser, each of this length.
const PERTURBATIONS: usize = 400;
const LENGTH: f64 = 1e-3;

/// `weights` moved by a random change of length [`LENGTH`] inside the set that the retention allows.
fn perturbed(rule: &Rule, weights: &[Layer], numbers: &mut Numbers) -> Weights {
    let mut change: Weights =
        weights.iter().map(|w| Layer::new(w.rows, w.cols, numbers.many(w.values.len()))).collect();
    if rule.retention == Retention::Kl {
        // Rows over the keys keep their sum, and every weight stays positive.
        for (layer, weights) in change.iter_mut().zip(weights) {
            layer.values.iter_mut().zip(&weights.values).for_each(|(c, w)| *c *= w.min(1.0));
            for j in 0..layer.cols {
                let sum: f64 = (0..layer.rows).map(|i| layer.values[i * layer.cols + j]).sum();
                let total: f64 = (0..layer.rows).map(|i| weights.values[i * layer.cols + j]).sum();
                for i in 0..layer.rows {
                    layer.values[i * layer.cols + j] -= sum * weights.values[i * layer.cols + j] / total;
                }
            }
        }
    }
    let length = reference::inner_product(&change, &change).sqrt();
    reference::add(weights, LENGTH / length, &change)
}

#[test]
fn every_closed_form_minimises_its_objective() {
    let mut checked = 0;
    for rule in sound_rules() {
        let sizes = sizes(&rule);
        for rule in [rule, Rule { window: if rule.learner == Learner::Proximal { 1 } else { 3 }, ..rule }] {
            let mut state = State::new(&rule, start(&rule, sizes, 1));
            let mut numbers = Numbers::new(2);
            for token in tokens(&rule, sizes, 4, 3) {
                let before = state.clone();
                reference::step(&rule, &mut state, &token);
                let Some(least) = objective(&rule, &before, &token, &state.memory) else { continue };
                checked += 1;
                let scale = 1e-12 * least.abs().max(1.0);
                for _ in 0..PERTURBATIONS {
                    let other = perturbed(&rule, &state.memory, &mut numbers);
                    let value = objective(&rule, &before, &token, &other).unwrap();
                    assert!(value > least - scale, "{}: {value} below {least}", name(&rule));
                    // A strictly convex objective rises; not only does it not fall.
                    assert!(value > least, "{}: flat at {least}", name(&rule));
                }
                // The step is needed: the memory before it is no minimiser.
                assert!(
                    objective(&rule, &before, &token, &before.memory).unwrap() > least,
                    "{}",
                    name(&rule)
                );
            }
        }
    }
    assert!(checked > 800, "{checked} steps were checked");
}

#[test]
fn the_printed_lq_rule_and_newton_schulz_state_no_objective() {
    for rule in sound_rules() {
        let sizes = sizes(&rule);
        let state = State::new(&rule, start(&rule, sizes, 1));
        let token = &tokens(&rule, sizes, 1, 2)[0];
        let none = rule.learner == Learner::NewtonSchulz || (rule.retention == Retention::Lq && !rule.mirror);
        assert_eq!(objective(&rule, &state, token, &state.memory).is_none(), none, "{}", name(&rule));
    }
}

/// The printed rule of Moneta is not the minimiser that its objective has: the mirror step is lower.
#[test]
fn the_printed_lq_rule_is_not_the_minimiser_of_the_mirror_steps_objective() {
    let printed = Rule::new(Memory::Matrix, Bias::Lp, Retention::Lq, Learner::Gradient);
    let mirror = Rule { mirror: true, ..printed };
    let before = State::new(&mirror, start(&mirror, [5, 4], 1));
    let token = &tokens(&mirror, [5, 4], 1, 2)[0];
    let mut state = before.clone();
    reference::step(&mirror, &mut state, token);
    let least = objective(&mirror, &before, token, &state.memory).unwrap();
    let other = vec![reference::normalise_lq(&state.dual[0], printed.q)];
    assert!(objective(&mirror, &before, token, &other).unwrap() > least + 1e-3);
}

/// Newton-Schulz approaches the minimiser of `-<P, O>` over matrices of spectral norm one: singular values near 1.
#[test]
fn newton_schulz_makes_the_momentum_nearly_orthogonal() {
    for (rows, cols) in [(5, 4), (4, 5), (6, 6)] {
        let momentum = Layer::new(rows, cols, Numbers::new(7).many(rows * cols));
        let o = reference::newton_schulz(&momentum);
        // |O|_F^2 is the sum of the squared singular values, each in the interval of the iteration.
        let rank = rows.min(cols) as f64;
        let square = reference::inner_product(std::slice::from_ref(&o), std::slice::from_ref(&o));
        assert!(square > 0.45 * rank && square < 1.5 * rank, "{square} for rank {rank}");
        assert!(reference::inner_product(&[o], &[momentum]) > 0.0);
    }
    let zero = reference::newton_schulz(&Layer::zeros(3, 2));
    assert!(zero.values.iter().all(|x| *x == 0.0));
}

/// Delta gradient descent is the solution of its normal equations `(k k^T + I / eta) W = k v^T + W_{t-1} / eta`.
#[test]
fn delta_gradient_descent_solves_the_normal_equations() {
    let rule = Rule::new(Memory::Matrix, Bias::Squared, Retention::None, Learner::Proximal);
    let mut state = State::new(&rule, start(&rule, [5, 4], 1));
    for token in tokens(&rule, [5, 4], 6, 9) {
        let before = state.memory[0].clone();
        reference::step(&rule, &mut state, &token);
        let after = &state.memory[0];
        for i in 0..5 {
            for j in 0..4 {
                let read: f64 = (0..5).map(|l| token.k[l] * after.values[l * 4 + j]).sum();
                let left = token.k[i] * read + after.values[i * 4 + j] / token.rate;
                let right = token.k[i] * token.v[j] + before.values[i * 4 + j] / token.rate;
                assert!((left - right).abs() < 1e-12, "{left} against {right}");
            }
        }
    }
}

/// The gradient in closed form is the derivative of the loss.
#[test]
fn closed_form_gradients_are_the_derivatives_of_their_losses() {
    for memory in [Memory::Vector, Memory::Matrix, Memory::Mlp] {
        for bias in [Bias::DotProduct, Bias::Squared, Bias::Huber, Bias::Lp] {
            let rule = Rule {
                huber_delta: 0.6,
                expansion: 2,
                ..Rule::new(memory, bias, Retention::None, Learner::Gradient)
            };
            let sizes = sizes(&rule);
            let weights = start(&rule, sizes, 4);
            for token in tokens(&rule, sizes, 3, 5) {
                let gradient = reference::gradient(&rule, &weights, &token.k, &token.v);
                for (layer, gradient) in gradient.iter().enumerate() {
                    for (i, expected) in gradient.values.iter().enumerate() {
                        let at = |by: f64| {
                            let mut moved = weights.clone();
                            moved[layer].values[i] += by;
                            reference::loss(&rule, &moved, &token.k, &token.v)
                        };
                        let found = (at(1e-5) - at(-1e-5)) / 2e-5;
                        assert!(
                            (found - expected).abs() < 1e-8,
                            "{}: {found} against {expected}",
                            name(&rule)
                        );
                    }
                }
            }
        }
    }
}
