//! Register-tile bodies of the [forward pass](super::forward).

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by row and register")]

use super::forward::Workspace;
use super::gates::Decays;
use super::memory::Rule;
use super::simd::Lanes;
use super::tile::{ROWS, load, multiply, multiply_transposed, scale_rows, store, store_bounded, zeros};

/// A chunk in progress.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    pub w: Workspace,
    pub decays: Decays,
    pub tokens: usize,
    pub key: usize,
    /// Value columns of the task.
    pub columns: usize,
    /// First output number of the chunk, and the same place among the saved rows, if any.
    pub o: *mut f32,
    pub saved_row: Option<*mut f32>,
    /// From a token to the next in `v` and `o`.
    pub stride: usize,
}

/// Writes and outputs of [`ROWS`] tokens.
///
/// # Safety
/// The CPU supports `L`; rows and columns are inside the matrices.
#[inline(always)]
pub(super) unsafe fn output_rows<L: Lanes, const N: usize, R: Rule>(column: usize, row: usize, c: &Chunk) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let w = &c.w;
        let left = c.columns.saturating_sub(column);
        let tokens = c.tokens - row;
        if R::DELTA {
            let mut acc = zeros::<L, N>();
            multiply(&mut acc, c.key, w.k.at(row, 0), w.k.stride, w.s.at(0, column), w.s.stride);
            for (m, registers) in acc.iter_mut().enumerate() {
                let decay = L::splat(-*c.decays.since_start(row + m));
                for (n, register) in registers.iter_mut().enumerate() {
                    *register = register.mul_add(decay, L::load(w.v.at(row + m, column + n * L::COUNT)));
                }
            }
            multiply(&mut acc, row, w.a.at(row, 0), w.a.stride, w.u.at(0, column), w.u.stride);
            let mut u = acc;
            for m in 0..ROWS {
                for l in 0..m {
                    let factor = L::splat(*w.a.at(row + m, row + l));
                    for n in 0..N {
                        acc[m][n] = factor.mul_add(u[l][n], acc[m][n]);
                    }
                }
                let beta = L::splat(*w.beta.at(0, row + m));
                for n in 0..N {
                    u[m][n] = acc[m][n].mul(beta);
                }
            }
            store(&u, w.u.at(row, column), w.u.stride);
            if let Some(saved) = c.saved_row {
                store_bounded(&acc, saved.add(row * c.stride + column), c.stride, tokens, left);
            }
            scale_rows(&mut u, c.decays.until_end(row));
            store(&u, w.u_end.at(row, column), w.u_end.stride);
        }
        let mut acc = zeros::<L, N>();
        multiply(&mut acc, c.key, w.q.at(row, 0), w.q.stride, w.s.at(0, column), w.s.stride);
        scale_rows(&mut acc, c.decays.since_start(row));
        multiply(&mut acc, row + ROWS, w.p.at(row, 0), w.p.stride, w.u.at(0, column), w.u.stride);
        scale_rows(&mut acc, w.out_scale.at(0, row));
        store_bounded(&acc, c.o.add(row * c.stride + column), c.stride, tokens, left);
    }
}

/// [`ROWS`] rows of the state at the chunk's end.
///
/// # Safety
/// As [`output_rows`].
#[inline(always)]
pub(super) unsafe fn state_rows<L: Lanes, const N: usize>(column: usize, row: usize, c: &Chunk) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let w = &c.w;
        let mut acc = load::<L, N>(w.s.at(row, column), w.s.stride);
        let total = L::splat(c.decays.total);
        for register in acc.iter_mut().flatten() {
            *register = register.mul(total);
        }
        let (k, u) = (w.k.at(0, row), w.u_end.at(0, column));
        multiply_transposed(&mut acc, c.tokens, k, w.k.stride, u, w.u_end.stride);
        store(&acc, w.s.at(row, column), w.s.stride);
    }
}
