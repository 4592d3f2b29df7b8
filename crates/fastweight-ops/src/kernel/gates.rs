//! Decays of a chunk from its log gates.

use super::simd::{EXP_FLOOR, Lanes};
use super::tile::Matrix;

/// Tokens of a chunk.
pub const CHUNK: usize = 32;

/// Decays from tokens before this one to itself or later ones are products of two, which take a few exponentials for
/// each chunk in place of one for each pair.
const MIDDLE: usize = CHUNK / 2;

/// Exponent taken off once for every reset between two tokens; far below [`EXP_FLOOR`], so the decay
/// across a reset is exactly zero.
const RESET: f32 = 1024.0;

/// Where the log gates of a head come from.
#[derive(Debug, Clone, Copy)]
pub enum Gate<'a> {
    /// No decay.
    None,
    /// `[heads]`: one log decay for all tokens of a head.
    PerHead(&'a [f32]),
    /// `[batch, time, heads]`.
    PerToken(&'a [f32]),
}

impl Gate<'_> {
    /// The log gate at a flat position of `[batch, time, heads]`.
    #[inline(always)]
    pub fn at(self, position: usize, head: usize) -> f32 {
        match self {
            Gate::None => 0.0,
            Gate::PerHead(gates) => gates[head],
            Gate::PerToken(gates) => gates[position],
        }
    }

    /// Whether there is any decay.
    #[inline(always)]
    pub fn is_some(self) -> bool {
        !matches!(self, Gate::None)
    }
}

/// Whether a log gate forgets everything: its exponential is taken as zero. Covers minus infinity.
#[inline(always)]
pub fn is_reset(gate: f32) -> bool {
    gate < EXP_FLOOR
}

/// Decays inside a chunk of [`CHUNK`] tokens.
///
/// Cumulative logs run in float64 and are kept as two float32 parts, because `c_i - c_j` between weak
/// gates must stay exact after strong ones. A reset adds nothing to the sum; the number of resets so far
/// is kept beside it, and two tokens with a reset between them have decay zero.
#[derive(Debug, Clone, Copy)]
pub struct Decays {
    /// Rows: high part, low part, resets, index, decay from the chunk's start, decay to its end, and between the token
    /// and the last one before [`MIDDLE`], whichever comes first.
    rows: Matrix,
    gated: bool,
    /// Decay over the whole chunk.
    pub total: f32,
}

impl Decays {
    /// Rows of [`CHUNK`] numbers that it needs.
    pub const ROWS: usize = 7;

    /// Reads the gates of `tokens` tokens, the first at flat position `position`, `heads` apart.
    ///
    /// # Safety
    /// The CPU supports `L`; `rows` has [`Self::ROWS`] rows of [`CHUNK`] numbers.
    #[inline(always)]
    pub unsafe fn new<L: Lanes>(
        rows: Matrix,
        gate: Gate<'_>,
        position: usize,
        heads: usize,
        head: usize,
        tokens: usize,
    ) -> Self {
        // SAFETY: indices below CHUNK in rows that the caller vouches for.
        unsafe {
            let (high, low, resets) = (rows.at(0, 0), rows.at(1, 0), rows.at(2, 0));
            let (index, from_start, to_end, across) =
                (rows.at(3, 0), rows.at(4, 0), rows.at(5, 0), rows.at(6, 0));
            let (mut sum, mut count) = (0f64, 0f32);
            for i in 0..CHUNK {
                if i < tokens {
                    let g = gate.at(position + i * heads, head);
                    if is_reset(g) {
                        count += 1.0;
                    } else {
                        sum += f64::from(g);
                    }
                }
                let c = sum as f32;
                *high.add(i) = c;
                *low.add(i) = (sum - f64::from(c)) as f32;
                *resets.add(i) = count * RESET;
                *index.add(i) = i as f32;
            }
            let last = CHUNK - 1;
            let (last_high, last_low) = (L::splat(*high.add(last)), L::splat(*low.add(last)));
            let last_resets = L::splat(*resets.add(last));
            let mut j = 0;
            while j < CHUNK {
                let (h, l, r) = (L::load(high.add(j)), L::load(low.add(j)), L::load(resets.add(j)));
                h.add(l).sub(r).exp().store(from_start.add(j));
                let left = last_high.sub(h).add(last_low.sub(l)).sub(last_resets.sub(r));
                left.exp().store(to_end.add(j));
                j += L::COUNT;
            }
            let middle = MIDDLE - 1;
            let (mid_high, mid_low) = (L::splat(*high.add(middle)), L::splat(*low.add(middle)));
            let mid_resets = L::splat(*resets.add(middle));
            let mut j = 0;
            while gate.is_some() && j < CHUNK {
                let sign = L::splat(if j < MIDDLE { 1.0 } else { -1.0 });
                let high = mid_high.sub(L::load(high.add(j)));
                let low = mid_low.sub(L::load(low.add(j)));
                let resets = mid_resets.sub(L::load(resets.add(j)));
                high.add(low).sub(resets).mul(sign).exp().store(across.add(j));
                j += L::COUNT;
            }
            Self { rows, gated: gate.is_some(), total: *from_start.add(last) }
        }
    }

    /// `exp(c_i)` of each token: decay since the chunk's start, the token's own gate included.
    ///
    /// # Safety
    /// `i < CHUNK`.
    #[inline(always)]
    pub unsafe fn since_start(self, i: usize) -> *const f32 {
        // SAFETY: vouched for by the caller.
        unsafe { self.rows.at(4, i) }
    }

    /// `exp(c_last - c_i)` of each token: decay until the chunk's end, the token's own gate excluded.
    ///
    /// # Safety
    /// `i < CHUNK`.
    #[inline(always)]
    pub unsafe fn until_end(self, i: usize) -> *const f32 {
        // SAFETY: vouched for by the caller.
        unsafe { self.rows.at(5, i) }
    }

    /// Decays from the tokens `j, j + 1, ..` to the token `i`; zero where they come after it.
    ///
    /// # Safety
    /// The CPU supports `L`; `i` and the lanes from `j` are below [`CHUNK`].
    #[inline(always)]
    pub unsafe fn between<L: Lanes>(self, i: usize, j: usize) -> L {
        // SAFETY: vouched for by the caller.
        unsafe {
            if self.gated && j + L::COUNT <= MIDDLE && i >= MIDDLE {
                let value = L::splat(*self.rows.at(6, i)).mul(L::load(self.rows.at(6, j)));
                return value.flush_tiny();
            }
            let value = if self.gated {
                let high = L::splat(*self.rows.at(0, i)).sub(L::load(self.rows.at(0, j)));
                let low = L::splat(*self.rows.at(1, i)).sub(L::load(self.rows.at(1, j)));
                let resets = L::splat(*self.rows.at(2, i)).sub(L::load(self.rows.at(2, j)));
                high.add(low).sub(resets).exp()
            } else {
                L::splat(1.0)
            };
            value.zero_where_below(L::splat(i as f32), L::load(self.rows.at(3, j)))
        }
    }

    /// `x` in the lanes of the tokens from `j` that come before the token `i`, zero in the others.
    ///
    /// # Safety
    /// `i` and the lanes from `j` are below [`CHUNK`].
    #[inline(always)]
    pub unsafe fn only_before<L: Lanes>(self, i: usize, j: usize, x: L) -> L {
        // SAFETY: vouched for by the caller.
        unsafe { x.zero_where_below(x.same(i as f32 - 0.5), L::load(self.rows.at(3, j))) }
    }
}

/// Gradients of the log gates of a chunk, written over `by_row`.
///
/// `by_row[i]` gathers what depends on the cumulative log `c_i` inside the chunk, `to_state[i]` the part
/// of the final state's gradient that token `i` wrote, and `through` the part that passed the whole chunk.
/// `g_t` enters `c_i` for `i >= t`, and the decay of what was written before `t`.
///
/// # Safety
/// `tokens` numbers are readable in both arrays and writable in `by_row`.
#[inline(always)]
pub unsafe fn gate_gradients(by_row: *mut f32, to_state: *const f32, through: f32, tokens: usize) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let mut suffix = 0.0;
        for t in (0..tokens).rev() {
            suffix += *by_row.add(t);
            *by_row.add(t) = suffix;
        }
        let mut prefix = through;
        for t in 0..tokens {
            *by_row.add(t) += prefix;
            prefix += *to_state.add(t);
        }
    }
}
