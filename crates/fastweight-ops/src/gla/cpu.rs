//! Fused CPU kernel of gated linear attention: token after token, the state in the cache, see `kernel::recurrent`.
//!
//! For the backward pass a head keeps `4 K V / 32` bytes a token: a state every 32 tokens.

use crate::fused::{Forward, FusedOp};
use crate::kernel::Dims;
use crate::kernel::recurrent::backward::{OutputGradients, Saved, backward};
use crate::kernel::recurrent::forward::forward;
use crate::kernel::recurrent::step::step as recurrent_step;
use crate::kernel::recurrent::{ChannelGated, Inputs};

/// Gated linear attention on slices: inputs `[q, k, v, gate, initial]`; outputs `[o, state]`.
#[derive(Debug, Clone)]
pub struct FusedGla {
    /// Sizes, scale and documents.
    pub dims: Dims,
}

impl FusedGla {
    fn inputs<'a>(&'a self, x: &[&'a [f32]]) -> Inputs<'a> {
        Inputs {
            dims: &self.dims,
            q: x[0],
            read: &[],
            write: x[1],
            value_key: &[],
            v: x[2],
            decay: x[3],
            rate: &[],
            momentum: &[],
            momentum_rate: &[],
            state: x[4],
            momentum_state: &[],
        }
    }
}

impl FusedOp for FusedGla {
    fn name(&self) -> &'static str {
        "gated_linear_attention"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let Dims { batch, time, heads, key, value, .. } = self.dims;
        let state = vec![self.dims.states(), heads, key, value];
        vec![vec![batch, time, heads, value], state]
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let out = forward::<ChannelGated>(&self.inputs(inputs), save);
        let saved = if save { vec![out.saved_states, out.saved_rows] } else { Vec::new() };
        Forward { outputs: vec![out.o, out.state], saved }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let saved = Saved { states: &saved[0], rows: &saved[1], momenta: &[] };
        let outputs = OutputGradients { o: grads[0], state: grads[1], momentum_state: None };
        let x = backward::<ChannelGated>(&self.inputs(inputs), saved, outputs);
        let gradients = [x.q, x.write, x.v, x.decay, x.state];
        gradients.into_iter().zip(needs).map(|(gradient, &needed)| needed.then_some(gradient)).collect()
    }
}

/// One token in place: `state [B,H,K,V]`, `q, k, gate [B,H,K]`, `v [B,H,V]`, `out [B,H,V]`.
///
/// # Panics
/// When a slice has not the length that `dims` says.
#[allow(clippy::too_many_arguments)]
pub fn step(dims: &Dims, state: &mut [f32], q: &[f32], k: &[f32], v: &[f32], gate: &[f32], out: &mut [f32]) {
    let inputs = Inputs {
        dims,
        q,
        read: &[],
        write: k,
        value_key: &[],
        v,
        decay: gate,
        rate: &[],
        momentum: &[],
        momentum_rate: &[],
        state: &[],
        momentum_state: &[],
    };
    recurrent_step::<ChannelGated>(&inputs, state, &mut [], out);
}
