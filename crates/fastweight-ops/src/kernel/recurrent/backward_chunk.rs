//! One chunk of the [backward pass](super::backward).

use super::backward::{BLOCK, BackwardTask, STRETCH, Workspace, transposed_in};
use super::backward_rows::{last_token, token};
use super::backward_states::{states_again, stretch_starts};
use super::{Rule, fill, scale_rows, sweeps, tokens_ahead};
use crate::kernel::ahead::Ahead;
use crate::kernel::dims::Dims;
use crate::kernel::gates::{CHUNK, is_reset};
use crate::kernel::memory::Place;
use crate::kernel::simd::Lanes;
use crate::kernel::tile::{Matrix, copy_in, copy_out};

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
        w.staged.load::<L, R>(x.inputs, place, &x.task.columns);
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
        transposed_in::<L>(w, w.start(0), Some(x.saved.states), start, value, key, columns);
        if R::MOMENTUM {
            transposed_in::<L>(w, w.start_p(0), Some(x.saved.momenta), start, value, key, columns);
        }
        for d in [w.d_q, w.d_read, w.d_write, w.d_value_key, w.d_decay] {
            fill::<L>(d, 0..place.tokens, 0.0);
        }
        fill::<L>(w.d_u, 0..place.tokens, 0.0);
        if R::MOMENTUM {
            fill::<L>(w.d_momentum, 0..place.tokens, 0.0);
        }
        if R::SCALES_MOMENTUM {
            fill::<L>(w.d_momentum_rate, 0..place.tokens, 0.0);
        }
        stretch_starts::<L, WIDE, R>(w, columns, place.tokens);
        let mut ahead = chunk_ahead::<R>(x, place, index, start);
        for from in (0..place.tokens).step_by(STRETCH).rev() {
            let to = place.tokens.min(from + STRETCH);
            let mut column = 0;
            while column < columns {
                let rows = BLOCK.min(columns - column);
                states_again::<L, WIDE, R>(w, column, rows, [from, to]);
                if rows < BLOCK {
                    fill::<L>(w.partial, 0..Workspace::partials::<R>(), 0.0);
                }
                if to == place.tokens {
                    last_token::<L, R>(w, column, rows, to - 1);
                }
                for t in (from..to).rev() {
                    ahead.ask(1);
                    if sweeps(t) {
                        token::<L, WIDE, R, true>(w, column, rows, t, from);
                    } else {
                        token::<L, WIDE, R, false>(w, column, rows, t, from);
                    }
                }
                column += rows;
            }
        }
        copy_out::<L>(w.d_v, x.targets.v.at(first), stride, place.tokens, columns);
        key_gradients::<L, R>(x, w, place);
        if R::COLUMN_GATES {
            column_gradients::<L, R>(x, w, place);
        } else {
            scalar_gradients::<L, R>(x, w, place);
        }
    }
}

/// What the chunk writes, and what the one before it reads.
#[inline(always)]
fn chunk_ahead<R: Rule>(x: &BackwardTask<'_, R>, place: Place, index: usize, start: usize) -> Ahead {
    let (inputs, to, split) = (x.inputs, &x.targets, x.task.split);
    let Dims { heads, key, value, .. } = *inputs.dims;
    let columns = &x.task.columns;
    let mut ahead = Ahead::new();
    let first = place.position * value + columns.start;
    let gates = [to.rate, to.decay, to.momentum];
    for to in std::iter::once(to.v).chain(gates.into_iter().filter(|_| R::COLUMN_GATES)) {
        ahead.name(to.at(first), heads * value, columns.len(), place.tokens);
    }
    let decay = if R::MOMENTUM { 0 } else { inputs.decay.len() };
    for (to, len) in [
        (to.q, inputs.q.len()),
        (to.write, inputs.write.len()),
        (to.read, inputs.read.len()),
        (to.value_key, inputs.value_key.len()),
        (to.decay, decay),
    ] {
        if len > 0 {
            let first = to.at(split * len + place.position * key);
            ahead.name(first, heads * key, key, place.tokens);
        }
    }
    if index > 0 {
        let before = CHUNK * heads;
        tokens_ahead::<R>(&mut ahead, inputs, place.position - before, CHUNK, columns);
        for from in [x.saved.rows, x.grads.o.unwrap_or(&[])] {
            if !from.is_empty() {
                let from = from.as_ptr().wrapping_add(first - before * value);
                ahead.name(from, heads * value, columns.len(), CHUNK);
            }
        }
        for from in [x.saved.states, x.saved.momenta] {
            if !from.is_empty() {
                let from = from.as_ptr().wrapping_add(start - key * value);
                ahead.name(from, value, columns.len(), key);
            }
        }
    }
    ahead.spread(place.tokens * columns.len().div_ceil(BLOCK))
}

/// What each token wrote.
#[inline(always)]
unsafe fn writes<L: Lanes, R: Rule>(w: &Workspace, tokens: usize) {
    // SAFETY: rows of the chunk.
    unsafe {
        for t in 0..tokens {
            let from = if R::READS { w.rows } else { w.v };
            let mut j = 0;
            while j < from.stride {
                let rate = if R::CORRECTS { w.staged.rate::<L, R>(t, j) } else { L::splat(1.0) };
                L::load(from.at(t, j)).mul(rate).store(w.u.at(t, j));
                j += L::COUNT;
            }
        }
    }
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

/// Writes the gradients of gates that each value column has its own of.
#[inline(always)]
unsafe fn column_gradients<L: Lanes, R: Rule>(x: &BackwardTask<'_, R>, w: &Workspace, place: Place) {
    let Dims { heads, value, .. } = *x.inputs.dims;
    let columns = &x.task.columns;
    let first = place.position * value + columns.start;
    // SAFETY: the task's columns of the chunk, in arrays of the checked lengths.
    unsafe {
        for t in 0..place.tokens {
            let mut j = 0;
            while j < w.rows.stride {
                L::load(w.rows.at(t, j)).mul(L::load(w.d_u.at(t, j))).store(w.rows.at(t, j));
                j += L::COUNT;
            }
        }
        let out = |from: Matrix, to: *mut f32| {
            copy_out::<L>(from, to, heads * value, place.tokens, columns.len());
        };
        out(w.rows, x.targets.rate.at(first));
        out(w.d_decay, x.targets.decay.at(first));
        out(w.d_momentum, x.targets.momentum.at(first));
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
