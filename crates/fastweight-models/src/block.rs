//! One block: a mixer between tokens, then a map on each token.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_memory::{MemoryError, Mixer, MixerState, RmsNorm, Shared, linear};
use fastweight_ops::activation::swiglu;
use fastweight_ops::{Offsets, OpError};

/// `down(silu(gate x) * up x)` (Shazeer 2020, 2002.05202).
#[derive(Module, Debug)]
pub struct SwiGlu {
    /// `width -> hidden`, through SiLU.
    pub gate: Linear,
    /// `width -> hidden`.
    pub up: Linear,
    /// `hidden -> width`.
    pub down: Linear,
}

impl SwiGlu {
    /// A map with `hidden` channels inside, zero until it is initialised.
    pub fn new(width: usize, hidden: usize, device: &Device) -> Self {
        Self {
            gate: linear(width, hidden, device),
            up: linear(width, hidden, device),
            down: linear(hidden, width, device),
        }
    }

    /// Maps every token of `x [.., width]` alone.
    ///
    /// # Errors
    /// An operator that refuses its arguments.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        Ok(self.down.forward(swiglu(self.gate.forward(x.clone()), self.up.forward(x))?))
    }
}

/// `x + mixer(norm(x))`, then `x + mlp(norm(x))`.
#[derive(Module, Debug)]
pub struct Block {
    /// Normalisation before the mixer.
    pub mixer_norm: RmsNorm,
    /// The memory.
    pub mixer: Mixer,
    /// Normalisation before the map on each token.
    pub mlp_norm: RmsNorm,
    /// The map on each token.
    pub mlp: SwiGlu,
}

impl Block {
    /// Reads `x [B, T, width]`; returns `[B, T, width]` and the mixer's state after it. `shared` goes from block to block.
    ///
    /// # Errors
    /// An input, state or offsets that do not fit.
    pub fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MixerState>,
        offsets: Option<&Offsets>,
        shared: &mut Shared,
    ) -> Result<(Tensor<3>, MixerState), MemoryError> {
        let normed = self.mixer_norm.forward(x.clone())?;
        let (mixed, state) = self.mixer.forward_shared(normed, state, offsets, shared)?;
        Ok((self.mlp(x + mixed)?, state))
    }

    /// Reads one token per row, `x [B, width]`.
    ///
    /// # Errors
    /// An input or state that does not fit.
    pub fn step(
        &self,
        x: Tensor<2>,
        state: MixerState,
        shared: &mut Shared,
    ) -> Result<(Tensor<2>, MixerState), MemoryError> {
        let (mixed, state) = self.mixer.step_shared(self.mixer_norm.forward(x.clone())?, state, shared)?;
        Ok((self.mlp(x + mixed)?, state))
    }

    fn mlp<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        Ok(x.clone() + self.mlp.forward(self.mlp_norm.forward(x)?)?)
    }
}
