//! Fused CPU kernel of linear attention: the chunked form of the delta rule's kernel without its solve, see
//! `kernel::forward` and `kernel::backward`.
//!
//! For the backward pass a head keeps `4 K V / 32` bytes a token: a state every 32 tokens.

use crate::fused::{Forward, FusedOp};
use crate::kernel::backward::{OutputGradients, backward};
use crate::kernel::forward::{Saved, forward};
use crate::kernel::gates::Gate;
use crate::kernel::memory::{Additive, Inputs};
use crate::kernel::step::StepInputs;
use crate::kernel::{self, Dims};

/// Which log gates there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateKind {
    /// None.
    None,
    /// `[H]`.
    PerHead,
    /// `[B,T,H]`.
    PerToken,
}

/// Linear attention on slices: inputs `[q, k, v, initial]`, then the gate if there is one; outputs
/// `[o, state]`.
#[derive(Debug, Clone)]
pub struct FusedLinear {
    /// Sizes, scale and documents.
    pub dims: Dims,
    /// Which log gates there are.
    pub gate: GateKind,
}

impl FusedLinear {
    fn inputs<'a>(&'a self, inputs: &[&'a [f32]]) -> Inputs<'a> {
        Inputs {
            dims: &self.dims,
            q: inputs[0],
            k: inputs[1],
            v: inputs[2],
            beta: &[],
            gate: match self.gate {
                GateKind::None => Gate::None,
                GateKind::PerHead => Gate::PerHead(inputs[4]),
                GateKind::PerToken => Gate::PerToken(inputs[4]),
            },
            state: inputs[3],
            normaliser: &[],
        }
    }
}

impl FusedOp for FusedLinear {
    fn name(&self) -> &'static str {
        "linear_attention"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let Dims { batch, time, heads, key, value, .. } = self.dims;
        vec![vec![batch, time, heads, value], vec![self.dims.states(), heads, key, value]]
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let out = forward::<Additive>(&self.inputs(inputs), save);
        let saved = if save { vec![out.saved.states] } else { Vec::new() };
        Forward { outputs: vec![out.o, out.state], saved }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let saved = Saved { states: &saved[0], rows: &[], normalisers: &[] };
        let outputs = OutputGradients { o: grads[0], state: grads[1], normaliser: None };
        let x = backward::<Additive>(&self.inputs(inputs), saved, outputs);
        let gradients = [x.q, x.k, x.v, x.state, x.gate];
        gradients.into_iter().zip(needs).map(|(gradient, &needed)| needed.then_some(gradient)).collect()
    }
}

/// One token in place: `state [B,H,K,V]`, `q, k [B,H,K]`, `v [B,H,V]`, `gate [B,H]`, `out [B,H,V]`.
///
/// # Panics
/// When a slice has not the length that `dims` says.
pub fn step(
    dims: &Dims,
    state: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    gate: Option<&[f32]>,
    out: &mut [f32],
) {
    let gate = gate.map_or(Gate::None, Gate::PerToken);
    kernel::step::step::<Additive>(StepInputs { dims, q, k, v, beta: &[], gate }, state, &mut [], out);
}
