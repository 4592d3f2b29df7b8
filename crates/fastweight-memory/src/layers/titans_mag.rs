//! Titans, memory as a gate: attention and memory read side by side.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::long_term::{GatedJoin, LongTermConfig, LongTermMemory, validate_span};
use super::prefix_attention::PrefixAttention;
use super::{Layer, LayerConfig, STATE_ELEMENT, step_as_sequence};
use crate::projection::check_sequence;
use crate::{KvState, LayerContext, MemoryAttentionState, MemoryError, State, StateSize};

const NAME: &str = TitansMagConfig::NAME;

/// Configuration of [`TitansMag`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TitansMagConfig {
    /// The memory; in recipes its options stand beside the others.
    #[serde(flatten)]
    pub memory: LongTermConfig,
    /// Tokens that attention sees, itself included, beside the persistent ones.
    pub window: usize,
    /// Learned tokens that attention always sees; 0 for none.
    pub persistent: usize,
    /// Rotary positions on queries and keys.
    pub rope: bool,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
}

impl Default for TitansMagConfig {
    fn default() -> Self {
        let memory = LongTermConfig::default();
        Self { memory, window: 512, persistent: 128, rope: true, rope_base: 10_000.0 }
    }
}

/// Titans MAG (Behrouz et al. 2025, 2501.00663, section 4.2): `o = SWA([P | x]) ⊗ M(x)`.
///
/// Sliding-window attention with persistent tokens that never leave the window, beside a whole [`Titans`](super::Titans) or
/// [`TitansMlp`](super::TitansMlp) layer on the same tokens, joined by [`GatedJoin`]. The persistent tokens do not enter the
/// memory. The paper gives attention no positions; here it has rotary ones unless `rope = false`.
#[derive(Module, Debug)]
pub struct TitansMag {
    /// The memory.
    pub memory: LongTermMemory,
    /// Attention.
    pub attention: PrefixAttention,
    /// How they are joined.
    pub join: GatedJoin,
    #[module(skip)]
    config: TitansMagConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl TitansMagConfig {
    /// Checks what the layer's size is computed from.
    pub(crate) fn validate_sizes(&self) -> Result<(), MemoryError> {
        self.memory.validate_memory(NAME)?;
        validate_span(NAME, ("window", self.window), self.persistent)
    }
}

impl LayerConfig for TitansMagConfig {
    const NAME: &'static str = "titans_mag";
    type Layer = TitansMag;

    fn conv_width(&self) -> usize {
        self.memory.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        self.memory.validate(NAME, ctx)?;
        self.validate_sizes()?;
        if self.rope { ctx.validate_rotary(NAME, self.rope_base) } else { Ok(()) }
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<TitansMag, MemoryError> {
        self.validate(ctx)?;
        let rope = self.rope.then_some(self.rope_base);
        Ok(TitansMag {
            memory: self.memory.build(ctx, device)?,
            attention: PrefixAttention::new(ctx, self.persistent, rope, device),
            join: GatedJoin::new(ctx, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let attention = PrefixAttention::parameter_count(ctx, self.persistent);
        self.memory.parameter_count(ctx) + attention + GatedJoin::parameter_count(ctx)
    }

    fn state_size(&self, ctx: &LayerContext, tokens: usize) -> StateSize {
        let growing = tokens.min(self.window - 1) * PrefixAttention::entry(ctx) * STATE_ELEMENT;
        StateSize { growing, ..self.memory.state_size(ctx) }
    }

    fn deep_training_bytes(&self, ctx: &LayerContext) -> Option<usize> {
        self.memory.deep_training_bytes(ctx)
    }
}

impl Layer for TitansMag {
    type State = MemoryAttentionState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<MemoryAttentionState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, MemoryAttentionState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let sequences = offsets.map_or(x.dims()[0], Offsets::documents);
        let MemoryAttentionState { memory, attention } =
            state.unwrap_or_else(|| self.zero_state(sequences, &x.device()));
        let (m, memory) = self.memory.forward(x.clone(), *memory, offsets)?;
        let (y, attention) = self.attention.windowed(x, attention, offsets, self.config.window)?;
        let o = self.join.forward(self.join.attention_norm.forward(y)?, m)?;
        Ok((o, MemoryAttentionState { memory: Box::new(memory), attention }))
    }

    fn step(
        &self,
        x: Tensor<2>,
        state: MemoryAttentionState,
    ) -> Result<(Tensor<2>, MemoryAttentionState), MemoryError> {
        step_as_sequence(self, NAME, self.ctx.width, x, state)
    }

    fn zero_state(&self, batch: usize, device: &Device) -> MemoryAttentionState {
        let attention = KvState::empty(batch, Some(self.config.window - 1), None);
        MemoryAttentionState { memory: Box::new(self.memory.zero_state(batch, device)), attention }
    }
}
