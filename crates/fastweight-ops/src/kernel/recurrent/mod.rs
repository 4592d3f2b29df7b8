//! Matrix memories run token after token, with the state in the first-level cache.
//!
//! `r = S^T a`, `u` from `r` and `v`, `S <- diag(w) S + x u^T (+ y v^T)`, `o = scale S^T q`; with momentum
//! `P <- mu P + x u^T`, `S <- w S + beta P`. One walk over the state a token decays it, writes to it, reads
//! it for the output and reads what the next token will need: each number is loaded and stored once.
//!
//! Decays of a channel enter as products, one token at a time, never as differences of sums of logs: any
//! gate, and any row of them, keeps full precision, and a gate of `-inf` is an exact zero. For 64 by 64
//! states this takes no longer than the chunked products of [`forward`](super::forward), which cannot take
//! a decay per channel without splitting their blocks.

pub(crate) mod backward;
mod backward_chunk;
mod backward_rows;
mod backward_states;
pub(crate) mod forward;
pub(crate) mod step;

use std::ops::Range;

use super::ahead::Ahead;
use super::dims::Dims;
use super::gates::CHUNK;
use super::memory::Place;
use super::simd::Lanes;
use super::tile::{Matrix, copy_in};
use super::workspace::{Carver, SPREAD};

/// Which rule writes the memory.
pub trait Rule: Copy + Send + Sync + 'static {
    /// Reads `r = S_{t-1}^T a` before it writes.
    const READS: bool;
    /// `a = k * exp(g)`: reads the decayed state with the write key. Otherwise `a` is an input.
    const READS_DECAYED: bool;
    /// Writes `u = rate (v - r)` instead of `u = r`, or `u = v` when nothing is read.
    const CORRECTS: bool;
    /// Adds `y v^T` to what is written.
    const ADDS_VALUE: bool;
    /// Writes to a momentum `P` first. The decays are then one plain number for each token and head.
    const MOMENTUM: bool;
    /// What the momentum adds to the state has a factor, one for each token and head.
    const SCALES_MOMENTUM: bool;
    /// With momentum: decays, momentum factors and rates are numbers for each value column.
    const COLUMN_GATES: bool;
}

/// `S <- diag(exp g) S + k v^T` (GLA, arXiv 2312.06635; HGRN2, 2404.07904).
#[derive(Debug, Clone, Copy)]
pub struct ChannelGated;

impl Rule for ChannelGated {
    const READS: bool = false;
    const READS_DECAYED: bool = false;
    const CORRECTS: bool = false;
    const ADDS_VALUE: bool = false;
    const MOMENTUM: bool = false;
    const SCALES_MOMENTUM: bool = false;
    const COLUMN_GATES: bool = false;
}

/// `S~ = diag(exp g) S`, `S <- S~ + beta k (v - S~^T k)^T` (Kimi Delta Attention, arXiv 2510.26692).
#[derive(Debug, Clone, Copy)]
pub struct ChannelDelta;

impl Rule for ChannelDelta {
    const READS: bool = true;
    const READS_DECAYED: bool = true;
    const CORRECTS: bool = true;
    const ADDS_VALUE: bool = false;
    const MOMENTUM: bool = false;
    const SCALES_MOMENTUM: bool = false;
    const COLUMN_GATES: bool = false;
}

/// `S <- diag(exp w) S + b (S^T a)^T + k v^T` (RWKV-7, arXiv 2503.14456).
#[derive(Debug, Clone, Copy)]
pub struct LowRank;

impl Rule for LowRank {
    const READS: bool = true;
    const READS_DECAYED: bool = false;
    const CORRECTS: bool = false;
    const ADDS_VALUE: bool = true;
    const MOMENTUM: bool = false;
    const SCALES_MOMENTUM: bool = false;
    const COLUMN_GATES: bool = false;
}

/// `P <- mu P + rate k (v - S^T p)^T`, `S <- retain S + beta P` (Titans, arXiv 2501.00663).
#[derive(Debug, Clone, Copy)]
pub struct Surprise;

impl Rule for Surprise {
    const READS: bool = true;
    const READS_DECAYED: bool = false;
    const CORRECTS: bool = true;
    const ADDS_VALUE: bool = false;
    const MOMENTUM: bool = true;
    const SCALES_MOMENTUM: bool = true;
    const COLUMN_GATES: bool = false;
}

/// `P <- P diag(mu) + k (rate (v - S^T p))^T`, `S <- S diag(retain) + P`: [`Surprise`] with gates for each value column.
#[derive(Debug, Clone, Copy)]
pub struct ChannelSurprise;

impl Rule for ChannelSurprise {
    const READS: bool = true;
    const READS_DECAYED: bool = false;
    const CORRECTS: bool = true;
    const ADDS_VALUE: bool = false;
    const MOMENTUM: bool = true;
    const SCALES_MOMENTUM: bool = false;
    const COLUMN_GATES: bool = true;
}

/// Inputs, contiguous; those a rule does not have are empty.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Sizes.
    pub dims: &'a Dims,
    /// Queries `[batch, time, heads, key]`.
    pub q: &'a [f32],
    /// `a`, what the state is read with `[batch, time, heads, key]`.
    pub read: &'a [f32],
    /// `x`, what `u` is written with `[batch, time, heads, key]`.
    pub write: &'a [f32],
    /// `y`, what `v` is written with `[batch, time, heads, key]`.
    pub value_key: &'a [f32],
    /// Values `[batch, time, heads, value]`.
    pub v: &'a [f32],
    /// Log decays `[batch, time, heads, key]`; with momentum plain factors `[batch, time, heads]`, or `[.., value]` with
    /// column gates.
    pub decay: &'a [f32],
    /// Rates of the correction `[batch, time, heads]`, or `[.., value]`.
    pub rate: &'a [f32],
    /// Factors `mu` on the momentum `[batch, time, heads]`, or `[.., value]`.
    pub momentum: &'a [f32],
    /// Factors `beta` on what the momentum adds to the state `[batch, time, heads]`.
    pub momentum_rate: &'a [f32],
    /// Initial states `[sequences, heads, key, value]`.
    pub state: &'a [f32],
    /// Initial momenta `[sequences, heads, key, value]`.
    pub momentum_state: &'a [f32],
}

impl Inputs<'_> {
    /// Tokens times heads.
    pub fn token_heads(&self) -> usize {
        self.dims.batch * self.dims.time * self.dims.heads
    }

    /// The kernels read through raw pointers; they rely on these lengths.
    ///
    /// # Panics
    /// When a slice does not have the length that the sizes say.
    pub fn check<R: Rule>(&self) {
        let d = self.dims;
        let tokens = self.token_heads();
        let keys = tokens * d.key;
        let states = d.states() * d.heads * d.key * d.value;
        let gates = if R::COLUMN_GATES { tokens * d.value } else { tokens };
        let only = |has: bool, len: usize| if has { len } else { 0 };
        assert_eq!(self.q.len(), keys, "length of q");
        assert_eq!(self.read.len(), only(R::READS && !R::READS_DECAYED, keys), "length of a");
        assert_eq!(self.write.len(), keys, "length of k");
        assert_eq!(self.value_key.len(), only(R::ADDS_VALUE, keys), "length of the value's key");
        assert_eq!(self.v.len(), tokens * d.value, "length of v");
        assert_eq!(self.decay.len(), if R::MOMENTUM { gates } else { keys }, "length of the decays");
        assert_eq!(self.rate.len(), only(R::CORRECTS, gates), "length of the rates");
        assert_eq!(self.momentum.len(), only(R::MOMENTUM, gates), "length of the momentum factors");
        assert_eq!(
            self.momentum_rate.len(),
            only(R::SCALES_MOMENTUM, tokens),
            "length of the momentum rates"
        );
        assert_eq!(self.state.len(), states, "length of the state");
        assert_eq!(self.momentum_state.len(), only(R::MOMENTUM, states), "length of the momentum");
        if let Some(offsets) = &d.offsets {
            assert!(d.batch == 1 && offsets.time() == d.time, "offsets cut the one row");
        }
    }
}

/// Tokens between two sweeps of a state for numbers about to turn denormal.
const SWEEP: usize = 4;

/// Whether a token of a chunk sweeps. Between two sweeps decays above 0.01 leave nothing denormal; stronger
/// ones pass through the denormal numbers in a token or two.
#[inline(always)]
pub(super) fn sweeps(t: usize) -> bool {
    t.is_multiple_of(SWEEP)
}

/// The key-sized inputs and the gates of a chunk, row by token, padded with zeros (decays with ones).
#[derive(Debug, Clone, Copy)]
pub(super) struct Staged {
    pub q: Matrix,
    /// One row more than the chunk, zero after the last token.
    pub read: Matrix,
    pub write: Matrix,
    pub value_key: Matrix,
    pub decay: Matrix,
    /// Rows: rates, momentum factors, momentum rates.
    scalars: Matrix,
    /// By value column, if the gates are: rates, decays, momentum factors.
    columns: [Matrix; 3],
}

impl Staged {
    /// Numbers it needs, for keys padded to `key` and value columns to `columns`.
    pub fn size<R: Rule>(key: usize, columns: usize) -> usize {
        let gates = if R::COLUMN_GATES { 3 * CHUNK * columns } else { 0 };
        (5 * CHUNK + 1) * key + 3 * CHUNK + gates + 9 * (16 + SPREAD)
    }

    /// Takes its memory.
    pub fn carve<R: Rule>(carver: &mut Carver, key: usize, columns: usize) -> Self {
        let gates = if R::COLUMN_GATES { CHUNK } else { 0 };
        Self {
            q: carver.spread(CHUNK, key),
            read: carver.spread(CHUNK + 1, key),
            write: carver.spread(CHUNK, key),
            value_key: carver.spread(CHUNK, key),
            decay: carver.spread(CHUNK, key),
            scalars: carver.spread(3, CHUNK),
            columns: [(); 3].map(|()| carver.spread(gates, columns)),
        }
    }

    /// Loads a chunk, and the gates of these value columns; the queries carry the factor on the output.
    ///
    /// # Safety
    /// The CPU supports `L`; the place is inside the checked inputs.
    #[inline(always)]
    pub unsafe fn load<L: Lanes, R: Rule>(&self, inputs: &Inputs<'_>, place: Place, columns: &Range<usize>) {
        let Dims { heads, key, value, scale, .. } = *inputs.dims;
        let Place { tokens, position, .. } = place;
        let stride = heads * key;
        // SAFETY: vouched for by the caller; every matrix has CHUNK rows.
        unsafe {
            let keys = |to: Matrix, from: &[f32]| {
                copy_in::<L>(to, tokens, from.as_ptr().add(position * key), stride, tokens, key);
            };
            keys(self.q, inputs.q);
            scale_rows::<L>(self.q, 0..tokens, scale);
            keys(self.write, inputs.write);
            if R::ADDS_VALUE {
                keys(self.value_key, inputs.value_key);
            }
            if R::COLUMN_GATES {
                let first = position * value + columns.start;
                for (&to, from) in self.columns.iter().zip([inputs.rate, inputs.decay, inputs.momentum]) {
                    copy_in::<L>(to, tokens, from.as_ptr().add(first), heads * value, tokens, columns.len());
                }
            } else if R::MOMENTUM {
                for t in 0..tokens {
                    let factor = *inputs.decay.get_unchecked(position + t * heads);
                    fill::<L>(self.decay, t..t + 1, factor);
                }
            } else {
                keys(self.decay, inputs.decay);
            }
            if R::READS && !R::READS_DECAYED {
                keys(self.read, inputs.read);
            }
            fill::<L>(self.read, tokens..tokens + 1, 0.0);
            for t in 0..tokens {
                let at = position + t * heads;
                if R::CORRECTS && !R::COLUMN_GATES {
                    *self.scalars.at(0, t) = *inputs.rate.get_unchecked(at);
                }
                if R::MOMENTUM && !R::COLUMN_GATES {
                    *self.scalars.at(1, t) = *inputs.momentum.get_unchecked(at);
                }
                if R::SCALES_MOMENTUM {
                    *self.scalars.at(2, t) = *inputs.momentum_rate.get_unchecked(at);
                }
            }
            if !R::MOMENTUM {
                self.take_exponentials::<L, R>(tokens);
            }
        }
    }

    /// From the log decays to the decays and what is read with them.
    #[inline(always)]
    unsafe fn take_exponentials<L: Lanes, R: Rule>(&self, tokens: usize) {
        for t in 0..tokens {
            let mut j = 0;
            while j < self.decay.stride {
                // SAFETY: rows of the chunk, just loaded.
                unsafe {
                    let decay = L::load(self.decay.at(t, j)).exp();
                    decay.store(self.decay.at(t, j));
                    if R::READS_DECAYED {
                        L::load(self.write.at(t, j)).mul(decay).store(self.read.at(t, j));
                    }
                }
                j += L::COUNT;
            }
        }
    }

    /// The rates of the correction, for the value columns from `column` on.
    ///
    /// # Safety
    /// The CPU supports `L`; token and columns are in the chunk.
    #[inline(always)]
    pub unsafe fn rate<L: Lanes, R: Rule>(&self, t: usize, column: usize) -> L {
        // SAFETY: vouched for by the caller.
        unsafe {
            if R::COLUMN_GATES {
                L::load(self.columns[0].at(t, column))
            } else {
                L::splat(*self.scalars.at(0, t))
            }
        }
    }

    /// The decays of value columns that have their own.
    #[inline(always)]
    pub fn decays(&self, t: usize, column: usize) -> *const f32 {
        // SAFETY: `t` is below CHUNK, `column` is one of the task's.
        unsafe { self.columns[1].at(t, column) }
    }

    /// The factors on the momentum, for the value columns from `column` on; one for all, unless they have their own.
    #[inline(always)]
    pub fn momenta<R: Rule>(&self, t: usize, column: usize) -> *const f32 {
        // SAFETY: as above.
        unsafe { if R::COLUMN_GATES { self.columns[2].at(t, column) } else { self.scalars.at(1, t) } }
    }

    /// The factor on what the momentum adds to the state.
    #[inline(always)]
    pub fn momentum_rate(&self, t: usize) -> f32 {
        // SAFETY: `t` is below CHUNK.
        unsafe { *self.scalars.at(2, t) }
    }
}

/// Names some tokens of the key-sized inputs, the values and their gates.
#[inline(always)]
pub(super) fn tokens_ahead<R: Rule>(
    ahead: &mut Ahead,
    inputs: &Inputs<'_>,
    position: usize,
    tokens: usize,
    columns: &Range<usize>,
) {
    let Dims { heads, key, value, .. } = *inputs.dims;
    let decay = if R::MOMENTUM { &[] } else { inputs.decay };
    for from in [inputs.q, inputs.write, inputs.value_key, decay, inputs.read] {
        if !from.is_empty() {
            ahead.name(from.as_ptr().wrapping_add(position * key), heads * key, key, tokens);
        }
    }
    let [rate, decay, momentum] =
        [inputs.rate, inputs.decay, inputs.momentum].map(|gate| if R::COLUMN_GATES { gate } else { &[] });
    for from in [inputs.v, rate, decay, momentum] {
        if !from.is_empty() {
            let first = from.as_ptr().wrapping_add(position * value + columns.start);
            ahead.name(first, heads * value, columns.len(), tokens);
        }
    }
}

/// Fills rows with one number.
///
/// # Safety
/// The CPU supports `L`; the rows are inside the matrix.
#[inline(always)]
pub(super) unsafe fn fill<L: Lanes>(m: Matrix, rows: Range<usize>, x: f32) {
    for i in rows {
        let mut j = 0;
        while j < m.stride {
            // SAFETY: vouched for by the caller.
            unsafe { L::splat(x).store(m.at(i, j)) };
            j += L::COUNT;
        }
    }
}

/// Multiplies rows by one number.
///
/// # Safety
/// As [`fill`].
#[inline(always)]
pub(super) unsafe fn scale_rows<L: Lanes>(m: Matrix, rows: Range<usize>, factor: f32) {
    for i in rows {
        let mut j = 0;
        while j < m.stride {
            // SAFETY: vouched for by the caller.
            unsafe { L::load(m.at(i, j)).mul(L::splat(factor)).store(m.at(i, j)) };
            j += L::COUNT;
        }
    }
}

/// Clears tiny numbers in a token that sweeps.
///
/// The helpers here are functions, not closures: a closure over lanes is compiled for the baseline
/// instruction set and may not be inlined.
#[inline(always)]
pub(super) fn swept<L: Lanes, const SWEEP: bool>(x: L) -> L {
    if SWEEP { x.flush_tiny() } else { x }
}
