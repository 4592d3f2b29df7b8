//! Accuracy over scored positions.

use crate::{IGNORE, TaskError, TokenBatch};

/// Right answers out of those asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Right answers.
    pub correct: usize,
    /// Answers asked for.
    pub total: usize,
}

impl Tally {
    /// The share of right answers in `[0, 1]`; absent when nothing was asked.
    pub fn accuracy(&self) -> Option<f64> {
        (self.total > 0).then(|| self.correct as f64 / self.total as f64)
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.correct += other.correct;
        self.total += other.total;
    }
}

/// Counts the scored positions of `batch` where `predictions`, `[batch * time]` token ids, hit the target.
///
/// # Errors
/// [`TaskError::Predictions`] when there is not one prediction per position.
pub fn score(batch: &TokenBatch, predictions: &[u32]) -> Result<Tally, TaskError> {
    if predictions.len() != batch.targets.len() {
        return Err(TaskError::Predictions {
            found: predictions.len(),
            batch: batch.batch,
            time: batch.time,
        });
    }
    let asked = batch.targets.iter().zip(predictions).filter(|(target, _)| **target != IGNORE);
    let mut tally = Tally::default();
    for (&target, &prediction) in asked {
        tally += Tally { correct: usize::from(target == i64::from(prediction)), total: 1 };
    }
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_scored_positions_count() {
        let batch = TokenBatch {
            tokens: vec![1, 2, 3, 4],
            targets: vec![IGNORE, 7, IGNORE, 9],
            batch: 2,
            time: 2,
            documents: None,
        };
        let tally = score(&batch, &[0, 7, 9, 8]).unwrap();
        assert_eq!(tally, Tally { correct: 1, total: 2 });
        assert_eq!(tally.accuracy(), Some(0.5));
        assert_eq!(Tally::default().accuracy(), None);
        let message = score(&batch, &[0, 7]).unwrap_err().to_string();
        assert!(message.contains("2 predictions") && message.contains("2 x 2"), "{message}");
    }
}
