//! One token of the [backward pass](super::backward), through a block of value columns.
//!
//! A token's walk over the gradients of the state ends with the state before it; it adds there what the output of that
//! earlier token asks for, and gathers the gradients of its `u` and `v`, so that each number is loaded and stored once.
//!
//! The innermost loops walk with plain pointers: addresses computed from rows and strides cost more than the arithmetic.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by register")]

use super::backward::{BLOCK, LINE, Workspace};
use super::{Rule, swept};
use crate::kernel::simd::Lanes;

/// Rows of [`Workspace::scalars`]: what one token brings for each value column of the block.
const U: usize = 0;
const V: usize = LINE;
/// Gradient of what was read.
const D_READING: usize = 2 * LINE;
/// Gradient of the output of the token before.
const D_O: usize = 3 * LINE;
/// Decay and momentum factor, of columns with their own.
const DECAY: usize = 4 * LINE;
const MOMENTUM: usize = 5 * LINE;

/// Rows of [`Workspace::partial`] that gather, lane by lane, the gradients of those.
const D_DECAY: usize = 2 * BLOCK;
const D_MOMENTUM: usize = 3 * BLOCK;

/// Adds the output's share of a chunk's last token, which no walk came before.
///
/// # Safety
/// The CPU supports `L`; the workspace holds the chunk.
#[inline(always)]
pub(super) unsafe fn last_token<L: Lanes, R: Rule>(w: &Workspace, column: usize, rows: usize, t: usize) {
    // SAFETY: rows and registers inside the matrices.
    unsafe {
        let earlier = Earlier::new::<R>(w, t, 0);
        for row in 0..rows {
            let zero = L::splat(0.0);
            let (mut d_u, mut d_v) = (zero, zero);
            let d_o = L::splat(*w.d_o.at(t, column + row));
            let (ds, dp) = (w.ds.at(column + row, 0), w.dp.start.wrapping_add((column + row) * w.dp.stride));
            let mut j = 0;
            while j < w.ds.stride {
                let past = L::load(ds.add(j));
                let past_p = if R::MOMENTUM { L::load(dp.add(j)) } else { past };
                earlier.open::<L, R>(j, d_o, (ds, past), (dp, past_p), [&mut d_u, &mut d_v]);
                j += L::COUNT;
            }
            let partial = w.partial.at(row, 0);
            d_u.store(partial);
            d_v.store(partial.add(BLOCK * LINE));
        }
        value_gradients::<L, R>(w, column, t);
    }
}

/// Gradients of one token, and the step to the token before.
///
/// # Safety
/// As [`last_token`]; that or this ran for the token after it. The history begins at token `from`.
#[inline(always)]
pub(super) unsafe fn token<L: Lanes, const WIDE: usize, R: Rule, const SWEEP: bool>(
    w: &Workspace,
    column: usize,
    rows: usize,
    t: usize,
    from: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        if t > 0 {
            walk::<L, WIDE, R, SWEEP, true>(w, column, rows, t, from);
            value_gradients::<L, R>(w, column, t - 1);
        } else {
            walk::<L, WIDE, R, SWEEP, false>(w, column, rows, t, from);
        }
        if R::COLUMN_GATES {
            column_gate_gradients::<L>(w, column, t);
        }
    }
}

#[inline(always)]
unsafe fn walk<L: Lanes, const WIDE: usize, R: Rule, const SWEEP: bool, const OPEN: bool>(
    w: &Workspace,
    column: usize,
    rows: usize,
    t: usize,
    from: usize,
) {
    let width = w.ds.stride;
    // SAFETY: rows and registers inside the matrices; a row of scalars has room for a register.
    unsafe {
        let mut row = 0;
        while row < BLOCK {
            let to = w.scalars.wrapping_add(row);
            L::load(w.u.at(t, column + row)).store(to.add(U));
            if R::ADDS_VALUE {
                L::load(w.v.at(t, column + row)).store(to.add(V));
            }
            if R::READS {
                let d_u = L::load(w.d_u.at(t, column + row));
                let through = if R::CORRECTS {
                    L::splat(0.0).sub(w.staged.rate::<L, R>(t, column + row))
                } else {
                    L::splat(1.0)
                };
                through.mul(d_u).store(to.add(D_READING));
            }
            if R::COLUMN_GATES {
                L::load(w.staged.decays(t, column + row)).store(to.add(DECAY));
                L::load(w.staged.momenta::<R>(t, column + row)).store(to.add(MOMENTUM));
            }
            if OPEN {
                L::load(w.d_o.at(t - 1, column + row)).store(to.add(D_O));
            }
            row += L::COUNT;
        }
        let mut j = 0;
        while WIDE >= 4 && j + 4 * L::COUNT <= width {
            keys::<L, 4, R, SWEEP, OPEN>(w, column, rows, [t, from], j);
            j += 4 * L::COUNT;
        }
        while j < width {
            keys::<L, 1, R, SWEEP, OPEN>(w, column, rows, [t, from], j);
            j += L::COUNT;
        }
    }
}

/// The inputs of the token before, from the first key of a walk on.
#[derive(Clone, Copy)]
struct Earlier {
    q: *const f32,
    write: *const f32,
    value_key: *const f32,
    momentum_rate: f32,
}

impl Earlier {
    /// # Safety
    /// Token `t` is in the chunk, `first` a key.
    #[inline(always)]
    unsafe fn new<R: Rule>(w: &Workspace, t: usize, first: usize) -> Self {
        // SAFETY: vouched for by the caller.
        unsafe {
            Self {
                q: w.staged.q.at(t, first),
                write: w.staged.write.at(t, first),
                value_key: w.staged.value_key.at(t, first),
                momentum_rate: if R::SCALES_MOMENTUM { w.staged.momentum_rate(t) } else { 1.0 },
            }
        }
    }

    /// Adds the share of the output to the gradients of the state (and momentum) at key `j`, stores them, and gathers
    /// the gradients of `u` and `v`.
    #[inline(always)]
    unsafe fn open<L: Lanes, R: Rule>(
        &self,
        j: usize,
        d_o: L,
        (ds, past): (*mut f32, L),
        (dp, past_p): (*mut f32, L),
        [d_u, d_v]: [&mut L; 2],
    ) {
        // SAFETY: `j` is a key of the matrices.
        unsafe {
            let grad = d_o.mul_add(L::load(self.q.add(j)), past);
            grad.store(ds.add(j));
            let mut written = grad;
            if R::MOMENTUM {
                written = if R::SCALES_MOMENTUM {
                    L::splat(self.momentum_rate).mul_add(grad, past_p)
                } else {
                    past_p.add(grad)
                };
                written.store(dp.add(j));
            }
            *d_u = written.mul_add(L::load(self.write.add(j)), *d_u);
            if R::ADDS_VALUE {
                *d_v = grad.mul_add(L::load(self.value_key.add(j)), *d_v);
            }
        }
    }
}

/// Gradients of `N` registers of keys, summed over the block's columns, and the step to the token before.
#[inline(always)]
unsafe fn keys<L: Lanes, const N: usize, R: Rule, const SWEEP: bool, const OPEN: bool>(
    w: &Workspace,
    column: usize,
    rows: usize,
    [t, from]: [usize; 2],
    first: usize,
) {
    // SAFETY: vouched for by the caller; the pointers stay inside their matrices.
    unsafe {
        let zero = [L::splat(0.0); N];
        let (mut d_read, mut d_write, mut d_value_key) = (zero, zero, zero);
        let (mut d_decay, mut d_momentum, mut d_momentum_rate) = (zero, zero, zero);
        let mu_of_all =
            L::splat(if R::MOMENTUM && !R::COLUMN_GATES { *w.staged.momenta::<R>(t, 0) } else { 0.0 });
        let (decay, read) = (w.staged.decay.at(t, first), w.staged.read.at(t, first));
        let earlier = Earlier::new::<R>(w, if OPEN { t - 1 } else { t }, first);
        let stride = w.ds.stride;
        let mut ds_row = w.ds.at(column, first);
        let mut dp_row = if R::MOMENTUM { w.dp.at(column, first) } else { ds_row };
        let mut s_row = w.states.at((t - from) * BLOCK, first);
        let mut p_row = if R::MOMENTUM { w.momenta.at((t - from) * BLOCK, first) } else { s_row };
        let (mut scalars, mut partial) = (w.scalars.cast_const(), w.partial.start);
        let end = scalars.add(rows);
        while scalars < end {
            let u = L::splat(*scalars.add(U));
            let v = if R::ADDS_VALUE { L::splat(*scalars.add(V)) } else { u };
            let d_reading = if R::READS { L::splat(*scalars.add(D_READING)) } else { u };
            let d_o = if OPEN { L::splat(*scalars.add(D_O)) } else { u };
            let w_of_column = if R::COLUMN_GATES { L::splat(*scalars.add(DECAY)) } else { u };
            let mu = if R::COLUMN_GATES { L::splat(*scalars.add(MOMENTUM)) } else { mu_of_all };
            let (mut d_u, mut d_v) = (zero[0], zero[0]);
            let (mut d_w, mut d_mu) = (zero[0], zero[0]);
            if R::COLUMN_GATES && first > 0 {
                d_w = L::load(partial.add(D_DECAY * LINE));
                d_mu = L::load(partial.add(D_MOMENTUM * LINE));
            }
            if OPEN && first > 0 {
                d_u = L::load(partial);
                d_v = L::load(partial.add(BLOCK * LINE));
            }
            for n in 0..N {
                let j = n * L::COUNT;
                let ds = L::load(ds_row.add(j));
                let s = L::load(s_row.add(j));
                if R::COLUMN_GATES {
                    d_w = ds.mul_add(s, d_w);
                } else {
                    d_decay[n] = ds.mul_add(s, d_decay[n]);
                }
                let (mut written, mut past_p) = (ds, ds);
                if R::MOMENTUM {
                    written = L::load(dp_row.add(j));
                    if R::SCALES_MOMENTUM {
                        let after = L::load(p_row.add(BLOCK * stride + j));
                        d_momentum_rate[n] = ds.mul_add(after, d_momentum_rate[n]);
                    }
                    let before = L::load(p_row.add(j));
                    if R::COLUMN_GATES {
                        d_mu = written.mul_add(before, d_mu);
                    } else {
                        d_momentum[n] = written.mul_add(before, d_momentum[n]);
                    }
                    past_p = swept::<L, SWEEP>(written.mul(mu));
                }
                d_write[n] = u.mul_add(written, d_write[n]);
                let mut past = ds.mul(if R::COLUMN_GATES { w_of_column } else { L::load(decay.add(j)) });
                if R::READS {
                    d_read[n] = d_reading.mul_add(s, d_read[n]);
                    past = d_reading.mul_add(L::load(read.add(j)), past);
                }
                if R::ADDS_VALUE {
                    d_value_key[n] = v.mul_add(ds, d_value_key[n]);
                }
                let past = swept::<L, SWEEP>(past);
                if OPEN {
                    earlier.open::<L, R>(j, d_o, (ds_row, past), (dp_row, past_p), [&mut d_u, &mut d_v]);
                } else {
                    past.store(ds_row.add(j));
                    if R::MOMENTUM {
                        past_p.store(dp_row.add(j));
                    }
                }
            }
            if OPEN {
                d_u.store(partial);
                d_v.store(partial.add(BLOCK * LINE));
            }
            if R::COLUMN_GATES {
                d_w.store(partial.add(D_DECAY * LINE));
                d_mu.store(partial.add(D_MOMENTUM * LINE));
            }
            scalars = scalars.add(1);
            partial = partial.wrapping_add(LINE);
            ds_row = ds_row.wrapping_add(stride);
            s_row = s_row.wrapping_add(stride);
            if R::MOMENTUM {
                dp_row = dp_row.wrapping_add(stride);
                p_row = p_row.wrapping_add(stride);
            }
        }
        for n in 0..N {
            let j = first + n * L::COUNT;
            add_to(w.d_write.at(t, j), d_write[n]);
            if !R::COLUMN_GATES {
                add_to(w.d_decay.at(t, j), d_decay[n]);
            }
            if R::READS {
                add_to(w.d_read.at(t, j), d_read[n]);
            }
            if R::ADDS_VALUE {
                add_to(w.d_value_key.at(t, j), d_value_key[n]);
            }
            if R::MOMENTUM && !R::COLUMN_GATES {
                add_to(w.d_momentum.at(t, j), d_momentum[n]);
            }
            if R::SCALES_MOMENTUM {
                add_to(w.d_momentum_rate.at(t, j), d_momentum_rate[n]);
            }
        }
    }
}

/// The gradients of a token's `u` and `v`, from their lanes. Columns of the block that do not exist get zeros.
#[inline(always)]
unsafe fn value_gradients<L: Lanes, R: Rule>(w: &Workspace, column: usize, t: usize) {
    // SAFETY: a row of tokens has room for a whole block, and a register of sums before the next row is written.
    unsafe {
        L::sum_rows(w.partial.start, LINE, w.sums);
        let from = if R::ADDS_VALUE { w.sums.add(BLOCK) } else { w.sums };
        let mut row = 0;
        while row < BLOCK {
            let (d_u, d_v) = (w.d_u.at(t, column + row), w.d_v.at(t, column + row));
            let rate = if R::CORRECTS { w.staged.rate::<L, R>(t, column + row) } else { L::splat(1.0) };
            let of_v = rate.mul(L::load(from.add(row)));
            if L::COUNT > BLOCK {
                L::load(w.sums).store_partial(d_u, BLOCK);
                of_v.store_partial(d_v, BLOCK);
            } else {
                L::load(w.sums.add(row)).store(d_u);
                of_v.store(d_v);
            }
            row += L::COUNT;
        }
    }
}

/// The gradients of a token's decays and momentum factors by column, from their lanes; as [`value_gradients`].
#[inline(always)]
unsafe fn column_gate_gradients<L: Lanes>(w: &Workspace, column: usize, t: usize) {
    // SAFETY: as there; the sums are apart from the gradients.
    unsafe {
        L::sum_rows(w.partial.at(D_DECAY, 0), LINE, w.sums);
        std::ptr::copy_nonoverlapping(w.sums, w.d_decay.at(t, column), BLOCK);
        std::ptr::copy_nonoverlapping(w.sums.add(BLOCK), w.d_momentum.at(t, column), BLOCK);
    }
}

#[inline(always)]
unsafe fn add_to<L: Lanes>(to: *mut f32, x: L) {
    // SAFETY: called on registers inside a matrix.
    unsafe { L::load(to).add(x).store(to) };
}
