//! Gradients of the float64 loops that no fixture holds, against central differences of the same loops.

use crate::support::random::{Gates, Sizes, problem};
use crate::support::{Array, Form, Operator, Problem};
use crate::{compute, support};

fn loss(problem: &Problem) -> f64 {
    let outputs = support::run(problem, Form::Reference).expect("valid arguments").outputs;
    let products = |(name, up): (&String, &Array)| -> f64 {
        outputs[name].values.iter().zip(&up.values).map(|(a, b)| a * b).sum()
    };
    problem.up.iter().map(products).sum()
}

/// Compares the gradient of each input, or of every `stride`-th number of it, with central differences.
pub fn check(label: &str, problem: &Problem, stride: usize) {
    let grads = compute(problem, Form::Reference).grads;
    for (name, input) in problem.inputs.iter().filter(|(name, _)| grads.contains_key(*name)) {
        let size = support::rms(&grads[name].values).max(1e-3);
        for at in (0..input.values.len()).step_by(stride) {
            let step = 1e-5;
            let [above, below] = [step, -step].map(|step| {
                let mut moved = problem.clone();
                moved.inputs.get_mut(name).expect("an input").values[at] += step;
                loss(&moved)
            });
            let (found, expected) = (grads[name].values[at], (above - below) / (2.0 * step));
            let error = (found - expected).abs() / size;
            assert!(error < 1e-5, "{label}: {name}[{at}] is {found}, differences say {expected}");
        }
    }
}

#[test]
fn loops_without_fixtures_agree_with_their_differences() {
    for operator in Operator::ALL.into_iter().filter(|operator| !operator.has_fixtures()) {
        for seed in 0..3 {
            for gates in [Gates::Absent, Gates::Weak] {
                let sizes = Sizes { offsets: Some(vec![0, 3, 3, 7]), ..Sizes::of(1, 7, 2, 4, 3) };
                check(&format!("{operator:?} {gates:?}"), &problem(operator, &sizes, gates, seed), 1);
            }
        }
    }
}
