//! The state: its bytes, rows, tensors by name.

use burn::tensor::{Device, Tensor};
use fastweight_ops::OpError;
use fastweight_ops::deep_memory::{DeepMemory, DeepState};

use crate::comparing::{numbers, tensor, values};

fn state(rows: usize) -> DeepState {
    let memory = DeepMemory { depth: 2, expansion: 2, bias: true, ..DeepMemory::default() };
    let weight = |(i, [from, to]): (usize, [usize; 2])| {
        tensor::<4>(&numbers(i as u64, rows * 3 * from * to), [rows, 3, from, to], &Device::flex())
    };
    let weights = memory.weight_shapes(4, 4).into_iter().enumerate().map(weight).collect();
    let mut state = DeepState::new(weights).with_momentum();
    state.positions = (10..10 + rows).collect();
    state
}

#[test]
fn bytes_are_those_of_the_tensors() {
    let state = state(2);
    let numbers: usize = state.tensors().iter().map(|(_, t)| values(t.clone()).len()).sum();
    assert_eq!(numbers, 3 * 2 * 3 * (5 * 8 + 9 * 4));
    assert_eq!(state.bytes(), 4 * numbers + 2 * size_of::<usize>());
    let memory = DeepMemory { expansion: 2, bias: true, ..DeepMemory::default() };
    assert_eq!(memory.weight_count(4, 4), 5 * 8 + 9 * 4);
}

#[test]
fn rows_are_selected_in_the_given_order() {
    let state = state(3);
    let picked = state.select(&[2, 0, 2]).unwrap();
    assert_eq!(picked.positions, [12, 10, 12]);
    for ((name, picked), (_, all)) in picked.tensors().into_iter().zip(state.tensors()) {
        let row = |row: usize| values(all.clone().narrow(0, row, 1));
        let expected = [row(2), row(0), row(2)].concat();
        assert_eq!(values(picked), expected, "{name}");
    }
    assert!(matches!(state.select(&[3]), Err(OpError::Value { argument: "rows", .. })));
}

#[test]
fn tensors_have_stable_names_and_map_reaches_all() {
    let state = state(1);
    let names: Vec<String> = state.tensors().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["start.0", "start.1", "current.0", "current.1", "momentum.0", "momentum.1"]);
    let twice = state.clone().map(|t| t.mul_scalar(2.0) + 1.0);
    for ((name, twice), (_, once)) in twice.tensors().into_iter().zip(state.tensors()) {
        assert_eq!(values(twice), values(once.mul_scalar(2.0) + 1.0), "{name}");
    }
}

#[test]
fn a_shared_start_is_the_same_for_every_row() {
    let weight = tensor::<3>(&numbers(1, 24), [2, 3, 4], &Device::flex());
    let state = DeepState::shared(std::slice::from_ref(&weight), 3);
    assert_eq!(state.positions, [0, 0, 0]);
    let rows: Vec<Tensor<3>> = (0..3).map(|_| weight.clone()).collect();
    assert_eq!(values(state.current[0].clone()), values(Tensor::stack::<4>(rows, 0)));
}
