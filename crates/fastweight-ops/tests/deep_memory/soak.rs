//! Training steps through four layers stay finite; `examples/deep_memory.rs` is the long run.

use fastweight_ops::Path;
use fastweight_ops::deep_memory::{DeepMemory, InnerLoss};

use crate::memories::losses;
use crate::training::Training;

fn train(memory: DeepMemory, context: usize, steps: usize, outputs: bool) -> Vec<f32> {
    let training = Training {
        memory,
        batch: 1,
        context,
        heads: 2,
        size: 16,
        steps,
        rate: 0.02,
        decay: 0.001,
        outputs,
        path: Path::Auto,
    };
    training.run().unwrap().losses
}

#[test]
fn nothing_stops_being_a_number() {
    for outputs in [false, true] {
        let losses = train(DeepMemory { depth: 4, ..DeepMemory::default() }, 512, 10, outputs);
        assert!(losses[9] < losses[0], "{losses:?}");
    }
}

#[test]
fn every_loss_trains() {
    for loss in losses().into_iter().chain([InnerLoss::Squared]) {
        let losses = train(DeepMemory { loss, expansion: 2, ..DeepMemory::default() }, 96, 8, false);
        assert!(losses[7] < losses[0], "{loss:?} {losses:?}");
    }
}
