//! DeepEmbed as RWKV-7a and RWKV-7b have it: the hidden channels are scaled by a small matrix of the token's id.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ChannelState, MOST_VOCAB, Rwkv7ChannelMix, Rwkv7ChannelMixConfig};
use crate::context::setting_error;
use crate::init::placeholder;
use crate::token_table::{TokenTable, validate_vocab};
use crate::{LayerContext, MemoryError, Shared, StateSize, linear};

const NAME: &str = Rwkv7DeepEmbedConfig::NAME;

/// Largest rank: a token's matrix has its square of numbers.
const MOST_RANK: usize = 1024;

/// Configuration of [`Rwkv7DeepEmbed`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Rwkv7DeepEmbedConfig {
    /// Rows and columns of a token's matrix.
    #[schemars(range(min = 1, max = MOST_RANK))]
    pub rank: usize,
}

impl Default for Rwkv7DeepEmbedConfig {
    fn default() -> Self {
        Self { rank: 32 }
    }
}

impl Rwkv7DeepEmbedConfig {
    /// The map's name in recipes.
    pub const NAME: &'static str = "rwkv7_deep_embed";

    /// Channels inside: those of the channel mix.
    pub fn hidden(&self, ctx: &LayerContext) -> usize {
        Rwkv7ChannelMixConfig::default().hidden(ctx)
    }

    pub(super) fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        if self.rank == 0 || self.rank > MOST_RANK {
            return Err(setting_error(NAME, "rank", self.rank, format!("1 to {MOST_RANK}")));
        }
        validate_vocab(NAME, ctx, MOST_VOCAB)
    }

    /// The map with all parameters zero.
    pub(super) fn build(&self, ctx: &LayerContext, device: &Device) -> Rwkv7DeepEmbed {
        let hidden = self.hidden(ctx);
        Rwkv7DeepEmbed {
            mix: Rwkv7ChannelMixConfig::default().build(ctx, device),
            reduce: linear(ctx.width, self.rank, device),
            maps: TokenTable::new(ctx.vocab, self.rank * self.rank, Some(ctx.width), device),
            lora_b: placeholder([self.rank, hidden], device),
            start: placeholder([hidden], device),
        }
    }

    /// Trained parameters; `usize::MAX` when there are more.
    pub(super) fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let hidden = self.hidden(ctx);
        let matrix = self.rank.saturating_mul(self.rank);
        let scale = self.rank.saturating_mul(ctx.width.saturating_add(hidden)).saturating_add(hidden);
        Rwkv7ChannelMixConfig::default()
            .parameter_count(ctx)
            .saturating_add(TokenTable::parameter_count(ctx.vocab, matrix, Some(ctx.width)))
            .saturating_add(scale)
    }

    pub(super) fn state_size(&self, ctx: &LayerContext) -> StateSize {
        Rwkv7ChannelMixConfig::default().state_size(ctx)
    }
}

/// The channel mix of RWKV-7 with DeepEmbed (RWKV-LM `RWKV-v7`, the v7a and v7b demos):
/// `(relu(x_k K)^2 * (ss s2 + s0)) V` with `ss = (x s1)[r] semb[id][r x r]` and `semb = s_emb + emb s_emb_x^T`, where `emb`
/// is the token's vector after the embedding's own normalisation, if the model has one.
///
/// `s0` starts at one and the rest small: training starts close to that of the channel mix.
#[derive(Module, Debug)]
pub struct Rwkv7DeepEmbed {
    /// The channel mix.
    pub mix: Rwkv7ChannelMix,
    /// `s1`, `width -> rank`.
    pub reduce: Linear,
    /// `semb`, a `rank x rank` matrix for each token, row by row.
    pub maps: TokenTable,
    /// `s2`, `[rank, hidden]`.
    pub lora_b: Param<Tensor<2>>,
    /// `s0`, `[hidden]`.
    pub start: Param<Tensor<1>>,
}

impl Rwkv7DeepEmbed {
    /// Maps `x [B, T, width]`, the tokens of `shared`; returns `[B, T, width]` and the last tokens.
    ///
    /// # Errors
    /// An input, state or offsets that do not fit, or no token ids or vectors.
    pub fn forward(
        &self,
        x: Tensor<3>,
        state: Option<ChannelState>,
        offsets: Option<&Offsets>,
        shared: &Shared,
    ) -> Result<(Tensor<3>, ChannelState), MemoryError> {
        let (hidden, state) = self.mix.hidden(NAME, x.clone(), state, offsets)?;
        let maps = self.maps.of(shared.ids(NAME, &x, self.maps.vocab())?, &shared.vectors_of(NAME, &x)?);
        let [batch, time, _] = x.dims();
        let [rank, _] = self.lora_b.val().dims();
        let reduced = self.reduce.forward(x).reshape([batch * time, 1, rank]);
        let read = reduced.matmul(maps.reshape([batch * time, rank, rank])).reshape([batch, time, rank]);
        let factors = read.matmul(self.lora_b.val().unsqueeze()) + self.start.val().unsqueeze();
        Ok((self.mix.value.forward(hidden * factors), state))
    }

    /// The state of `batch` sequences before their first token.
    pub(super) fn zero_state(&self, batch: usize, device: &Device) -> ChannelState {
        self.mix.zero_state(batch, device)
    }
}
