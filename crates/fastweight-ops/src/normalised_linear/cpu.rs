//! Fused CPU kernel of normalised linear attention: the chunked linear kernel with the normaliser beside
//! the state, see `kernel::forward` and `kernel::backward`.
//!
//! The normaliser is one more value column whose value is always 1, kept apart: its share of the scores is
//! their row sum, its share of the gradients one number a token.
//! For the backward pass a head keeps `4 (K V / 32 + K / 32)` bytes a token: both states every 32 tokens.

use crate::fused::{Forward, FusedOp};
use crate::kernel::backward::{OutputGradients, backward};
use crate::kernel::forward::{Saved, forward};
use crate::kernel::gates::Gate;
use crate::kernel::memory::{Inputs, Normalised};
use crate::kernel::step::StepInputs;
use crate::kernel::{self, Dims};

/// Normalised linear attention on slices: inputs `[q, k, v, S, z]`, then `gate [B,T,H]` if `gated`; outputs
/// `[o, S, z]`. The scale of `dims` is not used.
#[derive(Debug, Clone)]
pub struct FusedNormalisedLinear {
    /// Sizes and documents.
    pub dims: Dims,
    /// Whether there is a log gate for every token and head.
    pub gated: bool,
}

impl FusedNormalisedLinear {
    fn inputs<'a>(&'a self, inputs: &[&'a [f32]]) -> Inputs<'a> {
        Inputs {
            dims: &self.dims,
            q: inputs[0],
            k: inputs[1],
            v: inputs[2],
            beta: &[],
            gate: if self.gated { Gate::PerToken(inputs[5]) } else { Gate::None },
            state: inputs[3],
            normaliser: inputs[4],
        }
    }
}

impl FusedOp for FusedNormalisedLinear {
    fn name(&self) -> &'static str {
        "normalised_linear_attention"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let Dims { batch, time, heads, key, value, .. } = self.dims;
        let states = self.dims.states();
        vec![vec![batch, time, heads, value], vec![states, heads, key, value], vec![states, heads, key]]
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let out = forward::<Normalised>(&self.inputs(inputs), save);
        let saved = if save { vec![out.saved.states, out.saved.normalisers] } else { Vec::new() };
        Forward { outputs: vec![out.o, out.state, out.normaliser], saved }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let saved = Saved { states: &saved[0], rows: &[], normalisers: &saved[1] };
        let outputs = OutputGradients { o: grads[0], state: grads[1], normaliser: grads[2] };
        let x = backward::<Normalised>(&self.inputs(inputs), saved, outputs);
        let gradients = [x.q, x.k, x.v, x.state, x.normaliser, x.gate];
        gradients.into_iter().zip(needs).map(|(gradient, &needed)| needed.then_some(gradient)).collect()
    }
}

/// One token in place: states `s [B,H,K,V]` and `z [B,H,K]`, `q, k [B,H,K]`, `v [B,H,V]`, `gate [B,H]`,
/// `out [B,H,V]`.
///
/// # Panics
/// When a slice has not the length that `dims` says.
#[allow(clippy::too_many_arguments)]
pub fn step(
    dims: &Dims,
    s: &mut [f32],
    z: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    gate: Option<&[f32]>,
    out: &mut [f32],
) {
    let gate = gate.map_or(Gate::None, Gate::PerToken);
    kernel::step::step::<Normalised>(StepInputs { dims, q, k, v, beta: &[], gate }, s, z, out);
}
