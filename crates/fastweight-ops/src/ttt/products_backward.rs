//! The products of the backward pass of a piece, in register tiles.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by row and register")]

use crate::kernel::simd::Lanes;
use crate::kernel::tile::{
    Matrix, ROWS, column_tiles, load, multiply, multiply_transposed, scale_rows, store, store_bounded, zeros,
};

/// Gradients of queries and keys of a piece.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyGradients {
    /// Gradients of the readings of queries and keys, and the weights transposed.
    pub dz: Matrix,
    pub dx: Matrix,
    pub wt: Matrix,
    /// `-eta dz`, and what was gathered before the piece, transposed, if anything.
    pub write: Matrix,
    pub gt: Option<Matrix>,
    /// Inner gradients with the factor of the state's gradient, and that gradient transposed.
    pub u: Matrix,
    pub dt: Matrix,
    /// Gradients of the scores.
    pub dp: Matrix,
    /// Queries, with the factor on them, and keys.
    pub q: Matrix,
    pub k: Matrix,
    /// Gradients of the errors, which see the keys directly.
    pub d_error: Matrix,
    pub scale: f32,
    pub key: usize,
    pub tokens: usize,
    pub rows: usize,
    /// First numbers of the piece in the caller's arrays, and from a token to the next.
    pub to_q: *mut f32,
    pub to_k: *mut f32,
    pub stride: usize,
}

impl KeyGradients {
    /// Writes them to the caller's arrays.
    ///
    /// # Safety
    /// The CPU supports `L`; all cells are inside the matrices and the arrays.
    #[inline(always)]
    pub unsafe fn run<L: Lanes, const WIDE: usize>(&self) {
        let mut row = 0;
        while row < self.rows {
            // SAFETY: vouched for by the caller.
            unsafe {
                column_tiles!(L, WIDE, self.q.stride, key_gradient_tile; row, self);
            }
            row += ROWS;
        }
    }
}

#[inline(always)]
unsafe fn key_gradient_tile<L: Lanes, const N: usize>(column: usize, row: usize, x: &KeyGradients) {
    // SAFETY: called by `KeyGradients::run` on cells inside the matrices.
    unsafe {
        let left = x.key.saturating_sub(column);
        let tokens = x.tokens - row;
        let target = row * x.stride + column;
        let wt = x.wt.at(0, column);

        let mut acc = zeros::<L, N>();
        multiply(&mut acc, x.key, x.dz.at(row, 0), x.dz.stride, wt, x.wt.stride);
        if let Some(gt) = x.gt {
            multiply(&mut acc, x.key, x.write.at(row, 0), x.write.stride, gt.at(0, column), gt.stride);
        }
        multiply(&mut acc, row + ROWS, x.dp.at(row, 0), x.dp.stride, x.k.at(0, column), x.k.stride);
        let scale = [x.scale; ROWS];
        scale_rows(&mut acc, scale.as_ptr());
        store_bounded(&acc, x.to_q.wrapping_add(target), x.stride, tokens, left);

        let mut acc = load::<L, N>(x.d_error.at(row, column), x.d_error.stride);
        multiply(&mut acc, x.key, x.dx.at(row, 0), x.dx.stride, wt, x.wt.stride);
        multiply(&mut acc, x.key, x.u.at(row, 0), x.u.stride, x.dt.at(0, column), x.dt.stride);
        let (dp, q) = (x.dp.at(row, row), x.q.at(row, column));
        multiply_transposed(&mut acc, x.rows - row, dp, x.dp.stride, q, x.q.stride);
        store_bounded(&acc, x.to_k.wrapping_add(target), x.stride, tokens, left);
    }
}

/// `out = factor (A B + bias) + P^T E` over the piece's rows: gradients of the inner gradients.
#[derive(Debug, Clone, Copy)]
pub(super) struct WriteGradients {
    pub k: Matrix,
    pub d: Matrix,
    pub d_bias: Matrix,
    pub factor: f32,
    pub p: Matrix,
    pub write: Matrix,
    pub u: Matrix,
    pub key: usize,
    pub rows: usize,
}

impl WriteGradients {
    /// Writes them to `out`; returns `sum_ij u_ij (K D + bias)_ij`.
    ///
    /// # Safety
    /// The CPU supports `L`; all cells are inside the matrices.
    #[inline(always)]
    pub unsafe fn run<L: Lanes, const WIDE: usize>(&self, out: Matrix) -> f32 {
        // SAFETY: vouched for by the caller.
        let mut sum = unsafe { L::splat(0.0) };
        let mut row = 0;
        while row < self.rows {
            // SAFETY: vouched for by the caller.
            unsafe {
                column_tiles!(L, WIDE, out.stride, write_gradient_tile; row, self, out, &mut sum);
            }
            row += ROWS;
        }
        sum.sum()
    }
}

#[inline(always)]
unsafe fn write_gradient_tile<L: Lanes, const N: usize>(
    column: usize,
    row: usize,
    x: &WriteGradients,
    out: Matrix,
    sum: &mut L,
) {
    // SAFETY: called by `WriteGradients::run` on cells inside the matrices.
    unsafe {
        let mut acc = load::<L, N>(x.d_bias.at(0, column), 0);
        multiply(&mut acc, x.key, x.k.at(row, 0), x.k.stride, x.d.at(0, column), x.d.stride);
        for m in 0..ROWS {
            for n in 0..N {
                *sum = acc[m][n].mul_add(L::load(x.u.at(row + m, column + n * L::COUNT)), *sum);
            }
        }
        let factor = [x.factor; ROWS];
        scale_rows(&mut acc, factor.as_ptr());
        let (p, write) = (x.p.at(row, row), x.write.at(row, column));
        multiply_transposed(&mut acc, x.rows - row, p, x.p.stride, write, x.write.stride);
        store(&acc, out.at(row, column), out.stride);
    }
}
