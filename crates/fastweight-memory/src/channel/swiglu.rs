//! SwiGLU, the gated map of most language models.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_ops::OpError;
use fastweight_ops::activation::swiglu;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{LayerContext, MemoryError, StateSize, linear};

/// Configuration of [`SwiGlu`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SwiGluConfig {}

impl SwiGluConfig {
    /// The map's name in recipes.
    pub const NAME: &'static str = "swiglu";

    /// Channels inside: 8/3 of the width, rounded up to a multiple of 8, unless the model says.
    pub fn hidden(&self, ctx: &LayerContext) -> usize {
        ctx.mlp_hidden.unwrap_or_else(|| ctx.width.saturating_mul(8).div_ceil(3).next_multiple_of(8))
    }

    pub(super) fn validate(&self, _ctx: &LayerContext) -> Result<(), MemoryError> {
        Ok(())
    }

    /// The map with all parameters zero.
    pub(super) fn build(&self, ctx: &LayerContext, device: &Device) -> SwiGlu {
        SwiGlu::new(ctx.width, self.hidden(ctx), device)
    }

    /// Trained parameters; `usize::MAX` when there are more.
    pub(super) fn parameter_count(&self, ctx: &LayerContext) -> usize {
        ctx.width.saturating_mul(3).saturating_mul(self.hidden(ctx))
    }

    pub(super) fn state_size(&self, _ctx: &LayerContext) -> StateSize {
        StateSize::default()
    }
}

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
