//! Softmax attention beside a memory: learned tokens that stay in view, and a window or a segment of what was read.

use std::ops::Range;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_ops::softmax::{KvCache, SoftmaxOptions, softmax_attention};
use fastweight_ops::{Offsets, OpError};

use super::{advance, rotate_pair};
use crate::init::placeholder;
use crate::projection::{Projection, linear, split_heads};
use crate::sequences::ranges;
use crate::state::rows::gather;
use crate::{KvState, LayerContext, MemoryError};

/// Causal softmax attention over persistent tokens and the tokens in view.
///
/// Persistent tokens are learned, go through the same key and value maps as what is read, stand at rotary position 0, and are
/// seen by every token.
#[derive(Module, Debug)]
pub struct PrefixAttention {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Persistent tokens `[P, width]`, if there are any.
    pub persistent: Option<Param<Tensor<2>>>,
    /// From the heads to the width.
    pub y: Linear,
    #[module(skip)]
    rope_base: Option<f32>,
    #[module(skip)]
    ctx: LayerContext,
}

/// A run of new tokens that look at the same earlier ones.
struct Piece {
    /// Entries of the state they see: the row, and where in it.
    held: (usize, Range<usize>),
    /// Earlier new tokens they see.
    before: Range<usize>,
    /// The tokens themselves.
    tokens: Range<usize>,
}

/// New and held keys and values, one under the other: what is held, what is new, the persistent tokens.
struct Sources {
    k: Tensor<3>,
    v: Tensor<3>,
    /// Entries of a row of the state.
    held: usize,
    /// All of them, and then the new tokens.
    fresh: usize,
    persistent: Range<usize>,
}

impl PrefixAttention {
    pub(super) fn new(
        ctx: &LayerContext,
        persistent: usize,
        rope_base: Option<f32>,
        device: &Device,
    ) -> Self {
        let [key, value] = [ctx.key_width(), ctx.value_width()];
        let map = |channels| Projection::new(ctx.width, channels, 0, false, device);
        Self {
            q: map(key),
            k: map(key),
            v: map(value),
            persistent: (persistent > 0).then(|| placeholder([persistent, ctx.width], device)),
            y: linear(value, ctx.width, device),
            rope_base,
            ctx: ctx.clone(),
        }
    }

    pub(super) fn parameter_count(ctx: &LayerContext, persistent: usize) -> usize {
        ctx.width * (2 * ctx.key_width() + 2 * ctx.value_width() + persistent)
    }

    /// Numbers in an entry of the state.
    pub(super) fn entry(ctx: &LayerContext) -> usize {
        ctx.heads * (ctx.head_dim + ctx.value_dim)
    }

    /// Every token of `x [B, T, width]` sees the persistent tokens and the last `window` ones, itself included. Returns
    /// `[B, T, width]`; the state keeps `window - 1` entries.
    pub(super) fn windowed(
        &self,
        x: Tensor<3>,
        state: KvState,
        offsets: Option<&Offsets>,
        window: usize,
    ) -> Result<(Tensor<3>, KvState), MemoryError> {
        let [batch, time, _] = x.dims();
        let (q, [k, v]) = (self.queries(&x)?, self.keys_and_values(x)?);
        let (q, k) = self.rotate(q, k, &state.positions, offsets)?;
        let sequences = ranges(batch, time, offsets);
        let mut pieces = Vec::new();
        let mut kept = Vec::new();
        for (row, tokens) in sequences.into_iter().enumerate() {
            let length = state.lengths[row];
            let mut from = tokens.start;
            while from < tokens.end {
                let to = tokens.end.min(from + window);
                // From the second block on, the new tokens alone fill the window.
                let held = if from == tokens.start { 0..length } else { 0..0 };
                let before = tokens.start.max((from + 1).saturating_sub(window))..from;
                pieces.push(Piece { held: (row, held), before, tokens: from..to });
                from = to;
            }
            let fresh = tokens.len().min(window - 1);
            let old = length.min(window - 1 - fresh);
            kept.push((length - old..length, tokens.end - fresh..tokens.end));
        }
        let sources = self.sources(k, v, &state)?;
        let o = sources.attend(q, &pieces, Some(window))?;
        let o = o.reshape([batch, time, self.ctx.value_width()]);
        let positions = advance(state.positions.clone(), time, offsets);
        Ok((self.y.forward(o), KvState { positions, ..sources.keep(state, &kept) }))
    }

    /// Documents `x [1, L, width]`, none beyond the end of its segment: every token sees the persistent tokens, the tokens
    /// of its segment up to itself and, for each of those, the one of `h [1, L, width]`. Returns `[1, L, width]`; the state
    /// keeps two entries a token until the segment ends.
    pub(super) fn segment(
        &self,
        x: Tensor<3>,
        h: Tensor<3>,
        state: KvState,
        offsets: &Offsets,
        segment: usize,
    ) -> Result<(Tensor<3>, KvState), MemoryError> {
        let time = x.dims()[1];
        let starts: Vec<usize> = state.positions.iter().map(|position| position % segment).collect();
        let (q, [k, v]) = (self.queries(&x)?, self.keys_and_values(x)?);
        let [k_h, v_h] = self.keys_and_values(h)?;
        let (q, k) = self.rotate(q, k, &starts, Some(offsets))?;
        // Queries have no use here: any will do.
        let (_, k_h) = self.rotate(k_h.clone(), k_h, &starts, Some(offsets))?;
        // h before its token, so that a token sees both; what h itself would see is dropped.
        let pair = |a: Tensor<4>, b: Tensor<4>| {
            let [_, _, heads, size] = a.dims();
            Tensor::stack::<5>(vec![a, b], 2).reshape([1, 2 * time, heads, size])
        };
        let (k, v) = (pair(k_h, k), pair(v_h, v));
        let (mut pieces, mut kept) = (Vec::new(), Vec::new());
        for (row, tokens) in offsets.ranges().enumerate() {
            let tokens = 2 * tokens.start..2 * tokens.end;
            let length = state.lengths[row];
            let ends = !tokens.is_empty() && starts[row] + tokens.len() / 2 == segment;
            kept.push(if ends { (0..0, 0..0) } else { (0..length, tokens.clone()) });
            if !tokens.is_empty() {
                let before = tokens.start..tokens.start;
                pieces.push(Piece { held: (row, 0..length), before, tokens });
            }
        }
        let sources = self.sources(k, v, &state)?;
        let o = sources.attend(pair(q.clone(), q), &pieces, None)?;
        let [heads, value] = [self.ctx.heads, self.ctx.value_dim];
        let o = o.reshape([1, time, 2, heads * value]).narrow(2, 1, 1).reshape([1, time, heads * value]);
        let positions = advance(state.positions.clone(), time, Some(offsets));
        Ok((self.y.forward(o), KvState { positions, ..sources.keep(state, &kept) }))
    }

    fn queries(&self, x: &Tensor<3>) -> Result<Tensor<4>, OpError> {
        Ok(split_heads(self.q.forward(x.clone(), None, None)?.0, self.ctx.heads))
    }

    fn keys_and_values(&self, x: Tensor<3>) -> Result<[Tensor<4>; 2], OpError> {
        let k = self.k.forward(x.clone(), None, None)?.0;
        let v = self.v.forward(x, None, None)?.0;
        Ok([k, v].map(|x| split_heads(x, self.ctx.heads)))
    }

    fn rotate(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        starts: &[usize],
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<4>, Tensor<4>), OpError> {
        match self.rope_base {
            Some(base) => rotate_pair(q, k, starts, offsets, base),
            None => Ok((q, k)),
        }
    }

    fn check_entries(&self, argument: &'static str, x: &Tensor<4>, size: usize) -> Result<(), OpError> {
        let [rows, entries, heads, found] = x.dims();
        if [heads, found] == [self.ctx.heads, size] {
            return Ok(());
        }
        let expected = format!("[{rows}, {entries}, {}, {size}]", self.ctx.heads);
        Err(OpError::Shape { operator: "softmax_attention", argument, found: x.dims().to_vec(), expected })
    }

    fn sources(&self, k: Tensor<4>, v: Tensor<4>, state: &KvState) -> Result<Sources, OpError> {
        let flat = |x: Tensor<4>| {
            let [rows, tokens, heads, size] = x.dims();
            x.reshape([rows * tokens, heads, size])
        };
        let (mut all_k, mut all_v, mut held, mut fresh) = (Vec::new(), Vec::new(), 0, 0);
        if let Some((k, v)) = &state.entries {
            self.check_entries("state.keys", k, self.ctx.head_dim)?;
            self.check_entries("state.values", v, self.ctx.value_dim)?;
            let [rows, entries, ..] = k.dims();
            (held, fresh) = (entries, rows * entries);
            all_k.push(flat(k.clone()));
            all_v.push(flat(v.clone()));
        }
        let [rows, tokens, ..] = k.dims();
        let from = fresh + rows * tokens;
        all_k.push(flat(k));
        all_v.push(flat(v));
        let mut persistent = from..from;
        if let Some(tokens) = &self.persistent {
            let [k, v] = self.keys_and_values(tokens.val().unsqueeze_dim(0))?;
            persistent.end += tokens.dims()[0];
            all_k.push(flat(k));
            all_v.push(flat(v));
        }
        Ok(Sources { k: Tensor::cat(all_k, 0), v: Tensor::cat(all_v, 0), held, fresh, persistent })
    }
}

impl Sources {
    /// Keys and values `[N, longest, H, *]` of rows of sources, the shorter ones filled up with anything.
    fn take(&self, rows: &[Vec<usize>]) -> Option<(Tensor<4>, Tensor<4>)> {
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        if longest == 0 {
            return None;
        }
        let fill = |row: &Vec<usize>| {
            row.iter().copied().chain(std::iter::repeat_n(0, longest - row.len())).collect::<Vec<_>>()
        };
        let indices: Vec<usize> = rows.iter().flat_map(fill).collect();
        let cut = |x: &Tensor<3>| {
            let [_, heads, size] = x.dims();
            gather(x, 0, indices.iter().copied()).reshape([rows.len(), longest, heads, size])
        };
        Some((cut(&self.k), cut(&self.v)))
    }

    fn held_rows(&self, row: usize, entries: Range<usize>) -> impl Iterator<Item = usize> + use<> {
        let from = row * self.held;
        entries.map(move |entry| from + entry)
    }

    fn fresh_rows(&self, tokens: Range<usize>) -> impl Iterator<Item = usize> + use<> {
        let from = self.fresh;
        tokens.map(move |token| from + token)
    }

    /// Attention `[B, T, H, V]` of queries `[B, T, H, K]`; the pieces are those of all tokens, in order.
    ///
    /// Each piece is a document of the operator, and what it sees is that document's cache, the persistent tokens last: with a window
    /// of w tokens and P persistent ones, a window of `w + P` hides exactly the entries that have left the window, because
    /// a piece has at most w tokens.
    fn attend(&self, q: Tensor<4>, pieces: &[Piece], window: Option<usize>) -> Result<Tensor<4>, OpError> {
        let [batch, time, heads, key] = q.dims();
        let seen = |piece: &Piece| {
            let (row, entries) = piece.held.clone();
            let before = self.fresh_rows(piece.before.clone());
            self.held_rows(row, entries).chain(before).chain(self.persistent.clone()).collect::<Vec<_>>()
        };
        let seen: Vec<Vec<usize>> = pieces.iter().map(seen).collect();
        let lengths = seen.iter().map(Vec::len).collect();
        let cache = self.take(&seen).map(|(k, v)| KvCache { k, v, lengths: Some(lengths) });
        let fresh = self.fresh..self.fresh + batch * time;
        let new = |x: &Tensor<3>| x.clone().narrow(0, fresh.start, fresh.len()).unsqueeze_dim::<4>(0);
        let tokens: Vec<usize> = pieces.iter().map(|piece| piece.tokens.len()).collect();
        let options = SoftmaxOptions {
            window: window.map(|window| window + self.persistent.len()),
            offsets: Some(Offsets::from_lengths(&tokens)),
            ..SoftmaxOptions::default()
        };
        let q = q.reshape([1, batch * time, heads, key]);
        softmax_attention(q, new(&self.k), new(&self.v), cache, &options)
    }

    /// The state with these entries: of each row, what was held and what is new.
    fn keep(&self, state: KvState, kept: &[(Range<usize>, Range<usize>)]) -> KvState {
        let row = |(row, (held, fresh)): (usize, &(Range<usize>, Range<usize>))| {
            self.held_rows(row, held.clone()).chain(self.fresh_rows(fresh.clone())).collect::<Vec<_>>()
        };
        let rows: Vec<Vec<usize>> = kept.iter().enumerate().map(row).collect();
        let lengths = rows.iter().map(Vec::len).collect();
        KvState { entries: self.take(&rows), lengths, ..state }
    }
}
