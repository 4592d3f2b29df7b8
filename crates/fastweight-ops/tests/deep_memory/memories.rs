//! The memories under test: every option at least once.

use fastweight_ops::deep_memory::{Activation, DeepMemory, InnerLoss, RateOf};

use crate::problem::{ALL, Parts};

/// Largest relative error of a float32 output; Newton-Schulz steps blow up what is nearly zero.
pub fn single_limit(memory: &DeepMemory) -> f64 {
    if memory.newton_schulz { 1e-4 } else { 1e-5 }
}

/// Memories that differ in one thing each, of the given chunk.
pub fn memories(chunk: usize) -> Vec<(String, DeepMemory, Parts)> {
    let base = DeepMemory { expansion: 2, chunk, ..DeepMemory::default() };
    let mut all = Vec::new();
    let mut add = |name: &str, memory: DeepMemory, parts: Parts| all.push((name.to_string(), memory, parts));
    for depth in 1..=4 {
        add(&format!("depth {depth}"), DeepMemory { depth, ..base.clone() }, ALL);
    }
    add("plain", DeepMemory { depth: 1, residual: false, ..base.clone() }, Parts { norm: false, ..ALL });
    add("no norm", base.clone(), Parts { norm: false, ..ALL });
    add("no momentum", base.clone(), Parts { momentum: false, ..ALL });
    add("no decay", base.clone(), Parts { decay: false, ..ALL });
    add("bare", base.clone(), Parts { rate: false, momentum: false, decay: false, ..ALL });
    add("silu, bias", DeepMemory { activation: Activation::Silu, bias: true, ..base.clone() }, ALL);
    add("read first", DeepMemory { read_before_write: true, ..base.clone() }, ALL);
    add("window", DeepMemory { window: 3, ..base.clone() }, ALL);
    add("window, silu", DeepMemory { window: 2, activation: Activation::Silu, ..base.clone() }, ALL);
    let window = DeepMemory { window: 6, read_before_write: true, loss: InnerLoss::Huber, ..base.clone() };
    add("long window, read first", window.clone(), Parts { momentum: false, ..ALL });
    add("window, proximal", DeepMemory { proximal: true, ..window }, ALL);
    add("newton-schulz", DeepMemory { newton_schulz: true, ..base.clone() }, ALL);
    let atlas = DeepMemory { newton_schulz: true, read_before_write: true, ..base.clone() };
    add(
        "newton-schulz, window, read first",
        DeepMemory { window: 3, ..atlas },
        Parts { momentum: false, ..ALL },
    );
    add("proximal", DeepMemory { proximal: true, ..base.clone() }, ALL);
    for loss in losses() {
        add(&format!("{loss:?}"), DeepMemory { loss, ..base.clone() }, ALL);
    }
    let outputs = Parts { outputs: [true; 3], ..ALL };
    for depth in 1..=4 {
        add(&format!("outputs, depth {depth}"), DeepMemory { depth, ..base.clone() }, outputs);
    }
    add("outputs, no momentum", base.clone(), Parts { momentum: false, ..outputs });
    add("outputs, no decay", base.clone(), Parts { decay: false, norm: false, ..outputs });
    add("outputs' momentum alone", base.clone(), Parts { outputs: [false, true, false], ..ALL });
    let first = DeepMemory { read_before_write: true, proximal: true, bias: true, ..base.clone() };
    let huber = DeepMemory { loss: InnerLoss::Huber, ..first };
    add("outputs, read first, proximal, bias, Huber", huber, outputs);
    let reading = DeepMemory { rate: RateOf::Reading, bias: true, depth: 2, ..base.clone() };
    add("reading rate", reading, Parts { momentum: false, decay: false, ..ALL });
    all
}

pub fn losses() -> [InnerLoss; 5] {
    [
        InnerLoss::DotProduct,
        InnerLoss::Huber,
        InnerLoss::Power { p: 3.0, smooth: false },
        InnerLoss::Power { p: 2.5, smooth: false },
        InnerLoss::Power { p: 3.0, smooth: true },
    ]
}
