//! Sums of matrix products in register tiles: the one shape of every product of the kernel.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by row and register")]

use crate::kernel::simd::{InstructionSet, Kernel, Lanes, dispatch};
use crate::kernel::tile::{Matrix, accumulate, column_tiles, store};

/// `A B` over `depth` columns of A, which may be read transposed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Term {
    a: Matrix,
    by: Reading,
    b: Matrix,
    depth: usize,
}

#[derive(Debug, Clone, Copy)]
enum Reading {
    Rows,
    Columns,
}

/// `A B`.
pub(super) fn plain(a: Matrix, b: Matrix, depth: usize) -> Term {
    Term { a, by: Reading::Rows, b, depth }
}

/// `A^T B`.
pub(super) fn transposed(a: Matrix, b: Matrix, depth: usize) -> Term {
    Term { a, by: Reading::Columns, b, depth }
}

/// What a sum of products is added to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Start {
    /// Nothing.
    Zero,
    /// The target.
    Target,
    /// `factor M`.
    Scaled(f32, Matrix),
    /// `factor M + factor M`.
    Blend([(f32, Matrix); 2]),
}

/// `out = start + sum of terms`, whole tiles of it: up to 15 rows more than `rows`.
#[derive(Debug)]
pub(super) struct Sum<'a> {
    pub out: Matrix,
    pub start: Start,
    pub terms: &'a [Term],
    pub rows: usize,
    /// A whole number of registers.
    pub columns: usize,
    /// Whether tiny numbers become zero: what decays from chunk to chunk would become denormal.
    pub flush: bool,
}

impl Sum<'_> {
    pub fn run(self, set: InstructionSet) {
        dispatch(set, self);
    }
}

impl Kernel for Sum<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        // SAFETY: the matrices are those of the workspace, whose rows and columns are whole tiles.
        unsafe {
            column_tiles!(L, WIDE, self.columns, panel; WIDE, &self);
        }
    }
}

/// All rows of some registers of columns.
#[inline(always)]
unsafe fn panel<L: Lanes, const N: usize>(column: usize, wide: usize, x: &Sum<'_>) {
    // SAFETY: called by `Sum::run` on columns inside the matrices.
    unsafe {
        match (wide, N) {
            // 32 registers.
            (4.., 1) => rows::<L, 16, N>(column, x),
            (4.., 2) | (_, 1) => rows::<L, 8, N>(column, x),
            _ => rows::<L, 4, N>(column, x),
        }
    }
}

#[inline(always)]
unsafe fn rows<L: Lanes, const M: usize, const N: usize>(column: usize, x: &Sum<'_>) {
    let mut row = 0;
    while row < x.rows {
        // SAFETY: called by `Sum::run` on columns inside the matrices, whose rows are whole tiles.
        unsafe {
            let mut acc = start::<L, M, N>(row, column, x);
            for term in x.terms {
                let b = (term.b.at(0, column).cast_const(), term.b.stride);
                match term.by {
                    Reading::Rows => by_rows(&mut acc, term.depth, term.a.at(row, 0), term.a.stride, b),
                    Reading::Columns => {
                        accumulate(&mut acc, term.depth, (term.a.at(0, row), 1, term.a.stride), b);
                    }
                }
            }
            if x.flush {
                // No closures: they would not be compiled for the instruction set.
                for row in &mut acc {
                    for register in row {
                        *register = register.flush_tiny();
                    }
                }
            }
            store(&acc, x.out.at(row, column), x.out.stride);
        }
        row += M;
    }
}

/// `acc += A B` with four addresses of A for every pointer that moves: sixteen pointers would not fit the registers.
///
/// # Safety
/// The CPU supports `L`; M rows of A and `depth` rows of B are readable.
#[inline(always)]
unsafe fn by_rows<L: Lanes, const M: usize, const N: usize>(
    acc: &mut [[L; N]; M],
    depth: usize,
    a: *const f32,
    stride: usize,
    (b, b_stride): (*const f32, usize),
) {
    let mut sums = *acc;
    let mut bases = [a; 4];
    for (k, base) in bases.iter_mut().enumerate().take(M / 4) {
        *base = a.wrapping_add(4 * k * stride);
    }
    let mut b = b;
    for _ in 0..depth {
        // SAFETY: addresses as the caller vouches; the last step may leave them one past the end.
        unsafe {
            let mut row = [L::splat(0.0); N];
            for (n, register) in row.iter_mut().enumerate() {
                *register = L::load(b.add(n * L::COUNT));
            }
            for k in 0..M / 4 {
                for r in 0..4 {
                    let factor = L::splat(*bases[k].add(r * stride));
                    for n in 0..N {
                        sums[4 * k + r][n] = factor.mul_add(row[n], sums[4 * k + r][n]);
                    }
                }
                bases[k] = bases[k].wrapping_add(1);
            }
            b = b.wrapping_add(b_stride);
        }
    }
    *acc = sums;
}

#[inline(always)]
unsafe fn start<L: Lanes, const M: usize, const N: usize>(
    row: usize,
    column: usize,
    x: &Sum<'_>,
) -> [[L; N]; M] {
    // SAFETY: as `rows`.
    unsafe {
        let mut acc = [[L::splat(0.0); N]; M];
        let (count, pairs) = match x.start {
            Start::Zero => return acc,
            Start::Target => (1, [(1.0, x.out); 2]),
            Start::Scaled(factor, matrix) => (1, [(factor, matrix); 2]),
            Start::Blend(pairs) => (2, pairs),
        };
        for (factor, matrix) in pairs.into_iter().take(count) {
            let factor = L::splat(factor);
            for (m, acc) in acc.iter_mut().enumerate() {
                for (n, register) in acc.iter_mut().enumerate() {
                    let from = L::load(matrix.at(row + m, column + n * L::COUNT));
                    *register = from.mul_add(factor, *register);
                }
            }
        }
        acc
    }
}
