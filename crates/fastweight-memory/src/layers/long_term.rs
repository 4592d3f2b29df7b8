//! The long-term memory inside the architectures of Titans, a matrix or a network, and how attention joins it.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::deep_memory::{DeepState, deep_memory_read};
use fastweight_ops::{Offsets, OpError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::deep::{DeepLayer, DeepOptions};
use super::{Layer, LayerConfig, Titans, TitansConfig, TitansMlp, TitansMlpConfig};
use crate::context::setting_error;
use crate::projection::linear;
use crate::{DeepMemoryState, LayerContext, MemoryError, MixerState, MomentumState, RmsNorm, StateSize};

/// Most persistent tokens.
const MOST_PERSISTENT: usize = 1 << 16;
/// Most tokens of a segment or of a window beside a memory.
const MOST_SEGMENT: usize = 1 << 24;

/// What a long-term memory is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// A matrix a head, as in `titans`.
    Matrix,
    /// A network a head, as in `titans_mlp`.
    #[default]
    Mlp,
}

/// Options of the long-term memory inside `titans_mac`, `titans_mag` and `titans_mal`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LongTermConfig {
    /// `"mlp"` or `"matrix"`.
    pub memory: MemoryKind,
    /// Width of the memory's short convolutions; 0 for none.
    pub conv_width: usize,
    /// Largest rate of a write, above 0; when absent 0.1 for an MLP and 1 for a matrix.
    pub theta_max: Option<f32>,
    /// Linear layers of an MLP, 1 to 4.
    pub depth: usize,
    /// Hidden channels of an MLP for each key channel.
    pub expansion: usize,
    /// Tokens between two points where an MLP takes gradients.
    pub chunk: usize,
    /// Taken from the forgetting before its sigmoid; when absent 8 for an MLP and 4 for a matrix.
    pub forget_shift: Option<f32>,
    /// Whether every output of the memory's weights has a rate, a momentum and a forgetting of its own, instead of every head.
    pub channel_gates: bool,
}

impl Default for LongTermConfig {
    fn default() -> Self {
        let TitansMlpConfig { conv_width, depth, expansion, chunk, .. } = TitansMlpConfig::default();
        let memory = MemoryKind::default();
        Self {
            memory,
            conv_width,
            theta_max: None,
            depth,
            expansion,
            chunk,
            forget_shift: None,
            channel_gates: false,
        }
    }
}

impl LongTermConfig {
    fn matrix(&self) -> TitansConfig {
        let usual = TitansConfig::default();
        TitansConfig {
            conv_width: self.conv_width,
            theta_max: self.theta_max.unwrap_or(usual.theta_max),
            forget_shift: self.forget_shift.unwrap_or(usual.forget_shift),
            channel_gates: self.channel_gates,
        }
    }

    fn mlp(&self) -> TitansMlpConfig {
        let usual = TitansMlpConfig::default();
        let Self { conv_width, depth, expansion, chunk, channel_gates, .. } = *self;
        TitansMlpConfig {
            channel_gates,
            conv_width,
            depth,
            expansion,
            chunk,
            theta_max: self.theta_max.unwrap_or(usual.theta_max),
            forget_shift: self.forget_shift.unwrap_or(usual.forget_shift),
        }
    }

    /// Checks what the memory's size is computed from.
    pub(super) fn validate_memory(&self, layer: &'static str) -> Result<(), MemoryError> {
        DeepOptions { layer, ..self.mlp().options() }.validate_memory()
    }

    pub(super) fn validate(&self, layer: &'static str, ctx: &LayerContext) -> Result<(), MemoryError> {
        match self.memory {
            MemoryKind::Mlp => self.mlp().validate_inside(layer, ctx),
            MemoryKind::Matrix => {
                self.validate_memory(layer)?;
                let ours = [self.depth, self.expansion, self.chunk];
                let Self { depth, expansion, chunk, .. } = Self::default();
                let usual = [("depth", depth), ("expansion", expansion), ("chunk", chunk)];
                for (value, (setting, usual)) in ours.into_iter().zip(usual) {
                    if value != usual {
                        let expected = "left out: it belongs to memory = \"mlp\"";
                        return Err(setting_error(layer, setting, value, expected));
                    }
                }
                self.matrix().validate_inside(layer, ctx)
            }
        }
    }

    pub(super) fn build(&self, ctx: &LayerContext, device: &Device) -> Result<LongTermMemory, MemoryError> {
        Ok(match self.memory {
            MemoryKind::Matrix => LongTermMemory::Matrix(self.matrix().build(ctx, device)?),
            MemoryKind::Mlp => LongTermMemory::Mlp(self.mlp().build(ctx, device)?),
        })
    }

    pub(super) fn parameter_count(&self, ctx: &LayerContext) -> usize {
        match self.memory {
            MemoryKind::Matrix => self.matrix().parameter_count(ctx),
            MemoryKind::Mlp => self.mlp().parameter_count(ctx),
        }
    }

    pub(super) fn state_size(&self, ctx: &LayerContext) -> StateSize {
        match self.memory {
            MemoryKind::Matrix => self.matrix().state_size(ctx, 0),
            MemoryKind::Mlp => self.mlp().state_size(ctx, 0),
        }
    }

    /// Numbers in the memory's weights, all heads together.
    pub(super) fn weight_count(&self, ctx: &LayerContext) -> usize {
        let head = match self.memory {
            MemoryKind::Matrix => ctx.head_dim * ctx.value_dim,
            MemoryKind::Mlp => self.mlp().options().memory.weight_count(ctx.head_dim, ctx.value_dim),
        };
        ctx.heads * head
    }

    pub(super) fn deep_training_bytes(&self, ctx: &LayerContext) -> Option<usize> {
        match self.memory {
            MemoryKind::Matrix => None,
            MemoryKind::Mlp => self.mlp().deep_training_bytes(ctx),
        }
    }
}

/// The long-term memory of Titans, `[B, T, width]` to `[B, T, width]`.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum LongTermMemory {
    /// With a matrix.
    Matrix(Titans),
    /// With a network.
    Mlp(TitansMlp),
}

impl LongTermMemory {
    /// Writes and reads `x`; see [`Layer::forward`].
    pub(super) fn forward(
        &self,
        x: Tensor<3>,
        state: MixerState,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MixerState), MemoryError> {
        fn run<L: Layer>(
            layer: &L,
            x: Tensor<3>,
            state: MixerState,
            offsets: Option<&Offsets>,
        ) -> Result<(Tensor<3>, MixerState), MemoryError> {
            let (y, state) = layer.forward(x, Some(L::State::try_from(state)?), offsets)?;
            Ok((y, state.into()))
        }
        match self {
            Self::Matrix(layer) => run(layer, x, state, offsets),
            Self::Mlp(layer) => run(layer, x, state, offsets),
        }
    }

    pub(super) fn zero_state(&self, batch: usize, device: &Device) -> MixerState {
        match self {
            Self::Matrix(layer) => layer.zero_state(batch, device).into(),
            Self::Mlp(layer) => layer.zero_state(batch, device).into(),
        }
    }

    /// The weights `[N, H, in, out]` after the last token, less the trained start of a network.
    pub(super) fn weights(&self, state: &MixerState) -> Result<Vec<Tensor<4>>, MemoryError> {
        Ok(match self {
            Self::Matrix(_) => vec![MomentumState::try_from(state.clone())?.matrix.memory],
            Self::Mlp(_) => DeepMemoryState::try_from(state.clone())?.change.current,
        })
    }

    /// What [`weights`](Self::weights) return for unit queries `[N, T, H, K]`, `[N, T, H, V]`; nothing is written.
    pub(super) fn recall(&self, q: Tensor<4>, weights: Vec<Tensor<4>>) -> Result<Tensor<4>, OpError> {
        match self {
            Self::Matrix(_) => {
                let [rows, _, heads, key] = q.dims();
                let memory = Tensor::cat(weights, 0);
                let [.., value] = memory.dims();
                if memory.dims() != [rows, heads, key, value] {
                    let expected = format!("[{rows}, {heads}, {key}, value channels]");
                    let found = memory.dims().to_vec();
                    return Err(OpError::Shape { operator: "titans", argument: "state", found, expected });
                }
                Ok(q.swap_dims(1, 2).matmul(memory).swap_dims(1, 2))
            }
            Self::Mlp(layer) => {
                let network = layer.network();
                let state = DeepState::new(network.shifted(weights, 1.0)?);
                deep_memory_read(network.memory(), q, Some(&network.norm()), &state)
            }
        }
    }
}

/// Two branches in one, `W_o (norm(y) * sigmoid(norm(m)))` for what attention gives, y, and what the memory gives, m.
///
/// The paper lets the gate be any; normalised branches and a sigmoid are its choice for MAG.
#[derive(Module, Debug)]
pub struct GatedJoin {
    /// Normalisation of y.
    pub attention_norm: RmsNorm,
    /// Normalisation of m.
    pub memory_norm: RmsNorm,
    /// Output map.
    pub o: Linear,
}

impl GatedJoin {
    pub(super) fn new(ctx: &LayerContext, device: &Device) -> Self {
        let norm = || RmsNorm::new(ctx.width, ctx.norm_eps, device);
        Self { attention_norm: norm(), memory_norm: norm(), o: linear(ctx.width, ctx.width, device) }
    }

    pub(super) fn parameter_count(ctx: &LayerContext) -> usize {
        ctx.width * (ctx.width + 2)
    }

    /// y already normalised.
    pub(super) fn forward(&self, y: Tensor<3>, m: Tensor<3>) -> Result<Tensor<3>, OpError> {
        Ok(self.o.forward(y * sigmoid(self.memory_norm.forward(m)?)))
    }
}

/// Checks the span of the attention beside a memory, a segment or a window, and its persistent tokens.
pub(super) fn validate_span(
    layer: &'static str,
    (setting, span): (&'static str, usize),
    persistent: usize,
) -> Result<(), MemoryError> {
    if span == 0 || span > MOST_SEGMENT {
        return Err(setting_error(layer, setting, span, format!("1 to {MOST_SEGMENT} tokens")));
    }
    if persistent > MOST_PERSISTENT {
        let expected = format!("at most {MOST_PERSISTENT} tokens (128 is usual)");
        return Err(setting_error(layer, "persistent", persistent, expected));
    }
    Ok(())
}
