//! The memory layers, one file each.
//!
//! Every layer has a configuration with defaults that implements [`LayerConfig`], and implements [`Layer`].

mod comba;
mod dea;
mod deep;
mod delta_net;
mod delta_product;
mod dla;
mod elu1_linear_attention;
mod gated_delta_net;
mod gla;
mod hgrn2;
mod kda;
mod lightning_attention;
mod linear_attention;
pub(crate) mod long_term;
mod lstm;
mod mamba2;
pub(crate) mod matrix;
mod memora;
mod miras;
mod mixture_of_memories;
mod moneta;
mod prefix_attention;
mod retnet;
mod rule;
mod rwkv7;
mod rwkv7_dea;
mod softmax_attention;
mod srwm;
mod titans;
mod titans_mac;
mod titans_mag;
mod titans_mal;
mod titans_mlp;
mod ttt_linear;
mod ttt_mlp;
mod yaad;

pub use comba::{Comba, CombaConfig};
pub use dea::{Dea, DeaShift};
pub use deep::{InnerLayer, InnerNetwork};
pub use delta_net::{DeltaNet, DeltaNetConfig};
pub use delta_product::{DeltaProduct, DeltaProductConfig};
pub use dla::{Dla, DlaConfig};
pub use elu1_linear_attention::{Elu1LinearAttention, Elu1LinearAttentionConfig};
pub use gated_delta_net::{GatedDeltaNet, GatedDeltaNetConfig};
pub use gla::{GatedLinearAttention, GatedLinearAttentionConfig};
pub use hgrn2::{Hgrn2, Hgrn2Config};
pub use kda::{KimiDeltaAttention, KimiDeltaAttentionConfig};
pub use lightning_attention::{LightningAttention, LightningAttentionConfig};
pub use linear_attention::{LinearAttention, LinearAttentionConfig};
pub use long_term::{GatedJoin, LongTermConfig, LongTermMemory, MemoryKind};
pub use lstm::{Lstm, LstmConfig};
pub use mamba2::{Mamba2, Mamba2Config};
pub use memora::MemoraConfig;
pub use miras::{MirasMemory, MirasOptions, OutputGates};
pub use mixture_of_memories::{MemoryLoad, MixtureOfMemories, MixtureOfMemoriesConfig};
pub use moneta::MonetaConfig;
pub use prefix_attention::PrefixAttention;
pub use retnet::{RetNet, RetNetConfig};
pub use rule::{RuleConfig, RuleMemory};
pub use rwkv7::{LowRank, Rwkv7, Rwkv7Config, ShiftMix};
pub use rwkv7_dea::{Rwkv7Dea, Rwkv7DeaConfig};
pub use softmax_attention::{SoftmaxAttention, SoftmaxAttentionConfig};
pub use srwm::{Srwm, SrwmConfig};
pub use titans::{Surprise, Titans, TitansConfig};
pub use titans_mac::{TitansMac, TitansMacConfig};
pub use titans_mag::{TitansMag, TitansMagConfig};
pub use titans_mal::{TitansMal, TitansMalConfig};
pub use titans_mlp::{TitansMlp, TitansMlpConfig};
pub use ttt_linear::{TttLinear, TttLinearConfig};
pub use ttt_mlp::{TttMlp, TttMlpConfig};
pub use yaad::YaadConfig;

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use fastweight_ops::rope::{Positions, rotate};
use fastweight_ops::{Offsets, OpError, SequenceOptions};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::context::validate_conv;
use crate::init::initialise;
use crate::projection::{QkvSizes, check_token};
use crate::{LayerContext, MatrixState, MemoryError, MixerState, Shared, State, StateSize};

/// Options of a layer, as recipes write them; together with a [`LayerContext`] they make the layer.
pub trait LayerConfig: Clone + Default + Serialize + DeserializeOwned {
    /// The layer's name in recipes.
    const NAME: &'static str;
    /// The layer that is made.
    type Layer: Layer;

    /// Tokens that its short convolutions read; 0 without one.
    fn conv_width(&self) -> usize {
        0
    }

    /// Whether its state grows with every token read.
    fn state_grows(&self) -> bool {
        false
    }

    /// Checks the options against the layer's geometry.
    ///
    /// # Errors
    /// [`MemoryError::Setting`] names the setting and what to change.
    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(Self::NAME)?;
        validate_conv(Self::NAME, self.conv_width())
    }

    /// The layer with all parameters zero, to be initialised or loaded.
    ///
    /// # Errors
    /// Those of [`LayerConfig::validate`].
    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Self::Layer, MemoryError>;

    /// Trained parameters, exact, without building the layer.
    fn parameter_count(&self, ctx: &LayerContext) -> usize;

    /// Bytes of one sequence's state after `tokens` tokens.
    fn state_size(&self, ctx: &LayerContext, tokens: usize) -> StateSize;

    /// Bytes that all heads together keep of a token for the backward pass, where their memories are deep: see
    /// [`DeepMemory::training_bytes`](fastweight_ops::deep_memory::DeepMemory::training_bytes).
    fn deep_training_bytes(&self, _ctx: &LayerContext) -> Option<usize> {
        None
    }

    /// The layer with weights drawn from the context's seed.
    ///
    /// # Errors
    /// Those of [`LayerConfig::validate`].
    fn init(&self, ctx: &LayerContext, device: &Device) -> Result<Self::Layer, MemoryError> {
        Ok(initialise(self.build(ctx, device)?, ctx.seed, ctx.layers))
    }
}

/// A causal sequence mixer with a carried state.
///
/// `forward` of any cut of a sequence, and steps after it, give what one `forward` of the whole gives.
pub trait Layer: Module {
    /// What it carries from token to token.
    type State: State + Into<MixerState> + TryFrom<MixerState, Error = MemoryError>;

    /// Reads `x [B, T, width]`; returns `[B, T, width]` and the state after it.
    ///
    /// Without a state every sequence starts empty. With offsets `x` is one row of documents and the state holds
    /// one sequence per document.
    ///
    /// # Errors
    /// An input, state or offsets that do not fit.
    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<Self::State>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, Self::State), MemoryError>;

    /// Reads one token per row, `x [B, width]`; returns `[B, width]` and the state after it.
    ///
    /// # Errors
    /// An input or state that does not fit.
    fn step(&self, x: Tensor<2>, state: Self::State) -> Result<(Tensor<2>, Self::State), MemoryError>;

    /// As [`Layer::forward`], inside a model whose layers share something: see [`Shared`].
    ///
    /// # Errors
    /// Those of [`Layer::forward`].
    fn forward_shared(
        &self,
        x: Tensor<3>,
        state: Option<Self::State>,
        offsets: Option<&Offsets>,
        _shared: &mut Shared,
    ) -> Result<(Tensor<3>, Self::State), MemoryError> {
        self.forward(x, state, offsets)
    }

    /// As [`Layer::step`], inside a model whose layers share something: see [`Shared`].
    ///
    /// # Errors
    /// Those of [`Layer::step`].
    fn step_shared(
        &self,
        x: Tensor<2>,
        state: Self::State,
        _shared: &mut Shared,
    ) -> Result<(Tensor<2>, Self::State), MemoryError> {
        self.step(x, state)
    }

    /// The state of `batch` sequences before their first token.
    fn zero_state(&self, batch: usize, device: &Device) -> Self::State;
}

/// Bytes of a state element; states are float32.
const STATE_ELEMENT: usize = 4;

/// Added to the squared norm of keys and queries before the L2 normalisation.
pub(crate) const L2_EPS: f32 = 1e-6;

/// [`Layer::step`] of a layer for which one token is a short sequence.
fn step_as_sequence<L: Layer>(
    layer: &L,
    name: &'static str,
    width: usize,
    x: Tensor<2>,
    state: L::State,
) -> Result<(Tensor<2>, L::State), MemoryError> {
    check_token(name, width, &x, state.batch())?;
    let (y, state) = layer.forward(x.unsqueeze_dim(1), Some(state), None)?;
    Ok((y.squeeze_dim(1), state))
}

fn sequence_options(offsets: Option<&Offsets>, scale: Option<f32>) -> SequenceOptions {
    SequenceOptions { scale, offsets: offsets.cloned(), ..SequenceOptions::default() }
}

/// An empty matrix memory `[batch, H, K, V]` and its convolutions' states.
fn zero_matrix(ctx: &LayerContext, qkv: &QkvSizes, batch: usize, device: &Device) -> MatrixState {
    let memory = Tensor::zeros([batch, ctx.heads, ctx.head_dim, ctx.value_dim], device);
    MatrixState { memory, conv: qkv.zero_conv(batch, device) }
}

/// Bytes of one sequence's [`MatrixState`].
fn matrix_size(ctx: &LayerContext, qkv: &QkvSizes) -> StateSize {
    let elements = ctx.heads * ctx.head_dim * ctx.value_dim + qkv.conv_elements();
    StateSize { fixed: elements * STATE_ELEMENT, growing: 0 }
}

/// Turns queries and keys by their positions; `starts` is the position of each sequence's first token.
fn rotate_pair(
    q: Tensor<4>,
    k: Tensor<4>,
    starts: &[usize],
    offsets: Option<&Offsets>,
    base: f32,
) -> Result<(Tensor<4>, Tensor<4>), OpError> {
    let positions = match offsets {
        Some(offsets) => Positions::packed(offsets.clone(), starts.to_vec())?,
        None => Positions::rows(starts.to_vec()),
    };
    Ok((rotate(q, &positions, base)?, rotate(k, &positions, base)?))
}

/// Positions after the sequences' new tokens were read.
fn advance(mut positions: Vec<usize>, time: usize, offsets: Option<&Offsets>) -> Vec<usize> {
    match offsets {
        Some(offsets) => {
            positions.iter_mut().zip(offsets.ranges()).for_each(|(position, range)| *position += range.len());
        }
        None => positions.iter_mut().for_each(|position| *position += time),
    }
    positions
}

/// Fixed log decays, `[H]`.
fn decay_tensor(decays: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::new(decays.to_vec(), [decays.len()]), device)
}
