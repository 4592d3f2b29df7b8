//! Any mixer, chosen at run time.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;

use crate::layers::{
    DeltaNet, Elu1LinearAttention, GatedDeltaNet, Layer, LightningAttention, LinearAttention, Mamba2, RetNet,
    RuleMemory, SoftmaxAttention,
};
use crate::{MemoryError, MixerState};

/// One of the memory layers; parameters keep the layer's own names.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, missing_docs)]
pub enum Mixer {
    SoftmaxAttention(SoftmaxAttention),
    LinearAttention(LinearAttention),
    Elu1LinearAttention(Elu1LinearAttention),
    RetNet(RetNet),
    LightningAttention(LightningAttention),
    Mamba2(Mamba2),
    DeltaNet(DeltaNet),
    GatedDeltaNet(GatedDeltaNet),
    Rule(RuleMemory),
}

macro_rules! each {
    ($mixer:expr, $layer:ident => $result:expr) => {
        match $mixer {
            Mixer::SoftmaxAttention($layer) => $result,
            Mixer::LinearAttention($layer) => $result,
            Mixer::Elu1LinearAttention($layer) => $result,
            Mixer::RetNet($layer) => $result,
            Mixer::LightningAttention($layer) => $result,
            Mixer::Mamba2($layer) => $result,
            Mixer::DeltaNet($layer) => $result,
            Mixer::GatedDeltaNet($layer) => $result,
            Mixer::Rule($layer) => $result,
        }
    };
}

impl Mixer {
    /// Reads `x [B, T, width]`; returns `[B, T, width]` and the state after it. See [`Layer::forward`].
    ///
    /// # Errors
    /// An input, state or offsets that do not fit.
    pub fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MixerState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MixerState), MemoryError> {
        each!(self, layer => forward(layer, x, state, offsets))
    }

    /// Reads one token per row, `x [B, width]`; returns `[B, width]` and the state after it.
    ///
    /// # Errors
    /// An input or state that does not fit.
    pub fn step(&self, x: Tensor<2>, state: MixerState) -> Result<(Tensor<2>, MixerState), MemoryError> {
        each!(self, layer => step(layer, x, state))
    }

    /// The state of `batch` sequences before their first token.
    pub fn zero_state(&self, batch: usize, device: &Device) -> MixerState {
        each!(self, layer => layer.zero_state(batch, device).into())
    }
}

fn forward<L: Layer>(
    layer: &L,
    x: Tensor<3>,
    state: Option<MixerState>,
    offsets: Option<&Offsets>,
) -> Result<(Tensor<3>, MixerState), MemoryError> {
    let state = state.map(L::State::try_from).transpose()?;
    let (y, state) = layer.forward(x, state, offsets)?;
    Ok((y, state.into()))
}

fn step<L: Layer>(
    layer: &L,
    x: Tensor<2>,
    state: MixerState,
) -> Result<(Tensor<2>, MixerState), MemoryError> {
    let (y, state) = layer.step(x, L::State::try_from(state)?)?;
    Ok((y, state.into()))
}
