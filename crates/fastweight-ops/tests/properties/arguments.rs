//! Every argument that does not fit is an error that names it.

use burn::tensor::{DType, Device, Tensor, TensorData};
use fastweight_ops::delta::{delta_rule, delta_rule_step};
use fastweight_ops::linear::{
    LinearGate, linear_attention, linear_attention_noncausal, linear_attention_step,
};
use fastweight_ops::normalised_linear::{normalised_linear_attention, normalised_linear_attention_step};
use fastweight_ops::{Offsets, OpError, Path, SequenceOptions};

pub const B: usize = 2;
pub const T: usize = 5;
pub const H: usize = 3;
pub const K: usize = 4;
pub const V: usize = 6;

pub fn ones<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::ones(shape, &Device::flex())
}

pub fn zeros<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, &Device::flex())
}

pub fn argument(error: OpError) -> &'static str {
    match error {
        OpError::Shape { argument, .. }
        | OpError::Gate { argument, .. }
        | OpError::Value { argument, .. } => argument,
        OpError::Offsets { .. } | OpError::PackedBatch { .. } => "offsets",
        OpError::NoFusedKernel { .. } => "path",
    }
}

/// Shapes of `q, k, v` that do not fit each other.
fn wrong_tokens() -> Vec<(&'static str, [[usize; 4]; 3])> {
    let (q, v) = ([B, T, H, K], [B, T, H, V]);
    vec![
        ("k", [q, [B, T, H, K + 1], v]),
        ("k", [q, [B, T, H + 1, K], v]),
        ("k", [q, [B, T + 1, H, K], v]),
        ("k", [q, [B + 1, T, H, K], v]),
        ("v", [q, q, [B, T, H + 1, V]]),
        ("v", [q, q, [B, T - 1, H, V]]),
        ("v", [q, q, [1, T, H, V]]),
        ("v", [q, q, [B, T, H, 0]]),
        ("q", [[0, T, H, K], [0, T, H, K], [0, T, H, V]]),
        ("q", [[B, T, 0, K], [B, T, 0, K], [B, T, 0, V]]),
        ("q", [[B, T, H, 0], [B, T, H, 0], v]),
    ]
}

#[test]
fn tokens_of_other_shapes_are_named() {
    let options = SequenceOptions::default();
    for (name, shapes) in wrong_tokens() {
        let [q, k, v] = shapes.map(ones::<4>);
        let delta = delta_rule(q.clone(), k.clone(), v.clone(), ones([B, T, H]), None, None, &options);
        assert_eq!(delta.map(drop).map_err(argument), Err(name), "{shapes:?}");
        let linear = linear_attention(q.clone(), k.clone(), v.clone(), LinearGate::None, None, &options);
        assert_eq!(linear.map(drop).map_err(argument), Err(name), "{shapes:?}");
        let noncausal = linear_attention_noncausal(q.clone(), k.clone(), v.clone(), &options);
        assert_eq!(noncausal.map(drop).map_err(argument), Err(name), "{shapes:?}");
        let normalised = normalised_linear_attention(q, k, v, None, None, &options);
        assert_eq!(normalised.map(drop).map_err(argument), Err(name), "{shapes:?}");
    }
}

fn qkv() -> [Tensor<4>; 3] {
    [ones([B, T, H, K]), ones([B, T, H, K]), ones([B, T, H, V])]
}

#[test]
fn gates_strengths_and_states_of_other_shapes_are_named() {
    let options = SequenceOptions::default();
    let delta = |beta: [usize; 3], gate: Option<[usize; 3]>, state: Option<[usize; 4]>| {
        let [q, k, v] = qkv();
        delta_rule(q, k, v, ones(beta), gate.map(zeros), state.map(ones), &options)
            .map(drop)
            .map_err(argument)
    };
    let fine = [B, T, H];
    assert_eq!(delta(fine, Some(fine), Some([B, H, K, V])), Ok(()));
    assert_eq!(delta([B, H, T], None, None), Err("beta"));
    assert_eq!(delta(fine, Some([B, T, 1]), None), Err("gate"));
    for state in [[B, H, V, K], [1, H, K, V], [B, 1, K, V]] {
        assert_eq!(delta(fine, None, Some(state)), Err("initial"), "{state:?}");
    }
    let linear = |gate, state: Option<[usize; 4]>| {
        let [q, k, v] = qkv();
        linear_attention(q, k, v, gate, state.map(ones), &options).map(drop).map_err(argument)
    };
    assert_eq!(linear(LinearGate::PerHead(zeros([H + 1])), None), Err("gate"));
    assert_eq!(linear(LinearGate::PerToken(zeros([B, T, H + 1])), None), Err("gate"));
    assert_eq!(linear(LinearGate::None, Some([B, H, V, K])), Err("initial"));
    let normalised = |gate: Option<[usize; 3]>, s: [usize; 4], z: [usize; 3]| {
        let [q, k, v] = qkv();
        let initial = Some((ones(s), ones(z)));
        normalised_linear_attention(q, k, v, gate.map(zeros), initial, &options).map(drop).map_err(argument)
    };
    assert_eq!(normalised(Some(fine), [B, H, K, V], [B, H, K]), Ok(()));
    assert_eq!(normalised(Some([T, B, H]), [B, H, K, V], [B, H, K]), Err("gate"));
    assert_eq!(normalised(None, [B, H, V, K], [B, H, K]), Err("initial memory"));
    assert_eq!(normalised(None, [B, H, K, V], [B, H, V]), Err("initial normaliser"));
}

#[test]
fn steps_name_what_does_not_fit() {
    let (q, v) = (|| ones([B, H, K]), || ones([B, H, V]));
    let state = || ones([B, H, K, V]);
    let delta = |k: [usize; 3], beta: [usize; 2], s: Tensor<4>, scale| {
        delta_rule_step(q(), ones(k), v(), ones(beta), None, s, scale).map(drop).map_err(argument)
    };
    assert_eq!(delta([B, H, K], [B, H], state(), None), Ok(()));
    assert_eq!(delta([B, H, K + 1], [B, H], state(), None), Err("k"));
    assert_eq!(delta([B, H, K], [H, B], state(), None), Err("beta"));
    assert_eq!(delta([B, H, K], [B, H], ones([B, H, V, K]), None), Err("state"));
    assert_eq!(delta([B, H, K], [B, H], state(), Some(f32::NAN)), Err("scale"));
    let linear = linear_attention_step(q(), q(), v(), Some(zeros([B, H + 1])), state(), None);
    assert_eq!(linear.map(drop).map_err(argument), Err("gate"));
    let normalised = normalised_linear_attention_step(q(), q(), v(), None, state(), ones([B, H, V]));
    assert_eq!(normalised.map(drop).map_err(argument), Err("normaliser"));
}

#[test]
fn offsets_need_one_row_that_they_cover() {
    let options = |offsets: &[usize], time| SequenceOptions {
        offsets: Some(Offsets::new(offsets, time).expect("offsets")),
        ..SequenceOptions::default()
    };
    let [q, k, v] = qkv();
    let error = delta_rule(q, k, v, ones([B, T, H]), None, None, &options(&[0, 2, T], T)).unwrap_err();
    assert_eq!(error, OpError::PackedBatch { operator: "delta_rule", batch: B });
    let row = || ones([1, T, H, K]);
    let longer = options(&[0, 2, T + 1], T + 1);
    let error = linear_attention(row(), row(), row(), LinearGate::None, None, &longer).unwrap_err();
    assert!(matches!(error, OpError::Offsets { .. }), "{error}");
    let two = options(&[0, 2, T], T);
    let one_state = Some(ones([1, H, K, K]));
    let error = linear_attention(row(), row(), row(), LinearGate::None, one_state, &two).unwrap_err();
    assert!(error.to_string().contains("expected [2, 3, 4, 4]"), "{error}");
}

#[test]
fn scales_and_element_types_are_checked() {
    for scale in [f32::NAN, f32::INFINITY] {
        let [q, k, v] = qkv();
        let options = SequenceOptions::with_scale(scale);
        let result = linear_attention(q, k, v, LinearGate::None, None, &options);
        assert_eq!(result.map(drop).map_err(argument), Err("scale"));
    }
    let [q, k, v] = qkv();
    let result = normalised_linear_attention(q, k, v, None, None, &SequenceOptions::with_scale(0.5));
    assert_eq!(result.map(drop).map_err(argument), Err("scale"));
    let [q, k, v] = qkv();
    let double = ones([B, T, H]).cast(DType::F64);
    let error = delta_rule(q, k, v, double, None, None, &SequenceOptions::default()).unwrap_err();
    assert!(error.to_string().contains("beta is F64, expected F32"), "{error}");
}

/// A gate above zero or NaN is named with its value and its place, on every path and in steps.
#[test]
fn gates_above_zero_or_nan_are_named() {
    for bad in [176.0, 1e-30, f32::NAN, f32::INFINITY] {
        for tracking in [false, true] {
            let gate_of = |shape: &[usize], at: usize| {
                let mut values = vec![-0.5_f32; shape.iter().product()];
                values[at] = bad;
                TensorData::new(values, shape.to_vec())
            };
            let device = if tracking { Device::flex().autodiff() } else { Device::flex() };
            let check = |result: Result<(), OpError>, at: usize| {
                let Err(OpError::Gate { argument: "gate", value, position, .. }) = result else {
                    panic!("{bad}: {result:?}");
                };
                assert_eq!((value.to_bits(), position), (bad.to_bits(), at));
            };
            for path in [Path::Auto, Path::Fused, Path::Composed] {
                let options = SequenceOptions { path, ..SequenceOptions::default() };
                let gate = || Tensor::<3>::from_data(gate_of(&[B, T, H], 17), &device);
                let [q, k, v] = qkv();
                let beta = ones([B, T, H]);
                let delta = delta_rule(q.clone(), k.clone(), v.clone(), beta, Some(gate()), None, &options);
                check(delta.map(drop), 17);
                let per_token = LinearGate::PerToken(gate());
                let linear = linear_attention(q.clone(), k.clone(), v.clone(), per_token, None, &options);
                check(linear.map(drop), 17);
                let per_head = LinearGate::PerHead(Tensor::from_data(gate_of(&[H], 2), &device));
                let linear = linear_attention(q.clone(), k.clone(), v.clone(), per_head, None, &options);
                check(linear.map(drop), 2);
                check(normalised_linear_attention(q, k, v, Some(gate()), None, &options).map(drop), 17);
            }
            let (q, v, state) = (|| ones([B, H, K]), || ones([B, H, V]), || ones([B, H, K, V]));
            let gate = || Some(Tensor::<2>::from_data(gate_of(&[B, H], 4), &device));
            check(delta_rule_step(q(), q(), v(), ones([B, H]), gate(), state(), None).map(drop), 4);
            check(linear_attention_step(q(), q(), v(), gate(), state(), None).map(drop), 4);
            let normalised =
                normalised_linear_attention_step(q(), q(), v(), gate(), state(), ones([B, H, K]));
            check(normalised.map(drop), 4);
        }
    }
    let fine = Tensor::<1>::from_data([0.0, -0.0, f32::NEG_INFINITY], &Device::flex());
    let [q, k, v] = qkv();
    assert!(linear_attention(q, k, v, LinearGate::PerHead(fine), None, &SequenceOptions::default()).is_ok());
}
