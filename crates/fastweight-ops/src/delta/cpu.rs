//! Fused CPU kernel of the delta rule: chunked WY form (arXiv 2406.06484, 2412.06464), see
//! `kernel::forward` and `kernel::backward`.
//!
//! For the backward pass a head keeps `4 (K V / 32 + V)` bytes a token: a state every 32 tokens, and the
//! token's prediction error.

use crate::fused::{Forward, FusedOp};
use crate::kernel::backward::{OutputGradients, backward};
use crate::kernel::forward::{Saved, forward};
use crate::kernel::gates::Gate;
use crate::kernel::memory::{Delta, Inputs};
use crate::kernel::step::StepInputs;
use crate::kernel::{self, Dims};

/// The delta rule on slices: inputs `[q, k, v, beta, initial]`, then `gate [B,T,H]` if `gated`; outputs
/// `[o, state]`.
#[derive(Debug, Clone)]
pub struct FusedDelta {
    /// Sizes, scale and documents.
    pub dims: Dims,
    /// Whether there is a log gate for every token and head.
    pub gated: bool,
}

impl FusedDelta {
    fn inputs<'a>(&'a self, inputs: &[&'a [f32]]) -> Inputs<'a> {
        Inputs {
            dims: &self.dims,
            q: inputs[0],
            k: inputs[1],
            v: inputs[2],
            beta: inputs[3],
            gate: if self.gated { Gate::PerToken(inputs[5]) } else { Gate::None },
            state: inputs[4],
            normaliser: &[],
        }
    }
}

impl FusedOp for FusedDelta {
    fn name(&self) -> &'static str {
        "delta_rule"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let Dims { batch, time, heads, key, value, .. } = self.dims;
        vec![vec![batch, time, heads, value], vec![self.dims.states(), heads, key, value]]
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let out = forward::<Delta>(&self.inputs(inputs), save);
        let saved = if save { vec![out.saved.states, out.saved.rows] } else { Vec::new() };
        Forward { outputs: vec![out.o, out.state], saved }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let saved = Saved { states: &saved[0], rows: &saved[1], normalisers: &[] };
        let outputs = OutputGradients { o: grads[0], state: grads[1], normaliser: None };
        let x = backward::<Delta>(&self.inputs(inputs), saved, outputs);
        let gradients = [x.q, x.k, x.v, x.beta, x.state, x.gate];
        gradients.into_iter().zip(needs).map(|(gradient, &needed)| needed.then_some(gradient)).collect()
    }
}

/// One token in place: `state [B,H,K,V]`, `q, k [B,H,K]`, `v [B,H,V]`, `beta, gate [B,H]`, `out [B,H,V]`.
///
/// # Panics
/// When a slice has not the length that `dims` says.
#[allow(clippy::too_many_arguments)]
pub fn step(
    dims: &Dims,
    state: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    beta: &[f32],
    gate: Option<&[f32]>,
    out: &mut [f32],
) {
    let gate = gate.map_or(Gate::None, Gate::PerToken);
    kernel::step::step::<Delta>(StepInputs { dims, q, k, v, beta, gate }, state, &mut [], out);
}
