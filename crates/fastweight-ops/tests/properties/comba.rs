//! What Comba shares with other rules, and its arguments.

use burn::tensor::{Device, Tensor, TensorData};
use fastweight_ops::comba::{comba, comba_step};
use fastweight_ops::{OpError, SequenceOptions};

use crate::support::random::{Gates, Sizes, problem};
use crate::support::{Array, Form, Operator, Outcome};
use crate::{assert_same, compute};

/// Outcomes without the gradients that only one of the rules has.
fn common(mut outcome: Outcome) -> Outcome {
    outcome.grads.retain(|name, _| !matches!(name.as_str(), "b_head" | "d_head" | "g"));
    outcome
}

/// Without a decay, a correction of all that was read and a plain query make it the delta rule.
#[test]
fn a_full_correction_without_decay_is_the_delta_rule() {
    let mut whole = problem(Operator::Comba, &Sizes::of(2, 90, 3, 12, 20), Gates::Absent, 1);
    whole.inputs.insert("b_head".into(), Array::new(&[3], vec![1.0; 3]));
    whole.inputs.insert("d_head".into(), Array::zeros(&[3]));
    let mut delta = whole.clone();
    delta.operator = Operator::Delta;
    delta.inputs.retain(|name, _| !matches!(name.as_str(), "b_head" | "d_head" | "g"));
    for form in Form::ALL {
        let (found, expected) = (common(compute(&whole, form)), common(compute(&delta, form)));
        assert_same(form.name(), &found, &expected, form.is_f64());
    }
}

/// Without a correction it is gated linear attention of `beta v`, read by `q - d k`.
#[test]
fn no_correction_is_gated_linear_attention() {
    let mut whole = problem(Operator::Comba, &Sizes::of(2, 90, 3, 12, 20), Gates::Mixed, 1);
    whole.inputs.insert("b_head".into(), Array::zeros(&[3]));
    let mut linear = whole.clone();
    linear.operator = Operator::ScalarGatedLinear;
    linear.inputs.retain(|name, _| matches!(name.as_str(), "q" | "k" | "v" | "g" | "S"));
    let (beta, d) = (&whole.inputs["beta"].values, &whole.inputs["d_head"].values);
    let v = &mut linear.inputs.get_mut("v").expect("values").values;
    v.iter_mut().enumerate().for_each(|(i, v)| *v *= beta[i / 20]);
    let q = &mut linear.inputs.get_mut("q").expect("queries").values;
    q.iter_mut().zip(&whole.inputs["k"].values).enumerate().for_each(|(i, (q, k))| *q -= d[i / 12 % 3] * k);
    for form in Form::ALL {
        let (found, expected) = (compute(&whole, form), compute(&linear, form));
        for (name, expected) in &expected.outputs {
            crate::close(
                &found.outputs[name].values,
                &expected.values,
                if form.is_f64() { 1e-12 } else { 1e-5 },
            );
        }
        for name in ["q", "g", "S"] {
            if let Some(expected) = expected.grads.get(name) {
                crate::close(&found.grads[name].values, &expected.values, 1e-4);
            }
        }
    }
}

#[test]
fn arguments_that_do_not_fit_are_named() {
    fn ones<const D: usize>(shape: [usize; D]) -> Tensor<D> {
        Tensor::ones(shape, &Device::flex())
    }
    fn argument<T>(result: Result<T, OpError>) -> Result<(), &'static str> {
        result.map(drop).map_err(|error| match error {
            OpError::Shape { operator: "comba", argument, .. }
            | OpError::Gate { operator: "comba", argument, .. }
            | OpError::Value { operator: "comba", argument, .. } => argument,
            error => panic!("{error}"),
        })
    }
    let sequence = |beta: [usize; 3], gate: Tensor<3>, b: usize, d: usize, state: [usize; 4]| {
        let (q, k, v) = (ones([2, 5, 3, 4]), ones([2, 5, 3, 4]), ones([2, 5, 3, 6]));
        let options = SequenceOptions::default();
        argument(comba(q, k, v, ones(beta), gate, ones([b]), ones([d]), Some(ones(state)), &options))
    };
    let (fine, state) = ([2, 5, 3], [2, 3, 4, 6]);
    let gate = || ones([2, 5, 3]).neg();
    assert_eq!(sequence(fine, gate(), 3, 3, state), Ok(()));
    assert_eq!(sequence([2, 3, 5], gate(), 3, 3, state), Err("beta"));
    assert_eq!(sequence(fine, ones([2, 5, 1]).neg(), 3, 3, state), Err("gate"));
    assert_eq!(sequence(fine, gate(), 1, 3, state), Err("b"));
    assert_eq!(sequence(fine, gate(), 3, 4, state), Err("d"));
    assert_eq!(sequence(fine, gate(), 3, 3, [2, 3, 6, 4]), Err("initial"));
    let mut gates = vec![-0.5_f32; 30];
    gates[11] = 0.5;
    let bad = Tensor::from_data(TensorData::new(gates, [2, 5, 3]), &Device::flex());
    assert_eq!(sequence(fine, bad, 3, 3, state), Err("gate"));

    let step = |beta: [usize; 2], gate: f32, b: usize, state: [usize; 4], scale| {
        let (q, k, v) = (ones([2, 3, 4]), ones([2, 3, 4]), ones([2, 3, 6]));
        let gate = ones([2, 3]).mul_scalar(gate);
        argument(comba_step(q, k, v, ones(beta), gate, ones([b]), ones([3]), ones(state), scale))
    };
    assert_eq!(step([2, 3], -1.0, 3, state, None), Ok(()));
    assert_eq!(step([3, 2], -1.0, 3, state, None), Err("beta"));
    assert_eq!(step([2, 3], 1.0, 3, state, None), Err("gate"));
    assert_eq!(step([2, 3], -1.0, 2, state, None), Err("b"));
    assert_eq!(step([2, 3], -1.0, 3, [2, 3, 6, 4], None), Err("state"));
    assert_eq!(step([2, 3], -1.0, 3, state, Some(f32::INFINITY)), Err("scale"));
}
