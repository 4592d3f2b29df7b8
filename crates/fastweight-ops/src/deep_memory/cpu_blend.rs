//! `a keep + b carry` in one pass over memory: the state after a chunk, and a layer's value at every token.

use rayon::prelude::*;

use super::cpu_norm::sum;
use crate::fused::{Forward, FusedOp};

/// Inputs `[a]`, then `[keep]`, then `[b, carry]`; one output of the shape of `a`. A factor has one number for each
/// row of `size` numbers of a and b.
#[derive(Debug)]
pub(super) struct FusedBlend {
    pub(super) shape: Vec<usize>,
    pub(super) size: usize,
    pub(super) keep: bool,
    pub(super) carry: bool,
}

/// Numbers below which threads cost more than they save.
const PARALLEL: usize = 1 << 16;

impl FusedBlend {
    /// Runs `row(index, out)` on every row of a new output.
    fn rows(&self, row: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
        let mut out = vec![0.0; self.shape.iter().product()];
        if out.len() < PARALLEL {
            out.chunks_exact_mut(self.size).enumerate().for_each(|(index, out)| row(index, out));
        } else {
            let rows = (PARALLEL / 4).div_ceil(self.size);
            out.par_chunks_mut(rows * self.size).enumerate().for_each(|(piece, out)| {
                let each = out.chunks_exact_mut(self.size).enumerate();
                each.for_each(|(index, out)| row(piece * rows + index, out));
            });
        }
        out
    }

    /// The gradient of a factor: `sum(grad x)` over each row.
    fn factor(&self, grad: &[f32], x: &[f32]) -> Vec<f32> {
        let row = |(grad, x): (&[f32], &[f32])| sum(|i| grad[i] * x[i], self.size);
        if grad.len() < PARALLEL {
            return grad.chunks_exact(self.size).zip(x.chunks_exact(self.size)).map(row).collect();
        }
        grad.par_chunks_exact(self.size).zip(x.par_chunks_exact(self.size)).map(row).collect()
    }
}

impl FusedOp for FusedBlend {
    fn name(&self) -> &'static str {
        "deep_memory_blend"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![self.shape.clone()]
    }

    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        let a = inputs[0];
        let keep = self.keep.then(|| inputs[1]);
        let carried = self.carry.then(|| (inputs[inputs.len() - 2], inputs[inputs.len() - 1]));
        let out = self.rows(|row, out| {
            let range = row * self.size..(row + 1) * self.size;
            let keep = keep.map_or(1.0, |keep| keep[row]);
            let a = &a[range.clone()];
            match carried {
                None => out.iter_mut().zip(a).for_each(|(out, a)| *out = a * keep),
                Some((b, carry)) => {
                    let (b, carry) = (&b[range], carry[row]);
                    out.iter_mut().zip(a.iter().zip(b)).for_each(|(out, (a, b))| *out = a * keep + b * carry);
                }
            }
        });
        Forward { outputs: vec![out], saved: vec![] }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let Some(grad) = grads[0] else { return vec![None; needs.len()] };
        let times = |factors: Option<&[f32]>| match factors {
            None => grad.to_vec(),
            Some(factors) => self.rows(|row, out| {
                let range = row * self.size..(row + 1) * self.size;
                let factor = factors[row];
                out.iter_mut().zip(&grad[range]).for_each(|(out, grad)| *out = grad * factor);
            }),
        };
        let mut all = vec![needs[0].then(|| times(self.keep.then(|| inputs[1])))];
        if self.keep {
            all.push(needs[1].then(|| self.factor(grad, inputs[0])));
        }
        if self.carry {
            let at = inputs.len() - 2;
            all.push(needs[at].then(|| times(Some(inputs[at + 1]))));
            all.push(needs[at + 1].then(|| self.factor(grad, inputs[at])));
        }
        all
    }
}
