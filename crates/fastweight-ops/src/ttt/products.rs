//! The products of a piece of a mini-batch, in register tiles.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by row and register")]

use crate::kernel::simd::Lanes;
use crate::kernel::tile::{
    Matrix, ROWS, column_tiles, load, lower_product, multiply, multiply_transposed, store, zeros,
};

use super::plan::PIECE;

/// A product `factor_i (A B + bias)_i` of a piece's rows, `factor` 1 and `bias` zero when absent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Affine {
    pub a: Matrix,
    pub b: Matrix,
    pub bias: Option<Matrix>,
    /// Columns of A.
    pub depth: usize,
    /// Rows of the piece, whole tiles.
    pub rows: usize,
}

impl Affine {
    /// Writes it to `out`.
    ///
    /// # Safety
    /// The CPU supports `L`; all cells are inside the matrices, whose padding B makes zero.
    #[inline(always)]
    pub unsafe fn run<L: Lanes, const WIDE: usize>(&self, out: Matrix) {
        let mut row = 0;
        while row < self.rows {
            // SAFETY: vouched for by the caller.
            unsafe {
                column_tiles!(L, WIDE, out.stride, affine_tile; row, self, out);
            }
            row += ROWS;
        }
    }
}

#[inline(always)]
unsafe fn affine_tile<L: Lanes, const N: usize>(column: usize, row: usize, x: &Affine, out: Matrix) {
    // SAFETY: called by `Affine::run` on cells inside the matrices.
    unsafe {
        let mut acc = match x.bias {
            Some(bias) => load::<L, N>(bias.at(0, column), 0),
            None => zeros::<L, N>(),
        };
        multiply(&mut acc, x.depth, x.a.at(row, 0), x.a.stride, x.b.at(0, column), x.b.stride);
        store(&acc, out.at(row, column), out.stride);
    }
}

/// `P = lower(Q K^T) + 1` on and below the diagonal, zero above it, as far as whole tiles go.
///
/// # Safety
/// The CPU supports `L`; `kt` is K transposed, `triangle` is one on and below the diagonal and zero above.
#[inline(always)]
pub(super) unsafe fn scores<L: Lanes, const WIDE: usize>(
    q: Matrix,
    kt: Matrix,
    p: Matrix,
    triangle: Matrix,
    depth: usize,
    rows: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        lower_product::<L, WIDE>(q, kt, p, depth, rows);
        mask::<L>(p, triangle, 1.0, rows);
    }
}

/// `m <- (m + shift) * triangle`, as far as [`lower_product`] wrote.
///
/// # Safety
/// The CPU supports `L`; both have `rows` rows of [`PIECE`] columns.
#[inline(always)]
pub(super) unsafe fn mask<L: Lanes>(m: Matrix, triangle: Matrix, shift: f32, rows: usize) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let shift = L::splat(shift);
        for i in 0..rows {
            let mut j = 0;
            while j <= i {
                let kept = L::load(m.at(i, j)).add(shift).mul(L::load(triangle.at(i, j)));
                kept.store(m.at(i, j));
                j += L::COUNT;
            }
            // A tile of rows reads up to the tile's last column.
            while j < (i / ROWS + 1) * ROWS {
                L::splat(0.0).store(m.at(i, j));
                j += L::COUNT;
            }
        }
    }
}

/// Fills a triangle of ones for [`scores`].
///
/// # Safety
/// It has [`PIECE`] rows and columns.
#[inline(always)]
pub(super) unsafe fn fill_triangle(triangle: Matrix) {
    for i in 0..PIECE {
        for j in 0..PIECE {
            // SAFETY: vouched for by the caller.
            unsafe { *triangle.at(i, j) = if j <= i { 1.0 } else { 0.0 } };
        }
    }
}

/// Readings of what the mini-batch gathered: `R = P U` (with `Q G + g` when something was gathered before the
/// piece), and `Z <- Z - eta_i R`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Correction {
    pub p: Matrix,
    pub u: Matrix,
    pub q: Matrix,
    pub gathered: Option<(Matrix, Matrix)>,
    pub eta: Matrix,
    pub depth: usize,
    pub rows: usize,
    pub z: Matrix,
}

impl Correction {
    /// Writes R to `out` and updates Z.
    ///
    /// # Safety
    /// The CPU supports `L`; all cells are inside the matrices.
    #[inline(always)]
    pub unsafe fn run<L: Lanes, const WIDE: usize>(&self, out: Matrix) {
        let mut row = 0;
        while row < self.rows {
            // SAFETY: vouched for by the caller.
            unsafe {
                column_tiles!(L, WIDE, out.stride, correction_tile; row, self, out);
            }
            row += ROWS;
        }
    }
}

#[inline(always)]
unsafe fn correction_tile<L: Lanes, const N: usize>(column: usize, row: usize, x: &Correction, out: Matrix) {
    // SAFETY: called by `Correction::run` on cells inside the matrices.
    unsafe {
        let mut acc = zeros::<L, N>();
        if let Some((gathered, bias)) = x.gathered {
            acc = load::<L, N>(bias.at(0, column), 0);
            let g = gathered.at(0, column);
            multiply(&mut acc, x.depth, x.q.at(row, 0), x.q.stride, g, gathered.stride);
        }
        multiply(&mut acc, row + ROWS, x.p.at(row, 0), x.p.stride, x.u.at(0, column), x.u.stride);
        store(&acc, out.at(row, column), out.stride);
        let mut z = load::<L, N>(x.z.at(row, column), x.z.stride);
        for m in 0..ROWS {
            let rate = L::splat(-*x.eta.at(0, row + m));
            for n in 0..N {
                z[m][n] = rate.mul_add(acc[m][n], z[m][n]);
            }
        }
        store(&z, x.z.at(row, column), x.z.stride);
    }
}

/// `M <- keep M + A^T B (+ C^T D)` over the piece's tokens, and the same for the row of the bias with ones in
/// place of A and C.
#[derive(Debug, Clone, Copy)]
pub(super) struct Update {
    /// False starts from zero.
    pub keep: bool,
    pub first: (Matrix, Matrix),
    pub second: Option<(Matrix, Matrix)>,
    pub tokens: usize,
    /// Rows of M.
    pub key: usize,
}

impl Update {
    /// Updates a matrix and its bias row.
    ///
    /// # Safety
    /// The CPU supports `L`; all cells are inside the matrices.
    #[inline(always)]
    pub unsafe fn run<L: Lanes, const WIDE: usize>(&self, m: Matrix, bias: Matrix) {
        let mut row = 0;
        while row < self.key {
            // SAFETY: vouched for by the caller.
            unsafe {
                column_tiles!(L, WIDE, m.stride, update_tile; row, self, m);
            }
            row += ROWS;
        }
        // SAFETY: vouched for by the caller.
        unsafe {
            let mut j = 0;
            while j < bias.stride {
                let mut sum = if self.keep { L::load(bias.at(0, j)) } else { L::splat(0.0) };
                for i in 0..self.tokens {
                    sum = sum.add(L::load(self.first.1.at(i, j)));
                    if let Some((_, d)) = self.second {
                        sum = sum.add(L::load(d.at(i, j)));
                    }
                }
                sum.store(bias.at(0, j));
                j += L::COUNT;
            }
        }
    }
}

#[inline(always)]
unsafe fn update_tile<L: Lanes, const N: usize>(column: usize, row: usize, x: &Update, m: Matrix) {
    // SAFETY: called by `Update::run` on cells inside the matrices.
    unsafe {
        let mut acc = if x.keep { load::<L, N>(m.at(row, column), m.stride) } else { zeros::<L, N>() };
        for (a, b) in [Some(x.first), x.second].into_iter().flatten() {
            multiply_transposed(&mut acc, x.tokens, a.at(0, row), a.stride, b.at(0, column), b.stride);
        }
        store(&acc, m.at(row, column), m.stride);
    }
}

/// `M <- M + factor X` over `rows` rows.
///
/// # Safety
/// The CPU supports `L`; both have that many rows, of the same width.
#[inline(always)]
pub(super) unsafe fn add_scaled<L: Lanes>(m: Matrix, factor: f32, x: Matrix, rows: usize) {
    let mut i = 0;
    while i < rows * m.stride {
        // SAFETY: vouched for by the caller; rows lie one behind the other.
        unsafe {
            let to = m.start.add(i);
            L::splat(factor).mul_add(L::load(x.start.add(i)), L::load(to)).store(to);
        }
        i += L::COUNT;
    }
}

/// `to = factor M` over `rows` rows; `to` may be `m`.
///
/// # Safety
/// As [`add_scaled`].
#[inline(always)]
pub(super) unsafe fn scaled<L: Lanes>(m: Matrix, factor: f32, to: Matrix, rows: usize) {
    let mut i = 0;
    while i < rows * m.stride {
        // SAFETY: vouched for by the caller; rows lie one behind the other.
        unsafe { L::load(m.start.add(i)).mul(L::splat(factor)).store(to.start.add(i)) };
        i += L::COUNT;
    }
}

/// `sum_ij a_ij b_ij` over `rows` rows.
///
/// # Safety
/// As [`add_scaled`].
#[inline(always)]
pub(super) unsafe fn inner_product<L: Lanes>(a: Matrix, b: Matrix, rows: usize) -> f32 {
    // SAFETY: vouched for by the caller; rows lie one behind the other.
    unsafe {
        let mut sum = L::splat(0.0);
        let mut i = 0;
        while i < rows * a.stride {
            sum = L::load(a.start.add(i)).mul_add(L::load(b.start.add(i)), sum);
            i += L::COUNT;
        }
        sum.sum()
    }
}
