//! Fused CPU kernel of the diagonal plus low rank recurrence: token after token, the state in the cache, see `kernel::recurrent`.
//!
//! For the backward pass a head keeps `4 (K V / 32 + V)` bytes a token: a state every 32 tokens, and what
//! the token read with `a`.

use crate::fused::{Forward, FusedOp};
use crate::kernel::Dims;
use crate::kernel::recurrent::backward::{OutputGradients, Saved, backward};
use crate::kernel::recurrent::forward::forward;
use crate::kernel::recurrent::step::step as recurrent_step;
use crate::kernel::recurrent::{Inputs, LowRank};

/// The diagonal plus low rank recurrence on slices: inputs `[q, w, k, v, a, b, initial]`; outputs `[o, state]`.
#[derive(Debug, Clone)]
pub struct FusedDplr {
    /// Sizes, scale and documents.
    pub dims: Dims,
}

impl FusedDplr {
    fn inputs<'a>(&'a self, x: &[&'a [f32]]) -> Inputs<'a> {
        Inputs {
            dims: &self.dims,
            q: x[0],
            read: x[4],
            write: x[5],
            value_key: x[2],
            v: x[3],
            decay: x[1],
            rate: &[],
            momentum: &[],
            momentum_rate: &[],
            state: x[6],
            momentum_state: &[],
        }
    }
}

impl FusedOp for FusedDplr {
    fn name(&self) -> &'static str {
        "dplr"
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let Dims { batch, time, heads, key, value, .. } = self.dims;
        let state = vec![self.dims.states(), heads, key, value];
        vec![vec![batch, time, heads, value], state]
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let out = forward::<LowRank>(&self.inputs(inputs), save);
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
        let x = backward::<LowRank>(&self.inputs(inputs), saved, outputs);
        let gradients = [x.q, x.decay, x.value_key, x.v, x.read, x.write, x.state];
        gradients.into_iter().zip(needs).map(|(gradient, &needed)| needed.then_some(gradient)).collect()
    }
}

/// One token in place: `state [B,H,K,V]`, `q, w, k, a, b [B,H,K]`, `v [B,H,V]`, `out [B,H,V]`.
///
/// # Panics
/// When a slice has not the length that `dims` says.
#[allow(clippy::too_many_arguments)]
pub fn step(
    dims: &Dims,
    state: &mut [f32],
    q: &[f32],
    w: &[f32],
    k: &[f32],
    v: &[f32],
    a: &[f32],
    b: &[f32],
    out: &mut [f32],
) {
    let inputs = Inputs {
        dims,
        q,
        read: a,
        write: b,
        value_key: k,
        v,
        decay: w,
        rate: &[],
        momentum: &[],
        momentum_rate: &[],
        state: &[],
        momentum_state: &[],
    };
    recurrent_step::<LowRank>(&inputs, state, &mut [], out);
}
