//! Register-tile bodies of the [backward pass](super::backward).

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by row and register")]

use super::backward::Workspace;
use super::gates::Decays;
use super::memory::Rule;
use super::simd::Lanes;
use super::tile::{
    ROWS, column_tiles, load, multiply, multiply_transposed, scale_rows, store, store_bounded, zeros,
};

/// A chunk in progress.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    pub w: Workspace,
    pub decays: Decays,
    pub tokens: usize,
    /// Tokens rounded up to whole tiles.
    pub rows: usize,
    pub key: usize,
    /// Value columns of the task.
    pub columns: usize,
    /// Gradients of the chunk's first values; the next token is `stride` further.
    pub dv: *mut f32,
    pub stride: usize,
}

/// Gradients of the writes and of the values of [`ROWS`] tokens; those of later tokens are there.
///
/// # Safety
/// The CPU supports `L`; rows and columns are inside the matrices.
#[inline(always)]
pub(super) unsafe fn write_rows<L: Lanes, const N: usize, R: Rule>(column: usize, row: usize, c: &Chunk) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let w = &c.w;
        let mut acc = zeros::<L, N>();
        multiply(&mut acc, c.key, w.k.at(row, 0), w.k.stride, w.ds.at(0, column), w.ds.stride);
        scale_rows(&mut acc, c.decays.until_end(row));
        let (p, d_o) = (w.p.at(row, row), w.d_o.at(row, column));
        multiply_transposed(&mut acc, c.rows - row, p, w.p.stride, d_o, w.d_o.stride);
        let target = c.dv.wrapping_add(row * c.stride + column);
        let (tokens, left) = (c.tokens - row, c.columns.saturating_sub(column));
        if !R::DELTA {
            store_bounded(&acc, target, c.stride, tokens, left);
            return;
        }
        let next = row + ROWS;
        let (a, later) = (w.a.start.wrapping_add(next * w.a.stride + row), w.dv.start);
        let later = later.wrapping_add(next * w.dv.stride + column);
        multiply_transposed(&mut acc, c.rows - next, a, w.a.stride, later, w.dv.stride);
        let mut dv = acc;
        let mut dv_start = acc;
        for m in (0..ROWS).rev() {
            for l in m + 1..ROWS {
                let factor = L::splat(*w.a.at(row + l, row + m));
                for n in 0..N {
                    acc[m][n] = factor.mul_add(dv[l][n], acc[m][n]);
                }
            }
            let beta = L::splat(*w.beta.at(0, row + m));
            let decay = L::splat(-*c.decays.since_start(row + m));
            for n in 0..N {
                dv[m][n] = acc[m][n].mul(beta);
                dv_start[m][n] = dv[m][n].mul(decay);
            }
        }
        store(&acc, w.d_error.at(row, column), w.d_error.stride);
        store(&dv, w.dv.at(row, column), w.dv.stride);
        store_bounded(&dv, target, c.stride, tokens, left);
        store(&dv_start, w.dv_start.at(row, column), w.dv_start.stride);
    }
}

/// Gradients of the denominators, from the factors `1 / denominator` in their place: minus the factor times
/// `do_i . o_i = q_i . (S do_i) + sum_{j<=i} P_ij (do_i . u_j)`, where `do` has the factor and `G` is `do u^T`.
///
/// Leaves `S do_i`, decayed from the chunk's start, in `dq`.
///
/// # Safety
/// The CPU supports `L`; the matrices hold the chunk.
#[inline(always)]
pub(super) unsafe fn denominator_gradients<L: Lanes, const WIDE: usize>(c: &Chunk) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let w = &c.w;
        let mut row = 0;
        while row < c.rows {
            let mut sums = [L::splat(0.0); ROWS];
            column_tiles!(L, WIDE, w.q.stride, reading_rows; row, c, &mut sums);
            for m in 0..ROWS {
                let i = row + m;
                let mut sum = sums[m];
                let mut j = 0;
                while j <= i {
                    sum = L::load(w.p.at(i, j)).mul_add(L::load(w.g.at(i, j)), sum);
                    j += L::COUNT;
                }
                let d_denominator = -*w.d_denominator.at(0, i) * sum.sum();
                *w.d_denominator.at(0, i) = d_denominator;
                *w.d_denominator.at(1, i) = d_denominator * *c.decays.since_start(i);
            }
            row += ROWS;
        }
    }
}

/// `S do_i` of [`ROWS`] tokens, and its products with their queries.
#[inline(always)]
unsafe fn reading_rows<L: Lanes, const N: usize>(column: usize, row: usize, c: &Chunk, sums: &mut [L; ROWS]) {
    // SAFETY: called on rows and columns inside the matrices.
    unsafe {
        let w = &c.w;
        let mut acc = zeros::<L, N>();
        let (d_o, st) = (w.d_o_start.at(row, 0), w.st.at(0, column));
        multiply(&mut acc, c.columns, d_o, w.d_o_start.stride, st, w.st.stride);
        store(&acc, w.dq.at(row, column), w.dq.stride);
        add_row_products(sums, &load::<L, N>(w.q.at(row, column), w.q.stride), &acc);
    }
}

/// Gradients of q and k of [`ROWS`] tokens, and what they add to the gradients of the gates.
///
/// # Safety
/// The CPU supports `L`; rows and columns are inside the matrices; `dq` and `dk` are the chunk's first
/// tokens in arrays with `stride` from a token to the next.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn key_rows<L: Lanes, const N: usize, R: Rule>(
    column: usize,
    row: usize,
    c: &Chunk,
    dq: *mut f32,
    dk: *mut f32,
    stride: usize,
    from_state: &mut [L; ROWS],
    to_state: &mut [L; ROWS],
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let w = &c.w;
        let q = load::<L, N>(w.q.at(row, column), w.q.stride);
        let k = load::<L, N>(w.k.at(row, column), w.k.stride);
        let left = c.key.saturating_sub(column);
        let tokens = c.tokens - row;
        let target = row * stride + column;

        let mut acc = zeros::<L, N>();
        let st = w.st.at(0, column);
        if R::NORMALISED {
            acc = load(w.dq.at(row, column), w.dq.stride);
            add_outer(&mut acc, w.d_denominator.at(1, row), w.z.at(0, column));
        } else {
            multiply(&mut acc, c.columns, w.d_o_start.at(row, 0), w.d_o_start.stride, st, w.st.stride);
        }
        add_row_products(from_state, &q, &acc);
        let (g, keys) = (w.g.at(row, 0), w.k.at(0, column));
        multiply(&mut acc, row + ROWS, g, w.g.stride, keys, w.k.stride);
        if R::NORMALISED {
            multiply_by_slope(&mut acc, &q);
        }
        store_bounded(&acc, dq.wrapping_add(target), stride, tokens, left);

        // Through the keys as readers of the state and of earlier writes.
        let mut reading = zeros::<L, N>();
        if R::DELTA {
            multiply(&mut reading, c.columns, w.dv_start.at(row, 0), w.dv_start.stride, st, w.st.stride);
            add_row_products(from_state, &k, &reading);
            multiply(&mut reading, row + ROWS, w.h.at(row, 0), w.h.stride, keys, w.k.stride);
        }

        // Through the keys as what is written: to the final state, to later readings.
        let mut acc = zeros::<L, N>();
        let dst = w.dst.at(0, column);
        multiply(&mut acc, c.columns, w.u.at(row, 0), w.u.stride, dst, w.dst.stride);
        if R::NORMALISED {
            let one = [1f32; ROWS];
            add_outer(&mut acc, one.as_ptr(), w.dz.at(0, column));
        }
        scale_rows(&mut acc, c.decays.until_end(row));
        add_row_products(to_state, &k, &acc);
        let depth = c.rows - row;
        multiply_transposed(&mut acc, depth, w.g.at(row, row), w.g.stride, w.q.at(row, column), w.q.stride);
        if R::DELTA {
            let keys = w.k.at(row, column);
            multiply_transposed(&mut acc, depth, w.h.at(row, row), w.h.stride, keys, w.k.stride);
            for m in 0..ROWS {
                for n in 0..N {
                    acc[m][n] = acc[m][n].add(reading[m][n]);
                }
            }
        }
        if R::NORMALISED {
            multiply_by_slope(&mut acc, &k);
        }
        store_bounded(&acc, dk.wrapping_add(target), stride, tokens, left);
    }
}

/// [`ROWS`] rows of the gradient of the state at the chunk's start, over that at its end.
///
/// # Safety
/// The CPU supports `L`; rows and columns are inside the matrices.
#[inline(always)]
pub(super) unsafe fn state_rows<L: Lanes, const N: usize, R: Rule>(column: usize, row: usize, c: &Chunk) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let w = &c.w;
        let mut acc = load::<L, N>(w.ds.at(row, column), w.ds.stride);
        let total = L::splat(c.decays.total);
        for register in acc.iter_mut().flatten() {
            *register = register.mul(total);
        }
        let d_o = w.d_o_start.at(0, column);
        multiply_transposed(&mut acc, c.tokens, w.q.at(0, row), w.q.stride, d_o, w.d_o_start.stride);
        if R::DELTA {
            let dv = w.dv_start.at(0, column);
            multiply_transposed(&mut acc, c.tokens, w.k.at(0, row), w.k.stride, dv, w.dv_start.stride);
        }
        store(&acc, w.ds.at(row, column), w.ds.stride);
    }
}

/// `acc[m] += factors[m] * row`.
#[inline(always)]
unsafe fn add_outer<L: Lanes, const N: usize>(
    acc: &mut [[L; N]; ROWS],
    factors: *const f32,
    row: *const f32,
) {
    for m in 0..ROWS {
        for n in 0..N {
            // SAFETY: the caller passes ROWS factors and a padded row.
            unsafe {
                let factor = L::splat(*factors.add(m));
                acc[m][n] = factor.mul_add(L::load(row.add(n * L::COUNT)), acc[m][n]);
            }
        }
    }
}

#[inline(always)]
fn add_row_products<L: Lanes, const N: usize>(sums: &mut [L; ROWS], x: &[[L; N]; ROWS], y: &[[L; N]; ROWS]) {
    for m in 0..ROWS {
        for n in 0..N {
            sums[m] = x[m][n].mul_add(y[m][n], sums[m]);
        }
    }
}

/// Times the slope of `elu + 1`, which is the mapped value itself below zero (where it is under one).
#[inline(always)]
fn multiply_by_slope<L: Lanes, const N: usize>(acc: &mut [[L; N]; ROWS], mapped: &[[L; N]; ROWS]) {
    for m in 0..ROWS {
        for n in 0..N {
            acc[m][n] = acc[m][n].mul(mapped[m][n].min(mapped[m][n].same(1.0)));
        }
    }
}
