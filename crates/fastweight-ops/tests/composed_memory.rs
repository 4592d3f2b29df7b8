//! The tensor-operation forms need memory that grows with the number of tokens, not with its square: the peak of
//! a forward and backward pass, counted at the allocator, has the slope that the operators' docs state.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::tensor::{Device, Tensor};
use fastweight_ops::delta::delta_rule;
use fastweight_ops::dplr::dplr;
use fastweight_ops::gla::gated_linear_attention;
use fastweight_ops::kda::kimi_delta_attention;
use fastweight_ops::titans::{titans_memory, titans_memory_channelwise};
use fastweight_ops::{Path, SequenceOptions};

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system allocator, with a count of the bytes it has given out.
struct Counting;

fn count(bytes: usize) {
    PEAK.fetch_max(HELD.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call goes to the system allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HEADS: usize = 2;

/// What the operators are called with: `q, k, v`, a gate for each channel, a number for each head.
type Call = fn([Tensor<4>; 4], Tensor<3>, &SequenceOptions) -> Tensor<4>;

/// With the kilobytes a token and head, for heads of 64 by 64 in float32, that the docs state.
const CALLS: [(&str, Call, f64); 6] = [
    (
        "delta",
        |[q, k, v, _], number, options| {
            let (o, s) = delta_rule(q, k, v, number.clone(), Some(number.neg()), None, options).unwrap();
            Tensor::cat(vec![o, s.swap_dims(1, 2)], 1)
        },
        7.0,
    ),
    (
        "gla",
        |[q, k, v, gate], _, options| {
            let (o, s) = gated_linear_attention(q, k, v, gate, None, options).unwrap();
            Tensor::cat(vec![o, s.swap_dims(1, 2)], 1)
        },
        8.0,
    ),
    (
        "kda",
        |[q, k, v, gate], number, options| {
            let (o, s) = kimi_delta_attention(q, k, v, number, gate, None, options).unwrap();
            Tensor::cat(vec![o, s.swap_dims(1, 2)], 1)
        },
        14.0,
    ),
    (
        "dplr",
        |[q, k, v, gate], _, options| {
            let (a, b) = (q.clone(), k.clone());
            let (o, s) = dplr(q, gate, k, v, a, b, None, options).unwrap();
            Tensor::cat(vec![o, s.swap_dims(1, 2)], 1)
        },
        22.0,
    ),
    (
        "titans",
        |[q, k, v, _], number, options| {
            let (theta, eta, alpha) = (number.clone(), number.clone(), number);
            let (o, _, s) = titans_memory(q, k, v, theta, eta, alpha, None, options).unwrap();
            Tensor::cat(vec![o, s.swap_dims(1, 2)], 1)
        },
        10.0,
    ),
    (
        "titans with channel gates",
        |[q, k, v, gate], _, options| {
            let gate = gate.neg();
            let (theta, eta, alpha) = (gate.clone(), gate.clone(), gate);
            let (o, _, s) = titans_memory_channelwise(q, k, v, theta, eta, alpha, None, options).unwrap();
            Tensor::cat(vec![o, s.swap_dims(1, 2)], 1)
        },
        42.0,
    ),
];

/// Peak bytes of a forward and a backward pass, beyond the inputs.
fn peak(call: Call, time: usize, size: usize) -> usize {
    let device = Device::flex().autodiff();
    let leaf =
        |factor: f32| (Tensor::<4>::ones([1, time, HEADS, size], &device) * factor).detach().require_grad();
    let tokens = [leaf(0.1), leaf(0.1), leaf(0.1), leaf(-0.1)];
    let number = (Tensor::<3>::ones([1, time, HEADS], &device) * 0.1).require_grad();
    let options = SequenceOptions { path: Path::Composed, ..SequenceOptions::default() };
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    let _grads = call(tokens, number, &options).sum().backward();
    PEAK.load(Relaxed) - before
}

#[test]
fn memory_is_linear_in_the_number_of_tokens() {
    for (name, call, kilobytes) in CALLS {
        // The first call also pays for what threads keep.
        peak(call, 1024, 64);
        let peaks = [256, 512, 1024].map(|time| peak(call, time, 64));
        let slope = |i: usize| (peaks[i + 1] - peaks[i]) as f64 / ((256 << i) * HEADS) as f64 / 1000.0;
        let found = [slope(0), slope(1)];
        let label = format!("{name}: {found:.2?} kB a token and head, documented {kilobytes}");
        assert!((found[1] / found[0] - 1.0).abs() < 0.05, "{label}");
        assert!(found[1] <= kilobytes && found[1] >= 0.8 * kilobytes, "{label}");
    }
}
