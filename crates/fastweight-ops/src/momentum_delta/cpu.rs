//! Fused CPU kernel of the delta rule with momentum: token after token, the state in the cache, see `kernel::recurrent`.
//!
//! For the backward pass a head keeps `4 (2 K V / 32 + V)` bytes a token: state and momentum every 32
//! tokens, and the token's prediction error.

use crate::fused::{Forward, FusedOp};
use crate::kernel::Dims;
use crate::kernel::recurrent::backward::{OutputGradients, Saved, backward};
use crate::kernel::recurrent::forward::forward;
use crate::kernel::recurrent::step::step as recurrent_step;
use crate::kernel::recurrent::{ChannelSurprise, Inputs, Surprise};

/// The delta rule with momentum on slices: inputs `[q, k, p, v, retain, momentum, rate, S, P, write]`, without `write`
/// with channel gates; outputs `[o, S, P]`.
#[derive(Debug, Clone)]
pub struct FusedMomentumDelta {
    /// Sizes, scale and documents.
    pub dims: Dims,
    /// Whether `retain, momentum, rate` are `[B,T,H,V]`, one for each column of the states, and all of the momentum is
    /// written; else they and `write` are `[B,T,H]`.
    pub channel_gates: bool,
}

impl FusedMomentumDelta {
    fn inputs<'a>(&'a self, x: &[&'a [f32]]) -> Inputs<'a> {
        Inputs {
            dims: &self.dims,
            q: x[0],
            read: x[2],
            write: x[1],
            value_key: &[],
            v: x[3],
            decay: x[4],
            rate: x[6],
            momentum: x[5],
            momentum_rate: x.get(9).copied().unwrap_or_default(),
            state: x[7],
            momentum_state: x[8],
        }
    }
}

impl FusedOp for FusedMomentumDelta {
    fn name(&self) -> &'static str {
        "momentum_delta_rule"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let Dims { batch, time, heads, key, value, .. } = self.dims;
        let state = vec![self.dims.states(), heads, key, value];
        vec![vec![batch, time, heads, value], state.clone(), state]
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let inputs = self.inputs(inputs);
        let out = if self.channel_gates {
            forward::<ChannelSurprise>(&inputs, save)
        } else {
            forward::<Surprise>(&inputs, save)
        };
        let saved = if save { vec![out.saved_states, out.saved_rows, out.saved_momenta] } else { Vec::new() };
        Forward { outputs: vec![out.o, out.state, out.momentum_state], saved }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let saved = Saved { states: &saved[0], rows: &saved[1], momenta: &saved[2] };
        let outputs = OutputGradients { o: grads[0], state: grads[1], momentum_state: grads[2] };
        let inputs = self.inputs(inputs);
        let x = if self.channel_gates {
            backward::<ChannelSurprise>(&inputs, saved, outputs)
        } else {
            backward::<Surprise>(&inputs, saved, outputs)
        };
        let gradients = [
            x.q,
            x.write,
            x.read,
            x.v,
            x.decay,
            x.momentum,
            x.rate,
            x.state,
            x.momentum_state,
            x.momentum_rate,
        ];
        gradients.into_iter().zip(needs).map(|(gradient, &needed)| needed.then_some(gradient)).collect()
    }
}

/// One token in place: states `S, P [B,H,K,V]`, `q, k, p [B,H,K]`, `v [B,H,V]`, plain factors
/// `retain, momentum, rate, write [B,H]`, or without `write` `[B,H,V]`, `out [B,H,V]`; see [`FusedMomentumDelta`].
///
/// # Panics
/// When a slice has not the length that `dims` says.
#[allow(clippy::too_many_arguments)]
pub fn step(
    dims: &Dims,
    state: &mut [f32],
    momentum_state: &mut [f32],
    q: &[f32],
    k: &[f32],
    p: &[f32],
    v: &[f32],
    retain: &[f32],
    momentum: &[f32],
    rate: &[f32],
    write: Option<&[f32]>,
    out: &mut [f32],
) {
    let inputs = Inputs {
        dims,
        q,
        read: p,
        write: k,
        value_key: &[],
        v,
        decay: retain,
        rate,
        momentum,
        momentum_rate: write.unwrap_or_default(),
        state: &[],
        momentum_state: &[],
    };
    match write {
        Some(_) => recurrent_step::<Surprise>(&inputs, state, momentum_state, out),
        None => recurrent_step::<ChannelSurprise>(&inputs, state, momentum_state, out),
    }
}
