//! One chunk of the [backward pass](super::backward).

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by row and register")]

use super::backward::{BLOCK, BackwardTask, Workspace, transposed_in};
use super::backward_states::states_again;
use super::{Rule, fill, prefetch_token, scale_rows, sweeps, swept};
use crate::kernel::gates::{CHUNK, is_reset};
use crate::kernel::memory::{Place, prefetch_rows};
use crate::kernel::simd::Lanes;
use crate::kernel::tile::{Matrix, ROWS, copy_in, copy_out};

/// Runs a chunk.
///
/// # Safety
/// The CPU supports `L`; the task's checks hold.
#[inline(always)]
pub(super) unsafe fn run_chunk<L: Lanes, const WIDE: usize, R: Rule>(
    x: &BackwardTask<'_, R>,
    w: &Workspace,
    index: usize,
) {
    let dims = x.inputs.dims;
    let (key, value, heads) = (dims.key, dims.value, dims.heads);
    let columns = x.task.columns.len();
    let place = Place::new(x.task, heads, index);
    let first = place.position * value + x.task.columns.start;
    let stride = heads * value;
    let start = (x.task.first_chunk + index) * key * value + x.task.columns.start;
    // SAFETY: the chunk is inside the checked arrays, the matrices have CHUNK rows.
    unsafe {
        w.staged.load::<L, R>(x.inputs, place);
        let token_rows = |to: Matrix, from: &[f32]| {
            copy_in::<L>(to, place.tokens, from.as_ptr().add(first), stride, place.tokens, columns);
        };
        match x.grads.o {
            Some(grad) => token_rows(w.d_o, grad),
            None => fill::<L>(w.d_o, 0..place.tokens, 0.0),
        }
        token_rows(w.v, x.inputs.v);
        if R::READS {
            token_rows(w.rows, x.saved.rows);
        }
        writes::<L, R>(w, place.tokens);
        transposed_in::<L>(w, w.start, Some(x.saved.states), start, value, key, columns);
        if R::MOMENTUM {
            transposed_in::<L>(w, w.start_p, Some(x.saved.momenta), start, value, key, columns);
        }
        for d in [w.d_q, w.d_read, w.d_write, w.d_value_key, w.d_decay] {
            fill::<L>(d, 0..place.tokens, 0.0);
        }
        fill::<L>(w.d_u, 0..place.tokens, 0.0);
        if R::MOMENTUM {
            for d in [w.d_momentum, w.d_momentum_rate] {
                fill::<L>(d, 0..place.tokens, 0.0);
            }
        }
        let mut column = 0;
        while column < columns {
            let rows = BLOCK.min(columns - column);
            states_again::<L, R>(w, column, rows, place.tokens);
            for t in (0..place.tokens).rev() {
                if column == 0 && index > 0 {
                    prefetch_past::<R>(x, place, first, t);
                }
                if sweeps(t) {
                    token::<L, WIDE, R, true>(w, column, rows, t);
                } else {
                    token::<L, WIDE, R, false>(w, column, rows, t);
                }
            }
            column += rows;
        }
        copy_out::<L>(w.d_v, x.targets.v.at(first), stride, place.tokens, columns);
        key_gradients::<L, R>(x, w, place);
        scalar_gradients::<L, R>(x, w, place);
    }
}

/// Asks for the token a chunk earlier.
#[inline(always)]
fn prefetch_past<R: Rule>(x: &BackwardTask<'_, R>, place: Place, first: usize, t: usize) {
    let dims = x.inputs.dims;
    let past = CHUNK * dims.heads;
    prefetch_token(x.inputs, place.position.wrapping_sub(past), t, &x.task.columns);
    let at = first.wrapping_add(t * dims.heads * dims.value).wrapping_sub(past * dims.value);
    for from in [x.saved.rows, x.grads.o.unwrap_or(&[])] {
        if !from.is_empty() {
            prefetch_rows(from.as_ptr().wrapping_add(at), 0, x.task.columns.len(), 0, 1);
        }
    }
}

/// What each token wrote.
#[inline(always)]
unsafe fn writes<L: Lanes, R: Rule>(w: &Workspace, tokens: usize) {
    // SAFETY: rows of the chunk.
    unsafe {
        for t in 0..tokens {
            let rate = L::splat(if R::CORRECTS { w.staged.rate(t) } else { 1.0 });
            let from = if R::READS { w.rows } else { w.v };
            let mut j = 0;
            while j < from.stride {
                L::load(from.at(t, j)).mul(rate).store(w.u.at(t, j));
                j += L::COUNT;
            }
        }
    }
}

/// Gradients of one token through the block's columns.
#[inline(always)]
unsafe fn token<L: Lanes, const WIDE: usize, R: Rule, const SWEEP: bool>(
    w: &Workspace,
    column: usize,
    rows: usize,
    t: usize,
) {
    let width = w.ds.stride;
    // SAFETY: rows and registers inside the matrices.
    unsafe {
        let mut row = 0;
        while row + ROWS <= rows {
            value_gradients::<L, ROWS, R>(w, column + row, t);
            row += ROWS;
        }
        while row < rows {
            value_gradients::<L, 1, R>(w, column + row, t);
            row += 1;
        }
        let mut j = 0;
        while j + WIDE * L::COUNT <= width {
            sums::<L, WIDE, R, SWEEP>(w, column, rows, t, j);
            j += WIDE * L::COUNT;
        }
        while j < width {
            sums::<L, 1, R, SWEEP>(w, column, rows, t, j);
            j += L::COUNT;
        }
    }
}

/// Adds the output's share to the gradients of `M` columns of the state, and from them takes the gradients
/// of `u` and `v`.
#[inline(always)]
unsafe fn value_gradients<L: Lanes, const M: usize, R: Rule>(w: &Workspace, column: usize, t: usize) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let zero = L::splat(0.0);
        let (mut d_o, mut d_u, mut d_v) = ([zero; M], [zero; M], [zero; M]);
        for m in 0..M {
            d_o[m] = L::splat(*w.d_o.at(t, column + m));
        }
        let beta = L::splat(if R::MOMENTUM { w.staged.momentum_rate(t) } else { 0.0 });
        let mut j = 0;
        while j < w.ds.stride {
            let (q, write) = (L::load(w.staged.q.at(t, j)), L::load(w.staged.write.at(t, j)));
            let value_key = if R::ADDS_VALUE { L::load(w.staged.value_key.at(t, j)) } else { write };
            for m in 0..M {
                let ds = d_o[m].mul_add(q, L::load(w.ds.at(column + m, j)));
                ds.store(w.ds.at(column + m, j));
                let mut written = ds;
                if R::MOMENTUM {
                    written = beta.mul_add(ds, L::load(w.dp.at(column + m, j)));
                    written.store(w.dp.at(column + m, j));
                }
                d_u[m] = written.mul_add(write, d_u[m]);
                if R::ADDS_VALUE {
                    d_v[m] = ds.mul_add(value_key, d_v[m]);
                }
            }
            j += L::COUNT;
        }
        for m in 0..M {
            let d_u = d_u[m].sum();
            *w.d_u.at(t, column + m) = d_u;
            *w.d_v.at(t, column + m) = if R::CORRECTS {
                w.staged.rate(t) * d_u
            } else if R::ADDS_VALUE {
                d_v[m].sum()
            } else {
                d_u
            };
        }
    }
}

/// Gradients of `N` registers of keys, summed over the block's columns, and the step to the token before.
#[inline(always)]
unsafe fn sums<L: Lanes, const N: usize, R: Rule, const SWEEP: bool>(
    w: &Workspace,
    column: usize,
    rows: usize,
    t: usize,
    first: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let zero = [L::splat(0.0); N];
        let (mut d_read, mut d_write, mut d_value_key) = (zero, zero, zero);
        let (mut d_decay, mut d_momentum, mut d_momentum_rate) = (zero, zero, zero);
        let mu = L::splat(if R::MOMENTUM { w.staged.momentum(t) } else { 0.0 });
        let through = if R::CORRECTS { -w.staged.rate(t) } else { 1.0 };
        for row in 0..rows {
            let u = L::splat(*w.u.at(t, column + row));
            let v = if R::ADDS_VALUE { L::splat(*w.v.at(t, column + row)) } else { u };
            let d_reading = if R::READS { L::splat(through * *w.d_u.at(t, column + row)) } else { u };
            let before = t * BLOCK + row;
            for n in 0..N {
                let j = first + n * L::COUNT;
                let ds = L::load(w.ds.at(column + row, j));
                let s = L::load(w.states.at(before, j));
                d_decay[n] = ds.mul_add(s, d_decay[n]);
                let mut written = ds;
                if R::MOMENTUM {
                    written = L::load(w.dp.at(column + row, j));
                    d_momentum_rate[n] =
                        ds.mul_add(L::load(w.momenta.at(before + BLOCK, j)), d_momentum_rate[n]);
                    d_momentum[n] = written.mul_add(L::load(w.momenta.at(before, j)), d_momentum[n]);
                    swept::<L, SWEEP>(written.mul(mu)).store(w.dp.at(column + row, j));
                }
                d_write[n] = u.mul_add(written, d_write[n]);
                let mut past = ds.mul(L::load(w.staged.decay.at(t, j)));
                if R::READS {
                    d_read[n] = d_reading.mul_add(s, d_read[n]);
                    past = d_reading.mul_add(L::load(w.staged.read.at(t, j)), past);
                }
                if R::ADDS_VALUE {
                    d_value_key[n] = v.mul_add(ds, d_value_key[n]);
                }
                swept::<L, SWEEP>(past).store(w.ds.at(column + row, j));
            }
        }
        for n in 0..N {
            let j = first + n * L::COUNT;
            add_to(w.d_write.at(t, j), d_write[n]);
            add_to(w.d_decay.at(t, j), d_decay[n]);
            if R::READS {
                add_to(w.d_read.at(t, j), d_read[n]);
            }
            if R::ADDS_VALUE {
                add_to(w.d_value_key.at(t, j), d_value_key[n]);
            }
            if R::MOMENTUM {
                add_to(w.d_momentum.at(t, j), d_momentum[n]);
                add_to(w.d_momentum_rate.at(t, j), d_momentum_rate[n]);
            }
        }
    }
}

#[inline(always)]
unsafe fn add_to<L: Lanes>(to: *mut f32, x: L) {
    // SAFETY: called on registers inside a matrix.
    unsafe { L::load(to).add(x).store(to) };
}

/// Finishes and writes the gradients of the key-sized inputs.
#[inline(always)]
unsafe fn key_gradients<L: Lanes, R: Rule>(x: &BackwardTask<'_, R>, w: &Workspace, place: Place) {
    let (inputs, split) = (x.inputs, x.task.split);
    let (key, heads) = (inputs.dims.key, inputs.dims.heads);
    let (position, stride) = (place.position * key, heads * key);
    // SAFETY: the chunk is inside arrays of the checked lengths.
    unsafe {
        let scale = inputs.dims.scale;
        scale_rows::<L>(w.d_q, 0..place.tokens, scale);
        if !R::MOMENTUM {
            for t in 0..place.tokens {
                decay_gradients::<L, R>(x, w, place, t);
            }
        }
        let out = |from: Matrix, to: *mut f32| copy_out::<L>(from, to, stride, place.tokens, key);
        out(w.d_q, x.targets.q.at(split * inputs.q.len() + position));
        out(w.d_write, x.targets.write.at(split * inputs.write.len() + position));
        if R::READS && !R::READS_DECAYED {
            out(w.d_read, x.targets.read.at(split * inputs.read.len() + position));
        }
        if R::ADDS_VALUE {
            out(w.d_value_key, x.targets.value_key.at(split * inputs.value_key.len() + position));
        }
        if !R::MOMENTUM {
            out(w.d_decay, x.targets.decay.at(split * inputs.decay.len() + position));
        }
    }
}

/// From the gradient of the decay to that of its log; what was read with `k * decay` goes to both.
#[inline(always)]
unsafe fn decay_gradients<L: Lanes, R: Rule>(x: &BackwardTask<'_, R>, w: &Workspace, place: Place, t: usize) {
    let key = x.inputs.dims.key;
    let first = (place.position + t * x.inputs.dims.heads) * key;
    // SAFETY: rows of the chunk; the gates were checked to reach its last token.
    unsafe {
        let mut j = 0;
        while j < w.d_decay.stride {
            let decay = L::load(w.staged.decay.at(t, j));
            let mut d_decay = L::load(w.d_decay.at(t, j));
            if R::READS_DECAYED {
                let d_read = L::load(w.d_read.at(t, j));
                d_decay = d_read.mul_add(L::load(w.staged.write.at(t, j)), d_decay);
                d_read.mul_add(decay, L::load(w.d_write.at(t, j))).store(w.d_write.at(t, j));
            }
            d_decay.mul(decay).store(w.d_decay.at(t, j));
            j += L::COUNT;
        }
        for c in 0..key {
            if is_reset(*x.inputs.decay.get_unchecked(first + c)) {
                *w.d_decay.at(t, c) = 0.0;
            }
        }
    }
}

/// Gradients of the inputs that are one number for each token and head.
#[inline(always)]
unsafe fn scalar_gradients<L: Lanes, R: Rule>(x: &BackwardTask<'_, R>, w: &Workspace, place: Place) {
    let part = x.task.split * x.inputs.token_heads() + place.position;
    // SAFETY: tokens of the chunk, in arrays of the checked lengths.
    unsafe {
        for t in 0..place.tokens {
            let at = part + t * x.inputs.dims.heads;
            if R::CORRECTS {
                let mut sum = L::splat(0.0);
                let mut j = 0;
                while j < w.rows.stride {
                    sum = L::load(w.rows.at(t, j)).mul_add(L::load(w.d_u.at(t, j)), sum);
                    j += L::COUNT;
                }
                *x.targets.rate.at(at) = sum.sum();
            }
            if R::MOMENTUM {
                *x.targets.decay.at(at) = row_sum::<L>(w.d_decay, t);
                *x.targets.momentum.at(at) = row_sum::<L>(w.d_momentum, t);
                *x.targets.momentum_rate.at(at) = row_sum::<L>(w.d_momentum_rate, t);
            }
        }
    }
}

#[inline(always)]
unsafe fn row_sum<L: Lanes>(m: Matrix, row: usize) -> f32 {
    // SAFETY: a row of the matrix.
    unsafe {
        let mut sum = L::splat(0.0);
        let mut j = 0;
        while j < m.stride {
            sum = sum.add(L::load(m.at(row, j)));
            j += L::COUNT;
        }
        sum.sum()
    }
}
