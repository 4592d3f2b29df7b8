//! Register tiles of the softmax kernels: every product is a broadcast `a(row, p)` times a row of `b`.

use crate::kernel::simd::Lanes;

/// A matrix read one number at a time, with any strides.
#[derive(Clone, Copy)]
pub(super) struct Factor {
    pub at: *const f32,
    /// From one row of the product to the next.
    pub row: usize,
    /// From one term of the sum to the next.
    pub term: usize,
}

/// A matrix read by registers, its rows contiguous.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub at: *const f32,
    pub stride: usize,
}

/// What surrounds a product: the number that a sum starts from and what becomes of the sum.
pub(super) trait Around<L: Lanes> {
    /// The start of the sum at `(row, column)`.
    unsafe fn start(&self, row: usize, column: usize) -> L;
    /// Takes the finished sum at `(row, column)`.
    unsafe fn finish(&self, row: usize, column: usize, sum: L);
}

/// `sum_p a(row, p) b[p][column]` for all rows and columns; columns are a multiple of the lanes.
///
/// # Safety
/// The CPU supports the instruction set of `L`; both matrices are readable over `depth` terms.
#[inline(always)]
pub(super) unsafe fn product<L: Lanes, const WIDE: usize>(
    (rows, columns, depth): (usize, usize, usize),
    a: Factor,
    b: Rows,
    around: &impl Around<L>,
) {
    let mut row = 0;
    while row < rows {
        // SAFETY: strips stay inside the rows that the caller vouches for.
        unsafe {
            if row + 4 <= rows {
                strip::<L, 4, WIDE>((row, columns, depth), a, b, around);
                row += 4;
            } else {
                strip::<L, 1, WIDE>((row, columns, depth), a, b, around);
                row += 1;
            }
        }
    }
}

/// `M` rows of a product.
#[inline(always)]
unsafe fn strip<L: Lanes, const M: usize, const WIDE: usize>(
    (row, columns, depth): (usize, usize, usize),
    a: Factor,
    b: Rows,
    around: &impl Around<L>,
) {
    let mut column = 0;
    // SAFETY: tiles stay inside the columns that the caller of `product` vouches for.
    unsafe {
        while column + WIDE * L::COUNT <= columns {
            tile::<L, M, WIDE>((row, column, depth), a, b, around);
            column += WIDE * L::COUNT;
        }
        while WIDE > 2 && column + 2 * L::COUNT <= columns {
            tile::<L, M, 2>((row, column, depth), a, b, around);
            column += 2 * L::COUNT;
        }
        while column < columns {
            tile::<L, M, 1>((row, column, depth), a, b, around);
            column += L::COUNT;
        }
    }
}

#[inline(always)]
unsafe fn tile<L: Lanes, const M: usize, const N: usize>(
    (row, column, depth): (usize, usize, usize),
    a: Factor,
    b: Rows,
    around: &impl Around<L>,
) {
    // SAFETY: the caller of `product` vouches for the matrices and the instruction set.
    unsafe {
        let mut sums = [[L::splat(0.0); N]; M];
        for (m, sums) in sums.iter_mut().enumerate() {
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum = around.start(row + m, column + n * L::COUNT);
            }
        }
        let (a_start, b_start) = (a.at.add(row * a.row), b.at.add(column));
        for p in 0..depth {
            let b_row = b_start.add(p * b.stride);
            let mut b_values = [L::splat(0.0); N];
            for (n, value) in b_values.iter_mut().enumerate() {
                *value = L::load(b_row.add(n * L::COUNT));
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let factor = L::splat(*a_start.add(p * a.term + m * a.row));
                for (sum, value) in sums.iter_mut().zip(b_values) {
                    *sum = value.mul_add(factor, *sum);
                }
            }
        }
        for (m, sums) in sums.into_iter().enumerate() {
            for (n, sum) in sums.into_iter().enumerate() {
                around.finish(row + m, column + n * L::COUNT, sum);
            }
        }
    }
}

/// Sums that start at zero and are stored.
pub(super) struct Store {
    pub to: *mut f32,
    pub stride: usize,
}

impl<L: Lanes> Around<L> for Store {
    #[inline(always)]
    unsafe fn start(&self, _row: usize, _column: usize) -> L {
        // SAFETY: `product` is only called where the instruction set is there.
        unsafe { L::splat(0.0) }
    }
    #[inline(always)]
    unsafe fn finish(&self, row: usize, column: usize, sum: L) {
        // SAFETY: the target has the rows and columns of the product.
        unsafe { sum.store(self.to.add(row * self.stride + column)) }
    }
}

/// Sums added to what is stored.
pub(super) struct Accumulate {
    pub to: *mut f32,
    pub stride: usize,
}

impl<L: Lanes> Around<L> for Accumulate {
    #[inline(always)]
    unsafe fn start(&self, row: usize, column: usize) -> L {
        // SAFETY: the target has the rows and columns of the product.
        unsafe { L::load(self.to.add(row * self.stride + column)) }
    }
    #[inline(always)]
    unsafe fn finish(&self, row: usize, column: usize, sum: L) {
        // SAFETY: as above.
        unsafe { sum.store(self.to.add(row * self.stride + column)) }
    }
}

/// `to[column][row] = from[row][column]`.
///
/// # Safety
/// The CPU supports the instruction set of `L`; both matrices have the sizes and do not overlap.
#[inline(always)]
pub(super) unsafe fn transpose<L: Lanes>(
    (rows, columns): (usize, usize),
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
) {
    let full = (rows / L::COUNT * L::COUNT, columns / L::COUNT * L::COUNT);
    // SAFETY: inside the matrices that the caller vouches for.
    unsafe {
        for row in (0..full.0).step_by(L::COUNT) {
            for column in (0..full.1).step_by(L::COUNT) {
                L::transpose(
                    from.add(row * from_stride + column),
                    from_stride,
                    to.add(column * to_stride + row),
                    to_stride,
                );
            }
        }
        for row in 0..rows {
            let first = if row < full.0 { full.1 } else { 0 };
            for column in first..columns {
                *to.add(column * to_stride + row) = *from.add(row * from_stride + column);
            }
        }
    }
}
