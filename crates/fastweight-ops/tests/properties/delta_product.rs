//! What several steps a token add to the delta rule.

use burn::tensor::{Device, Tensor, TensorData};
use fastweight_ops::delta_product::delta_product;
use fastweight_ops::{OpError, Path, SequenceOptions};

use crate::support::random::{Gates, Sizes, problem};
use crate::support::{Array, Arrays, Form, Operator, relative_rms};
use crate::{assert_same, compute};

/// One step a token is the delta rule, to the bit; its float64 loop rounds in another order.
#[test]
fn one_step_is_the_delta_rule() {
    let sizes = Sizes { offsets: Some(vec![0, 40, 40, 75]), ..Sizes::of(1, 75, 3, 12, 20) };
    for gates in [Gates::Absent, Gates::Mixed] {
        let product = problem(Operator::DeltaProduct, &sizes, gates, 0);
        assert_eq!(product.shape("k"), [1, 75, 1, 3, 12]);
        let mut delta = product.clone();
        delta.operator = Operator::GatedDelta;
        for name in ["k", "v", "beta"] {
            delta.inputs.get_mut(name).expect("an input").shape.remove(2);
        }
        for form in Form::ALL {
            let (found, expected) = (compute(&product, form), compute(&delta, form));
            let same = |found: &Arrays, expected: &Arrays| {
                for (name, array) in expected {
                    let found = &found[name].values;
                    let limit = if form == Form::Reference { 1e-14 } else { 0.0 };
                    let error = relative_rms(found, &array.values);
                    assert!(error <= limit, "{gates:?} {} {name}: {error:e}", form.name());
                }
            };
            same(&found.outputs, &expected.outputs);
            same(&found.grads, &expected.grads);
        }
    }
}

/// Three steps equal three tokens of the delta rule, of which the first decays and the last reads.
#[test]
fn steps_equal_tokens_of_the_delta_rule() {
    let product = problem(Operator::DeltaProduct, &Sizes::of(2, 25, 2, 8, 6), Gates::Strong, 2);
    let [batch, time, steps, heads] = product.shape("beta").try_into().expect("four axes");
    assert_eq!(steps, 3);
    let mut delta = product.clone();
    delta.operator = Operator::GatedDelta;
    for name in ["k", "v", "beta"] {
        let shape = &mut delta.inputs.get_mut(name).expect("an input").shape;
        shape.splice(1..3, [time * steps]);
    }
    let spread = |array: &Array, size: usize, last: bool| {
        let mut values = Vec::new();
        for token in array.values.chunks(heads * size) {
            let nothing = vec![0.0; (steps - 1) * token.len()];
            if last {
                values.extend([nothing, token.to_vec()].concat());
            } else {
                values.extend([token.to_vec(), nothing].concat());
            }
        }
        let mut shape = array.shape.clone();
        shape[1] *= steps;
        Array::new(&shape, values)
    };
    delta.inputs.insert("q".into(), spread(&product.inputs["q"], 8, true));
    delta.inputs.insert("g".into(), spread(&product.inputs["g"], 1, false));
    delta.up.insert("o".into(), spread(&product.up["o"], 6, true));
    let mut expected = compute(&delta, Form::Reference);
    let o = &expected.outputs["o"].values;
    let token = heads * 6;
    let last = o.chunks(token).skip(steps - 1).step_by(steps).flatten().copied().collect();
    expected.outputs.insert("o".into(), Array::new(&[batch, time, heads, 6], last));
    for (name, size, at) in [("q", 8, steps - 1), ("g", 1, 0)] {
        let grad = &expected.grads[name].values;
        let own = grad.chunks(heads * size).skip(at).step_by(steps).flatten().copied().collect();
        let grad = Array::new(product.shape(name), own);
        expected.grads.insert(name.into(), grad);
    }
    for name in ["k", "v", "beta"] {
        expected.grads.get_mut(name).expect("a gradient").shape = product.shape(name).to_vec();
    }
    assert_same("reference", &compute(&product, Form::Reference), &expected, true);
}

/// Two full reflections turn the memory by twice the angle between their keys.
#[test]
fn two_reflections_are_a_rotation() {
    let device = Device::flex();
    let angle = 0.3_f32;
    let k = [1.0, 0.0, angle.cos(), angle.sin()];
    let k = Tensor::<5>::from_data(TensorData::new(k.to_vec(), [1, 1, 2, 1, 2]), &device);
    let state = Tensor::<4>::from_data(TensorData::new(vec![3.0_f32, 2.0], [1, 1, 2, 1]), &device);
    let q = Tensor::<4>::ones([1, 1, 1, 2], &device);
    let v = Tensor::<5>::zeros([1, 1, 2, 1, 1], &device);
    let beta = Tensor::<4>::full([1, 1, 2, 1], 2.0, &device);
    for path in [Path::Fused, Path::Composed] {
        let options = SequenceOptions { path, ..SequenceOptions::with_scale(1.0) };
        let (o, s) =
            delta_product(q.clone(), k.clone(), v.clone(), beta.clone(), None, Some(state.clone()), &options)
                .expect("valid arguments");
        let (sin, cos) = (2.0 * f64::from(angle)).sin_cos();
        let turned = [3.0 * cos - 2.0 * sin, 3.0 * sin + 2.0 * cos];
        crate::close(&s.into_data().iter::<f64>().collect::<Vec<_>>(), &turned, 1e-6);
        crate::close(&o.into_data().iter::<f64>().collect::<Vec<_>>(), &[turned[0] + turned[1]], 1e-6);
    }
}

#[test]
fn arguments_that_do_not_fit_are_named() {
    let device = Device::flex();
    let ones4 = |shape: [usize; 4]| Tensor::<4>::ones(shape, &device);
    let ones5 = |shape: [usize; 5]| Tensor::<5>::ones(shape, &device);
    let call = |k, v, beta, gate: Option<Tensor<3>>| {
        let q = ones4([2, 5, 3, 4]);
        match delta_product(q, ones5(k), ones5(v), ones4(beta), gate, None, &SequenceOptions::default()) {
            Ok(_) => "fine",
            Err(OpError::Shape { operator: "delta_product", argument, .. }) => argument,
            Err(OpError::Gate { operator: "delta_product", argument, position: 7, .. }) => argument,
            Err(error) => panic!("{error}"),
        }
    };
    let (k, v, beta) = ([2, 5, 2, 3, 4], [2, 5, 2, 3, 6], [2, 5, 2, 3]);
    assert_eq!(call(k, v, beta, None), "fine");
    assert_eq!(call([2, 5, 0, 3, 4], [2, 5, 0, 3, 6], [2, 5, 0, 3], None), "k");
    assert_eq!(call([2, 5, 2, 3, 5], v, beta, None), "k");
    assert_eq!(call(k, [2, 5, 1, 3, 6], beta, None), "v");
    assert_eq!(call(k, v, [2, 5, 3, 2], None), "beta");
    assert_eq!(call(k, v, beta, Some(Tensor::zeros([2, 10, 3], &device))), "gate");
    let mut gate = vec![-0.1_f32; 30];
    gate[7] = f32::NAN;
    assert_eq!(call(k, v, beta, Some(Tensor::from_data(TensorData::new(gate, [2, 5, 3]), &device))), "gate");
    let (q, none) = (ones4([1, 0, 3, 4]), |last| ones5([1, 0, 2, 3, last]));
    let state = ones4([1, 3, 4, 6]);
    let options = SequenceOptions::default();
    let (o, s) = delta_product(q, none(4), none(6), ones4([1, 0, 2, 3]), None, Some(state), &options)
        .expect("no token");
    assert_eq!((o.dims(), s.dims()), ([1, 0, 3, 6], [1, 3, 4, 6]));
}
