//! Speed of the fused kernels at batch 4, 2048 tokens, 4 heads, keys and values of 64, and of one token for 64
//! sessions. About 4 minutes in all: `cargo bench --workspace --bench ops -- FILTER`.

use std::hint::black_box;
use std::time::Duration;

use burn::tensor::{Device, Tensor, TensorData};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fastweight_ops::Path;
use fastweight_ops::deep_memory::{
    Activation, DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens, deep_memory,
};
use fastweight_ops::delta::cpu::{self as delta, FusedDelta};
use fastweight_ops::dplr::cpu::FusedDplr;
use fastweight_ops::fused::FusedOp;
use fastweight_ops::gla::cpu::FusedGla;
use fastweight_ops::kda::cpu::FusedKda;
use fastweight_ops::kernel::{Dims, InstructionSet, with_instruction_set};
use fastweight_ops::linear::cpu::{self as linear, FusedLinear, GateKind};
use fastweight_ops::momentum_delta::cpu::FusedMomentumDelta;
use fastweight_ops::normalised_linear::cpu::{self as normalised, FusedNormalisedLinear};
use fastweight_ops::softmax::cpu::FusedSoftmax;
use fastweight_ops::softmax::{KvCache, Sizes, SoftmaxOptions, softmax_attention};
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

fn normalised_inputs(d: &Dims, gate: Vec<f32>) -> Vec<Vec<f32>> {
    let mut inputs = linear_inputs(d, vec![]);
    inputs[3].iter_mut().for_each(|x| *x = x.abs());
    inputs.push(numbers(d.batch * d.heads * d.key, 7).iter().map(|x| x.abs()).collect());
    if !gate.is_empty() {
        inputs.push(gate);
    }
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

/// Softmax attention of these sizes.
fn softmax(d: &Dims, groups: usize, window: usize) -> (FusedSoftmax, Vec<Vec<f32>>) {
    let Dims { batch, time, heads, key, value, scale, .. } = *d;
    let cache = (0, vec![0; batch]);
    let sizes = Sizes { batch, time, heads, groups, key, value, scale, window, offsets: None, cache };
    let new = batch * time * groups;
    let inputs = vec![numbers(tokens(d) * key, 1), numbers(new * key, 2), numbers(new * value, 3)];
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

/// Strengths of the gates; a log gate of -60 forgets everything.
const GATES: [(&str, f32); 2] = [("weak", 0.1), ("strong", 60.0)];

/// Every operator, on the best instruction set.
fn operators(c: &mut Criterion) {
    let d = dims(4, 2048, 4, 64, 64);
    let n = tokens(&d);
    let delta = FusedDelta { dims: d.clone(), gated: false };
    sequence(c, "delta", &delta, &delta_inputs(&d, 0.1)[..5]);
    let linear = |kind| FusedLinear { dims: d.clone(), gate: kind };
    sequence(c, "linear", &linear(GateKind::None), &linear_inputs(&d, vec![]));
    let normalised = |gated| FusedNormalisedLinear { dims: d.clone(), gated };
    sequence(c, "elu1_linear", &normalised(false), &normalised_inputs(&d, vec![]));
    for (name, strength) in GATES {
        let delta = FusedDelta { dims: d.clone(), gated: true };
        sequence(c, &format!("gated_delta/{name}"), &delta, &delta_inputs(&d, strength));
        for (operator, kind, count) in
            [("linear_per_head", GateKind::PerHead, 4), ("linear_per_token", GateKind::PerToken, n)]
        {
            let inputs = linear_inputs(&d, gates(count, strength));
            sequence(c, &format!("{operator}/{name}"), &linear(kind), &inputs);
        }
        let inputs = normalised_inputs(&d, gates(n, strength));
        sequence(c, &format!("elu1_linear_per_token/{name}"), &normalised(true), &inputs);
    }
    for (name, groups, window) in
        [("softmax", 4, usize::MAX), ("softmax_grouped", 1, usize::MAX), ("softmax_window_256", 4, 256)]
    {
        let (op, inputs) = softmax(&d, groups, window);
        sequence(c, name, &op, &inputs);
    }
}

/// The operators with a decay per channel, low-rank transitions or momentum, and test-time training.
fn recurrent(c: &mut Criterion) {
    let d = dims(4, 2048, 4, 64, 64);
    let n = tokens(&d);
    let [q, v] = [1, 3].map(|seed| numbers(n * 64, seed));
    let (k, state) = (keys(n * 64, 64), numbers(d.batch * d.heads * 64 * 64, 6));
    let beta: Vec<f32> = numbers(n, 4).iter().map(|x| 0.5 * (x + 1.0)).collect();
    let half: Vec<f32> = k.iter().map(|x| 0.5 * x).collect();
    let removed: Vec<f32> = k.iter().map(|x| -x).collect();
    for (name, strength) in GATES {
        let gate = gates(n * 64, strength);
        let inputs = [&q, &k, &v, &gate, &state].map(Clone::clone);
        sequence(c, &format!("gla/{name}"), &FusedGla { dims: d.clone() }, &inputs);
        let inputs = [&q, &k, &v, &beta, &gate, &state].map(Clone::clone);
        sequence(c, &format!("kda/{name}"), &FusedKda { dims: d.clone() }, &inputs);
        let inputs = [&q, &gate, &k, &v, &removed, &half, &state].map(Clone::clone);
        sequence(c, &format!("dplr/{name}"), &FusedDplr { dims: d.clone() }, &inputs);
        let factors: Vec<f32> = gates(n, strength).iter().map(|g| g.exp()).collect();
        let write = vec![1.0; n];
        let inputs = [&q, &k, &k, &v, &factors, &factors, &beta, &state, &state, &write].map(Clone::clone);
        let titans = |channel_gates| FusedMomentumDelta { dims: d.clone(), channel_gates };
        sequence(c, &format!("titans/{name}"), &titans(false), &inputs);
        let factors: Vec<f32> = gate.iter().map(|g| g.exp()).collect();
        let rates: Vec<f32> = beta.iter().flat_map(|&x| [x; 64]).collect();
        let inputs = [&q, &k, &k, &v, &factors, &factors, &rates, &state, &state].map(Clone::clone);
        sequence(c, &format!("titans_channelwise/{name}"), &titans(true), &inputs);
    }
    let ttt = FusedTtt { dims: d.clone(), mini_batch: 16, position: vec![0; d.batch] };
    sequence(c, "ttt_linear", &ttt, &ttt_inputs(&d));
}

fn leaf<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device, tracked: bool) -> Tensor<D> {
    let x = Tensor::from_data(TensorData::new(values, shape), device);
    if tracked { x.require_grad() } else { x }
}

/// Deep memories of two layers, expansion 4, chunks of 16: Titans with an MLP memory, the same without momentum.
fn deep(c: &mut Criterion) {
    let d = dims(4, 2048, 4, 64, 64);
    let batch = d.batch;
    let mut group = c.benchmark_group("deep_memory");
    group.sample_size(10);
    for (name, momentum) in [("momentum", true), ("no_momentum", false)] {
        let run = |tracked: bool| {
            let device = if tracked { Device::flex().autodiff() } else { Device::flex() };
            let n = tokens(&d);
            let vector = |values| leaf(values, [d.batch, d.time, d.heads, 64], &device, tracked);
            let share = |seed, most: f32| {
                let values = numbers(n, seed).iter().map(|x| 0.5 * most * (x + 1.0)).collect();
                leaf(values, [d.batch, d.time, d.heads], &device, tracked)
            };
            let memory = DeepMemory { activation: Activation::Silu, ..DeepMemory::default() };
            let weight = |[from, to]: [usize; 2]| {
                let bound = (from as f32).powf(-0.5);
                let values = numbers(d.heads * from * to, 6).iter().map(|x| bound * x).collect();
                leaf(values, [d.heads, from, to], &device, tracked)
            };
            let weights: Vec<_> = memory.weight_shapes(64, 64).into_iter().map(weight).collect();
            let norm = |x: f32| leaf(vec![x; d.heads * 64], [d.heads, 64], &device, tracked);
            let norm = DeepNorm { weight: norm(1.0), bias: norm(0.0) };
            let tokens = DeepTokens {
                q: vector(keys(n * 64, 64)),
                k: vector(keys(n * 64, 64)),
                v: vector(numbers(n * 64, 3)),
                rate: Some(DeepGate::Heads(share(4, 0.1))),
                momentum: momentum.then(|| DeepGate::Heads(share(5, 1.0))),
                decay: Some(DeepGate::Heads(share(6, 0.001))),
                threshold: None,
            };
            move || {
                let state = DeepState::shared(&weights, batch);
                deep_memory(&memory, tokens.clone(), Some(&norm), state, None, Path::Auto)
            }
        };
        let forward = run(false);
        group.bench_function(format!("{name}/forward"), |b| b.iter(|| black_box(forward())));
        let forward = run(true);
        group.bench_function(format!("{name}/forward_backward"), |b| {
            b.iter(|| black_box(forward().map(|(o, _)| o.sum().backward())));
        });
    }
    group.finish();
}

/// Instruction sets, head sizes, and one head for all threads.
fn shapes(c: &mut Criterion) {
    let standard = dims(4, 2048, 4, 64, 64);
    for set in InstructionSet::available() {
        with_instruction_set(set, || {
            let set = format!("{set:?}").to_lowercase();
            let delta = FusedDelta { dims: standard.clone(), gated: true };
            sequence(c, &format!("gated_delta/{set}"), &delta, &delta_inputs(&standard, 0.1));
            let (op, inputs) = softmax(&standard, 4, usize::MAX);
            sequence(c, &format!("softmax/{set}"), &op, &inputs);
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
    let (q, k, v, beta) = (&inputs[0], &inputs[1], &inputs[2], &inputs[3]);
    let mut z = vec![1.0; 64 * 4 * 64];
    let mut out = vec![0.0; 64 * 4 * 64];
    for (name, gate) in [("", None), ("_gated", Some(inputs[5].as_slice()))] {
        group.bench_function(format!("delta{name}"), |b| {
            b.iter(|| delta::step(&d, &mut state, q, k, v, beta, gate, black_box(&mut out)));
        });
        group.bench_function(format!("linear{name}"), |b| {
            b.iter(|| linear::step(&d, &mut state, q, k, v, gate, black_box(&mut out)));
        });
        group.bench_function(format!("elu1_linear{name}"), |b| {
            b.iter(|| normalised::step(&d, &mut state, &mut z, q, k, v, gate, black_box(&mut out)));
        });
    }
    group.finish();
}

/// One token of softmax attention for a session with 4096 tokens in its cache: the attention alone, with the token
/// appended in place, and with a longer copy made of the cache.
fn decoding(c: &mut Criterion) {
    let (device, tokens, reserve) = (Device::flex(), 4096, 512);
    let random = |time: usize, seed| {
        let data = TensorData::new(numbers(time * 4 * 64, seed), [1, time, 4, 64]);
        Tensor::<4>::from_data(data, &device)
    };
    let [q, k, v] = [1, 2, 3].map(|seed| random(1, seed));
    let cache = |extra: usize| {
        let lengths = (extra > 0).then(|| vec![tokens]);
        KvCache { k: random(tokens + extra, 4), v: random(tokens + extra, 5), lengths }
    };
    let attend = |cache: &KvCache| {
        let options = SoftmaxOptions::default();
        softmax_attention(q.clone(), k.clone(), v.clone(), Some(cache.clone()), &options)
    };
    let mut group = c.benchmark_group("softmax_step");
    let held = cache(0);
    group.bench_function("attention", |b| b.iter(|| black_box(attend(&held))));
    let mut held = Some(cache(reserve));
    group.bench_function("attention_and_append", |b| {
        b.iter(|| {
            // Back to the same length, so that every iteration does the same work; growth comes once in 544 tokens.
            let cache = held.take().map(|cache| KvCache { lengths: Some(vec![tokens]), ..cache });
            black_box(cache.as_ref().map(attend));
            held = KvCache::append(cache, k.clone(), v.clone(), None, None).ok().flatten();
        });
    });
    let held = cache(0);
    group.bench_function("attention_and_copy", |b| {
        b.iter(|| {
            let joined = [(&held.k, &k), (&held.v, &v)]
                .map(|(held, new)| Tensor::cat(vec![held.clone(), new.clone()], 1));
            black_box((attend(&held), joined))
        });
    });
    group.finish();
}

criterion_group! {
    name = ops;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500));
    targets = steps, decoding, operators, recurrent, deep, shapes
}
criterion_main!(ops);
