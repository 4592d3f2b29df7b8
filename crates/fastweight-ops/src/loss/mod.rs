//! Cross entropy of next-token logits.

mod composed;
mod cpu;

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::fused::apply;
use crate::{OpError, Path};

const OPERATOR: &str = "cross_entropy";

/// The target of a position that takes no part in the loss.
pub const IGNORE: i64 = -1;

/// Mean of `logsumexp(logits) - logits[target]` over the scored positions, a tensor of one element.
///
/// `logits [N, vocab]`; `targets` holds a token id for each of the `N` positions, or [`IGNORE`]. When no position
/// is scored the loss is 0 and so is every gradient.
///
/// # Errors
/// Another number of targets than rows, a target outside the vocabulary.
pub fn cross_entropy(logits: Tensor<2>, targets: &[i64]) -> Result<Tensor<1>, OpError> {
    cross_entropy_on(logits, targets, Path::Auto)
}

/// [`cross_entropy`] on a chosen path.
///
/// # Errors
/// Those of [`cross_entropy`], and a path that does not exist for the tensor.
pub fn cross_entropy_on(logits: Tensor<2>, targets: &[i64], path: Path) -> Result<Tensor<1>, OpError> {
    check(&logits, targets)?;
    if !path.is_fused(OPERATOR, &logits)? {
        return Ok(composed::cross_entropy(logits, targets));
    }
    let op = cpu::FusedCrossEntropy { vocab: logits.dims()[1], targets: targets.to_vec() };
    let [loss, ..] = apply(Arc::new(op), vec![logits.into_dispatch()]);
    Ok(Tensor::from_dispatch(loss))
}

/// What a model predicts right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Score {
    /// Positions whose largest logit (the first of equals) is the target's.
    pub correct: usize,
    /// Positions with a target.
    pub scored: usize,
}

/// Counts the scored positions of `logits [N, vocab]` whose largest logit is the target's.
///
/// # Errors
/// Those of [`cross_entropy`], and a device that cannot be read.
pub fn count_correct(logits: &Tensor<2>, targets: &[i64]) -> Result<Score, OpError> {
    check(logits, targets)?;
    let best = logits.clone().without_autodiff().argmax(1);
    let best = best.into_data();
    let scored = targets.iter().filter(|&&t| t != IGNORE).count();
    let correct = best.iter::<i64>().zip(targets).filter(|(best, target)| best == *target).count();
    Ok(Score { correct, scored })
}

fn check(logits: &Tensor<2>, targets: &[i64]) -> Result<(), OpError> {
    let [rows, vocab] = logits.dims();
    let wrong =
        |argument, found, expected| Err(OpError::Value { operator: OPERATOR, argument, found, expected });
    if targets.len() != rows {
        return wrong(
            "targets",
            format!("{} targets", targets.len()),
            format!("one for each of {rows} rows of logits"),
        );
    }
    match targets.iter().find(|&&t| t != IGNORE && !(0..vocab as i64).contains(&t)) {
        Some(target) => wrong(
            "targets",
            target.to_string(),
            format!("{IGNORE} (not scored) or below the vocabulary of {vocab}"),
        ),
        None => Ok(()),
    }
}
