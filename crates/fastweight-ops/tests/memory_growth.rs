//! Memory at its peak, counted by the allocator, over the length of the sequence.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::tensor::{Device, Tensor, TensorData};
use fastweight_ops::SequenceOptions;
use fastweight_ops::delta::delta_rule;
use fastweight_ops::linear::{LinearGate, linear_attention};
use fastweight_ops::normalised_linear::normalised_linear_attention;
use fastweight_ops::softmax::{SoftmaxOptions, softmax_attention};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn add(bytes: usize) {
    PEAK.fetch_max(NOW.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HEADS: usize = 2;
const SIZE: usize = 64;

/// An operator with gradients of every argument; threads; the bytes that a token and head takes at the peak beside the
/// arguments with so many; and the least share of it that may be seen. A thread keeps a workspace from its first task on, which
/// with one thread is there before anything is measured. Softmax attention adds up the gradients of keys and values in parts, and
/// holds those of fewer heads at once where a thread comes late.
const OPERATORS: [(&str, usize, f64, f64); 4] = [
    ("gated delta", 1, 1800.0, 0.98),
    ("linear", 1, 1540.0, 0.98),
    ("ELU+1 linear", 1, 1548.0, 0.98),
    ("softmax", 2, 5892.0, 0.2),
];
/// Bytes that do not grow: states, what burn keeps of the graph.
const FIXED: f64 = (1 << 17) as f64;

/// The peak of one forward and backward pass over `time` tokens, beside the arguments.
fn peak(operator: &str, time: usize) -> usize {
    let device = Device::flex().autodiff();
    let numbers = |count: usize, seed: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 7 + seed * 13) % 29) as f32 / 29.0 - 0.5).collect()
    };
    let wide = |seed| {
        let data = TensorData::new(numbers(time * HEADS * SIZE, seed), [1, time, HEADS, SIZE]);
        Tensor::<4>::from_data(data, &device).require_grad()
    };
    let narrow = |low: f32| {
        let values: Vec<f32> = numbers(time * HEADS, 4).iter().map(|x| low + (x + 0.5) * 0.1).collect();
        Tensor::<3>::from_data(TensorData::new(values, [1, time, HEADS]), &device).require_grad()
    };
    let arguments = ([1, 2, 3].map(wide), narrow(0.3), narrow(-0.2));
    let start = NOW.load(Relaxed);
    PEAK.store(start, Relaxed);
    let ([q, k, v], beta, gate) = arguments.clone();
    let options = SequenceOptions::default();
    let o = match operator {
        "gated delta" => delta_rule(q, k, v, beta, Some(gate), None, &options).unwrap().0,
        "linear" => linear_attention(q, k, v, LinearGate::PerToken(gate), None, &options).unwrap().0,
        "ELU+1 linear" => normalised_linear_attention(q, k, v, Some(gate), None, &options).unwrap().0,
        _ => softmax_attention(q, k, v, None, &SoftmaxOptions::default()).unwrap(),
    };
    let gradients = o.sum().backward();
    assert!(arguments.0[0].grad(&gradients).is_some());
    PEAK.load(Relaxed) - start
}

/// One test, since the allocator counts what all threads do.
#[test]
fn the_peak_grows_linearly_by_the_stated_slope() {
    for (operator, threads, stated, least) in OPERATORS {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| peak(operator, 2048));
        for time in [1024, 2048, 4096, 8192] {
            let peak = pool.install(|| peak(operator, time)) as f64;
            let share = (peak - FIXED) / (stated * (time * HEADS) as f64);
            println!("{operator}, {time} tokens: {peak} bytes, {share:.3} of what is stated");
            assert!(share < 1.02, "{operator}, {time} tokens: {peak} bytes, {share} of what is stated");
            let share = peak / (stated * (time * HEADS) as f64);
            assert!(share > least, "{operator}, {time} tokens: {peak} bytes, {share} of what is stated");
        }
    }
}
