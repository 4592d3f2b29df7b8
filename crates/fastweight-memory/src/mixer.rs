//! Any mixer, chosen at run time.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use fastweight_ops::Offsets;

use crate::layers::{
    Comba, DeltaNet, DeltaProduct, Dla, Elu1LinearAttention, GatedDeltaNet, GatedLinearAttention, Hgrn2,
    KimiDeltaAttention, Layer, LightningAttention, LinearAttention, Lstm, Mamba2, MemoryLoad, MirasMemory,
    MixtureOfMemories, RetNet, RuleMemory, Rwkv7, Rwkv7Dea, SoftmaxAttention, Srwm, Titans, TitansMac,
    TitansMag, TitansMal, TitansMlp, TttLinear, TttMlp,
};
use crate::{MemoryError, MixerState, TokenVectors};

/// What a model and its layers leave for the layers after them, at the tokens being read. Not a state: nothing of it
/// outlives the call.
#[derive(Debug, Clone, Default)]
pub struct Shared {
    /// Values of the first RWKV-7 layer, `[B, T, heads V]`.
    pub first_value: Option<Tensor<3>>,
    /// The tokens read, `[B, T]`.
    pub tokens: Option<Tensor<2, Int>>,
    /// Their vectors, as the first block reads them, `[B, T, width]`.
    pub embedded: Option<Tensor<3>>,
    /// What the block at hand reads, before its normalisation, `[B, T, width]`.
    pub residual: Option<Tensor<3>>,
    /// Vectors of any token, for layers that remember tokens.
    pub vectors: Option<TokenVectors>,
    /// How tokens spread in the layers that route them, in order.
    pub loads: Vec<MemoryLoad>,
}

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
    GatedLinearAttention(GatedLinearAttention),
    Hgrn2(Hgrn2),
    KimiDeltaAttention(KimiDeltaAttention),
    Comba(Comba),
    DeltaProduct(DeltaProduct),
    Titans(Titans),
    TttLinear(TttLinear),
    TttMlp(TttMlp),
    TitansMlp(TitansMlp),
    TitansMac(TitansMac),
    TitansMag(TitansMag),
    TitansMal(TitansMal),
    Dla(Dla),
    Lstm(Lstm),
    Srwm(Srwm),
    MixtureOfMemories(MixtureOfMemories),
    Moneta(MirasMemory),
    Yaad(MirasMemory),
    Memora(MirasMemory),
    Rule(RuleMemory),
    Rwkv7(Rwkv7),
    Rwkv7Dea(Rwkv7Dea),
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
            Mixer::GatedLinearAttention($layer) => $result,
            Mixer::Hgrn2($layer) => $result,
            Mixer::KimiDeltaAttention($layer) => $result,
            Mixer::Titans($layer) => $result,
            Mixer::Comba($layer) => $result,
            Mixer::DeltaProduct($layer) => $result,
            Mixer::TttLinear($layer) => $result,
            Mixer::TttMlp($layer) => $result,
            Mixer::TitansMlp($layer) => $result,
            Mixer::TitansMac($layer) => $result,
            Mixer::TitansMag($layer) => $result,
            Mixer::TitansMal($layer) => $result,
            Mixer::Dla($layer) => $result,
            Mixer::Lstm($layer) => $result,
            Mixer::Srwm($layer) => $result,
            Mixer::MixtureOfMemories($layer) => $result,
            Mixer::Moneta($layer) => $result,
            Mixer::Yaad($layer) => $result,
            Mixer::Memora($layer) => $result,
            Mixer::Rule($layer) => $result,
            Mixer::Rwkv7($layer) => $result,
            Mixer::Rwkv7Dea($layer) => $result,
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
        self.forward_shared(x, state, offsets, &mut Shared::default())
    }

    /// As [`Mixer::forward`], inside a model: `shared` goes from layer to layer at the same tokens.
    ///
    /// # Errors
    /// Those of [`Mixer::forward`].
    pub fn forward_shared(
        &self,
        x: Tensor<3>,
        state: Option<MixerState>,
        offsets: Option<&Offsets>,
        shared: &mut Shared,
    ) -> Result<(Tensor<3>, MixerState), MemoryError> {
        each!(self, layer => forward(layer, x, state, offsets, shared))
    }

    /// Reads one token per row, `x [B, width]`; returns `[B, width]` and the state after it.
    ///
    /// # Errors
    /// An input or state that does not fit.
    pub fn step(&self, x: Tensor<2>, state: MixerState) -> Result<(Tensor<2>, MixerState), MemoryError> {
        self.step_shared(x, state, &mut Shared::default())
    }

    /// As [`Mixer::step`], inside a model: `shared` goes from layer to layer at the same token.
    ///
    /// # Errors
    /// Those of [`Mixer::step`].
    pub fn step_shared(
        &self,
        x: Tensor<2>,
        state: MixerState,
        shared: &mut Shared,
    ) -> Result<(Tensor<2>, MixerState), MemoryError> {
        each!(self, layer => step(layer, x, state, shared))
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
    shared: &mut Shared,
) -> Result<(Tensor<3>, MixerState), MemoryError> {
    let state = state.map(L::State::try_from).transpose()?;
    let (y, state) = layer.forward_shared(x, state, offsets, shared)?;
    Ok((y, state.into()))
}

fn step<L: Layer>(
    layer: &L,
    x: Tensor<2>,
    state: MixerState,
    shared: &mut Shared,
) -> Result<(Tensor<2>, MixerState), MemoryError> {
    let (y, state) = layer.step_shared(x, L::State::try_from(state)?, shared)?;
    Ok((y, state.into()))
}
