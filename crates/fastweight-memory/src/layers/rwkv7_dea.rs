//! RWKV-7's time mix with DEA beside it, the mixer of RWKV-7b.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::dea::{Dea, DeaSizes};
use super::{Layer, LayerConfig, Rwkv7, Rwkv7Config, STATE_ELEMENT};
use crate::context::setting_error;
use crate::token_table::validate_vocab;
use crate::{DeaState, KvState, LayerContext, MemoryError, Shared, State, StateSize};

const NAME: &str = Rwkv7DeaConfig::NAME;

/// Most token ids: the cache holds them as float32.
const MOST_VOCAB: usize = 1 << 24;

/// Most query channels, and numbers of a token in the cache.
const MOST_CHANNELS: usize = 1 << 16;

/// Configuration of [`Rwkv7Dea`]; the options of the time mix are those of [`Rwkv7Config`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Rwkv7DeaConfig {
    /// Rank of the map to the decays.
    #[schemars(range(min = 1, max = MOST_CHANNELS))]
    pub decay_rank: Option<usize>,
    /// Rank of the map to the in-context rates.
    #[schemars(range(min = 1, max = MOST_CHANNELS))]
    pub rate_rank: Option<usize>,
    /// Rank of the map to the mix with the first layer's values.
    #[schemars(range(min = 1, max = MOST_CHANNELS))]
    pub value_rank: Option<usize>,
    /// Rank of the map to the output gate.
    #[schemars(range(min = 1, max = MOST_CHANNELS))]
    pub gate_rank: Option<usize>,
    /// Channels of DEA's queries and keys.
    #[schemars(range(min = 1, max = MOST_CHANNELS))]
    pub query_dim: usize,
    /// Numbers of each token that DEA caches for its key, and as many for its value.
    #[schemars(range(min = 1, max = MOST_CHANNELS))]
    pub cache_rank: usize,
}

impl Default for Rwkv7DeaConfig {
    fn default() -> Self {
        Self {
            decay_rank: None,
            rate_rank: None,
            value_rank: None,
            gate_rank: None,
            query_dim: 256,
            cache_rank: 32,
        }
    }
}

impl Rwkv7DeaConfig {
    /// The time mix's options.
    fn time_mix(&self) -> Rwkv7Config {
        Rwkv7Config {
            decay_rank: self.decay_rank,
            rate_rank: self.rate_rank,
            value_rank: self.value_rank,
            gate_rank: self.gate_rank,
            ..Rwkv7Config::default()
        }
    }

    fn dea(&self) -> DeaSizes {
        DeaSizes { query: self.query_dim, rank: self.cache_rank }
    }

    /// Checks all sizes that belong to the options.
    pub(crate) fn validate_sizes(&self, width: usize) -> Result<(), MemoryError> {
        for (setting, size) in [("query_dim", self.query_dim), ("cache_rank", self.cache_rank)] {
            if size == 0 || size > MOST_CHANNELS {
                return Err(setting_error(NAME, setting, size, format!("1 to {MOST_CHANNELS}")));
            }
        }
        self.time_mix().validate_ranks(NAME, width)
    }
}

impl LayerConfig for Rwkv7DeaConfig {
    const NAME: &'static str = "rwkv7_dea";
    type Layer = Rwkv7Dea;

    fn state_grows(&self) -> bool {
        true
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(NAME)?;
        self.validate_sizes(ctx.width)?;
        validate_vocab(NAME, ctx, MOST_VOCAB)
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Rwkv7Dea, MemoryError> {
        self.validate(ctx)?;
        Ok(Rwkv7Dea {
            time_mix: self.time_mix().build(ctx, device)?,
            dea: self.dea().build(ctx, device),
            query_dim: self.query_dim,
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        self.time_mix().parameter_count(ctx).saturating_add(self.dea().parameter_count(ctx))
    }

    fn state_size(&self, ctx: &LayerContext, tokens: usize) -> StateSize {
        let time_mix = self.time_mix().state_size(ctx, tokens);
        let (fixed, entry) = (self.dea().fixed_elements(), self.dea().entry_elements());
        StateSize {
            fixed: time_mix.fixed + fixed * STATE_ELEMENT,
            growing: (entry * STATE_ELEMENT).saturating_mul(tokens),
        }
    }
}

/// The time mix of RWKV-7 and [`Dea`] added to it: the mixer of RWKV-7b (RWKV-LM `RWKV-v7`, the v7b demo).
///
/// The time mix reads the block's normalised input; DEA the block's own, before its normalisation, the token ids and
/// the tokens' vectors, all from [`Shared`]. A session holds the time mix's state, the last query, and for every token
/// `2 cache_rank` numbers and its id, where attention over keys and values would hold `query_dim + width`.
#[derive(Module, Debug)]
pub struct Rwkv7Dea {
    /// The time mix.
    pub time_mix: Rwkv7,
    /// The attention over all tokens.
    pub dea: Dea,
    query_dim: usize,
}

impl Layer for Rwkv7Dea {
    type State = DeaState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<DeaState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, DeaState), MemoryError> {
        self.forward_shared(x, state, offsets, &mut Shared::default())
    }

    fn step(&self, x: Tensor<2>, state: DeaState) -> Result<(Tensor<2>, DeaState), MemoryError> {
        self.step_shared(x, state, &mut Shared::default())
    }

    fn forward_shared(
        &self,
        x: Tensor<3>,
        state: Option<DeaState>,
        offsets: Option<&Offsets>,
        shared: &mut Shared,
    ) -> Result<(Tensor<3>, DeaState), MemoryError> {
        let (time_mix, dea) = match state {
            Some(state) => (Some(state.time_mix), Some((state.cache, Some(state.last_query)))),
            None => (None, None),
        };
        let (y, time_mix) = self.time_mix.forward_shared(x.clone(), time_mix, offsets, shared)?;
        let dea = dea.unwrap_or_else(|| (KvState::empty(time_mix.batch(), None, None), None));
        let x = shared.before_norm(NAME, &x)?;
        let (read, cache, last_query) = self.dea.forward(NAME, x, dea, offsets, shared)?;
        Ok((y + read, DeaState { time_mix, cache, last_query }))
    }

    fn step_shared(
        &self,
        x: Tensor<2>,
        state: DeaState,
        shared: &mut Shared,
    ) -> Result<(Tensor<2>, DeaState), MemoryError> {
        let (y, time_mix) = self.time_mix.step_shared(x.clone(), state.time_mix, shared)?;
        let x = shared.before_norm(NAME, &x.unsqueeze_dim(1))?;
        let dea = (state.cache, Some(state.last_query));
        let (read, cache, last_query) = self.dea.forward(NAME, x, dea, None, shared)?;
        Ok((y + read.squeeze_dim(1), DeaState { time_mix, cache, last_query }))
    }

    fn zero_state(&self, batch: usize, device: &Device) -> DeaState {
        DeaState {
            time_mix: self.time_mix.zero_state(batch, device),
            cache: KvState::empty(batch, None, None),
            last_query: Tensor::zeros([batch, 1, self.query_dim], device),
        }
    }
}
