//! One block: a mixer between tokens, then a map on each token.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fastweight_memory::{ChannelMixer, ChannelState, MemoryError, Mixer, Norm, Shared};
use fastweight_ops::Offsets;

use crate::LayerState;

/// `x + mixer(norm(x))`, then `x + mlp(norm(x))`.
#[derive(Module, Debug)]
pub struct Block {
    /// Normalisation before the mixer.
    pub mixer_norm: Norm,
    /// The memory.
    pub mixer: Mixer,
    /// Normalisation before the map on each token.
    pub mlp_norm: Norm,
    /// The map on each token.
    pub mlp: ChannelMixer,
}

impl Block {
    /// Reads `x [B, T, width]`; returns `[B, T, width]` and the state after it. `shared` goes from block to block.
    ///
    /// # Errors
    /// An input, state or offsets that do not fit.
    pub fn forward(
        &self,
        x: Tensor<3>,
        state: Option<LayerState>,
        offsets: Option<&Offsets>,
        shared: &mut Shared,
    ) -> Result<(Tensor<3>, LayerState), MemoryError> {
        let (mixer, channel) = state.map_or((None, None), |state| (Some(state.mixer), state.channel));
        shared.residual = Some(x.clone());
        let normed = self.mixer_norm.forward(x.clone())?;
        let (mixed, mixer) = self.mixer.forward_shared(normed, mixer, offsets, shared)?;
        let (y, channel) = self.mlp(x + mixed, channel, offsets, shared)?;
        Ok((y, LayerState { mixer, channel }))
    }

    /// Reads one token per row, `x [B, width]`.
    ///
    /// # Errors
    /// An input or state that does not fit.
    pub fn step(
        &self,
        x: Tensor<2>,
        state: LayerState,
        shared: &mut Shared,
    ) -> Result<(Tensor<2>, LayerState), MemoryError> {
        shared.residual = Some(x.clone().unsqueeze_dim(1));
        let normed = self.mixer_norm.forward(x.clone())?;
        let (mixed, mixer) = self.mixer.step_shared(normed, state.mixer, shared)?;
        let (y, channel) = self.mlp((x + mixed).unsqueeze_dim(1), state.channel, None, shared)?;
        Ok((y.squeeze_dim(1), LayerState { mixer, channel }))
    }

    /// The state of `batch` sequences before their first token.
    pub fn zero_state(&self, batch: usize, device: &Device) -> LayerState {
        LayerState {
            mixer: self.mixer.zero_state(batch, device),
            channel: self.mlp.zero_state(batch, device),
        }
    }

    fn mlp(
        &self,
        x: Tensor<3>,
        state: Option<ChannelState>,
        offsets: Option<&Offsets>,
        shared: &Shared,
    ) -> Result<(Tensor<3>, Option<ChannelState>), MemoryError> {
        let normed = self.mlp_norm.forward(x.clone())?;
        let (y, state) = self.mlp.forward(normed, state, offsets, shared)?;
        Ok((x + y, state))
    }
}
