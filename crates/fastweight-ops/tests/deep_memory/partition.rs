//! Any cut of the input, packed documents, rows at different positions, rows that do not see each other.

use burn::tensor::{DType, Device, Tensor};
use fastweight_ops::Path;
use fastweight_ops::deep_memory::{
    DeepGate, DeepMemory, DeepState, DeepToken, DeepTokens, RateOf, deep_memory, deep_memory_read,
    deep_memory_step,
};

use crate::comparing::{numbers, tensor, values};
use crate::memories::{memories, single_limit};
use crate::problem::{ALL, Array, Outcome, Parts, Problem, Sizes, assert_same, narrow, read};

#[test]
fn any_cut_gives_the_same_result() {
    for (name, memory, parts) in memories(8) {
        let limit = single_limit(&memory);
        let problem = Problem::new(memory, &Sizes::of(2, 27, 2, 6), parts, 0, 31);
        let whole = problem.tensors(DType::F64, Path::Composed, true, &[]);
        let every: Vec<usize> = (1..27).collect();
        for cuts in [vec![8], vec![3], vec![16, 17], vec![5, 13, 20, 26], every] {
            let cut = problem.tensors(DType::F64, Path::Composed, true, &cuts);
            assert_same(&format!("{name}, cut at {cuts:?}"), &cut.outputs, &whole.outputs, 1e-10);
            assert_same(&format!("{name}, cut at {cuts:?}"), &cut.grads, &whole.grads, 1e-10);
        }
        let single = problem.tensors(DType::F32, Path::Auto, false, &[11]);
        assert_same(&format!("{name}, f32"), &single.outputs, &whole.outputs, limit);
    }
}

/// One document of a packed problem.
fn document(problem: &Problem, index: usize) -> Problem {
    let offsets = problem.dims.offsets.as_ref().unwrap().as_slice();
    let (from, to) = (offsets[index], offsets[index + 1]);
    let mut alone = problem.clone();
    alone.dims.offsets = None;
    alone.dims.time = to - from;
    alone.positions = vec![problem.positions[index]];
    for (name, array) in &mut alone.inputs {
        let (parts, range) = match name.as_str() {
            "norm.weight" | "norm.bias" => continue,
            name if name.contains('.') => (problem.dims.states(), index..index + 1),
            _ => (problem.dims.time, from..to),
        };
        let size = array.values.len() / parts;
        array.values = array.values[range.start * size..range.end * size].to_vec();
        let axis = if parts == problem.dims.states() && name.contains('.') { 0 } else { 1 };
        array.shape[axis] = range.len();
    }
    alone
}

#[test]
fn packed_documents_equal_documents_alone() {
    for (name, memory, parts) in memories(4) {
        let reading = memory.rate == RateOf::Reading;
        let offsets = vec![0, 1, 10, 10, 21, 30, 32];
        let sizes = Sizes { offsets: Some(offsets.clone()), ..Sizes::of(1, 32, 2, 6) };
        let mut problem = Problem::new(memory, &sizes, parts, if reading { 0 } else { 5 }, 41);
        if !reading {
            problem.positions = vec![5, 5, 6, 5, 9, 5];
        }
        let packed = problem.tensors(DType::F64, Path::Composed, false, &[]);
        assert_same(&format!("{name}, definition"), &packed.outputs, &problem.definition(), 1e-10);
        for index in 0..6 {
            if offsets[index] == offsets[index + 1] {
                continue;
            }
            let alone = document(&problem, index).tensors(DType::F64, Path::Composed, false, &[]);
            for (output, array) in &alone.outputs {
                let (_, all) = packed.outputs.iter().find(|(n, _)| n == output).unwrap();
                let size = array.values.len();
                let start = match output.as_str() {
                    "o" => offsets[index] * all.values.len() / 32,
                    _ => index * size,
                };
                assert_eq!(
                    all.values[start..start + size],
                    array.values,
                    "{name}, document {index}, {output}"
                );
            }
        }
    }
}

#[test]
fn gradients_reach_packed_documents() {
    let memory = DeepMemory { expansion: 2, chunk: 4, ..DeepMemory::default() };
    let sizes = Sizes { offsets: Some(vec![0, 2, 9, 9, 12]), ..Sizes::of(1, 12, 2, 4) };
    let mut problem = Problem::new(memory, &sizes, ALL, 5, 43);
    problem.positions = vec![5, 6, 5, 5];
    let found = problem.tensors(DType::F64, Path::Composed, true, &[]);
    assert_same("packed", &found.grads, &problem.differences(), 1e-6);
}

fn rows_of(outcome: &Outcome, row: usize, rows: usize) -> Vec<(String, Array)> {
    let part = |(name, array): &(String, Array)| {
        let size = array.values.len() / rows;
        let mut shape = array.shape.clone();
        shape[0] = 1;
        (name.clone(), Array { shape, values: array.values[row * size..(row + 1) * size].to_vec() })
    };
    outcome.outputs.iter().map(part).collect()
}

#[test]
fn rows_do_not_see_each_other() {
    for (name, memory, parts) in memories(8) {
        let problem = Problem::new(memory, &Sizes::of(3, 20, 2, 6), parts, 0, 51);
        let mut sick = problem.clone();
        for (input, array) in &mut sick.inputs {
            if input == "v" {
                let row = array.values.len() / 3;
                array.values[row..2 * row].fill(f64::NAN);
            }
        }
        let [expected, found] = [&problem, &sick].map(|p| p.tensors(DType::F32, Path::Auto, false, &[]));
        for row in [0, 2] {
            assert_same(
                &format!("{name}, row {row}"),
                &rows_of(&found, row, 3),
                &rows_of(&expected, row, 3),
                0.0,
            );
        }
        assert!(rows_of(&found, 1, 3)[0].1.values.iter().any(|x| x.is_nan()), "{name}");
    }
}

fn token(tokens: &DeepTokens, t: usize) -> DeepToken {
    let DeepTokens { q, k, v, rate, momentum, decay, threshold } = narrow(tokens, t, 1);
    let vector = |x: Tensor<4>| x.squeeze_dim::<3>(1);
    let gate = |gate: Option<DeepGate>| {
        gate.map(|gate| match gate {
            DeepGate::Heads(x) => DeepGate::Heads(x.squeeze_dim::<2>(1)),
            DeepGate::Outputs(x) => DeepGate::Outputs(vector(x)),
        })
    };
    DeepToken {
        q: vector(q),
        k: vector(k),
        v: vector(v),
        rate: gate(rate),
        momentum: gate(momentum),
        decay: gate(decay),
        threshold: threshold.map(|x| x.squeeze_dim(1)),
    }
}

/// Gates of a head, or of each of its `outputs`.
fn random_tokens(rows: usize, time: usize, outputs: Option<usize>, device: &Device) -> DeepTokens {
    let vector = |seed| tensor::<4>(&numbers(seed, rows * time * 12), [rows, time, 2, 6], device);
    let share = |seed, from: f64, by: f64| {
        let columns = outputs.unwrap_or(1);
        let x = tensor::<4>(&numbers(seed, rows * time * 2 * columns), [rows, time, 2, columns], device);
        let x = x.mul_scalar(by / 2.0) + (from + by / 2.0);
        match outputs {
            Some(_) => DeepGate::Outputs(x),
            None => DeepGate::Heads(x.squeeze_dim(3)),
        }
    };
    DeepTokens {
        q: vector(1),
        k: vector(2),
        v: vector(3),
        rate: Some(share(4, 0.0, 0.2)),
        momentum: Some(share(5, 0.0, 0.9)),
        decay: Some(share(6, 0.0, 0.3)),
        threshold: None,
    }
}

fn weights(memory: &DeepMemory, device: &Device) -> Vec<Tensor<3>> {
    let shapes = memory.weight_shapes(6, 6);
    let weight = |(i, [from, to]): (usize, [usize; 2])| {
        tensor::<3>(&numbers(60 + i as u64, 2 * from * to), [2, from, to], device).mul_scalar(0.5)
    };
    shapes.into_iter().enumerate().map(weight).collect()
}

fn close(what: &str, found: &[f32], expected: &[f32]) {
    let expected: Vec<f64> = expected.iter().map(|&x| f64::from(x)).collect();
    crate::comparing::assert_close(what, found, &expected, 1e-5);
}

/// forward(n) and then 64 steps are forward(n + 64); rows that joined later step along at their own positions.
#[test]
fn steps_continue_a_forward_at_any_position() {
    let memory = DeepMemory { chunk: 8, depth: 3, expansion: 2, ..DeepMemory::default() };
    for outputs in [None, Some(memory.output_count(6, 6))] {
        steps_continue(&memory, outputs);
    }
}

fn steps_continue(memory: &DeepMemory, outputs: Option<usize>) {
    let device = Device::flex();
    let (rows, time, steps) = (3, 11, 64);
    let tokens = random_tokens(rows, time + steps, outputs, &device);
    let fresh = DeepState::shared(&weights(memory, &device), rows);
    let run = |tokens: DeepTokens, state| deep_memory(memory, tokens, None, state, None, Path::Auto).unwrap();
    let (whole, end) = run(tokens.clone(), fresh.clone());
    let (_, mut state) = run(narrow(&tokens, 0, time), fresh.clone());
    let mut outputs = Vec::new();
    for t in time..time + steps {
        let (o, next) = deep_memory_step(memory, token(&tokens, t), None, state).unwrap();
        outputs.push(o.unsqueeze_dim::<4>(1));
        state = next;
    }
    close("steps", &values(Tensor::cat(outputs, 1)), &values(whole.narrow(1, time, steps)));
    for ((name, found), (_, expected)) in state.tensors().into_iter().zip(end.tensors()) {
        close(&name, &values(found), &values(expected));
    }
    assert_eq!(state.positions, [75; 3]);

    // A row at 75 and a fresh one, together and alone.
    let (_, late) = run(narrow(&tokens, 0, 3), fresh);
    let momentum = |state: &DeepState, row: usize| state.select(&[row]).unwrap();
    let mixed = join(&[momentum(&state, 0), momentum(&late, 1), momentum(&state, 2)]);
    assert_eq!(mixed.positions, [75, 3, 75]);
    let next = narrow(&tokens, 20, 13);
    let (o, after) = run(next.clone(), mixed.clone());
    for row in 0..3 {
        let gate = |gate: &Option<DeepGate>| {
            gate.clone().map(|gate| match gate {
                DeepGate::Heads(x) => DeepGate::Heads(x.narrow(0, row, 1)),
                DeepGate::Outputs(x) => DeepGate::Outputs(x.narrow(0, row, 1)),
            })
        };
        let alone = DeepTokens {
            q: next.q.clone().narrow(0, row, 1),
            k: next.k.clone().narrow(0, row, 1),
            v: next.v.clone().narrow(0, row, 1),
            rate: gate(&next.rate),
            momentum: gate(&next.momentum),
            decay: gate(&next.decay),
            threshold: None,
        };
        let (expected, expected_state) = run(alone, mixed.select(&[row]).unwrap());
        assert_eq!(values(o.clone().narrow(0, row, 1)), values(expected), "row {row}");
        let found = after.select(&[row]).unwrap();
        assert_eq!(found.positions, expected_state.positions);
        for ((name, found), (_, expected)) in found.tensors().into_iter().zip(expected_state.tensors()) {
            assert_eq!(values(found), values(expected), "row {row}, {name}");
        }
    }
}

fn join(states: &[DeepState]) -> DeepState {
    let stack = |pick: fn(&DeepState) -> &Vec<Tensor<4>>| -> Vec<Tensor<4>> {
        let depth = pick(&states[0]).len();
        (0..depth).map(|i| Tensor::cat(states.iter().map(|s| pick(s)[i].clone()).collect(), 0)).collect()
    };
    DeepState {
        start: stack(|s| &s.start),
        current: stack(|s| &s.current),
        momentum: Some(stack(|s| s.momentum.as_ref().unwrap())),
        recent: None,
        positions: states.iter().flat_map(|s| s.positions.clone()).collect(),
    }
}

/// Reading the memory as it is: what a token sees that writes nothing.
#[test]
fn a_read_is_a_token_without_a_write() {
    let device = Device::flex();
    let memory = DeepMemory { chunk: 4, ..DeepMemory::default() };
    let tokens = random_tokens(2, 7, None, &device);
    let state = DeepState::shared(&weights(&memory, &device), 2);
    let (_, state) = deep_memory(&memory, tokens.clone(), None, state, None, Path::Auto).unwrap();
    let read_now = deep_memory_read(&memory, tokens.q.clone(), None, &state).unwrap();
    let still = DeepTokens {
        rate: Some(DeepGate::Heads(Tensor::zeros([2, 7, 2], &device))),
        momentum: Some(DeepGate::Heads(Tensor::zeros([2, 7, 2], &device))),
        decay: None,
        ..tokens
    };
    let (o, _) = deep_memory(&memory, still, None, state, None, Path::Auto).unwrap();
    let expected: Vec<f32> = read(&o).values.iter().map(|&x| x as f32).collect();
    close("read", &values(read_now), &expected);
}

/// A reset, momentum that never fades, rates of zero: the products are exact and every gradient is finite.
#[test]
fn extreme_factors_equal_the_loop() {
    let extremes =
        [(0.1, 0.5, 1.0), (0.1, 1.0, 0.0), (0.0, 0.0, 0.0), (0.05, 0.0, 1.0), (0.1, 0.9, 1.0 - 1e-7)];
    let kinds = [[false; 3], [true; 3]];
    for ((rate, momentum, decay), outputs) in kinds.iter().flat_map(|kind| extremes.map(|x| (x, *kind))) {
        // Behind a LayerNorm a reset leaves numbers that are nothing but rounding errors.
        let memory = DeepMemory { chunk: 16, ..DeepMemory::default() };
        let parts = Parts { norm: false, outputs, ..ALL };
        let mut problem = Problem::new(memory, &Sizes::of(1, 40, 2, 8), parts, 3, 61);
        for (name, array) in &mut problem.inputs {
            let number = match name.as_str() {
                "rate" => rate,
                "momentum" => momentum,
                "decay" => decay,
                _ => continue,
            };
            // Every third token, and both neighbours of a chunk's start.
            for (t, token) in array.values.chunks_mut(array.shape[2..].iter().product()).enumerate() {
                if t % 3 == 0 || [12, 13, 28, 29].contains(&t) {
                    token.fill(number);
                }
            }
        }
        let label = format!("rate {rate}, momentum {momentum}, decay {decay}, outputs {outputs:?}");
        let expected = problem.definition();
        let double = problem.tensors(DType::F64, Path::Composed, true, &[]);
        assert_same(&label, &double.outputs, &expected, 1e-10);
        let single = problem.tensors(DType::F32, Path::Auto, true, &[]);
        assert_same(&label, &single.outputs, &expected, 1e-5);
        assert_same(&label, &single.grads, &double.grads, 1e-4);
    }
}

/// Without a rate, momentum or decay the result is that of a rate of one and of zeros.
#[test]
fn absent_equals_neutral() {
    let bare = Parts { rate: false, momentum: false, decay: false, ..ALL };
    let memory = DeepMemory { chunk: 4, ..DeepMemory::default() };
    let outputs = memory.output_count(6, 6);
    let absent = Problem::new(memory, &Sizes::of(2, 9, 2, 6), bare, 0, 71);
    let expected = absent.tensors(DType::F64, Path::Composed, false, &[]);
    for shape in [vec![2, 9, 2], vec![2, 9, 2, outputs]] {
        let mut neutral = absent.clone();
        neutral.parts = ALL;
        for (name, number) in [("rate", 1.0), ("momentum", 0.0), ("decay", 0.0)] {
            let values = vec![number; shape.iter().product()];
            neutral.inputs.push((name.into(), Array { shape: shape.clone(), values }));
        }
        let neutral = neutral.tensors(DType::F64, Path::Composed, false, &[]);
        let neutral: Vec<_> =
            neutral.outputs.into_iter().filter(|(name, _)| !name.starts_with("momentum")).collect();
        assert_same("absent", &expected.outputs, &neutral, 1e-12);
    }
}
