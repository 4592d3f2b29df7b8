//! Register tiles: every product of the chunked kernels is "broadcast a scalar of A, times a row of B".
//!
//! Matrices live in a workspace, row after row, zero-padded to whole registers.

use super::simd::Lanes;

/// Rows of a register tile.
pub const ROWS: usize = 4;

/// Accumulators of a tile: [`ROWS`] rows of `N` registers.
pub type Tile<L, const N: usize> = [[L; N]; ROWS];

/// A matrix in a workspace.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// Its first number.
    pub start: *mut f32,
    /// Numbers from a row to the next.
    pub stride: usize,
}

impl Matrix {
    /// Address of a cell.
    ///
    /// # Safety
    /// The cell is inside the matrix's memory.
    #[inline(always)]
    pub unsafe fn at(self, row: usize, column: usize) -> *mut f32 {
        // SAFETY: vouched for by the caller.
        unsafe { self.start.add(row * self.stride + column) }
    }
}

/// Calls `$body::<Lanes, N, ..>(column, ..)` for tiles that together cover `$columns`, a whole number of
/// registers: the widest first, then two registers, then one.
macro_rules! column_tiles {
    ($lanes:ident, $wide:ident, $columns:expr, $body:ident $(, $rule:ident)? ; $($argument:expr),*) => {{
        let columns = $columns;
        let mut column = 0;
        while column + $wide * $lanes::COUNT <= columns {
            $body::<$lanes, $wide $(, $rule)?>(column, $($argument),*);
            column += $wide * $lanes::COUNT;
        }
        while $wide > 2 && column + 2 * $lanes::COUNT <= columns {
            $body::<$lanes, 2 $(, $rule)?>(column, $($argument),*);
            column += 2 * $lanes::COUNT;
        }
        while column < columns {
            $body::<$lanes, 1 $(, $rule)?>(column, $($argument),*);
            column += $lanes::COUNT;
        }
    }};
}
pub(crate) use column_tiles;

/// A tile of zeros.
///
/// # Safety
/// The CPU supports the instruction set of `L`.
#[inline(always)]
pub unsafe fn zeros<L: Lanes, const N: usize>() -> Tile<L, N> {
    // SAFETY: vouched for by the caller.
    [[unsafe { L::splat(0.0) }; N]; ROWS]
}

/// `acc[m][n] += sum_p a[m * a_row + p * a_depth] * b[p * b_stride + n]` for `p < depth`.
///
/// # Safety
/// The CPU supports `L`; every address named is readable.
#[inline(always)]
pub unsafe fn accumulate<L: Lanes, const M: usize, const N: usize>(
    acc: &mut [[L; N]; M],
    depth: usize,
    (a, a_row, a_depth): (*const f32, usize, usize),
    (b, b_stride): (*const f32, usize),
) {
    let mut sums = *acc;
    let (mut a, mut b) = (a, b);
    for _ in 0..depth {
        // SAFETY: addresses as the caller vouches; the last step may leave them one past the end.
        unsafe {
            let mut row = [L::splat(0.0); N];
            for (n, register) in row.iter_mut().enumerate() {
                *register = L::load(b.add(n * L::COUNT));
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let factor = L::splat(*a.add(m * a_row));
                for n in 0..N {
                    sums[n] = factor.mul_add(row[n], sums[n]);
                }
            }
            a = a.wrapping_add(a_depth);
            b = b.wrapping_add(b_stride);
        }
    }
    *acc = sums;
}

/// `acc += A[row.., from..from + depth] * B[.., column..]`, where B's first row meets A's column `from`.
///
/// # Safety
/// The CPU supports `L`; the cells named are inside both matrices.
#[inline(always)]
pub unsafe fn multiply<L: Lanes, const M: usize, const N: usize>(
    acc: &mut [[L; N]; M],
    depth: usize,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    b_stride: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe { accumulate(acc, depth, (a, a_stride, 1), (b, b_stride)) }
}

/// As [`multiply`] with A transposed: `a` points at A's first row, at the column of the tile's first row.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
pub unsafe fn multiply_transposed<L: Lanes, const M: usize, const N: usize>(
    acc: &mut [[L; N]; M],
    depth: usize,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    b_stride: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe { accumulate(acc, depth, (a, 1, a_stride), (b, b_stride)) }
}

/// Writes a tile into a workspace matrix.
///
/// # Safety
/// The tile is inside the matrix.
#[inline(always)]
pub unsafe fn store<L: Lanes, const M: usize, const N: usize>(
    tile: &[[L; N]; M],
    to: *mut f32,
    stride: usize,
) {
    for (m, row) in tile.iter().enumerate() {
        for (n, register) in row.iter().enumerate() {
            // SAFETY: vouched for by the caller.
            unsafe { register.store(to.add(m * stride + n * L::COUNT)) };
        }
    }
}

/// Reads a tile of a workspace matrix.
///
/// # Safety
/// The CPU supports `L`; the tile is inside the matrix.
#[inline(always)]
pub unsafe fn load<L: Lanes, const N: usize>(from: *const f32, stride: usize) -> Tile<L, N> {
    // SAFETY: vouched for by the caller.
    unsafe {
        let mut tile = zeros::<L, N>();
        for (m, row) in tile.iter_mut().enumerate() {
            for (n, register) in row.iter_mut().enumerate() {
                *register = L::load(from.add(m * stride + n * L::COUNT));
            }
        }
        tile
    }
}

/// Multiplies each row of the tile by its factor.
///
/// # Safety
/// [`ROWS`] factors are readable.
#[inline(always)]
pub unsafe fn scale_rows<L: Lanes, const N: usize>(tile: &mut Tile<L, N>, factors: *const f32) {
    for (m, row) in tile.iter_mut().enumerate() {
        for register in row {
            // SAFETY: vouched for by the caller.
            *register = register.mul(register.same(unsafe { *factors.add(m) }));
        }
    }
}

/// Writes the first `rows` rows and `columns` columns of a tile to an array of the caller's layout.
///
/// # Safety
/// Those cells are writable.
#[inline(always)]
pub unsafe fn store_bounded<L: Lanes, const N: usize>(
    tile: &Tile<L, N>,
    to: *mut f32,
    stride: usize,
    rows: usize,
    columns: usize,
) {
    for (m, row) in tile.iter().enumerate() {
        if m >= rows {
            break;
        }
        for (n, register) in row.iter().enumerate() {
            let left = columns.saturating_sub(n * L::COUNT);
            // SAFETY: no more than `left` numbers are written.
            unsafe {
                if left >= L::COUNT {
                    register.store(to.add(m * stride + n * L::COUNT));
                } else if left > 0 {
                    register.store_partial(to.add(m * stride + n * L::COUNT), left);
                }
            }
        }
    }
}

/// A register of at most `left` numbers, zero in the other lanes.
///
/// # Safety
/// The CPU supports `L`; that many numbers are readable.
#[inline(always)]
pub unsafe fn load_some<L: Lanes>(from: *const f32, left: usize) -> L {
    // SAFETY: vouched for by the caller; a partial load reads only what is left.
    unsafe {
        if left >= L::COUNT {
            L::load(from)
        } else if left > 0 {
            L::load_partial(from, left)
        } else {
            L::splat(0.0)
        }
    }
}

/// `rows` rows of `columns` numbers where they lie, if they need no padding; else their copy, as [`copy_in`]. For
/// matrices that are read once: rows far apart share few sets of the first-level cache.
///
/// # Safety
/// As [`copy_in`]; nothing is written to a matrix that lies where it was.
#[inline(always)]
pub unsafe fn view_or_copy<L: Lanes>(
    to: Matrix,
    padded_rows: usize,
    from: *const f32,
    from_stride: usize,
    rows: usize,
    columns: usize,
) -> Matrix {
    if rows == padded_rows && columns == to.stride {
        return Matrix { start: from.cast_mut(), stride: from_stride };
    }
    // SAFETY: vouched for by the caller.
    unsafe { copy_in::<L>(to, padded_rows, from, from_stride, rows, columns) };
    to
}

/// Copies `rows` rows of `columns` numbers into a matrix and zeroes its padding: the rest of each row up
/// to the stride, and the rows up to `padded_rows`.
///
/// # Safety
/// The CPU supports `L`; the source cells are readable, the matrix has `padded_rows` rows and a stride
/// that is a whole number of registers.
#[inline(always)]
pub unsafe fn copy_in<L: Lanes>(
    to: Matrix,
    padded_rows: usize,
    from: *const f32,
    from_stride: usize,
    rows: usize,
    columns: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        for i in 0..padded_rows {
            let mut j = 0;
            while j < to.stride {
                let left = if i < rows { columns.saturating_sub(j) } else { 0 };
                load_some::<L>(from.wrapping_add(i * from_stride + j), left).store(to.at(i, j));
                j += L::COUNT;
            }
        }
    }
}

/// Copies `rows` rows of `columns` numbers out of a matrix.
///
/// # Safety
/// The CPU supports `L`; the cells are inside the matrix and writable at the target.
#[inline(always)]
pub unsafe fn copy_out<L: Lanes>(from: Matrix, to: *mut f32, to_stride: usize, rows: usize, columns: usize) {
    // SAFETY: vouched for by the caller; a partial store writes only what is left of the row.
    unsafe {
        for i in 0..rows {
            let mut j = 0;
            while j < columns {
                let register = L::load(from.at(i, j));
                let left = columns - j;
                if left >= L::COUNT {
                    register.store(to.add(i * to_stride + j));
                } else {
                    register.store_partial(to.add(i * to_stride + j), left);
                }
                j += L::COUNT;
            }
        }
    }
}

/// `to = from` transposed; both sizes are whole numbers of registers.
///
/// # Safety
/// The CPU supports `L`; the cells are inside both matrices, which do not overlap.
#[inline(always)]
pub unsafe fn transpose<L: Lanes>(from: Matrix, rows: usize, columns: usize, to: Matrix) {
    let mut i = 0;
    while i < rows {
        let mut j = 0;
        while j < columns {
            // SAFETY: vouched for by the caller.
            unsafe { L::transpose(from.at(i, j), from.stride, to.at(j, i), to.stride) };
            j += L::COUNT;
        }
        i += L::COUNT;
    }
}

#[inline(always)]
unsafe fn lower_tile<L: Lanes, const N: usize>(
    column: usize,
    row: usize,
    depth: usize,
    x: Matrix,
    yt: Matrix,
    out: Matrix,
) {
    // SAFETY: called by `lower_product` on cells inside the matrices.
    unsafe {
        let mut acc = zeros::<L, N>();
        multiply(&mut acc, depth, x.at(row, 0), x.stride, yt.at(0, column), yt.stride);
        store(&acc, out.at(row, column), out.stride);
    }
}

/// The lower triangle, whole tiles of it, of `X * Y^T` from `yt = Y^T`; what lies right of the tiles is
/// left alone.
///
/// # Safety
/// The CPU supports `L`; `rows` is a multiple of [`ROWS`] inside X, Y and `out`, `depth` inside X and `yt`.
#[inline(always)]
pub unsafe fn lower_product<L: Lanes, const WIDE: usize>(
    x: Matrix,
    yt: Matrix,
    out: Matrix,
    depth: usize,
    rows: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let mut row = 0;
        // Tiles one register wide hide the latency of the FMA only with eight rows.
        while row + 2 * ROWS <= rows.min(L::COUNT) {
            let mut acc = [[L::splat(0.0); 1]; 2 * ROWS];
            multiply(&mut acc, depth, x.at(row, 0), x.stride, yt.at(0, 0), yt.stride);
            store(&acc, out.at(row, 0), out.stride);
            row += 2 * ROWS;
        }
        while row < rows {
            let columns = (row + ROWS).next_multiple_of(L::COUNT);
            column_tiles!(L, WIDE, columns, lower_tile; row, depth, x, yt, out);
            row += ROWS;
        }
    }
}
