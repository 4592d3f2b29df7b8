//! Memory of a training pass through a deep memory: linear in the tokens, with the slope that the documentation states.
//!
//! A process of its own, since it counts what the whole process allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Tensor};
use fastweight_ops::Path;
use fastweight_ops::deep_memory::{DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens, deep_memory};

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

fn add(bytes: usize) {
    let held = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(held, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: vouched for by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: vouched for by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: vouched for by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HEADS: usize = 2;
const SIZE: usize = 32;

/// The most bytes held at once during a forward and a backward pass, beyond those held before.
fn peak(memory: &DeepMemory, time: usize, outputs: bool) -> usize {
    let device = Device::flex().autodiff();
    let vector = |phase: f32| {
        let ramp = Tensor::<1, burn::tensor::Int>::arange(0..(time * HEADS * SIZE) as i64, &device).float();
        (ramp * 0.7 + phase).sin().reshape([1, time, HEADS, SIZE]).require_grad()
    };
    let number = |x: f32| {
        let all = [1, time, HEADS, memory.output_count(SIZE, SIZE)];
        Some(match outputs {
            true => DeepGate::Outputs(Tensor::full(all, x, &device).require_grad()),
            false => DeepGate::Heads(Tensor::full([1, time, HEADS], x, &device).require_grad()),
        })
    };
    let tokens = DeepTokens {
        q: vector(0.0),
        k: vector(1.0),
        v: vector(2.0),
        rate: number(0.001),
        momentum: number(0.5),
        decay: number(0.001),
        threshold: None,
    };
    let weight = |[from, to]: [usize; 2]| {
        let count = HEADS * from * to;
        let ramp = Tensor::<1, burn::tensor::Int>::arange(0..count as i64, &device).float();
        ((ramp * 0.9).sin() / (from as f32).sqrt()).reshape([HEADS, from, to]).require_grad()
    };
    let weights: Vec<_> = memory.weight_shapes(SIZE, SIZE).into_iter().map(weight).collect();
    let norm = DeepNorm {
        weight: Tensor::ones([HEADS, SIZE], &device),
        bias: Tensor::zeros([HEADS, SIZE], &device),
    };
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let state = DeepState::shared(&weights, 1);
    let (o, _) = deep_memory(memory, tokens, Some(&norm), state, None, Path::Auto).unwrap();
    let grads = o.square().mean().backward();
    let peak = PEAK.load(Ordering::Relaxed) - before;
    assert!(weights[0].grad(&grads).is_some());
    peak
}

#[test]
fn peak_memory_grows_linearly_with_the_stated_slope() {
    // Each thread keeps a workspace for the next call: one thread, so that the first call here makes it.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let shapes =
        [(1, 16, false), (2, 16, false), (2, 32, true), (4, 16, false), (2, 64, false), (2, 128, false)];
    // Chunks of 128 tokens are for the kernel, which gates for every output do not have.
    let with_outputs = shapes.into_iter().filter(|(_, chunk, _)| *chunk < 128);
    let cases = shapes.map(|shape| (shape, false)).into_iter().chain(with_outputs.map(|shape| (shape, true)));
    for ((depth, chunk, proximal), outputs) in cases {
        let memory = DeepMemory { depth, chunk, proximal, ..DeepMemory::default() };
        let peak = |time: usize| pool.install(|| peak(&memory, time, outputs));
        peak(512);
        let at: Vec<usize> = [512, 1024, 2560].into_iter().map(peak).collect();
        let slopes = [(at[1] - at[0]) / 512 / HEADS, (at[2] - at[1]) / 1536 / HEADS];
        let stated = match outputs {
            true => memory.training_bytes_with_output_gates(SIZE, SIZE, true),
            false => memory.training_bytes(SIZE, SIZE, true),
        };
        let label = format!(
            "depth {depth}, chunk {chunk}, outputs {outputs}: {slopes:?} bytes a token and head, stated {stated}"
        );
        println!("{label}");
        assert!(slopes[1] <= stated && slopes[1] * 3 > stated * 2, "{label}");
        // Memory that grew with the square would give a second slope of more than three times the first.
        assert!(slopes[1] * 2 < slopes[0] * 3 && slopes[0] * 2 < slopes[1] * 3, "{label}, peaks {at:?}");
    }
}
