//! What the matrix-memory operators share: inputs, rules, and the pieces of a chunk both passes need.

use super::dims::Dims;
use super::gates::{CHUNK, Decays, Gate};
use super::plan::Task;
use super::simd::Lanes;
use super::tile::{Matrix, copy_in, load_some, lower_product};

/// Added to the denominator of the normalised memory.
pub const EPSILON: f32 = 1e-6;

/// Which rule writes the memory; all of them decay it first and read it after the write.
pub trait Rule: Copy + Send + Sync + 'static {
    /// Writes `beta (v - S^T k)` instead of `v`.
    const DELTA: bool;
    /// Maps q and k by `elu + 1` and divides the reading by `q . z + eps`.
    const NORMALISED: bool;
}

/// `S <- S + k (beta (v - S^T k))^T`.
#[derive(Debug, Clone, Copy)]
pub struct Delta;

/// `S <- S + k v^T`.
#[derive(Debug, Clone, Copy)]
pub struct Additive;

/// `S <- S + phi(k) v^T`, `z <- z + phi(k)`, `phi = elu + 1`.
#[derive(Debug, Clone, Copy)]
pub struct Normalised;

impl Rule for Delta {
    const DELTA: bool = true;
    const NORMALISED: bool = false;
}

impl Rule for Additive {
    const DELTA: bool = false;
    const NORMALISED: bool = false;
}

impl Rule for Normalised {
    const DELTA: bool = false;
    const NORMALISED: bool = true;
}

/// Inputs of a matrix memory, contiguous.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Sizes.
    pub dims: &'a Dims,
    /// `[batch, time, heads, key]`.
    pub q: &'a [f32],
    /// `[batch, time, heads, key]`.
    pub k: &'a [f32],
    /// `[batch, time, heads, value]`.
    pub v: &'a [f32],
    /// `[batch, time, heads]`; empty unless the rule is [`Delta`].
    pub beta: &'a [f32],
    /// Log gates.
    pub gate: Gate<'a>,
    /// Initial states `[sequences, heads, key, value]`.
    pub state: &'a [f32],
    /// Initial normalisers `[sequences, heads, key]`; empty unless the rule is [`Normalised`].
    pub normaliser: &'a [f32],
}

impl Inputs<'_> {
    /// Tokens times heads.
    pub fn token_heads(&self) -> usize {
        self.dims.batch * self.dims.time * self.dims.heads
    }

    /// Numbers in all states.
    pub fn state_len(&self) -> usize {
        self.dims.states() * self.dims.heads * self.dims.key * self.dims.value
    }

    /// Numbers in all normalisers.
    pub fn normaliser_len(&self) -> usize {
        self.dims.states() * self.dims.heads * self.dims.key
    }

    /// The kernels read through raw pointers; they rely on these lengths.
    ///
    /// # Panics
    /// When a slice does not have the length that the sizes say.
    pub fn check<R: Rule>(&self) {
        let d = self.dims;
        let token_heads = self.token_heads();
        assert_eq!(self.q.len(), token_heads * d.key, "length of q");
        assert_eq!(self.k.len(), token_heads * d.key, "length of k");
        assert_eq!(self.v.len(), token_heads * d.value, "length of v");
        assert_eq!(self.beta.len(), if R::DELTA { token_heads } else { 0 }, "length of beta");
        match self.gate {
            Gate::None => {}
            Gate::PerHead(gates) => assert_eq!(gates.len(), d.heads, "length of the gate"),
            Gate::PerToken(gates) => assert_eq!(gates.len(), token_heads, "length of the gate"),
        }
        assert_eq!(self.state.len(), self.state_len(), "length of the state");
        let normaliser = if R::NORMALISED { self.normaliser_len() } else { 0 };
        assert_eq!(self.normaliser.len(), normaliser, "length of the normaliser");
        if let Some(offsets) = &d.offsets {
            assert!(d.batch == 1 && offsets.time() == d.time, "offsets cut the one row");
        }
    }
}

/// Where a chunk lies in the arrays of the caller.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Tokens, at most [`CHUNK`].
    pub tokens: usize,
    /// Tokens rounded up to whole register tiles.
    pub rows: usize,
    /// Flat position of its first token in `[batch, time, heads]`; the next one is `heads` further.
    pub position: usize,
}

impl Place {
    /// The `index`-th chunk of a task.
    #[inline(always)]
    pub fn new(task: &Task, heads: usize, index: usize) -> Self {
        let tokens = (task.tokens - index * CHUNK).min(CHUNK);
        Self {
            tokens,
            rows: tokens.next_multiple_of(super::tile::ROWS),
            position: (task.first_token + index * CHUNK) * heads + task.head,
        }
    }
}

/// `elu(x) + 1` lane by lane.
#[inline(always)]
fn elu_plus_one<L: Lanes>(x: L) -> L {
    let zero = x.same(0.0);
    zero.max(x).add(zero.min(x).exp())
}

/// As [`copy_in`], each number mapped by `elu + 1`; padding is zero.
///
/// # Safety
/// As [`copy_in`].
#[inline(always)]
pub unsafe fn copy_mapped<L: Lanes>(
    to: Matrix,
    padded_rows: usize,
    from: *const f32,
    from_stride: usize,
    rows: usize,
    columns: usize,
) {
    // SAFETY: vouched for by the caller; the rows of the matrix are padded to whole registers.
    unsafe {
        for i in 0..padded_rows {
            let mut j = 0;
            while j < to.stride {
                let left = if i < rows { columns.saturating_sub(j) } else { 0 };
                let at = to.at(i, j);
                if left > 0 {
                    let x = load_some::<L>(from.add(i * from_stride + j), left);
                    let mapped = elu_plus_one(x);
                    if left >= L::COUNT {
                        mapped.store(at);
                    } else {
                        x.same(0.0).store(at);
                        mapped.store_partial(at, left);
                    }
                } else {
                    L::splat(0.0).store(at);
                }
                j += L::COUNT;
            }
        }
    }
}

/// Copies a chunk's q or k into a matrix, mapped if the rule says so.
///
/// # Safety
/// The CPU supports `L`; `from` is the array `[batch, time, heads, key]`, `to` has [`CHUNK`] rows.
#[inline(always)]
pub unsafe fn load_keys<L: Lanes, R: Rule>(to: Matrix, from: &[f32], place: Place, dims: &Dims) {
    // SAFETY: `place` is inside the array, whose length was checked.
    unsafe {
        let start = from.as_ptr().add(place.position * dims.key);
        if R::NORMALISED {
            copy_mapped::<L>(to, CHUNK, start, dims.heads * dims.key, place.tokens, dims.key);
        } else {
            copy_in::<L>(to, CHUNK, start, dims.heads * dims.key, place.tokens, dims.key);
        }
    }
}

/// Scores of a chunk: `P = (Q K^T) * decay` on and below the diagonal, zero above, and for the delta rule
/// `A = -(K K^T) * decay`, meant strictly below it (its diagonal is not read).
///
/// Writes the decays to `decay` when that is given.
///
/// # Safety
/// The CPU supports `L`; all matrices have [`CHUNK`] rows, `kt` is K transposed.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub unsafe fn scores<L: Lanes, const WIDE: usize, R: Rule>(
    q: Matrix,
    k: Matrix,
    kt: Matrix,
    p: Matrix,
    a: Matrix,
    decay: Option<Matrix>,
    decays: Decays,
    depth: usize,
    rows: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        lower_product::<L, WIDE>(q, kt, p, depth, rows);
        if R::DELTA {
            lower_product::<L, WIDE>(k, kt, a, depth, rows);
        }
        for i in 0..rows {
            let mut j = 0;
            while j <= i {
                let between = decays.between::<L>(i, j);
                L::load(p.at(i, j)).mul(between).store(p.at(i, j));
                if R::DELTA {
                    let negative = between.same(0.0).sub(between);
                    L::load(a.at(i, j)).mul(negative).store(a.at(i, j));
                }
                if let Some(decay) = decay {
                    between.store(decay.at(i, j));
                }
                j += L::COUNT;
            }
        }
    }
}

/// Denominators `phi(q_i) . z_i + eps` of a chunk, from the normaliser `z` at its start.
///
/// # Safety
/// The CPU supports `L`; `p` holds the chunk's scores, `z` is one padded row, `out` has `rows` numbers.
#[inline(always)]
pub unsafe fn denominators<L: Lanes>(
    q: Matrix,
    p: Matrix,
    z: Matrix,
    decays: Decays,
    rows: usize,
    out: *mut f32,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        for i in 0..rows {
            let mut from_state = L::splat(0.0);
            let mut j = 0;
            while j < z.stride {
                from_state = L::load(q.at(i, j)).mul_add(L::load(z.at(0, j)), from_state);
                j += L::COUNT;
            }
            let mut in_chunk = L::splat(0.0);
            let mut j = 0;
            while j <= i {
                in_chunk = in_chunk.add(L::load(p.at(i, j)));
                j += L::COUNT;
            }
            *out.add(i) = *decays.since_start(i) * from_state.sum() + in_chunk.sum() + EPSILON;
        }
    }
}

/// `row <- total * row + sum_i weights_i m_i` over the first `rows` rows of `m`.
///
/// # Safety
/// The CPU supports `L`; `row` is as wide as `m`, `weights` has `rows` numbers.
#[inline(always)]
pub unsafe fn add_weighted_rows<L: Lanes>(
    row: Matrix,
    total: f32,
    m: Matrix,
    weights: *const f32,
    rows: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let mut j = 0;
        while j < row.stride {
            let mut sum = L::load(row.at(0, j)).mul(L::splat(total));
            for i in 0..rows {
                sum = L::splat(*weights.add(i)).mul_add(L::load(m.at(i, j)), sum);
            }
            sum.store(row.at(0, j));
            j += L::COUNT;
        }
    }
}

/// Chunks between two sweeps of [`flush`].
const FLUSH_PERIOD: usize = 8;

/// Clears what decayed to almost nothing, every few chunks, before it turns denormal.
///
/// # Safety
/// The CPU supports `L`; the matrix has `rows` rows.
#[inline(always)]
pub unsafe fn flush<L: Lanes>(matrix: Matrix, rows: usize, chunk: usize) {
    if !chunk.is_multiple_of(FLUSH_PERIOD) {
        return;
    }
    for i in 0..rows {
        let mut j = 0;
        while j < matrix.stride {
            // SAFETY: vouched for by the caller.
            unsafe { L::load(matrix.at(i, j)).flush_tiny().store(matrix.at(i, j)) };
            j += L::COUNT;
        }
    }
}
