//! Wrong arguments are refused with their name, what came and what was expected.

use burn::tensor::{Device, Tensor};
use fastweight_ops::deep_memory::{
    DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens, InnerLoss, RateOf, deep_memory,
};
use fastweight_ops::{Offsets, OpError, Path};

fn tokens() -> DeepTokens {
    let device = Device::flex();
    let zeros = || Tensor::zeros([2, 5, 3, 4], &device);
    DeepTokens {
        q: zeros(),
        k: zeros(),
        v: zeros(),
        rate: None,
        momentum: None,
        decay: None,
        threshold: None,
    }
}

fn state(memory: &DeepMemory) -> DeepState {
    let weight = |[from, to]: [usize; 2]| Tensor::<3>::zeros([3, from, to], &Device::flex());
    let weights: Vec<_> = memory.weight_shapes(4, 4).into_iter().map(weight).collect();
    DeepState::shared(&weights, 2)
}

fn refused(memory: &DeepMemory, tokens: DeepTokens, state: DeepState, words: &[&str]) {
    let error = deep_memory(memory, tokens, None, state, None, Path::Auto).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "{error}: no {word}");
    }
}

fn numbers(number: f32) -> Tensor<3> {
    Tensor::<3>::full([2, 5, 3], 0.5, &Device::flex()).slice_fill([1..2, 2..3, 1..2], number)
}

fn scalars(number: f32) -> Option<DeepGate> {
    Some(DeepGate::Heads(numbers(number)))
}

/// Gates of the 16 hidden and 4 value channels of the usual memory.
fn outputs(count: usize, number: f32) -> Option<DeepGate> {
    let at = Tensor::<4>::full([2, 5, 3, count], 0.5, &Device::flex());
    Some(DeepGate::Outputs(at.slice_fill([1..2, 2..3, 1..2, 7..8], number)))
}

#[test]
fn numbers_out_of_their_range_are_named_with_their_place() {
    let memory = DeepMemory::default();
    // Row 1, token 2, head 1.
    let place = "flat position 22";
    for (number, range) in [(1.5, "0 to 1"), (-0.1, "0 to 1"), (f32::NAN, "0 to 1")] {
        let wrong = DeepTokens { momentum: scalars(number), ..tokens() };
        refused(&memory, wrong, state(&memory), &["momentum", place, range]);
        let wrong = DeepTokens { decay: scalars(number), ..tokens() };
        refused(&memory, wrong, state(&memory), &["decay", place, range]);
    }
    for number in [-0.1, f32::INFINITY, f32::NAN] {
        let wrong = DeepTokens { rate: scalars(number), ..tokens() };
        refused(&memory, wrong, state(&memory), &["rate", place, "at least 0"]);
    }
    // Row 1, token 2, head 1, output 7.
    let wrong = DeepTokens { decay: outputs(20, 1.5), ..tokens() };
    refused(&memory, wrong, state(&memory), &["decay", "flat position 447", "0 to 1"]);
    let wrong = DeepTokens { threshold: Some(numbers(0.0)), ..tokens() };
    refused(&memory, wrong, state(&memory), &["threshold", place, "above 0"]);
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let memory = DeepMemory::default();
    let device = Device::flex();
    let wrong = DeepTokens { k: Tensor::zeros([2, 5, 3, 5], &device), ..tokens() };
    refused(&memory, wrong, state(&memory), &["k", "[2, 5, 3, 5]", "[2, 5, 3, 4]"]);
    let wrong = DeepTokens { rate: Some(DeepGate::Heads(Tensor::zeros([2, 5, 4], &device))), ..tokens() };
    refused(&memory, wrong, state(&memory), &["rate", "[2, 5, 4]"]);
    let wrong = DeepTokens { rate: outputs(16, 0.5), ..tokens() };
    refused(&memory, wrong, state(&memory), &["rate", "[2, 5, 3, 16]", "[2, 5, 3, 20]"]);
    let other = DeepMemory { expansion: 2, ..DeepMemory::default() };
    refused(&memory, tokens(), state(&other), &["state", "[2, 3, 4, 16]"]);
    let deeper = DeepMemory { depth: 3, ..DeepMemory::default() };
    refused(&memory, tokens(), state(&deeper), &["3 layers", "2"]);
    let mut fewer = state(&memory);
    fewer.positions.pop();
    refused(&memory, tokens(), fewer, &["positions", "1 rows"]);
    let norm = DeepNorm { weight: Tensor::zeros([3, 5], &device), bias: Tensor::zeros([3, 4], &device) };
    let error = deep_memory(&memory, tokens(), Some(&norm), state(&memory), None, Path::Auto).unwrap_err();
    assert!(error.to_string().contains("norm.weight"), "{error}");
}

#[test]
fn memories_that_cannot_be_are_refused() {
    let base = DeepMemory::default();
    let memories = [
        (DeepMemory { depth: 0, ..base.clone() }, "depth"),
        (DeepMemory { depth: 5, ..base.clone() }, "depth"),
        (DeepMemory { expansion: 0, ..base.clone() }, "expansion"),
        (DeepMemory { chunk: 0, ..base.clone() }, "chunk"),
        (DeepMemory { rate: RateOf::Reading, newton_schulz: true, ..base.clone() }, "newton_schulz"),
        (DeepMemory { window: 0, ..base.clone() }, "window"),
        (DeepMemory { rate: RateOf::Reading, window: 2, ..base.clone() }, "window"),
        (DeepMemory { norm_eps: 0.0, ..base.clone() }, "norm_eps"),
        (DeepMemory { loss: InnerLoss::Power { p: 0.5, smooth: false }, ..base.clone() }, "loss"),
        (DeepMemory { rate: RateOf::Reading, proximal: true, ..base.clone() }, "proximal"),
        (DeepMemory { rate: RateOf::Reading, read_before_write: true, ..base.clone() }, "read_before_write"),
    ];
    for (memory, word) in memories {
        refused(&memory, tokens(), state(&base), &[word]);
    }
    assert!(base.check(4, 5).unwrap_err().to_string().contains("residual"));
    let reading = DeepMemory { rate: RateOf::Reading, ..base.clone() };
    let wrong = DeepTokens { momentum: scalars(0.5), ..tokens() };
    refused(&reading, wrong, state(&base), &["momentum or decay"]);
    refused(&base, tokens(), state(&base).with_momentum(), &["momentum", "absent"]);
}

#[test]
fn gates_of_every_output_are_refused_where_there_are_none() {
    let base = DeepMemory::default();
    for (memory, words) in [
        (DeepMemory { rate: RateOf::Reading, ..base.clone() }, ["RateOf::Reading", "RateOf::Written"]),
        (DeepMemory { window: 2, ..base.clone() }, ["window", "1 with gates for every output"]),
        (DeepMemory { newton_schulz: true, ..base.clone() }, ["newton_schulz", "false with gates"]),
    ] {
        let tokens = DeepTokens { rate: outputs(20, 0.5), ..tokens() };
        refused(&memory, tokens, state(&memory), &words);
    }
}

#[test]
fn packed_documents_need_one_row_and_a_state_each() {
    let memory = DeepMemory::default();
    let offsets = Offsets::new(&[0, 5], 5).unwrap();
    let packed = deep_memory(&memory, tokens(), None, state(&memory), Some(&offsets), Path::Auto);
    assert!(matches!(packed, Err(OpError::PackedBatch { batch: 2, .. })));
}

#[test]
fn no_tokens_change_nothing() {
    let memory = DeepMemory::default();
    let none = || Tensor::zeros([2, 0, 3, 4], &Device::flex());
    let empty = DeepTokens { q: none(), k: none(), v: none(), ..tokens() };
    let (o, after) = deep_memory(&memory, empty, None, state(&memory), None, Path::Auto).unwrap();
    assert_eq!(o.dims(), [2, 0, 3, 4]);
    assert_eq!(after.positions, [0, 0]);
}
