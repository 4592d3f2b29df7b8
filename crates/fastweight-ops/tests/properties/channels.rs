//! Gates for each channel, and gates of momentum, at their limits.

use crate::support::parts::{Axis, part};
use crate::support::random::{Gates, Sizes, problem};
use crate::support::{Array, Form, Operator, Problem, STATES};
use crate::{PUBLIC, assert_same, compute};

const NEW: [Operator; 5] =
    [Operator::Gla, Operator::Kda, Operator::Dplr, Operator::MomentumDelta, Operator::Titans];

/// Sets the numbers of one token, of every row and head.
fn set(problem: &mut Problem, name: &str, token: usize, number: f64) {
    let array = problem.inputs.get_mut(name).expect("an input");
    let [rows, time] = [array.shape[0], array.shape[1]];
    let size = array.values.len() / (rows * time);
    for row in 0..rows {
        let start = (row * time + token) * size;
        array.values[start..start + size].fill(number);
    }
}

/// The names of the log gates.
fn log_gates(operator: Operator) -> &'static [&'static str] {
    match operator {
        Operator::Gla | Operator::Kda => &["g"],
        Operator::Dplr => &["w"],
        Operator::MomentumDelta => &["log_alpha", "log_mu"],
        _ => &[],
    }
}

/// Forgets everything at one token.
fn reset(problem: &mut Problem, token: usize) {
    for name in log_gates(problem.operator) {
        set(problem, name, token, f64::NEG_INFINITY);
    }
    match problem.operator {
        // These read before they forget: what they read must not be written again.
        Operator::Dplr => set(problem, "b", token, 0.0),
        Operator::MomentumDelta => set(problem, "p", token, 0.0),
        Operator::Titans => {
            set(problem, "alpha", token, 1.0);
            set(problem, "eta", token, 0.0);
            set(problem, "theta", token, 0.0);
        }
        _ => {}
    }
}

fn assert_finite(label: &str, arrays: &crate::support::Arrays) {
    for (name, array) in arrays {
        assert!(array.values.iter().all(|x| x.is_finite()), "{label}: {name}");
    }
}

/// What follows a reset equals a sequence that starts there from nothing, wherever in a chunk it is.
#[test]
fn a_reset_of_all_channels_starts_anew() {
    for operator in NEW {
        for token in [0, 1, 31, 32, 70] {
            let mut whole = problem(operator, &Sizes::of(2, 110, 2, 8, 12), Gates::Weak, 6);
            reset(&mut whole, token);
            let mut fresh = part(&whole, Axis::Time, token..110);
            fresh.inputs.retain(|name, _| !STATES.contains(&name.as_str()));
            let fresh = fresh.with_states();
            for form in Form::ALL {
                let label = format!("{operator:?} token {token} {}", form.name());
                let (found, expected) = (compute(&whole, form), compute(&fresh, form));
                assert_finite(&label, &found.outputs);
                crate::close(
                    &found.outputs["o"].slice(1, token..110).values,
                    &expected.outputs["o"].values,
                    1e-6,
                );
                for name in STATES.iter().filter(|name| found.outputs.contains_key(**name)) {
                    crate::close(&found.outputs[*name].values, &expected.outputs[*name].values, 1e-6);
                }
                assert_finite(&label, &found.grads);
                let Some(grad) = found.grads.get("v") else { continue };
                crate::close(&grad.slice(1, token..110).values, &expected.grads["v"].values, 1e-5);
                for name in log_gates(operator) {
                    let gate = found.grads[*name].slice(1, token..token + 1);
                    assert!(gate.values.iter().all(|&g| g == 0.0), "{label}: {name}");
                }
            }
        }
    }
}

/// One channel is forgotten, the others are not: for that channel the gate of the token is `-inf`, everywhere.
#[test]
fn a_reset_of_one_channel_leaves_the_others() {
    for operator in [Operator::Gla, Operator::Kda, Operator::Dplr] {
        let mut one = problem(operator, &Sizes::of(1, 100, 1, 4, 5), Gates::Absent, 3);
        let gate = one.inputs.get_mut(log_gates(operator)[0]).expect("a gate");
        gate.values.iter_mut().skip(2).step_by(4).for_each(|g| *g = f64::NEG_INFINITY);
        let expected = compute(&one, Form::Reference);
        for form in PUBLIC {
            let found = compute(&one, form);
            let label = format!("{operator:?} {}", form.name());
            assert_finite(&label, &found.grads);
            assert_same(&label, &found, &expected, false);
        }
    }
}

/// `g = -20` at every token, and the strongest finite gates float32 holds.
#[test]
fn strong_gates_stay_finite() {
    for operator in NEW {
        let twenty = problem(operator, &Sizes::of(1, 256, 2, 16, 16), Gates::Twenty, 4);
        let mut strongest = twenty.clone();
        for name in log_gates(operator) {
            let gate = strongest.inputs.get_mut(*name).expect("a gate");
            gate.values.iter_mut().step_by(3).for_each(|g| *g = f64::from(f32::MIN));
        }
        for problem in [twenty, strongest] {
            let expected = compute(&problem, Form::Reference);
            for form in PUBLIC {
                let found = compute(&problem, form);
                let label = format!("{operator:?} {}", form.name());
                assert_finite(&label, &found.grads);
                assert_same(&label, &found, &expected, false);
            }
        }
    }
}

/// Gates of exactly zero and write strengths of 0, 1 and 2 over many chunks.
#[test]
fn corrections_of_zero_one_and_two_agree() {
    let mut kda = problem(Operator::Kda, &Sizes::of(1, 300, 2, 16, 16), Gates::Absent, 5);
    let beta = kda.inputs.get_mut("beta").expect("beta");
    beta.values.iter_mut().enumerate().for_each(|(i, b)| *b = (i / 2 % 3) as f64);
    let expected = compute(&kda, Form::Reference);
    for form in PUBLIC {
        assert_same(form.name(), &compute(&kda, form), &expected, false);
    }
}

/// Short sequences give gradients to every input.
#[test]
fn short_sequences_give_gradients_to_every_input() {
    for operator in NEW {
        for time in [2, 5, 32] {
            let problem = problem(operator, &Sizes::of(1, time, 2, 6, 4), Gates::Weak, 9);
            for form in [Form::Fused, Form::Composed, Form::TrackedSteps] {
                let grads = compute(&problem, form).grads;
                let names = |arrays: &crate::support::Arrays| arrays.keys().cloned().collect::<Vec<_>>();
                assert_eq!(names(&grads), names(&problem.inputs), "{operator:?} {}", form.name());
                for (name, Array { values, .. }) in &grads {
                    assert!(values.iter().any(|&g| g != 0.0), "{operator:?} {name} {}", form.name());
                }
            }
        }
    }
}
