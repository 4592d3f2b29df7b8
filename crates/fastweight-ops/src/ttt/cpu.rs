//! Fused CPU kernel of TTT-Linear.
//!
//! The tokens of a mini-batch of 16 (larger ones in pieces of 16) are computed together. For the backward pass
//! a head keeps `4 (K + 1) V / 16` bytes a token: the weights at the start of each mini-batch (at the default
//! size of 16; a piece of a larger mini-batch keeps what was gathered instead).

use crate::fused::{Forward, FusedOp};
use crate::kernel::Dims;

use super::backward::{OutputGradients, backward};
use super::forward::forward;

pub use super::cpu_step::{StepInputs, learn, step};

/// TTT-Linear on slices: inputs `[q, k, v, eta, ln_w, ln_b, weights, gathered]`, the last two
/// `[N,H,K+1,V]` with the bias as last row; outputs `[o, weights, gathered]`.
#[derive(Debug, Clone)]
pub struct FusedTtt {
    /// Sizes, factor on the query, documents; `key` equals `value`.
    pub dims: Dims,
    /// Tokens of a mini-batch.
    pub mini_batch: usize,
    /// Where in its mini-batch each sequence starts.
    pub position: Vec<usize>,
}

/// Inputs, contiguous.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub dims: &'a Dims,
    pub mini_batch: usize,
    pub position: &'a [usize],
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub eta: &'a [f32],
    pub ln_w: &'a [f32],
    pub ln_b: &'a [f32],
    pub weights: &'a [f32],
    pub gathered: &'a [f32],
}

impl FusedTtt {
    /// The kernels read through raw pointers; they rely on these lengths.
    fn inputs<'a>(&'a self, inputs: &[&'a [f32]]) -> Inputs<'a> {
        let d = &self.dims;
        let tokens = d.batch * d.time * d.heads;
        let states = d.states() * d.heads * (d.key + 1) * d.value;
        assert_eq!(d.key, d.value, "values are as wide as keys");
        let norm = d.heads * d.value;
        let lens = [tokens * d.key, tokens * d.key, tokens * d.value, tokens, norm, norm, states, states];
        for (i, len) in lens.into_iter().enumerate() {
            assert_eq!(inputs[i].len(), len, "length of input {i}");
        }
        assert_eq!(self.position.len(), d.states(), "positions");
        assert!(self.position.iter().all(|&position| position < self.mini_batch), "positions");
        if let Some(offsets) = &d.offsets {
            assert!(d.batch == 1 && offsets.time() == d.time, "offsets cut the one row");
        }
        Inputs {
            dims: &self.dims,
            mini_batch: self.mini_batch,
            position: &self.position,
            q: inputs[0],
            k: inputs[1],
            v: inputs[2],
            eta: inputs[3],
            ln_w: inputs[4],
            ln_b: inputs[5],
            weights: inputs[6],
            gathered: inputs[7],
        }
    }
}

impl FusedOp for FusedTtt {
    fn name(&self) -> &'static str {
        super::NAME
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let Dims { batch, time, heads, key, value, .. } = self.dims;
        let state = vec![self.dims.states(), heads, key + 1, value];
        vec![vec![batch, time, heads, value], state.clone(), state]
    }

    fn forward(&self, inputs: &[&[f32]], save: bool) -> Forward {
        let out = forward(&self.inputs(inputs), save);
        let saved = if save { vec![out.saved] } else { Vec::new() };
        Forward { outputs: vec![out.o, out.weights, out.gathered], saved }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let outputs = OutputGradients { o: grads[0], weights: grads[1], gathered: grads[2] };
        let x = backward(&self.inputs(inputs), &saved[0], outputs);
        let gradients = [x.q, x.k, x.v, x.eta, x.ln_w, x.ln_b, x.weights, x.gathered];
        gradients.into_iter().zip(needs).map(|(gradient, &needed)| needed.then_some(gradient)).collect()
    }
}
