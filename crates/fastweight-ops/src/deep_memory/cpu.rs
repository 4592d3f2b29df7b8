//! Fused pieces of the network on the flex device: each number is read once forward and once backward.

use std::ops::Range;

use super::Activation;
use crate::fused::{Forward, FusedOp};
use crate::kernel::InstructionSet;
use crate::kernel::simd::{Kernel, Lanes, dispatch};
use crate::kernel::workspace::SharedOut;
use crate::pointwise::{load, pieces, run, sigmoid, store};

/// The activation and its derivative. Input `[z]`, outputs `[value, slope]`.
///
/// Both activations are `x sigmoid(w)`: SiLU with `w = x`, the tanh form of GELU with
/// `w = 2 sqrt(2/pi) (x + 0.044715 x^3)`.
#[derive(Debug)]
pub(super) struct FusedActivation {
    pub(super) shape: Vec<usize>,
    pub(super) activation: Activation,
}

/// `2 sqrt(2/pi)` and its product with 0.044715.
const GELU: (f32, f32) = (1.595_769_2, 0.071_354_814);

/// `w` and its first two derivatives.
#[inline(always)]
fn inner<L: Lanes>(x: L, activation: Activation) -> (L, L, L) {
    match activation {
        Activation::Silu => (x, x.same(1.0), x.same(0.0)),
        Activation::Gelu => {
            let square = x.mul(x);
            let w = x.mul(square.mul_add(x.same(GELU.1), x.same(GELU.0)));
            let first = square.mul_add(x.same(3.0 * GELU.1), x.same(GELU.0));
            (w, first, x.mul(x.same(6.0 * GELU.1)))
        }
    }
}

/// The activation, its derivative and its second derivative.
#[inline(always)]
pub(super) fn derivatives<L: Lanes>(x: L, activation: Activation) -> (L, L, L) {
    let (w, first, second) = inner(x, activation);
    let s = sigmoid(w);
    let one = x.same(1.0);
    let spread = s.mul(one.sub(s));
    let slope = x.mul(spread).mul_add(first, s);
    let bend = first.mul(first).mul(one.sub(s.add(s))).add(second);
    let curve = spread.mul(x.mul_add(bend, first.add(first)));
    (x.mul(s), slope, curve)
}

impl FusedOp for FusedActivation {
    fn name(&self) -> &'static str {
        "deep_memory_activation"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        vec![self.shape.clone(); 2]
    }

    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        let z = inputs[0];
        let (mut value, mut slope) = (vec![0.0; z.len()], vec![0.0; z.len()]);
        let to = [SharedOut::new(&mut value), SharedOut::new(&mut slope)];
        let (set, activation) = (InstructionSet::active(), self.activation);
        run(&pieces(z.len(), 1), |range| dispatch(set, Value { z, to, activation, range: range.clone() }));
        Forward { outputs: vec![value, slope], saved: vec![] }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        if !needs[0] {
            return vec![None];
        }
        let z = inputs[0];
        let mut d = vec![0.0; z.len()];
        let to = SharedOut::new(&mut d);
        let (set, activation) = (InstructionSet::active(), self.activation);
        let [value, slope] = [grads[0], grads[1]];
        run(&pieces(z.len(), 1), |range| {
            dispatch(set, Gradient { z, value, slope, to, activation, range: range.clone() })
        });
        vec![Some(d)]
    }
}

struct Value<'a> {
    z: &'a [f32],
    to: [SharedOut; 2],
    activation: Activation,
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
                let z = load::<L>(self.z.as_ptr().add(at), end - at);
                let (value, slope, _) = derivatives(z, self.activation);
                store(value, self.to[0].at(at), end - at);
                store(slope, self.to[1].at(at), end - at);
            }
        }
    }
}

struct Gradient<'a> {
    z: &'a [f32],
    value: Option<&'a [f32]>,
    slope: Option<&'a [f32]>,
    to: SharedOut,
    activation: Activation,
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
                let z = load::<L>(self.z.as_ptr().add(at), left);
                let (_, slope, curve) = derivatives(z, self.activation);
                let mut d = z.same(0.0);
                if let Some(grad) = self.value {
                    d = load::<L>(grad.as_ptr().add(at), left).mul_add(slope, d);
                }
                if let Some(grad) = self.slope {
                    d = load::<L>(grad.as_ptr().add(at), left).mul_add(curve, d);
                }
                store(d, self.to.at(at), left);
            }
        }
    }
}
