//! Fused cross entropy: each row's largest logit and log sum of exponentials below it are saved (apart, so that
//! large logits lose no digits), probabilities are not.

use std::ops::Range;

use super::IGNORE;
use crate::fused::{Forward, FusedOp};
use crate::kernel::InstructionSet;
use crate::kernel::simd::{Kernel, Lanes, dispatch};
use crate::kernel::workspace::SharedOut;
use crate::pointwise::{load, pieces, run, store};

/// Input `[logits [N, vocab]]`, output the mean loss `[1]`.
#[derive(Debug)]
pub(super) struct FusedCrossEntropy {
    pub vocab: usize,
    /// One for each row, [`IGNORE`] where it is not scored.
    pub targets: Vec<i64>,
}

impl FusedCrossEntropy {
    fn scored(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE).count()
    }

    fn pieces(&self) -> Vec<Range<usize>> {
        pieces(self.targets.len(), self.vocab)
    }
}

impl FusedOp for FusedCrossEntropy {
    fn name(&self) -> &'static str {
        super::OPERATOR
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![vec![1]]
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let (logits, set) = (inputs[0], InstructionSet::active());
        let (mut maxima, mut log_sums) = (vec![0.0; self.targets.len()], vec![0.0; self.targets.len()]);
        let to = [SharedOut::new(&mut maxima), SharedOut::new(&mut log_sums)];
        run(&self.pieces(), |rows| dispatch(set, LogSums { op: self, logits, to, rows: rows.clone() }));
        let scored = self.targets.iter().enumerate().filter(|(_, target)| **target != IGNORE);
        let loss = |(row, target): (usize, &i64)| {
            let below = f64::from(maxima[row]) - f64::from(logits[row * self.vocab + *target as usize]);
            below + f64::from(log_sums[row])
        };
        let total: f64 = scored.map(loss).sum();
        let mean = (total / self.scored().max(1) as f64) as f32;
        Forward { outputs: vec![vec![mean]], saved: if save { vec![maxima, log_sums] } else { vec![] } }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let (Some(grad), true) = (grads[0], needs[0]) else { return vec![None] };
        let mut d_logits = vec![0.0; inputs[0].len()];
        let (to, set) = (SharedOut::new(&mut d_logits), InstructionSet::active());
        let factor = grad[0] / self.scored().max(1) as f32;
        run(&self.pieces(), |rows| {
            let rows = rows.clone();
            dispatch(set, Gradient { op: self, logits: inputs[0], saved, factor, to, rows });
        });
        vec![Some(d_logits)]
    }
}

struct LogSums<'a> {
    op: &'a FusedCrossEntropy,
    logits: &'a [f32],
    /// Largest logits, and log sums below them.
    to: [SharedOut; 2],
    rows: Range<usize>,
}

impl Kernel for LogSums<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        let vocab = self.op.vocab;
        for row in self.rows.filter(|&row| self.op.targets[row] != IGNORE) {
            let logits = &self.logits[row * vocab..(row + 1) * vocab];
            // SAFETY: registers stay inside the row; this piece alone writes its rows.
            unsafe {
                let mut largest = L::splat(f32::NEG_INFINITY);
                for at in (0..vocab).step_by(L::COUNT) {
                    let left = vocab - at;
                    // Lanes past the end repeat the first logit.
                    let register = if left >= L::COUNT {
                        L::load(logits.as_ptr().add(at))
                    } else {
                        let mut end = [logits[0]; 16];
                        end[..left].copy_from_slice(&logits[at..]);
                        L::load(end.as_ptr())
                    };
                    largest = largest.max(register);
                }
                let maximum = largest.largest();
                let (mut sum, mut end) = (L::splat(0.0), 0.0);
                for at in (0..vocab / L::COUNT * L::COUNT).step_by(L::COUNT) {
                    sum = sum.add(L::load(logits.as_ptr().add(at)).sub(L::splat(maximum)).exp());
                }
                for logit in &logits[vocab / L::COUNT * L::COUNT..] {
                    end += (logit - maximum).exp();
                }
                *self.to[0].at(row) = maximum;
                *self.to[1].at(row) = (sum.sum() + end).ln();
            }
        }
    }
}

struct Gradient<'a> {
    op: &'a FusedCrossEntropy,
    logits: &'a [f32],
    saved: &'a [Vec<f32>],
    factor: f32,
    to: SharedOut,
    rows: Range<usize>,
}

impl Kernel for Gradient<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        let vocab = self.op.vocab;
        for row in self.rows {
            let target = self.op.targets[row];
            if target == IGNORE {
                continue;
            }
            let logits = &self.logits[row * vocab..(row + 1) * vocab];
            // SAFETY: registers stay inside the row; this piece alone writes its rows.
            unsafe {
                let [maximum, log_sum, factor] =
                    [self.saved[0][row], self.saved[1][row], self.factor].map(|x| L::splat(x));
                for at in (0..vocab).step_by(L::COUNT) {
                    let below = load::<L>(logits.as_ptr().add(at), vocab - at).sub(maximum);
                    let probability = below.sub(log_sum).exp();
                    store(probability.mul(factor), self.to.at(row * vocab + at), vocab - at);
                }
                *self.to.at(row * vocab + target as usize) -= self.factor;
            }
        }
    }
}
