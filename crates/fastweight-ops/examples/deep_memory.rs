//! Trains through a deep memory and reports losses and time: `deep_memory DEPTH CONTEXT STEPS [HEADS SIZE CHUNK BATCH PROXIMAL RATE DECAY OUTPUTS]`.
//!
//! The long run of the test suite's `nothing_stops_being_a_number`: depth 4, context 4096, 100 steps.

#[path = "../tests/deep_memory/training.rs"]
mod training;

use fastweight_ops::Path;
use fastweight_ops::deep_memory::DeepMemory;
use training::Training;

fn main() -> Result<(), String> {
    let mut numbers = Vec::new();
    for argument in std::env::args().skip(1) {
        numbers.push(argument.parse::<f32>().map_err(|error| format!("{argument}: {error}"))?);
    }
    let real = |at: usize, otherwise: f32| numbers.get(at).copied().unwrap_or(otherwise);
    let number = |at: usize, otherwise: usize| real(at, otherwise as f32) as usize;
    let training = Training {
        memory: DeepMemory {
            depth: number(0, 4),
            chunk: number(5, 16),
            proximal: number(7, 0) == 1,
            ..DeepMemory::default()
        },
        batch: number(6, 1),
        context: number(1, 4096),
        heads: number(3, 2),
        size: number(4, 32),
        steps: number(2, 100),
        rate: real(8, 0.02),
        decay: real(9, 0.001),
        outputs: number(10, 0) == 1,
        path: Path::Auto,
    };
    let trained = training.run()?;
    let last = trained.losses.len().saturating_sub(1);
    for step in (0..=last).filter(|step| *step == last || step % 10 == 0) {
        println!("step {step}: loss {}, largest gradient {}", trained.losses[step], trained.gradients[step]);
    }
    println!("forward {:?}, backward {:?}", trained.forward, trained.backward);
    Ok(())
}
