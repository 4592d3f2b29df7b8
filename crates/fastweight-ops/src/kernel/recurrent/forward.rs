//! Forward pass of the token-recurrent memories.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by register")]

use std::marker::PhantomData;

use super::{Inputs, Rule, Staged, sweeps, swept, tokens_ahead};
use crate::kernel::ahead::Ahead;
use crate::kernel::gates::CHUNK;
use crate::kernel::memory::Place;
use crate::kernel::plan::{Plan, Task};
use crate::kernel::simd::{InstructionSet, Kernel, Lanes, dispatch};
use crate::kernel::tile::{Matrix, column_tiles, copy_in, copy_out};
use crate::kernel::workspace::{Carver, SharedOut, Unwritten, with_workspace};

/// Outputs of the forward pass, and what the backward pass wants to see again.
#[derive(Debug, Default)]
pub struct Outputs {
    /// `[batch, time, heads, value]`.
    pub o: Vec<f32>,
    /// Final states `[sequences, heads, key, value]`.
    pub state: Vec<f32>,
    /// Final momenta, for the rule with momentum.
    pub momentum_state: Vec<f32>,
    /// Chunk-start states `[chunks, key, value]`.
    pub saved_states: Vec<f32>,
    /// Chunk-start momenta `[chunks, key, value]`.
    pub saved_momenta: Vec<f32>,
    /// `[batch, time, heads, value]`: errors `v - r` of the rules that correct, else the readings `r`.
    pub saved_rows: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Targets {
    o: SharedOut,
    state: SharedOut,
    momentum_state: SharedOut,
    saved_states: SharedOut,
    saved_momenta: SharedOut,
    saved_rows: SharedOut,
}

/// Runs the forward pass.
///
/// # Panics
/// When a slice of `inputs` has not the length its sizes say.
pub fn forward<R: Rule>(inputs: &Inputs<'_>, save: bool) -> Outputs {
    inputs.check::<R>();
    let plan = Plan::new(inputs.dims, InstructionSet::active());
    let starts = if save { plan.chunks * inputs.dims.key * inputs.dims.value } else { 0 };
    let lens = [
        inputs.v.len(),
        inputs.state.len(),
        inputs.momentum_state.len(),
        starts,
        if R::MOMENTUM { starts } else { 0 },
        if save && R::READS { inputs.v.len() } else { 0 },
    ];
    let mut vectors = lens.map(Unwritten::new);
    let shared = vectors.each_mut().map(Unwritten::share);
    let unless_empty = |i: usize| if lens[i] > 0 { shared[i] } else { SharedOut::null() };
    let targets = Targets {
        o: shared[0],
        state: shared[1],
        momentum_state: shared[2],
        saved_states: unless_empty(3),
        saved_momenta: unless_empty(4),
        saved_rows: unless_empty(5),
    };
    plan.run(|task| {
        let key = inputs.dims.key.next_multiple_of(16);
        let columns = task.columns.len().next_multiple_of(16);
        let size = Staged::size::<R>(key, columns) + (CHUNK + 1 + 2 * key) * columns + 4 * 16;
        with_workspace(size, |carver| {
            dispatch(plan.set, ForwardTask { inputs, task, targets, carver, rule: PhantomData::<R> });
        });
    });
    let mut lens = lens.into_iter();
    let [o, state, momentum_state, saved_states, saved_momenta, saved_rows] = vectors.map(|vector| {
        // SAFETY: the tasks cover every token, head, column and chunk, and write all of their part.
        unsafe { vector.written(lens.next().unwrap_or(0)) }
    });
    Outputs { o, state, momentum_state, saved_states, saved_momenta, saved_rows }
}

struct ForwardTask<'a, R> {
    inputs: &'a Inputs<'a>,
    task: &'a Task,
    targets: Targets,
    carver: Carver,
    rule: PhantomData<R>,
}

/// A chunk in progress.
struct Chunk<R> {
    staged: Staged,
    v: Matrix,
    /// What the next token reads.
    reading: Matrix,
    s: Matrix,
    p: Matrix,
    tokens: usize,
    key: usize,
    columns: usize,
    /// The chunk's first token in `o` and, if any, in the saved rows; the next one is `stride` further.
    o: *mut f32,
    saved_row: Option<*mut f32>,
    stride: usize,
    rule: PhantomData<R>,
}

impl<R: Rule> Kernel for ForwardTask<'_, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(mut self) {
        let Self { inputs, task, targets, .. } = self;
        let dims = inputs.dims;
        let (key, value, heads) = (dims.key, dims.value, dims.heads);
        let columns = task.columns.len();
        let width = columns.next_multiple_of(L::COUNT);
        let staged = Staged::carve::<R>(&mut self.carver, key.next_multiple_of(L::COUNT), width);
        let v = self.carver.matrix(CHUNK, width);
        let reading = self.carver.matrix(1, width);
        let s = self.carver.matrix(key, width);
        let p = self.carver.matrix(if R::MOMENTUM { key } else { 0 }, width);
        let stride = heads * value;
        let state = task.state * key * value + task.columns.start;
        // SAFETY: `dispatch` vouches for the instruction set, `Inputs::check` for the inputs, `Plan` for the
        // targets, and the matrices are as large as they are used.
        unsafe {
            copy_in::<L>(s, key, inputs.state.as_ptr().add(state), value, key, columns);
            if R::MOMENTUM {
                copy_in::<L>(p, key, inputs.momentum_state.as_ptr().add(state), value, key, columns);
            }
            for index in 0..task.tokens.div_ceil(CHUNK) {
                let place = Place::new(task, heads, index);
                let first = place.position * value + task.columns.start;
                let start = (task.first_chunk + index) * key * value + task.columns.start;
                if !targets.saved_states.is_null() {
                    copy_out::<L>(s, targets.saved_states.at(start), value, key, columns);
                }
                if R::MOMENTUM && !targets.saved_momenta.is_null() {
                    copy_out::<L>(p, targets.saved_momenta.at(start), value, key, columns);
                }
                staged.load::<L, R>(inputs, place, &task.columns);
                copy_in::<L>(v, CHUNK, inputs.v.as_ptr().add(first), stride, place.tokens, columns);
                let c = Chunk {
                    staged,
                    v,
                    reading,
                    s,
                    p,
                    tokens: place.tokens,
                    key,
                    columns,
                    o: targets.o.at(first),
                    saved_row: (!targets.saved_rows.is_null()).then(|| targets.saved_rows.at(first)),
                    stride,
                    rule: PhantomData::<R>,
                };
                let mut ahead = Ahead::new();
                let left = task.tokens.saturating_sub((index + 1) * CHUNK).min(CHUNK);
                let starts = [targets.saved_states, targets.saved_momenta];
                for to in starts.into_iter().filter(|to| left > 0 && !to.is_null()) {
                    ahead.name(to.at(start + key * value), value, columns, key);
                }
                let next = place.position + CHUNK * heads;
                tokens_ahead::<R>(&mut ahead, inputs, next, left, &task.columns);
                for to in [targets.o, targets.saved_rows].into_iter().filter(|to| !to.is_null()) {
                    ahead.name(to.at(next * value + task.columns.start), stride, columns, left);
                }
                let mut ahead = ahead.spread(place.tokens * width.div_ceil(WIDE * L::COUNT));
                column_tiles!(L, WIDE, width, tile, R; &c, &mut ahead);
            }
            copy_out::<L>(s, targets.state.at(state), value, key, columns);
            if R::MOMENTUM {
                copy_out::<L>(p, targets.momentum_state.at(state), value, key, columns);
            }
        }
    }
}

/// All tokens of the chunk over `N` registers of value columns.
#[inline(always)]
unsafe fn tile<L: Lanes, const N: usize, R: Rule>(column: usize, c: &Chunk<R>, ahead: &mut Ahead) {
    // SAFETY: the columns are inside the matrices.
    unsafe {
        if R::READS {
            first_reading::<L, N, R>(column, c);
        }
        for t in 0..c.tokens {
            ahead.ask(1);
            if sweeps(t) {
                token::<L, N, R, true>(column, t, c);
            } else {
                token::<L, N, R, false>(column, t, c);
            }
        }
    }
}

/// What the chunk's first token reads.
#[inline(always)]
unsafe fn first_reading<L: Lanes, const N: usize, R: Rule>(column: usize, c: &Chunk<R>) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let mut reading = [L::splat(0.0); N];
        for i in 0..c.key {
            let a = L::splat(*c.staged.read.at(0, i));
            for n in 0..N {
                reading[n] = a.mul_add(L::load(c.s.at(i, column + n * L::COUNT)), reading[n]);
            }
        }
        for n in 0..N {
            reading[n].store(c.reading.at(0, column + n * L::COUNT));
        }
    }
}

/// One token: the write, the output, and what the next token reads.
#[inline(always)]
unsafe fn token<L: Lanes, const N: usize, R: Rule, const SWEEP: bool>(column: usize, t: usize, c: &Chunk<R>) {
    // SAFETY: vouched for by the caller; rows and columns are inside the matrices.
    unsafe {
        let staged = &c.staged;
        let zero = [L::splat(0.0); N];
        let (mut v, mut u) = (zero, zero);
        for n in 0..N {
            let at = column + n * L::COUNT;
            v[n] = L::load(c.v.at(t, at));
            u[n] = v[n];
            if R::READS {
                let reading = L::load(c.reading.at(0, at));
                let saved = if R::CORRECTS { v[n].sub(reading) } else { reading };
                u[n] = if R::CORRECTS { saved.mul(staged.rate::<L, R>(t, at)) } else { saved };
                if let Some(to) = c.saved_row {
                    store_some(saved, to.add(t * c.stride + at), c.columns.saturating_sub(at));
                }
            }
        }
        let (mut output, mut next) = (zero, zero);
        let (mut mu, mut decay) = (zero, zero);
        for n in 0..N {
            if R::COLUMN_GATES {
                mu[n] = L::load(staged.momenta::<R>(t, column + n * L::COUNT));
                decay[n] = L::load(staged.decays(t, column + n * L::COUNT));
            } else if R::MOMENTUM {
                mu[n] = L::splat(*staged.momenta::<R>(t, 0));
            }
        }
        let beta = L::splat(if R::SCALES_MOMENTUM { staged.momentum_rate(t) } else { 1.0 });
        for i in 0..c.key {
            let x = L::splat(*staged.write.at(t, i));
            let w = if R::COLUMN_GATES { x } else { L::splat(*staged.decay.at(t, i)) };
            let q = L::splat(*staged.q.at(t, i));
            let y = if R::ADDS_VALUE { L::splat(*staged.value_key.at(t, i)) } else { x };
            let a = if R::READS { L::splat(*staged.read.at(t + 1, i)) } else { x };
            for n in 0..N {
                let at = c.s.at(i, column + n * L::COUNT);
                let mut s = L::load(at).mul(if R::COLUMN_GATES { decay[n] } else { w });
                if R::MOMENTUM {
                    let momentum = c.p.at(i, column + n * L::COUNT);
                    let p = swept::<L, SWEEP>(x.mul_add(u[n], L::load(momentum).mul(mu[n])));
                    p.store(momentum);
                    s = if R::SCALES_MOMENTUM { beta.mul_add(p, s) } else { s.add(p) };
                } else {
                    s = x.mul_add(u[n], s);
                }
                if R::ADDS_VALUE {
                    s = y.mul_add(v[n], s);
                }
                let s = swept::<L, SWEEP>(s);
                s.store(at);
                output[n] = q.mul_add(s, output[n]);
                if R::READS {
                    next[n] = a.mul_add(s, next[n]);
                }
            }
        }
        for n in 0..N {
            let at = column + n * L::COUNT;
            store_some(output[n], c.o.add(t * c.stride + at), c.columns.saturating_sub(at));
            if R::READS {
                next[n].store(c.reading.at(0, at));
            }
        }
    }
}

/// Writes at most `left` lanes.
///
/// # Safety
/// That many numbers are writable.
#[inline(always)]
pub(super) unsafe fn store_some<L: Lanes>(x: L, to: *mut f32, left: usize) {
    // SAFETY: vouched for by the caller.
    unsafe {
        if left >= L::COUNT {
            x.store(to);
        } else if left > 0 {
            x.store_partial(to, left);
        }
    }
}
