//! Titans, memory as a context: what the memory recalls is read by attention, segment by segment.

use std::ops::Range;

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::norm::l2_normalise;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::deep::{check_weights, layer_shape};
use super::long_term::{GatedJoin, LongTermConfig, LongTermMemory, validate_span};
use super::prefix_attention::PrefixAttention;
use super::{L2_EPS, Layer, LayerConfig, STATE_ELEMENT, step_as_sequence};
use crate::projection::{Projection, check_sequence, linear, merge_heads, split_heads};
use crate::sequences::{cut, inverse, ranges};
use crate::state::rows::gather;
use crate::{KvState, LayerContext, MemoryError, SegmentState, State, StateSize};

const NAME: &str = TitansMacConfig::NAME;

/// Configuration of [`TitansMac`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TitansMacConfig {
    /// The memory; in recipes its options stand beside the others.
    #[serde(flatten)]
    pub memory: LongTermConfig,
    /// Tokens of a segment.
    pub segment: usize,
    /// Learned tokens that attention always sees; 0 for none.
    pub persistent: usize,
    /// Rotary positions inside the segment, on queries and keys.
    pub rope: bool,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
}

impl Default for TitansMacConfig {
    fn default() -> Self {
        let memory = LongTermConfig::default();
        Self { memory, segment: 512, persistent: 128, rope: true, rope_base: 10_000.0 }
    }
}

/// Titans MAC (Behrouz et al. 2025, 2501.00663, section 4.1).
///
/// Segments begin at absolute positions of a text. With M' the memory at the segment's start, the token `x_t` recalls
/// `h_t = W_h M'(W_Q x_t)` (short convolution, SiLU and unit length on the query), so the memory is read before the segment is
/// written. Attention gives `y_t`: the token sees the persistent tokens always, and of its own segment every `x_i` and
/// `h_i` with `i <= t`; in the paper a segment's h are seen by all of its tokens, which a model of the next token must not do. What
/// enters the memory is `norm(y_t)`, token by token and not at the segment's end, so that `o_t` reads a memory that has
/// taken in `y_1 .. y_t` and no later one: `o_t = y_t ⊗ M_t(y_t)`, with ⊗ a [`GatedJoin`].
///
/// The memory is a whole [`Titans`](super::Titans) or [`TitansMlp`](super::TitansMlp) layer. The state holds it, its weights at the segment's
/// start, and two entries of keys and values a token of the segment in progress.
#[derive(Module, Debug)]
pub struct TitansMac {
    /// Queries of what the memory recalls.
    pub recall: Projection,
    /// What it recalls, from the heads to the width.
    pub h: Linear,
    /// Attention.
    pub attention: PrefixAttention,
    /// The memory.
    pub memory: LongTermMemory,
    /// How they are joined.
    pub join: GatedJoin,
    #[module(skip)]
    config: TitansMacConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl TitansMacConfig {
    /// Checks what the layer's size is computed from.
    pub(crate) fn validate_sizes(&self) -> Result<(), MemoryError> {
        self.memory.validate_memory(NAME)?;
        validate_span(NAME, ("segment", self.segment), self.persistent)
    }

    /// Numbers of the recall's convolution state.
    fn recall_elements(&self, ctx: &LayerContext) -> usize {
        self.memory.conv_width.saturating_sub(1) * ctx.key_width()
    }
}

impl LayerConfig for TitansMacConfig {
    const NAME: &'static str = "titans_mac";
    type Layer = TitansMac;

    fn conv_width(&self) -> usize {
        self.memory.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        self.memory.validate(NAME, ctx)?;
        self.validate_sizes()?;
        if self.rope { ctx.validate_rotary(NAME, self.rope_base) } else { Ok(()) }
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<TitansMac, MemoryError> {
        self.validate(ctx)?;
        let rope = self.rope.then_some(self.rope_base);
        Ok(TitansMac {
            recall: Projection::new(ctx.width, ctx.key_width(), self.memory.conv_width, true, device),
            h: linear(ctx.value_width(), ctx.width, device),
            attention: PrefixAttention::new(ctx, self.persistent, rope, device),
            memory: self.memory.build(ctx, device)?,
            join: GatedJoin::new(ctx, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let query = Projection::parameter_count(ctx.width, ctx.key_width(), self.memory.conv_width);
        let recall = query + ctx.value_width() * ctx.width;
        let attention = PrefixAttention::parameter_count(ctx, self.persistent);
        self.memory.parameter_count(ctx) + recall + attention + GatedJoin::parameter_count(ctx)
    }

    fn state_size(&self, ctx: &LayerContext, tokens: usize) -> StateSize {
        let start = self.memory.weight_count(ctx) + self.recall_elements(ctx);
        let entries = 2 * (tokens % self.segment);
        StateSize {
            fixed: self.memory.state_size(ctx).fixed + start * STATE_ELEMENT,
            growing: entries * PrefixAttention::entry(ctx) * STATE_ELEMENT,
        }
    }

    fn deep_training_bytes(&self, ctx: &LayerContext) -> Option<usize> {
        self.memory.deep_training_bytes(ctx)
    }
}

impl Layer for TitansMac {
    type State = SegmentState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<SegmentState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, SegmentState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let [batch, time, width] = x.dims();
        let sequences = ranges(batch, time, offsets);
        let mut state = state.unwrap_or_else(|| self.zero_state(sequences.len(), &x.device()));
        let rounds = rounds(sequences, &state.attention.positions, self.config.segment);
        let order: Vec<usize> = rounds.iter().flatten().flat_map(Clone::clone).collect();
        let sorted = order.iter().copied().eq(0..batch * time);
        let mut packed = x.reshape([1, batch * time, width]);
        if !sorted {
            packed = gather(&packed, 1, order.iter().copied());
        }
        let offsets: Vec<Offsets> = rounds
            .iter()
            .map(|round| Offsets::from_lengths(&round.iter().map(Range::len).collect::<Vec<_>>()))
            .collect();
        let lengths: Vec<usize> = offsets.iter().map(Offsets::time).collect();
        let mut outputs = Vec::new();
        for (part, offsets) in cut(packed, 1, &lengths).into_iter().zip(&offsets) {
            let (o, next) = self.segment(part, state, offsets)?;
            outputs.push(o);
            state = next;
        }
        let mut o = Tensor::cat(outputs, 1);
        if !sorted {
            o = gather(&o, 1, inverse(&order));
        }
        Ok((o.reshape([batch, time, width]), state))
    }

    fn step(&self, x: Tensor<2>, state: SegmentState) -> Result<(Tensor<2>, SegmentState), MemoryError> {
        step_as_sequence(self, NAME, self.ctx.width, x, state)
    }

    fn zero_state(&self, batch: usize, device: &Device) -> SegmentState {
        let memory = self.memory.zero_state(batch, device);
        let start = self.memory.weights(&memory).unwrap_or_default();
        let recall = self.config.memory.conv_width.checked_sub(1);
        SegmentState {
            start,
            memory: Box::new(memory),
            recall: recall.map(|taps| Tensor::zeros([batch, taps, self.ctx.key_width()], device)),
            attention: KvState::empty(batch, None, None),
        }
    }
}

impl TitansMac {
    /// Documents `x [1, L, width]`, none beyond the end of its segment.
    fn segment(
        &self,
        x: Tensor<3>,
        state: SegmentState,
        offsets: &Offsets,
    ) -> Result<(Tensor<3>, SegmentState), MemoryError> {
        let SegmentState { memory, start, recall, attention } = state;
        let segment = self.config.segment;
        let enters: Vec<bool> = offsets
            .ranges()
            .zip(&attention.positions)
            .map(|(tokens, position)| !tokens.is_empty() && position % segment == 0)
            .collect();
        let current = self.memory.weights(&memory)?;
        check_weights(&start, &current.iter().map(layer_shape).collect::<Vec<_>>())?;
        let start = choose(current, start, &enters);
        let (q, recall) = self.recall.forward(x.clone(), recall, Some(offsets))?;
        let q = l2_normalise(split_heads(q, self.ctx.heads), L2_EPS);
        let recalled = self.recalled(q, start.clone(), offsets)?;
        let h = self.h.forward(merge_heads(recalled));
        let (y, attention) = self.attention.segment(x, h, attention, offsets, segment)?;
        let y = self.join.attention_norm.forward(y)?;
        let (m, memory) = self.memory.forward(y.clone(), *memory, Some(offsets))?;
        let o = self.join.forward(y, m)?;
        Ok((o, SegmentState { memory: Box::new(memory), start, recall, attention }))
    }

    /// Each document's memory read at its queries `[1, L, H, K]`: documents side by side, the shorter ones filled up.
    fn recalled(
        &self,
        q: Tensor<4>,
        start: Vec<Tensor<4>>,
        offsets: &Offsets,
    ) -> Result<Tensor<4>, MemoryError> {
        let [_, total, heads, key] = q.dims();
        let longest = offsets.ranges().map(|tokens| tokens.len()).max().unwrap_or(0);
        let documents = offsets.documents();
        let alike = total == documents * longest;
        let mut rows = q;
        if !alike {
            let fill = |tokens: Range<usize>| {
                let missing = longest - tokens.len();
                tokens.chain(std::iter::repeat_n(0, missing))
            };
            rows = gather(&rows, 1, offsets.ranges().flat_map(fill));
        }
        let recalled = self.memory.recall(rows.reshape([documents, longest, heads, key]), start)?;
        let [.., value] = recalled.dims();
        let recalled = recalled.reshape([1, documents * longest, heads, value]);
        if alike {
            return Ok(recalled);
        }
        let own = offsets.ranges().enumerate();
        let own = own.flat_map(|(row, tokens)| row * longest..row * longest + tokens.len());
        Ok(gather(&recalled, 1, own))
    }
}

/// The rows of `new` where `enters`, those of `old` elsewhere.
fn choose(new: Vec<Tensor<4>>, old: Vec<Tensor<4>>, enters: &[bool]) -> Vec<Tensor<4>> {
    if !enters.contains(&true) {
        return old;
    }
    if !enters.contains(&false) {
        return new;
    }
    let count = enters.len();
    let rows = || enters.iter().enumerate().map(|(row, enters)| if *enters { row } else { count + row });
    let pick = |(new, old): (Tensor<4>, Tensor<4>)| gather(&Tensor::cat(vec![new, old], 0), 0, rows());
    new.into_iter().zip(old).map(pick).collect()
}

/// Pieces of the sequences that end with the text or a segment, one of each sequence a round.
fn rounds(sequences: Vec<Range<usize>>, positions: &[usize], segment: usize) -> Vec<Vec<Range<usize>>> {
    let mut left: Vec<(Range<usize>, usize)> =
        sequences.into_iter().zip(positions.iter().map(|position| position % segment)).collect();
    let mut rounds = Vec::new();
    while left.iter().any(|(tokens, _)| !tokens.is_empty()) {
        let piece = |(tokens, phase): &mut (Range<usize>, usize)| {
            let end = tokens.end.min(tokens.start + segment - *phase);
            *phase = 0;
            let piece = tokens.start..end;
            tokens.start = end;
            piece
        };
        rounds.push(left.iter_mut().map(piece).collect());
    }
    rounds
}
