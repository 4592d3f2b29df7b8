//! Titans, memory as a layer: attention reads what the memory returns.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::long_term::{LongTermConfig, LongTermMemory, validate_span};
use super::{Layer, LayerConfig, SoftmaxAttention, SoftmaxAttentionConfig, step_as_sequence};
use crate::init::placeholder;
use crate::projection::check_sequence;
use crate::sequences::ranges;
use crate::state::rows::gather;
use crate::{LayerContext, MemoryAttentionState, MemoryError, RmsNorm, State, StateSize};

const NAME: &str = TitansMalConfig::NAME;

/// Configuration of [`TitansMal`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TitansMalConfig {
    /// The memory; in recipes its options stand beside the others.
    #[serde(flatten)]
    pub memory: LongTermConfig,
    /// Tokens that attention sees, itself included.
    pub window: usize,
    /// Learned tokens in front of every text; 0 for none.
    pub persistent: usize,
    /// Rotary positions on queries and keys.
    pub rope: bool,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
}

impl Default for TitansMalConfig {
    fn default() -> Self {
        let memory = LongTermConfig::default();
        Self { memory, window: 512, persistent: 128, rope: true, rope_base: 10_000.0 }
    }
}

/// Titans MAL (Behrouz et al. 2025, 2501.00663, section 4.3): `o = SWA(M([P | x]))`.
///
/// The persistent tokens stand in front of every text: with its first token the memory reads and writes them once, and
/// what it reads there is in attention's window like any token before, until it slides out. The memory is a whole
/// [`Titans`](super::Titans) or [`TitansMlp`](super::TitansMlp) layer, its output RMS-normalised (the paper has nothing between), and
/// attention a [`SoftmaxAttention`] with a window. A text's first step therefore reads `P + 1` tokens.
#[derive(Module, Debug)]
pub struct TitansMal {
    /// Persistent tokens `[P, width]`, if there are any.
    pub persistent: Option<Param<Tensor<2>>>,
    /// The memory.
    pub memory: LongTermMemory,
    /// Normalisation of what the memory returns.
    pub norm: RmsNorm,
    /// Attention.
    pub attention: SoftmaxAttention,
    #[module(skip)]
    ctx: LayerContext,
}

impl TitansMalConfig {
    /// Checks what the layer's size is computed from.
    pub(crate) fn validate_sizes(&self) -> Result<(), MemoryError> {
        self.memory.validate_memory(NAME)?;
        validate_span(NAME, ("window", self.window), self.persistent)
    }

    fn attention(&self) -> SoftmaxAttentionConfig {
        let Self { window, rope, rope_base, .. } = *self;
        SoftmaxAttentionConfig { window: Some(window), rope, rope_base, ..SoftmaxAttentionConfig::default() }
    }
}

impl LayerConfig for TitansMalConfig {
    const NAME: &'static str = "titans_mal";
    type Layer = TitansMal;

    fn conv_width(&self) -> usize {
        self.memory.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        self.memory.validate(NAME, ctx)?;
        self.validate_sizes()?;
        if self.rope { ctx.validate_rotary(NAME, self.rope_base) } else { Ok(()) }
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<TitansMal, MemoryError> {
        self.validate(ctx)?;
        Ok(TitansMal {
            persistent: (self.persistent > 0).then(|| placeholder([self.persistent, ctx.width], device)),
            memory: self.memory.build(ctx, device)?,
            norm: RmsNorm::new(ctx.width, ctx.norm_eps, device),
            attention: self.attention().build(ctx, device)?,
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let attention = self.attention().parameter_count(ctx);
        self.memory.parameter_count(ctx) + attention + ctx.width * (1 + self.persistent)
    }

    fn state_size(&self, ctx: &LayerContext, tokens: usize) -> StateSize {
        let read = if tokens > 0 { tokens + self.persistent } else { 0 };
        StateSize { growing: self.attention().state_size(ctx, read).growing, ..self.memory.state_size(ctx) }
    }

    fn deep_training_bytes(&self, ctx: &LayerContext) -> Option<usize> {
        self.memory.deep_training_bytes(ctx)
    }
}

impl TitansMal {
    /// `[P | x]` or `x`, as it stands.
    fn read(
        &self,
        x: Tensor<3>,
        state: MemoryAttentionState,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MemoryAttentionState), MemoryError> {
        let (m, memory) = self.memory.forward(x, *state.memory, offsets)?;
        let (y, attention) = self.attention.forward(self.norm.forward(m)?, Some(state.attention), offsets)?;
        Ok((y, MemoryAttentionState { memory: Box::new(memory), attention }))
    }
}

impl Layer for TitansMal {
    type State = MemoryAttentionState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MemoryAttentionState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MemoryAttentionState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let [batch, time, width] = x.dims();
        let sequences = ranges(batch, time, offsets);
        let state = state.unwrap_or_else(|| self.zero_state(sequences.len(), &x.device()));
        let begins: Vec<bool> = sequences
            .iter()
            .zip(&state.attention.positions)
            .map(|(tokens, position)| *position == 0 && !tokens.is_empty())
            .collect();
        let Some(persistent) = self.persistent.as_ref().filter(|_| begins.contains(&true)) else {
            return self.read(x, state, offsets);
        };
        // One row of documents, the persistent tokens in front of those that begin.
        let persistent = persistent.val().unsqueeze_dim::<3>(0);
        let (total, prefix) = (batch * time, persistent.dims()[1]);
        let (mut sources, mut lengths, mut own) = (Vec::new(), Vec::new(), Vec::new());
        for (tokens, begins) in sequences.into_iter().zip(begins) {
            let before = sources.len();
            if begins {
                sources.extend(total..total + prefix);
            }
            own.extend(sources.len()..sources.len() + tokens.len());
            sources.extend(tokens);
            lengths.push(sources.len() - before);
        }
        let all = Tensor::cat(vec![x.reshape([1, total, width]), persistent], 1);
        let packed = gather(&all, 1, sources.into_iter());
        let (y, state) = self.read(packed, state, Some(&Offsets::from_lengths(&lengths)))?;
        Ok((gather(&y, 1, own.into_iter()).reshape([batch, time, width]), state))
    }

    fn step(
        &self,
        x: Tensor<2>,
        state: MemoryAttentionState,
    ) -> Result<(Tensor<2>, MemoryAttentionState), MemoryError> {
        step_as_sequence(self, NAME, self.ctx.width, x, state)
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MemoryAttentionState {
        let memory = Box::new(self.memory.zero_state(batch, device));
        MemoryAttentionState { memory, attention: self.attention.zero_state(batch, device) }
    }
}
