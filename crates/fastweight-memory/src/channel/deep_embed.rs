//! DeepEmbed, the plain form: a feed-forward map whose output is scaled by the token's id.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ChannelState, MOST_VOCAB, Rwkv7ChannelMix, Rwkv7ChannelMixConfig, SwiGlu, SwiGluConfig};
use crate::token_table::{TokenTable, validate_vocab};
use crate::{LayerContext, MemoryError, Shared, StateSize};

const NAME: &str = DeepEmbedConfig::NAME;

/// Which map [`DeepEmbed`] scales.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Inside {
    /// `swiglu`.
    #[default]
    #[serde(rename = "swiglu")]
    SwiGlu,
    /// `rwkv7_channel_mix`.
    Rwkv7ChannelMix,
}

/// Configuration of [`DeepEmbed`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DeepEmbedConfig {
    /// The map that is scaled.
    pub inside: Inside,
}

macro_rules! inside {
    ($config:expr, $map:ident => $result:expr) => {
        match $config.inside {
            Inside::SwiGlu => {
                let $map = SwiGluConfig::default();
                $result
            }
            Inside::Rwkv7ChannelMix => {
                let $map = Rwkv7ChannelMixConfig::default();
                $result
            }
        }
    };
}

impl DeepEmbedConfig {
    /// The map's name in recipes.
    pub const NAME: &'static str = "deep_embed";

    /// Channels inside: those of the map that is scaled.
    pub fn hidden(&self, ctx: &LayerContext) -> usize {
        inside!(self, map => map.hidden(ctx))
    }

    pub(super) fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        validate_vocab(NAME, ctx, MOST_VOCAB)
    }

    /// The map with all parameters zero.
    pub(super) fn build(&self, ctx: &LayerContext, device: &Device) -> DeepEmbed {
        let inside = match self.inside {
            Inside::SwiGlu => FeedForward::SwiGlu(SwiGluConfig::default().build(ctx, device)),
            Inside::Rwkv7ChannelMix => {
                FeedForward::Rwkv7ChannelMix(Rwkv7ChannelMixConfig::default().build(ctx, device))
            }
        };
        DeepEmbed { inside, scale: TokenTable::new(ctx.vocab, ctx.width, None, device) }
    }

    /// Trained parameters; `usize::MAX` when there are more.
    pub(super) fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let scale = TokenTable::parameter_count(ctx.vocab, ctx.width, None);
        inside!(self, map => map.parameter_count(ctx)).saturating_add(scale)
    }

    pub(super) fn state_size(&self, ctx: &LayerContext) -> StateSize {
        inside!(self, map => map.state_size(ctx))
    }
}

/// The map that is scaled; parameters keep its own names.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub enum FeedForward {
    SwiGlu(SwiGlu),
    Rwkv7ChannelMix(Rwkv7ChannelMix),
}

/// `FFN(x) * Emb(id)`, a trained vector for every token id in every layer (the plain form of RWKV's DeepEmbed).
///
/// All vectors start at one: training starts as that of the map alone. A map reads no row of the table but those of the
/// tokens at hand, so that a large table may lie in slow memory.
#[derive(Module, Debug)]
pub struct DeepEmbed {
    /// The map that is scaled.
    pub inside: FeedForward,
    /// Factors of its outputs, `[vocab, width]`.
    pub scale: TokenTable,
}

impl DeepEmbed {
    /// Maps `x [B, T, width]`, the tokens of `shared`; returns `[B, T, width]` and the state of the map inside.
    ///
    /// # Errors
    /// An input, state or offsets that do not fit, or no token ids.
    pub fn forward(
        &self,
        x: Tensor<3>,
        state: Option<ChannelState>,
        offsets: Option<&Offsets>,
        shared: &Shared,
    ) -> Result<(Tensor<3>, Option<ChannelState>), MemoryError> {
        let factors = self.scale.of(shared.ids(NAME, &x, self.scale.vocab())?, &x);
        let (y, state) = match &self.inside {
            FeedForward::SwiGlu(map) => (map.forward(x)?, None),
            FeedForward::Rwkv7ChannelMix(map) => {
                let (y, state) = map.forward(x, state, offsets)?;
                (y, Some(state))
            }
        };
        Ok((y * factors, state))
    }

    /// The state of `batch` sequences before their first token, if the map inside has one.
    pub(super) fn zero_state(&self, batch: usize, device: &Device) -> Option<ChannelState> {
        match &self.inside {
            FeedForward::SwiGlu(_) => None,
            FeedForward::Rwkv7ChannelMix(map) => Some(map.zero_state(batch, device)),
        }
    }
}
