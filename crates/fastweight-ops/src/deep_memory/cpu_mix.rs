//! What a chunk's tokens add to a layer's values where every output has its own gates, in one pass that forms no factors.

use rayon::prelude::*;

use super::cpu_norm::sum;
use crate::fused::{Forward, FusedOp};

/// `out_t = sum_{s <= t} scores[t,s] x[t,s] weighed_s`, `x[t,s] = kept_t x[t-1,s] + prod_{s < r <= t} momentum_r`, `x[s,s] = 1`.
/// Inputs `[scores [M,C,C], weighed, momentum, kept]`, the last three and the output `[M,C,out]`.
#[derive(Debug)]
pub(super) struct FusedMix {
    pub(super) shape: [usize; 3],
}

/// Multiplications below which threads cost more than they save.
const PARALLEL: usize = 1 << 16;

/// One row's inputs.
struct Row<'a> {
    scores: &'a [f32],
    weighed: &'a [f32],
    momentum: &'a [f32],
    kept: &'a [f32],
}

/// Gradients of one row's inputs.
struct Gradients {
    scores: Vec<f32>,
    weighed: Vec<f32>,
    momentum: Vec<f32>,
    kept: Vec<f32>,
}

impl FusedMix {
    fn row<'a>(&self, inputs: &[&'a [f32]], row: usize) -> Row<'a> {
        let [_, tokens, outputs] = self.shape;
        let part = |x: &'a [f32], size: usize| &x[row * size..(row + 1) * size];
        let vectors = |at: usize| part(inputs[at], tokens * outputs);
        let scores = part(inputs[0], tokens * tokens);
        Row { scores, weighed: vectors(1), momentum: vectors(2), kept: vectors(3) }
    }

    /// `body` of every row, in order.
    fn rows<R: Send>(&self, body: impl Fn(usize) -> R + Sync + Send) -> Vec<R> {
        let [rows, tokens, outputs] = self.shape;
        if rows * tokens * tokens * outputs < PARALLEL {
            return (0..rows).map(body).collect();
        }
        (0..rows).into_par_iter().map(body).collect()
    }

    fn sums(&self, row: &Row) -> Vec<f32> {
        let [_, tokens, outputs] = self.shape;
        let at = |t: usize| t * outputs..(t + 1) * outputs;
        let mut out = vec![0.0; tokens * outputs];
        for s in 0..tokens {
            let mut x = row.weighed[at(s)].to_vec();
            let mut held = x.clone();
            let score = row.scores[s * tokens + s];
            out[at(s)].iter_mut().zip(&x).for_each(|(out, x)| *out += score * x);
            for t in s + 1..tokens {
                let score = row.scores[t * tokens + s];
                let gates = row.momentum[at(t)].iter().zip(&row.kept[at(t)]);
                let values = out[at(t)].iter_mut().zip(&mut x).zip(&mut held);
                for (((out, x), held), (momentum, kept)) in values.zip(gates) {
                    *held *= momentum;
                    *x = *x * kept + *held;
                    *out += score * *x;
                }
            }
        }
        out
    }

    /// `x` and `held` of each source are run forward again, then their gradients back from the last token.
    fn gradients(&self, row: &Row, grad: &[f32]) -> Gradients {
        let [_, tokens, outputs] = self.shape;
        let at = |t: usize| t * outputs..(t + 1) * outputs;
        let zeros = || vec![0.0; tokens * outputs];
        let mut d = Gradients {
            scores: vec![0.0; tokens * tokens],
            weighed: zeros(),
            momentum: zeros(),
            kept: zeros(),
        };
        let (mut x, mut held) = (zeros(), zeros());
        for s in 0..tokens {
            x[at(s)].copy_from_slice(&row.weighed[at(s)]);
            held[at(s)].copy_from_slice(&row.weighed[at(s)]);
            for t in s + 1..tokens {
                let (x_before, x) = x[(t - 1) * outputs..(t + 1) * outputs].split_at_mut(outputs);
                let (held_before, held) = held[(t - 1) * outputs..(t + 1) * outputs].split_at_mut(outputs);
                let (momentum, kept) = (&row.momentum[at(t)], &row.kept[at(t)]);
                held.iter_mut()
                    .zip(held_before)
                    .zip(momentum)
                    .for_each(|((held, before), m)| *held = *before * m);
                let factors = x_before.iter().zip(kept).zip(held);
                x.iter_mut().zip(factors).for_each(|(x, ((before, kept), held))| *x = before * kept + *held);
            }
            let (mut d_x, mut d_held) = (vec![0.0; outputs], vec![0.0; outputs]);
            for t in (s..tokens).rev() {
                let (grad, x_now) = (&grad[at(t)], &x[at(t)]);
                d.scores[t * tokens + s] = sum(|j| grad[j] * x_now[j], outputs);
                let score = row.scores[t * tokens + s];
                for ((d_x, d_held), grad) in d_x.iter_mut().zip(&mut d_held).zip(grad) {
                    *d_x += score * grad;
                    *d_held += *d_x;
                }
                if t == s {
                    break;
                }
                let back = |d: &mut [f32], d_factor: &mut [f32], x: &[f32], factor: &[f32]| {
                    let factors = d_factor.iter_mut().zip(x.iter().zip(factor));
                    for (d, (d_factor, (x, factor))) in d.iter_mut().zip(factors) {
                        *d_factor += *d * x;
                        *d *= factor;
                    }
                };
                back(&mut d_x, &mut d.kept[at(t)], &x[at(t - 1)], &row.kept[at(t)]);
                back(&mut d_held, &mut d.momentum[at(t)], &held[at(t - 1)], &row.momentum[at(t)]);
            }
            d.weighed[at(s)].copy_from_slice(&d_held);
        }
        d
    }
}

impl FusedOp for FusedMix {
    fn name(&self) -> &'static str {
        "deep_memory_mix"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![self.shape.to_vec()]
    }

    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        let rows = self.rows(|row| self.sums(&self.row(inputs, row)));
        Forward { outputs: vec![rows.concat()], saved: vec![] }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let Some(grad) = grads[0] else { return vec![None; needs.len()] };
        let size = self.shape[1] * self.shape[2];
        let rows =
            self.rows(|row| self.gradients(&self.row(inputs, row), &grad[row * size..(row + 1) * size]));
        let all = |pick: fn(&Gradients) -> &Vec<f32>| rows.iter().flat_map(pick).copied().collect();
        let picks: [fn(&Gradients) -> &Vec<f32>; 4] =
            [|d| &d.scores, |d| &d.weighed, |d| &d.momentum, |d| &d.kept];
        picks.into_iter().zip(needs).map(|(pick, &needed)| needed.then(|| all(pick))).collect()
    }
}
