//! Gates and write strengths at their limits.

use crate::support::parts::{Axis, part};
use crate::support::random::{Gates, Random, Sizes, problem};
use crate::support::{Array, Form, Operator, Problem, rms};
use crate::{PUBLIC, assert_close, assert_same, cases, compute};

use proptest::prelude::*;

/// Operators that take a gate for each token.
const GATED: [Operator; 3] = [Operator::ScalarGatedLinear, Operator::NormalisedLinear, Operator::GatedDelta];

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn an_absent_gate_equals_a_gate_of_zero(
        operator in prop::sample::select(GATED.to_vec()), time in 1..100_usize, seed in any::<u64>()
    ) {
        let without = problem(operator, &Sizes::of(2, time, 2, 8, 12), Gates::Absent, seed);
        let mut with = without.clone();
        with.inputs.insert("g".into(), Array::zeros(&[2, time, 2]));
        for form in Form::ALL {
            let expected = compute(&without, form);
            let mut found = compute(&with, form);
            let grad = found.grads.remove("g");
            assert!(form == Form::Steps || grad.is_some_and(|g| rms(&g.values) > 0.0), "{}", form.name());
            let limit = if form.is_f64() { 1e-14 } else { 2e-6 };
            let label = format!("{operator:?} {}", form.name());
            assert_close(&label, "output", &found.outputs, &expected.outputs, limit);
            assert_close(&label, "gradient", &found.grads, &expected.grads, 10.0 * limit);
        }
    }

    #[test]
    fn a_gate_per_head_equals_the_same_gate_at_every_token(time in 1..100_usize, seed in any::<u64>()) {
        let per_head = problem(Operator::Linear, &Sizes::of(2, time, 3, 8, 12), Gates::PerHead, seed);
        let mut per_token = per_head.clone();
        let gate = per_head.inputs["g"].values.repeat(2 * time);
        per_token.inputs.insert("g".into(), Array::new(&[2, time, 3], gate));
        for form in Form::ALL {
            let expected = compute(&per_head, form);
            let mut found = compute(&per_token, form);
            if let Some(grad) = found.grads.get_mut("g") {
                let sum = |head: usize| grad.values.iter().skip(head).step_by(3).sum();
                *grad = Array::new(&[3], (0..3).map(sum).collect());
            }
            assert_same(form.name(), &found, &expected, false);
        }
    }
}

#[test]
fn gates_of_minus_twenty_stay_finite() {
    for operator in GATED {
        let problem = problem(operator, &Sizes::of(1, 256, 2, 16, 16), Gates::Twenty, 4);
        let expected = compute(&problem, Form::Reference);
        for form in PUBLIC {
            assert_same(&format!("{operator:?} {}", form.name()), &compute(&problem, form), &expected, false);
        }
    }
}

/// A reset at token 70: what follows equals a sequence that starts there from nothing.
#[test]
fn a_gate_of_minus_infinity_is_a_hard_reset() {
    for operator in GATED {
        let mut whole = problem(operator, &Sizes::of(1, 150, 2, 8, 8), Gates::Weak, 6);
        let gate = &mut whole.inputs.get_mut("g").expect("a gate").values;
        gate[2 * 70..2 * 71].fill(f64::NEG_INFINITY);
        let mut fresh = part(&whole, Axis::Time, 70..150);
        fresh.inputs.retain(|name, _| !matches!(name.as_str(), "S" | "z"));
        let fresh = fresh.with_states();
        for form in PUBLIC {
            let (found, expected) = (compute(&whole, form), compute(&fresh, form));
            crate::close(&found.outputs["o"].slice(1, 70..150).values, &expected.outputs["o"].values, 1e-6);
            crate::close(&found.outputs["S"].values, &expected.outputs["S"].values, 1e-6);
            if let Some(grad) = found.grads.get("v") {
                crate::close(&grad.slice(1, 70..150).values, &expected.grads["v"].values, 1e-5);
                assert!(
                    found.grads.values().all(|g| g.values.iter().all(|x| x.is_finite())),
                    "{}",
                    form.name()
                );
                let gate = &found.grads["g"].values[2 * 70..2 * 71];
                assert_eq!(gate, [0.0, 0.0], "{operator:?} {}", form.name());
            }
        }
    }
}

/// Values that one fixed map gives: then a correcting memory never moves away from that map.
fn consistent(time: usize, beta: f64, spread: f64) -> (Problem, f64) {
    let (key, value) = (16, 16);
    let mut random = Random::new(9);
    let centre = random.unit_vectors(&[1, key]).values;
    let mut k = random.unit_vectors(&[1, time, 1, key]);
    for vector in k.values.chunks_mut(key) {
        vector.iter_mut().zip(&centre).for_each(|(x, c)| *x = spread * *x + (1.0 - spread) * c);
        let norm = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
        vector.iter_mut().for_each(|x| *x = f64::from((*x / norm) as f32));
    }
    let map = random.normals(&[key, value]);
    let read = |k: &[f64]| -> Vec<f64> {
        (0..value).map(|j| k.iter().enumerate().map(|(i, x)| x * map.values[i * value + j]).sum()).collect()
    };
    let v = k.values.chunks(key).flat_map(read).map(|x| f64::from(x as f32)).collect();
    let v = Array::new(&[1, time, 1, value], v);
    let q = random.normals(&[1, time, 1, key]);
    let beta = Array::new(&[1, time, 1], vec![beta; time]);
    let inputs =
        [("q", q), ("k", k), ("v", v), ("beta", beta)].map(|(name, array)| (name.to_owned(), array)).into();
    let up = [("o".to_owned(), random.normals(&[1, time, 1, value]))].into();
    let problem = Problem { operator: Operator::Delta, inputs, up, scale: 0.25, window: None, offsets: None };
    (problem.with_states(), rms(&map.values))
}

/// The same with a gate of zero for each channel.
fn with_channels(delta: &Problem) -> Problem {
    let mut kda = Problem { operator: Operator::Kda, ..delta.clone() };
    kda.inputs.insert("g".into(), Array::zeros(delta.shape("k")));
    kda
}

#[test]
fn full_and_double_corrections_stay_bounded_over_ten_thousand_tokens() {
    for beta in [1.0, 2.0] {
        for spread in [1.0, 0.2] {
            let (problem, size) = consistent(10_000, beta, spread);
            for problem in [with_channels(&problem), problem] {
                for form in [Form::Fused, Form::Composed, Form::Steps] {
                    let state = compute(&problem, form).outputs["S"].values.clone();
                    let found = rms(&state);
                    let label =
                        format!("{:?} beta {beta}, spread {spread}, {}", problem.operator, form.name());
                    assert!(found <= 2.001 * size, "{label}: {found} of {size}");
                }
            }
        }
    }
}

/// The chunked forms solve a triangular system; keys that nearly agree make it as hard as it gets: the
/// rounding of `k . k` is the same for every pair, so its effect adds up instead of averaging out.
#[test]
fn similar_keys_with_double_corrections_agree() {
    for (spread, limit) in [(0.0, 1e-4), (0.02, 1e-4), (0.2, 1e-5)] {
        let (mut problem, _) = consistent(200, 2.0, spread);
        problem.inputs.insert("S".into(), Random::new(2).normals(&[1, 1, 16, 16]));
        for problem in [with_channels(&problem), problem] {
            let expected = compute(&problem, Form::Reference);
            for form in PUBLIC {
                let found = compute(&problem, form);
                let label = format!("{:?} spread {spread} {}", problem.operator, form.name());
                assert_close(&label, "output", &found.outputs, &expected.outputs, limit);
                if form != Form::Steps {
                    assert_close(&label, "gradient", &found.grads, &expected.grads, 10.0 * limit);
                }
            }
        }
    }
}
