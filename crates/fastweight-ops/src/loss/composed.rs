//! Cross entropy as tensor operations, on any device.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor, TensorData};

use super::IGNORE;

/// Cross entropy of checked arguments.
pub fn cross_entropy(logits: Tensor<2>, targets: &[i64]) -> Tensor<1> {
    let device = logits.device();
    let scored: Vec<i64> = (0..).zip(targets).filter(|(_, t)| **t != IGNORE).map(|(row, _)| row).collect();
    if scored.is_empty() {
        return (logits * 0.0).sum();
    }
    let count = scored.len();
    let chosen: Vec<i64> = targets.iter().copied().filter(|&t| t != IGNORE).collect();
    let rows = Tensor::<1, Int>::from_data(TensorData::new(scored, [count]), &device);
    let chosen = Tensor::<2, Int>::from_data(TensorData::new(chosen, [count, 1]), &device);
    log_softmax(logits.select(0, rows), 1).gather(1, chosen).mean().neg()
}
