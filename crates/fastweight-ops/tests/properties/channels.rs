//! Gates for each channel, and gates of momentum, at their limits.

use crate::support::parts::{Axis, part};
use crate::support::random::{Gates, Sizes, problem};
use crate::support::{Array, Form, Operator, Problem, STATES};
use crate::{PUBLIC, assert_same, compute};

const NEW: [Operator; 6] = [
    Operator::Gla,
    Operator::Kda,
    Operator::Dplr,
    Operator::MomentumDelta,
    Operator::Titans,
    Operator::TitansChannels,
];

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
        Operator::Titans | Operator::TitansChannels => {
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

/// One column of a Titans memory forgets everything at a token, which it does not write, another has no momentum, a third is
/// never written: the others do not notice, and what the first held before reaches nothing after.
#[test]
fn gates_at_their_limits_stay_in_their_column() {
    let plain = problem(Operator::TitansChannels, &Sizes::of(2, 75, 2, 9, 13), Gates::Weak, 7);
    let mut limits = plain.clone();
    let gates = [("alpha", 2, 1.0), ("eta", 2, 0.0), ("theta", 2, 0.0), ("eta", 5, 0.0), ("theta", 11, 0.0)];
    for (name, column, number) in gates {
        let gate = limits.inputs.get_mut(name).expect("a gate");
        // Every row and head at token 40, or a column at all tokens.
        let tokens = if column == 2 { 40..41 } else { 0..75 };
        for (at, x) in gate.values.iter_mut().enumerate() {
            if at % 13 == column && tokens.contains(&(at / (2 * 13) % 75)) {
                *x = number;
            }
        }
    }
    let mut other_start = limits.clone();
    for name in ["S", "M"] {
        let state = other_start.inputs.get_mut(name).expect("a state");
        state.values.iter_mut().skip(2).step_by(13).for_each(|x| *x += 3.0);
    }
    let expected = compute(&limits, Form::Reference);
    let column =
        |array: &Array, j: usize| -> Vec<f64> { array.values.iter().skip(j).step_by(13).copied().collect() };
    for form in Form::ALL {
        let [before, found, moved] = [&plain, &limits, &other_start].map(|problem| compute(problem, form));
        assert_same(form.name(), &found, &expected, form.is_f64());
        for name in ["o", "S", "M"] {
            for j in (0..13).filter(|j| ![2, 5, 11].contains(j)) {
                let [before, found] = [&before, &found].map(|outcome| column(&outcome.outputs[name], j));
                assert_eq!(before, found, "{} {name} column {j}", form.name());
            }
            let [found, moved] = [&found, &moved].map(|outcome| &outcome.outputs[name]);
            if name == "o" {
                let [found, moved] = [found, moved].map(|o| column(&o.slice(1, 40..75), 2));
                assert_eq!(found, moved, "{}", form.name());
            } else {
                assert_eq!(column(found, 2), column(moved, 2), "{} {name}", form.name());
            }
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
