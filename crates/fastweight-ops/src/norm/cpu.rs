//! Fused normalisations, one row at a time: forward and backward read each number once or twice.

use std::ops::Range;

use crate::fused::{Forward, FusedOp};
use crate::kernel::InstructionSet;
use crate::kernel::simd::{Kernel, Lanes, dispatch};
use crate::kernel::workspace::SharedOut;
use crate::pointwise::{add, load, pieces, run, silu, store};

/// What follows the division of a row by its norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// Nothing, and the norm is the root of the sum: L2. Inputs `[x]`.
    Nothing,
    /// The weight; the norm is the root of the mean. Inputs `[x, weight]`.
    Weight,
    /// Weight and `silu(gate)`. Inputs `[x, weight, gate]`.
    Gate,
}

/// `x / sqrt(sum or mean of x^2 + eps)` over rows of `size` numbers; one output of `x`'s shape.
#[derive(Debug)]
pub(super) struct FusedNorm {
    pub operator: &'static str,
    pub shape: Vec<usize>,
    pub size: usize,
    pub eps: f32,
    pub after: After,
}

impl FusedNorm {
    /// Numbers that the sum of squares is divided by.
    fn count(&self) -> f32 {
        if self.after == After::Nothing { 1.0 } else { self.size as f32 }
    }

    fn pieces(&self) -> Vec<Range<usize>> {
        pieces(self.shape.iter().product::<usize>() / self.size, self.size)
    }
}

impl FusedOp for FusedNorm {
    fn name(&self) -> &'static str {
        self.operator
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![self.shape.clone()]
    }

    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        let mut y = vec![0.0; inputs[0].len()];
        let (to, set) = (SharedOut::new(&mut y), InstructionSet::active());
        run(&self.pieces(), |rows| dispatch(set, Value { op: self, inputs, to, rows: rows.clone() }));
        Forward { outputs: vec![y], saved: vec![] }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let Some(grad) = grads[0] else { return vec![None; needs.len()] };
        let mut d_x = vec![0.0; grad.len()];
        let mut d_gate = vec![0.0; if self.after == After::Gate { grad.len() } else { 0 }];
        let to = [SharedOut::new(&mut d_x), SharedOut::new(&mut d_gate)];
        let set = InstructionSet::active();
        let weights = run(&self.pieces(), |rows| {
            dispatch(set, Gradient { op: self, inputs, grad, to, rows: rows.clone() })
        });
        let mut d_weight = vec![0.0; self.size];
        weights.iter().for_each(|part| add(&mut d_weight, part));
        [d_x, d_weight, d_gate].into_iter().zip(needs).map(|(d, &needed)| needed.then_some(d)).collect()
    }
}

/// One over the norm of a row.
///
/// # Safety
/// The instruction set of `L` is there.
#[inline(always)]
unsafe fn inverse_norm<L: Lanes>(op: &FusedNorm, row: &[f32]) -> f32 {
    // SAFETY: registers stay inside the row.
    unsafe {
        let mut squares = L::splat(0.0);
        for at in (0..row.len()).step_by(L::COUNT) {
            let x = load::<L>(row.as_ptr().add(at), row.len() - at);
            squares = x.mul_add(x, squares);
        }
        1.0 / (squares.sum() / op.count() + op.eps).sqrt()
    }
}

struct Value<'a> {
    op: &'a FusedNorm,
    inputs: &'a [&'a [f32]],
    to: SharedOut,
    rows: Range<usize>,
}

impl Kernel for Value<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        let Self { op, inputs, to, rows } = self;
        let size = op.size;
        for row in rows {
            let start = row * size;
            // SAFETY: registers stay inside the row; this piece alone writes its rows.
            unsafe {
                let inverse = L::splat(inverse_norm::<L>(op, &inputs[0][start..start + size]));
                for at in (0..size).step_by(L::COUNT) {
                    let left = size - at;
                    let mut y = load::<L>(inputs[0].as_ptr().add(start + at), left).mul(inverse);
                    if op.after != After::Nothing {
                        y = y.mul(load::<L>(inputs[1].as_ptr().add(at), left));
                    }
                    if op.after == After::Gate {
                        y = y.mul(silu(load::<L>(inputs[2].as_ptr().add(start + at), left)).0);
                    }
                    store(y, to.at(start + at), left);
                }
            }
        }
    }
}

struct Gradient<'a> {
    op: &'a FusedNorm,
    inputs: &'a [&'a [f32]],
    grad: &'a [f32],
    /// Gradients of `x` and of the gate.
    to: [SharedOut; 2],
    rows: Range<usize>,
}

impl Kernel for Gradient<'_> {
    /// This piece's part of the weight gradient.
    type Output = Vec<f32>;

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) -> Vec<f32> {
        let Self { op, inputs, grad, to: [d_x, d_gate], rows } = self;
        let size = op.size;
        let mut d_weight = vec![0.0; size];
        for row in rows {
            let start = row * size;
            // SAFETY: registers stay inside the row; this piece alone writes its rows.
            unsafe {
                let inverse = inverse_norm::<L>(op, &inputs[0][start..start + size]);
                let scale = L::splat(inverse);
                // With n = x * inverse and g the gradient of n: dx = inverse * (g - n * sum(g n) / count).
                let mut products = L::splat(0.0);
                for at in (0..size).step_by(L::COUNT) {
                    let left = size - at;
                    let n = load::<L>(inputs[0].as_ptr().add(start + at), left).mul(scale);
                    let mut g = load::<L>(grad.as_ptr().add(start + at), left);
                    if op.after == After::Gate {
                        let weight = load::<L>(inputs[1].as_ptr().add(at), left);
                        let (value, slope) = silu(load::<L>(inputs[2].as_ptr().add(start + at), left));
                        store(g.mul(n).mul(weight).mul(slope), d_gate.at(start + at), left);
                        g = g.mul(value);
                    }
                    if op.after != After::Nothing {
                        let sum = d_weight.as_mut_ptr().add(at);
                        store(g.mul_add(n, load::<L>(sum, left)), sum, left);
                        g = g.mul(load::<L>(inputs[1].as_ptr().add(at), left));
                    }
                    products = g.mul_add(n, products);
                    store(g, d_x.at(start + at), left);
                }
                let mean = L::splat(-products.sum() / op.count());
                for at in (0..size).step_by(L::COUNT) {
                    let left = size - at;
                    let n = load::<L>(inputs[0].as_ptr().add(start + at), left).mul(scale);
                    let g = load::<L>(d_x.at(start + at), left);
                    store(n.mul_add(mean, g).mul(scale), d_x.at(start + at), left);
                }
            }
        }
        d_weight
    }
}
