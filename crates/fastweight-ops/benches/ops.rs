//! Speed of the fused kernels at batch 4, 2048 tokens, 4 heads, keys and values of 64, and of one token for
//! 64 sessions. `cargo bench -p fastweight-ops --bench ops -- FILTER`.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fastweight_ops::delta::cpu::{self as delta, FusedDelta};
use fastweight_ops::fused::FusedOp;
use fastweight_ops::kernel::{Dims, InstructionSet, with_instruction_set};
use fastweight_ops::linear::cpu::{self as linear, FusedLinear, GateKind};
use fastweight_ops::normalised_linear::cpu::{self as normalised, FusedNormalisedLinear};
use fastweight_ops::softmax::Sizes;
use fastweight_ops::softmax::cpu::FusedSoftmax;
use fastweight_ops::ttt::cpu::FusedTtt;
use rayon::prelude::*;

/// Numbers in `[-1, 1)`, the same every run.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn keys(len: usize, size: usize) -> Vec<f32> {
    let mut keys = numbers(len, 2);
    for key in keys.chunks_exact_mut(size) {
        let norm = key.iter().map(|x| x * x).sum::<f32>().sqrt();
        key.iter_mut().for_each(|x| *x /= norm);
    }
    keys
}

/// Log gates between `-strength` and 0.
fn gates(len: usize, strength: f32) -> Vec<f32> {
    numbers(len, 5).iter().map(|x| 0.5 * strength * (x - 1.0)).collect()
}

fn dims(batch: usize, time: usize, heads: usize, key: usize, value: usize) -> Dims {
    Dims { batch, time, heads, key, value, scale: (key as f32).powf(-0.5), offsets: None }
}

fn tokens(d: &Dims) -> usize {
    d.batch * d.time * d.heads
}

fn delta_inputs(d: &Dims, strength: f32) -> Vec<Vec<f32>> {
    let n = tokens(d);
    vec![
        numbers(n * d.key, 1),
        keys(n * d.key, d.key),
        numbers(n * d.value, 3),
        numbers(n, 4).iter().map(|x| 0.5 * (x + 1.0)).collect(),
        numbers(d.batch * d.heads * d.key * d.value, 6),
        gates(n, strength),
    ]
}

fn linear_inputs(d: &Dims, gate: Vec<f32>) -> Vec<Vec<f32>> {
    let n = tokens(d);
    let state = numbers(d.batch * d.heads * d.key * d.value, 6);
    let mut inputs = vec![numbers(n * d.key, 1), keys(n * d.key, d.key), numbers(n * d.value, 3), state];
    if !gate.is_empty() {
        inputs.push(gate);
    }
    inputs
}

fn normalised_inputs(d: &Dims) -> Vec<Vec<f32>> {
    let mut inputs = linear_inputs(d, vec![]);
    inputs[3].iter_mut().for_each(|x| *x = x.abs());
    inputs.push(numbers(d.batch * d.heads * d.key, 7).iter().map(|x| x.abs()).collect());
    inputs.push(gates(tokens(d), 0.1));
    inputs
}

/// Learning rates up to 0.1, a normalisation that changes nothing, weights and bias, and nothing gathered.
fn ttt_inputs(d: &Dims) -> Vec<Vec<f32>> {
    let (n, norm) = (tokens(d), d.heads * d.value);
    let state = numbers(d.batch * d.heads * (d.key + 1) * d.value, 6);
    vec![
        numbers(n * d.key, 1),
        keys(n * d.key, d.key),
        numbers(n * d.value, 3),
        numbers(n, 4).iter().map(|x| 0.05 * (x + 1.0)).collect(),
        vec![1.0; norm],
        vec![0.0; norm],
        state.clone(),
        vec![0.0; state.len()],
    ]
}

/// Softmax attention of these sizes, with that many cached entries in each row.
fn softmax(d: &Dims, groups: usize, window: usize, cached: usize) -> (FusedSoftmax, Vec<Vec<f32>>) {
    let Dims { batch, time, heads, key, value, scale, .. } = *d;
    let cache = (cached, vec![cached; batch]);
    let sizes = Sizes { batch, time, heads, groups, key, value, scale, window, offsets: None, cache };
    let (new, held) = (batch * time * groups, batch * cached * groups);
    let mut inputs = vec![numbers(tokens(d) * key, 1), numbers(new * key, 2), numbers(new * value, 3)];
    if cached > 0 {
        inputs.extend([numbers(held * key, 4), numbers(held * value, 5)]);
    }
    (FusedSoftmax { sizes }, inputs)
}

/// Benchmarks the forward pass, and the forward and backward pass with all gradients.
fn sequence(c: &mut Criterion, name: &str, op: &dyn FusedOp, inputs: &[Vec<f32>]) {
    let inputs: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
    let grads: Vec<Vec<f32>> = op
        .output_shapes()
        .iter()
        .enumerate()
        .map(|(i, shape)| numbers(shape.iter().product(), 10 + i as u64))
        .collect();
    let grads: Vec<Option<&[f32]>> = grads.iter().map(|g| Some(g.as_slice())).collect();
    let needs = vec![true; inputs.len()];
    c.bench_function(&format!("{name}/forward"), |b| b.iter(|| black_box(op.forward(&inputs, false))));
    c.bench_function(&format!("{name}/forward_backward"), |b| {
        b.iter(|| {
            let forward = op.forward(&inputs, true);
            black_box(op.backward(&inputs, &forward.saved, &grads, &needs))
        });
    });
}

fn sequences(c: &mut Criterion) {
    let standard = dims(4, 2048, 4, 64, 64);
    for set in InstructionSet::available() {
        with_instruction_set(set, || {
            let set = format!("{set:?}").to_lowercase();
            let delta = FusedDelta { dims: standard.clone(), gated: true };
            for (gates, strength) in [("weak", 0.1), ("strong", 60.0)] {
                let inputs = delta_inputs(&standard, strength);
                sequence(c, &format!("gated_delta/{set}/{gates}"), &delta, &inputs);
            }
            let delta = FusedDelta { gated: false, ..delta };
            sequence(c, &format!("delta/{set}"), &delta, &delta_inputs(&standard, 0.1)[..5]);
            for (name, kind, gate) in [
                ("linear", GateKind::None, vec![]),
                ("linear_per_head", GateKind::PerHead, gates(4, 0.1)),
                ("linear_per_token", GateKind::PerToken, gates(tokens(&standard), 0.1)),
            ] {
                let op = FusedLinear { dims: standard.clone(), gate: kind };
                sequence(c, &format!("{name}/{set}"), &op, &linear_inputs(&standard, gate));
            }
            let op = FusedNormalisedLinear { dims: standard.clone(), gated: true };
            sequence(c, &format!("normalised_linear/{set}"), &op, &normalised_inputs(&standard));
            let ttt = FusedTtt { dims: standard.clone(), mini_batch: 16, position: vec![0; standard.batch] };
            sequence(c, &format!("ttt_linear/{set}"), &ttt, &ttt_inputs(&standard));
            for (name, groups, window) in [
                ("softmax", 4, usize::MAX),
                ("softmax_grouped", 1, usize::MAX),
                ("softmax_window_256", 4, 256),
            ] {
                let (op, inputs) = softmax(&standard, groups, window, 0);
                sequence(c, &format!("{name}/{set}"), &op, &inputs);
            }
        });
    }
    for (key, value) in [(20, 20), (60, 60), (128, 128), (128, 64)] {
        let dims = dims(4, 2048, 4, key, value);
        let inputs = delta_inputs(&dims, 0.1);
        sequence(c, &format!("gated_delta/k{key}_v{value}"), &FusedDelta { dims, gated: true }, &inputs);
    }
    let one_head = dims(1, 8192, 1, 64, 64);
    let inputs = delta_inputs(&one_head, 0.1);
    sequence(c, "gated_delta/one_head_8192", &FusedDelta { dims: one_head, gated: true }, &inputs);
}

fn steps(c: &mut Criterion) {
    let d = dims(64, 1, 4, 64, 64);
    let mut group = c.benchmark_group("step");
    let mut state = numbers(64 * 4 * 64 * 64, 6);
    group.throughput(Throughput::Bytes(2 * 4 * state.len() as u64));
    let mut copy = state.clone();
    let part = state.len().div_ceil(rayon::current_num_threads());
    group.bench_function("copy_of_the_state", |b| {
        b.iter(|| {
            copy.par_chunks_mut(part)
                .zip(state.par_chunks(part))
                .for_each(|(to, from)| to.copy_from_slice(from));
            black_box(&mut copy);
        });
    });
    let inputs = delta_inputs(&d, 0.1);
    let mut out = vec![0.0; 64 * 4 * 64];
    for set in InstructionSet::available() {
        with_instruction_set(set, || {
            let set = format!("{set:?}").to_lowercase();
            let (q, k, v, beta, gate) = (&inputs[0], &inputs[1], &inputs[2], &inputs[3], &inputs[5]);
            group.bench_function(format!("gated_delta/{set}"), |b| {
                b.iter(|| delta::step(&d, &mut state, q, k, v, beta, Some(gate), black_box(&mut out)));
            });
            group.bench_function(format!("linear_per_token/{set}"), |b| {
                b.iter(|| linear::step(&d, &mut state, q, k, v, Some(gate), black_box(&mut out)));
            });
            let mut z = vec![1.0; 64 * 4 * 64];
            group.bench_function(format!("normalised_linear/{set}"), |b| {
                b.iter(|| {
                    normalised::step(&d, &mut state, &mut z, q, k, v, Some(gate), black_box(&mut out));
                });
            });
        });
    }
    let (op, inputs) = softmax(&d, 4, usize::MAX, 256);
    let inputs: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
    group.throughput(Throughput::Bytes(4 * inputs[3..].iter().map(|cache| cache.len() as u64).sum::<u64>()));
    group.bench_function("softmax_256_cached", |b| b.iter(|| black_box(op.forward(&inputs, false))));
    group.finish();
}

criterion_group! {
    name = ops;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500));
    targets = steps, sequences
}
criterion_main!(ops);
