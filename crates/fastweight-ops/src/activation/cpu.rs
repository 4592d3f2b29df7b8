//! Fused SwiGLU: one pass over memory forward, one backward.

use std::ops::Range;

use crate::fused::{Forward, FusedOp};
use crate::kernel::InstructionSet;
use crate::kernel::simd::{Kernel, Lanes, dispatch};
use crate::kernel::workspace::SharedOut;
use crate::pointwise::{load, pieces, run, silu, store};

/// Inputs `[gate, up]`, output `silu(gate) * up`, all of one shape.
#[derive(Debug)]
pub(super) struct FusedSwiglu {
    pub shape: Vec<usize>,
}

impl FusedOp for FusedSwiglu {
    fn name(&self) -> &'static str {
        super::SWIGLU
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![self.shape.clone()]
    }

    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        let (gate, up) = (inputs[0], inputs[1]);
        let mut y = vec![0.0; gate.len()];
        let (set, to) = (InstructionSet::active(), SharedOut::new(&mut y));
        run(&pieces(gate.len(), 1), |range| dispatch(set, Value { gate, up, to, range: range.clone() }));
        Forward { outputs: vec![y], saved: vec![] }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let (gate, up) = (inputs[0], inputs[1]);
        let Some(grad) = grads[0] else { return vec![None; needs.len()] };
        let (mut d_gate, mut d_up) = (vec![0.0; gate.len()], vec![0.0; gate.len()]);
        let to = [SharedOut::new(&mut d_gate), SharedOut::new(&mut d_up)];
        let set = InstructionSet::active();
        run(&pieces(gate.len(), 1), |range| {
            dispatch(set, Gradient { gate, up, grad, to, range: range.clone() })
        });
        vec![needs[0].then_some(d_gate), needs[1].then_some(d_up)]
    }
}

struct Value<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    to: SharedOut,
    range: Range<usize>,
}

impl Kernel for Value<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        let end = self.range.end;
        for at in self.range.step_by(L::COUNT) {
            // SAFETY: the range is inside every slice, and this piece alone writes it.
            unsafe {
                let gate = load::<L>(self.gate.as_ptr().add(at), end - at);
                let up = load::<L>(self.up.as_ptr().add(at), end - at);
                store(silu(gate).0.mul(up), self.to.at(at), end - at);
            }
        }
    }
}

struct Gradient<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    grad: &'a [f32],
    to: [SharedOut; 2],
    range: Range<usize>,
}

impl Kernel for Gradient<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        let end = self.range.end;
        for at in self.range.step_by(L::COUNT) {
            let left = end - at;
            // SAFETY: the range is inside every slice, and this piece alone writes it.
            unsafe {
                let [gate, up, grad] =
                    [self.gate, self.up, self.grad].map(|slice| load::<L>(slice.as_ptr().add(at), left));
                let (value, slope) = silu(gate);
                store(grad.mul(up).mul(slope), self.to[0].at(at), left);
                store(grad.mul(value), self.to[1].at(at), left);
            }
        }
    }
}
