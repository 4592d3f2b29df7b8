//! The channel mix of RWKV-7: two matrices with a squared ReLU, over a token mixed with the one before.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ChannelState;
use crate::init::placeholder;
use crate::projection::check_sequence;
use crate::token_shift::token_shift;
use crate::{LayerContext, MemoryError, State, StateSize, linear};

/// Configuration of [`Rwkv7ChannelMix`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Rwkv7ChannelMixConfig {}

impl Rwkv7ChannelMixConfig {
    /// The map's name in recipes.
    pub const NAME: &'static str = "rwkv7_channel_mix";

    /// Channels inside: 4 times the width, unless the model says.
    pub fn hidden(&self, ctx: &LayerContext) -> usize {
        ctx.mlp_hidden.unwrap_or_else(|| ctx.width.saturating_mul(4))
    }

    pub(super) fn validate(&self, _ctx: &LayerContext) -> Result<(), MemoryError> {
        Ok(())
    }

    /// The map with all parameters zero.
    pub(super) fn build(&self, ctx: &LayerContext, device: &Device) -> Rwkv7ChannelMix {
        let hidden = self.hidden(ctx);
        Rwkv7ChannelMix {
            shift: placeholder([ctx.width], device),
            key: linear(ctx.width, hidden, device),
            value: linear(hidden, ctx.width, device),
        }
    }

    /// Trained parameters; `usize::MAX` when there are more.
    pub(super) fn parameter_count(&self, ctx: &LayerContext) -> usize {
        ctx.width.saturating_mul(2).saturating_mul(self.hidden(ctx)).saturating_add(ctx.width)
    }

    /// The last token.
    pub(super) fn state_size(&self, ctx: &LayerContext) -> StateSize {
        StateSize { fixed: ctx.width.saturating_mul(size_of::<f32>()), growing: 0 }
    }
}

/// `relu(x_k K)^2 V` with `x_k = lerp(x, x_before, shift)` (Peng et al. 2025, 2503.14456; RWKV-LM `RWKV-v7`).
///
/// Starts as RWKV-LM starts it, but for `value`, which is zero there and small here, so that all parameters learn from
/// the first step.
#[derive(Module, Debug)]
pub struct Rwkv7ChannelMix {
    /// How much of the token before goes into each channel, `[width]`.
    pub shift: Param<Tensor<1>>,
    /// `width -> hidden`, through a squared ReLU.
    pub key: Linear,
    /// `hidden -> width`.
    pub value: Linear,
}

impl Rwkv7ChannelMix {
    /// Maps `x [B, T, width]`; returns `[B, T, width]` and the last tokens. The token before restarts at each offset.
    ///
    /// # Errors
    /// An input, state or offsets that do not fit.
    pub fn forward(
        &self,
        x: Tensor<3>,
        state: Option<ChannelState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, ChannelState), MemoryError> {
        let (hidden, state) = self.hidden(Rwkv7ChannelMixConfig::NAME, x, state, offsets)?;
        Ok((self.value.forward(hidden), state))
    }

    /// The channels inside, `[B, T, hidden]`, for the map of this name.
    pub(super) fn hidden(
        &self,
        name: &'static str,
        x: Tensor<3>,
        state: Option<ChannelState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, ChannelState), MemoryError> {
        let [width] = self.shift.val().dims();
        check_sequence(name, width, &x, offsets, state.as_ref().map(State::batch))?;
        let (before, last) = token_shift(x.clone(), state.map(|state| state.last), offsets)?;
        let mixed = x.clone() + (before - x) * self.shift.val().unsqueeze();
        Ok((relu(self.key.forward(mixed)).square(), ChannelState { last }))
    }

    /// The state of `batch` sequences before their first token.
    pub(super) fn zero_state(&self, batch: usize, device: &Device) -> ChannelState {
        let [width] = self.shift.lazy_shape().dims();
        ChannelState { last: Tensor::zeros([batch, 1, width], device) }
    }
}
