//! Pieces shared by the memory-bound kernels: rows in parallel, whole and partial registers.

use std::ops::Range;

use rayon::prelude::*;

use crate::kernel::simd::Lanes;

/// Numbers of a parallel piece.
const PIECE: usize = 1 << 14;

/// Cuts `rows` of `width` numbers into pieces; the same for any number of threads, so that sums are too.
pub(crate) fn pieces(rows: usize, width: usize) -> Vec<Range<usize>> {
    let step = PIECE.div_ceil(width.max(1));
    (0..rows).step_by(step).map(|start| start..rows.min(start + step)).collect()
}

/// Runs `body` on every piece, in parallel when there are several; results in order.
pub(crate) fn run<P: Sync, R: Send>(pieces: &[P], body: impl Fn(&P) -> R + Sync + Send) -> Vec<R> {
    if pieces.len() > 1 { pieces.par_iter().map(body).collect() } else { pieces.iter().map(body).collect() }
}

/// Adds the numbers of `part` to `sum`.
pub(crate) fn add(sum: &mut [f32], part: &[f32]) {
    sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
}

/// A register of the numbers from `from` on, zeros past the `left` that remain.
///
/// # Safety
/// The instruction set of `L` is there, and `left` numbers are readable.
#[inline(always)]
pub(crate) unsafe fn load<L: Lanes>(from: *const f32, left: usize) -> L {
    // SAFETY: vouched for by the caller.
    unsafe { if left >= L::COUNT { L::load(from) } else { L::load_partial(from, left) } }
}

/// Writes the lanes of which `left` numbers remain.
///
/// # Safety
/// `left` numbers, or a register of them, are writable.
#[inline(always)]
pub(crate) unsafe fn store<L: Lanes>(register: L, to: *mut f32, left: usize) {
    // SAFETY: vouched for by the caller.
    unsafe { if left >= L::COUNT { register.store(to) } else { register.store_partial(to, left) } }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<L: Lanes>(x: L) -> L {
    let one = x.same(1.0);
    one.div(one.add(x.same(0.0).sub(x).exp()))
}

/// `silu(x) = x sigmoid(x)` and its derivative.
#[inline(always)]
pub(crate) fn silu<L: Lanes>(x: L) -> (L, L) {
    let s = sigmoid(x);
    let value = x.mul(s);
    (value, value.mul(x.same(1.0).sub(s)).add(s))
}
