//! Options of lookup experts.

use burn::tensor::Device;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ExpertNetworks, ExpertTables, Experts, Mole};
use crate::channel::{MOST_HIDDEN, SwiGlu, SwiGluConfig};
use crate::context::setting_error;
use crate::{LayerContext, MemoryError, StateSize, linear};

const NAME: &str = MoleConfig::NAME;

/// Most experts of a layer.
const MOST_EXPERTS: usize = 4096;

/// Configuration of [`Mole`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MoleConfig {
    /// Experts, all of them active at every token.
    #[schemars(range(min = 1, max = MOST_EXPERTS))]
    pub experts: usize,
    /// Channels inside an expert; as many as the shared map has when absent.
    #[schemars(range(min = 1, max = MOST_HIDDEN))]
    pub expert_hidden: Option<usize>,
    /// Whether a SwiGLU of the hidden state stands beside the experts.
    pub shared: bool,
    /// Whether the experts are tables of their outputs, as an export makes them, and not networks. Tables learn too, but a
    /// row only from its own token, and there are `vocab * experts` of them.
    pub tables: bool,
}

impl Default for MoleConfig {
    fn default() -> Self {
        Self { experts: 4, expert_hidden: None, shared: true, tables: false }
    }
}

impl MoleConfig {
    /// The map's name in recipes.
    pub const NAME: &'static str = "mole";

    /// Channels inside the shared map: those of a SwiGLU of the same model.
    pub fn hidden(&self, ctx: &LayerContext) -> usize {
        SwiGluConfig::default().hidden(ctx)
    }

    /// Channels inside an expert.
    pub fn expert_hidden(&self, ctx: &LayerContext) -> usize {
        self.expert_hidden.unwrap_or_else(|| self.hidden(ctx))
    }

    /// Numbers in the tables of a layer, whether or not it has them; `usize::MAX` when there are more.
    pub fn table_size(&self, ctx: &LayerContext) -> usize {
        ctx.vocab.saturating_mul(self.experts).saturating_mul(ctx.width)
    }

    pub(in crate::channel) fn state_size(&self, _ctx: &LayerContext) -> StateSize {
        StateSize::default()
    }

    /// Checks the options against the layer's geometry.
    pub(in crate::channel) fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        let sizes = [
            ("experts", self.experts, MOST_EXPERTS),
            ("expert_hidden", self.expert_hidden(ctx), MOST_HIDDEN),
        ];
        for (setting, size, most) in sizes {
            if size == 0 {
                return Err(setting_error(NAME, setting, 0, "at least 1"));
            }
            if size > most {
                return Err(setting_error(NAME, setting, size, format!("at most {most}")));
            }
        }
        if self.tables && ctx.vocab == 0 {
            let expected = "at least 1: a table has a row for every token of the model's vocabulary";
            return Err(setting_error(NAME, "vocab", 0, expected));
        }
        Ok(())
    }

    /// The map with all parameters zero.
    pub(in crate::channel) fn build(&self, ctx: &LayerContext, device: &Device) -> Mole {
        let experts = if self.tables {
            Experts::Tables(ExpertTables::new(ctx.vocab, self.experts, ctx.width, device))
        } else {
            Experts::Networks(ExpertNetworks::new(self.experts, self.expert_hidden(ctx), ctx, device))
        };
        Mole {
            router: linear(ctx.width, self.experts, device),
            shared: self.shared.then(|| SwiGlu::new(ctx.width, self.hidden(ctx), device)),
            experts,
            width: ctx.width,
        }
    }

    /// Trained parameters; `usize::MAX` when there are more.
    pub(in crate::channel) fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let swiglu = |hidden: usize| ctx.width.saturating_mul(3).saturating_mul(hidden);
        let shared = if self.shared { swiglu(self.hidden(ctx)) } else { 0 };
        let experts = match self.tables {
            true => self.table_size(ctx),
            false => swiglu(self.expert_hidden(ctx)).saturating_mul(self.experts).saturating_add(ctx.width),
        };
        ctx.width.saturating_mul(self.experts).saturating_add(shared).saturating_add(experts)
    }
}
