//! The fused kernel against the tensor form in float64: every option it knows, odd sizes, pieces and groups of chunks,
//! documents at different positions, any number of threads, every instruction set.

use burn::tensor::DType;
use fastweight_ops::Path;
use fastweight_ops::deep_memory::{Activation, DeepMemory, InnerLoss, RateOf};
use fastweight_ops::kernel::{InstructionSet, with_instruction_set};

use crate::memories::memories;
use crate::problem::{ALL, Outcome, Parts, Problem, Sizes, assert_same};

/// The memories that the kernel computes, with more combinations.
fn known(chunk: usize) -> Vec<(String, DeepMemory, Parts)> {
    let mut all = memories(chunk);
    all.retain(|(_, memory, _)| memory.window == 1 && !memory.newton_schulz);
    let base = DeepMemory { expansion: 2, chunk, ..DeepMemory::default() };
    let still = Parts { momentum: false, decay: false, ..ALL };
    let reading = DeepMemory { rate: RateOf::Reading, ..base.clone() };
    let mut add = |name: &str, memory: DeepMemory, parts: Parts| all.push((name.to_string(), memory, parts));
    add("reading rate, depth 1", DeepMemory { depth: 1, ..reading.clone() }, still);
    let hebb = DeepMemory { depth: 3, residual: false, loss: InnerLoss::DotProduct, ..reading };
    add("reading rate, dot product, no norm", hebb, Parts { norm: false, ..still });
    let deep = DeepMemory { depth: 4, bias: true, activation: Activation::Silu, ..base.clone() };
    add("depth 4, silu, bias, read first", DeepMemory { read_before_write: true, ..deep.clone() }, ALL);
    let huber = DeepMemory { loss: InnerLoss::Huber, proximal: true, depth: 3, ..deep };
    add("huber, proximal, silu, bias", huber, ALL);
    let power = InnerLoss::Power { p: 2.0, smooth: false };
    add("square", DeepMemory { loss: power, ..base.clone() }, Parts { norm: false, ..ALL });
    add("no decay, no norm", base, Parts { decay: false, norm: false, ..ALL });
    all
}

/// Outputs and gradients of the kernel in float32 within the limits of those of the tensor form in float64.
fn check(label: &str, problem: &Problem, expected: &Outcome, cuts: &[usize]) {
    let found = problem.tensors(DType::F32, Path::Fused, true, cuts);
    assert_same(label, &found.outputs, &expected.outputs, 1e-5);
    assert_same(&format!("{label}, gradients"), &found.grads, &expected.grads, 1e-4);
}

#[test]
fn it_equals_the_tensor_form() {
    // Chunks of less than a register, of one, of several; longer than a piece; more chunks than a group.
    for (chunk, time, position, size) in
        [(16, 83, 0, 20), (5, 24, 7, 9), (64, 70, 60, 6), (150, 170, 0, 4), (1, 6, 0, 33), (20, 47, 13, 16)]
    {
        for (name, memory, parts) in known(chunk) {
            // Rounding errors grow from chunk to chunk, the faster the larger the rates: small ones, and not those of 1.
            if !parts.rate && time > chunk {
                continue;
            }
            let mut problem = Problem::new(memory, &Sizes::of(2, time, 2, size), parts, position, 11);
            for (_, rate) in problem.inputs.iter_mut().filter(|(name, _)| name == "rate") {
                rate.values.iter_mut().for_each(|x| *x *= 0.02);
            }
            let expected = problem.tensors(DType::F64, Path::Composed, true, &[]);
            let label = format!("{name}, chunk {chunk}, {time} tokens from {position}, size {size}");
            check(&label, &problem, &expected, &[]);
        }
    }
}

#[test]
fn keys_and_values_of_different_sizes() {
    for (key, value) in [(3, 17), (20, 5), (16, 40)] {
        for (depth, norm, momentum) in [(1, true, true), (2, false, true), (3, true, false)] {
            let memory =
                DeepMemory { depth, residual: false, expansion: 3, bias: norm, ..DeepMemory::default() };
            let sizes = Sizes { key, value, ..Sizes::of(1, 37, 3, key) };
            let problem = Problem::new(memory, &sizes, Parts { norm, momentum, ..ALL }, 5, 13);
            let expected = problem.tensors(DType::F64, Path::Composed, true, &[]);
            check(&format!("K {key}, V {value}, depth {depth}"), &problem, &expected, &[]);
        }
    }
}

#[test]
fn any_cut_gives_the_same_gradients() {
    for (name, memory, parts) in known(8) {
        let problem = Problem::new(memory, &Sizes::of(1, 27, 2, 6), parts, 0, 31);
        let expected = problem.tensors(DType::F64, Path::Composed, true, &[]);
        for cuts in [vec![8], vec![3], vec![16, 17], vec![5, 13, 20, 26]] {
            check(&format!("{name}, cut at {cuts:?}"), &problem, &expected, &cuts);
        }
    }
}

#[test]
fn documents_at_different_positions() {
    for (name, memory, parts) in known(4) {
        let sizes = Sizes { offsets: Some(vec![0, 1, 10, 10, 31, 40, 42]), ..Sizes::of(1, 42, 2, 6) };
        let mut problem = Problem::new(memory, &sizes, parts, 5, 41);
        problem.positions = vec![5, 5, 6, 5, 9, 5];
        let expected = problem.tensors(DType::F64, Path::Composed, true, &[]);
        check(&name, &problem, &expected, &[]);
    }
}

#[test]
fn every_instruction_set_gives_the_same() {
    for set in InstructionSet::available() {
        for (name, memory, parts) in known(12) {
            let problem = Problem::new(memory, &Sizes::of(1, 29, 2, 10), parts, 0, 17);
            let expected = problem.tensors(DType::F64, Path::Composed, true, &[]);
            with_instruction_set(set, || check(&format!("{name}, {set:?}"), &problem, &expected, &[]));
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let memory = DeepMemory { expansion: 2, ..DeepMemory::default() };
    let problem = Problem::new(memory, &Sizes::of(3, 70, 2, 12), ALL, 3, 19);
    let outcomes = [1, 2, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| problem.tensors(DType::F32, Path::Fused, true, &[]))
    });
    for other in &outcomes[1..] {
        assert_same("outputs", &other.outputs, &outcomes[0].outputs, 0.0);
        assert_same("gradients", &other.grads, &outcomes[0].grads, 0.0);
    }
}

/// Resets, momenta of one and of zero, rates of zero: gradients are finite and those of the tensor form.
#[test]
fn extreme_factors() {
    for before in [false, true] {
        for (rate, momentum, decay) in
            [(0.1, 0.5, 1.0), (0.1, 1.0, 0.0), (0.0, 0.0, 0.0), (0.05, 0.0, 1.0), (0.1, 0.9, 1.0 - 1e-7)]
        {
            let memory = DeepMemory { read_before_write: before, ..DeepMemory::default() };
            let parts = Parts { norm: false, ..ALL };
            let mut problem = Problem::new(memory, &Sizes::of(1, 40, 2, 8), parts, 3, 61);
            for (name, array) in &mut problem.inputs {
                let number = match name.as_str() {
                    "rate" => rate,
                    "momentum" => momentum,
                    "decay" => decay,
                    _ => continue,
                };
                array.values.iter_mut().skip(6).step_by(3).for_each(|x| *x = number);
            }
            let expected = problem.tensors(DType::F64, Path::Composed, true, &[]);
            let label = format!("rate {rate}, momentum {momentum}, decay {decay}, read first {before}");
            check(&label, &problem, &expected, &[]);
        }
    }
}

/// Numbers that decay from chunk to chunk end at zero: denormal ones would take a hundred times longer.
#[test]
fn what_fades_becomes_zero() {
    let memory = DeepMemory { expansion: 2, residual: false, ..DeepMemory::default() };
    let mut problem = Problem::new(memory, &Sizes::of(1, 900, 1, 6), Parts { norm: false, ..ALL }, 0, 71);
    for (name, array) in &mut problem.inputs {
        match name.as_str() {
            "rate" => array.values.fill(0.0),
            "momentum" => array.values.fill(0.9),
            "decay" => array.values.fill(0.13),
            _ => {}
        }
    }
    let found = problem.tensors(DType::F32, Path::Fused, true, &[]);
    let mut zeros = 0;
    for (name, array) in found.outputs.iter().chain(&found.grads).filter(|(name, _)| name.contains('.')) {
        for x in &array.values {
            let size = (*x as f32).abs();
            assert!(size == 0.0 || size >= f32::MIN_POSITIVE, "{name}: {size:e}");
            zeros += usize::from(size == 0.0);
        }
    }
    assert!(zeros > 0);
}
