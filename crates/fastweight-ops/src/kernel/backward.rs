//! Backward pass of the matrix memories: the chunks in reverse, from the states that the forward pass saved.
//!
//! Notation of the [forward pass](super::forward); `dS` is the gradient of the state at the chunk's end.
//! `du = exp(c_n - c_i) dS^T k_i + P^T do` is solved through `I + A` transposed, last rows first; then
//! `G = do u^T * decay` and `H = -du u^T * decay` give `dq`, `dk`, and with `q.dq + k.dk` the log gates.

use std::marker::PhantomData;

use super::ahead::Ahead;
use super::backward_rows::{Chunk, denominator_gradients, key_rows, state_rows, write_rows};
use super::backward_scalars::{inner_product, mask, row_gradients, scalar_gradients};
use super::dims::Dims;
use super::forward::Saved;
use super::gates::{CHUNK, Decays, Gate};
use super::memory::{Inputs, Place, Rule, add_weighted_rows, flush, load_keys, scores};
use super::plan::{Plan, Task};
use super::simd::{InstructionSet, Kernel, Lanes, dispatch};
use super::tile::{Matrix, ROWS, column_tiles, copy_in, copy_out, lower_product, transpose, view_or_copy};
use super::workspace::{Carver, SharedOut, Unwritten, with_workspace};

/// Gradients of the outputs; an output without one took no part in the loss.
#[derive(Debug, Clone, Copy)]
pub struct OutputGradients<'a> {
    /// Of `o`, `[batch, time, heads, value]`.
    pub o: Option<&'a [f32]>,
    /// Of the final states `[sequences, heads, key, value]`.
    pub state: Option<&'a [f32]>,
    /// Of the final normalisers `[sequences, heads, key]`.
    pub normaliser: Option<&'a [f32]>,
}

/// Gradients of the inputs, each with the shape of its input.
#[derive(Debug, Default)]
pub struct Gradients {
    /// Of the queries.
    pub q: Vec<f32>,
    /// Of the keys.
    pub k: Vec<f32>,
    /// Of the values.
    pub v: Vec<f32>,
    /// Of the write rates, for the delta rule.
    pub beta: Vec<f32>,
    /// Of the log gates, if there are any.
    pub gate: Vec<f32>,
    /// Of the initial states.
    pub state: Vec<f32>,
    /// Of the initial normalisers, for the normalised rule.
    pub normaliser: Vec<f32>,
}

/// Where the gradients go; all but `v` and `state` once for every split of the value columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Targets {
    pub q: SharedOut,
    pub k: SharedOut,
    pub v: SharedOut,
    pub beta: SharedOut,
    pub gate: SharedOut,
    pub state: SharedOut,
    pub normaliser: SharedOut,
}

/// Runs the backward pass.
///
/// # Panics
/// When a slice has not the length that the sizes say, or `saved` comes from another call.
pub fn backward<R: Rule>(inputs: &Inputs<'_>, saved: Saved<'_>, grads: OutputGradients<'_>) -> Gradients {
    inputs.check::<R>();
    let plan = Plan::new(inputs.dims, InstructionSet::active());
    check_saved::<R>(inputs, &plan, saved, grads);
    let token_heads = inputs.token_heads();
    let gated = inputs.gate.is_some();
    let lens = [
        plan.splits * inputs.q.len(),
        plan.splits * inputs.k.len(),
        inputs.v.len(),
        plan.splits * inputs.beta.len(),
        if gated { plan.splits * token_heads } else { 0 },
        inputs.state.len(),
        plan.splits * inputs.normaliser.len(),
    ];
    let mut vectors = lens.map(Unwritten::new);
    let [q, k, v, beta, gate, state, normaliser] = vectors.each_mut().map(Unwritten::share);
    let targets = Targets { q, k, v, beta, gate, state, normaliser };
    plan.run(|task| {
        let key = inputs.dims.key.next_multiple_of(16);
        let columns = task.columns.len().next_multiple_of(16);
        with_workspace(Workspace::size(key, columns), |carver| {
            let rule = PhantomData::<R>;
            dispatch(plan.set, BackwardTask { inputs, saved, grads, task, targets, carver, rule });
        });
    });
    let mut lens = lens.into_iter();
    let [q, k, v, beta, gate, state, normaliser] = vectors.map(|vector| {
        // SAFETY: the tasks cover every token, head, column and split, and write all of their part.
        unsafe { vector.written(lens.next().unwrap_or(0)) }
    });
    let [q, k, beta, mut gate, normaliser] = [q, k, beta, gate, normaliser].map(|parts| plan.reduce(parts));
    if matches!(inputs.gate, Gate::PerHead(_)) {
        gate = sum_over_tokens(&gate, inputs.dims.heads);
    }
    Gradients { q, k, v, beta, gate, state, normaliser }
}

fn check_saved<R: Rule>(inputs: &Inputs<'_>, plan: &Plan, saved: Saved<'_>, grads: OutputGradients<'_>) {
    let dims = inputs.dims;
    assert_eq!(saved.states.len(), plan.chunks * dims.key * dims.value, "saved states");
    let rows = if R::DELTA { inputs.v.len() } else { 0 };
    assert_eq!(saved.rows.len(), rows, "saved rows");
    let normalisers = if R::NORMALISED { plan.chunks * dims.key } else { 0 };
    assert_eq!(saved.normalisers.len(), normalisers, "saved normalisers");
    assert!(grads.o.is_none_or(|o| o.len() == inputs.v.len()), "gradient of o");
    assert!(grads.state.is_none_or(|s| s.len() == inputs.state.len()), "gradient of the states");
    let normaliser = inputs.normaliser.len();
    assert!(grads.normaliser.is_none_or(|z| !R::NORMALISED || z.len() == normaliser), "gradient of z");
}

/// Sums `[.., heads]` over all but the last axis, in float64.
fn sum_over_tokens(per_token: &[f32], heads: usize) -> Vec<f32> {
    let mut sums = vec![0f64; heads];
    for row in per_token.chunks_exact(heads.max(1)) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += f64::from(*x);
        }
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

/// The backward pass of one task.
pub(super) struct BackwardTask<'a, R> {
    pub inputs: &'a Inputs<'a>,
    pub saved: Saved<'a>,
    pub grads: OutputGradients<'a>,
    pub task: &'a Task,
    pub targets: Targets,
    carver: Carver,
    rule: PhantomData<R>,
}

impl<R: Rule> Kernel for BackwardTask<'_, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(mut self) {
        let dims = self.inputs.dims;
        let w = Workspace::carve::<R>(
            &mut self.carver,
            dims.key.next_multiple_of(L::COUNT),
            self.task.columns.len().next_multiple_of(L::COUNT),
            self.inputs.gate.is_some(),
        );
        // SAFETY: `dispatch` vouches for the instruction set, the checks for the lengths.
        unsafe {
            start_state::<L, R>(&self, &w);
            for index in (0..self.task.tokens.div_ceil(CHUNK)).rev() {
                run_chunk::<L, WIDE, R>(&self, &w, index);
            }
            let state = self.task.state * dims.key * dims.value + self.task.columns.start;
            let columns = self.task.columns.len();
            copy_out::<L>(w.ds, self.targets.state.at(state), dims.value, dims.key, columns);
            if R::NORMALISED {
                let part = self.task.split * self.inputs.normaliser.len();
                let to = self.targets.normaliser.at(part + self.task.state * dims.key);
                copy_out::<L>(w.dz, to, dims.key, 1, dims.key);
            }
        }
    }
}

/// Matrices of one task; `d` before a name is its gradient.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workspace {
    pub q: Matrix,
    pub k: Matrix,
    pub kt: Matrix,
    /// Output gradients, with the factor on the output.
    pub d_o: Matrix,
    /// The same, decayed from the chunk's start; without a gate the same matrix.
    pub d_o_start: Matrix,
    /// Prediction errors of the delta rule.
    pub error: Matrix,
    pub u: Matrix,
    pub ut: Matrix,
    /// Gradients of the prediction errors, and of the values.
    pub d_error: Matrix,
    pub dv: Matrix,
    /// `-exp(c_i) dv_i`.
    pub dv_start: Matrix,
    /// What the normalised rule's queries get from the state, before the denominators' share.
    pub dq: Matrix,
    pub p: Matrix,
    pub a: Matrix,
    pub g: Matrix,
    pub h: Matrix,
    pub decay: Matrix,
    pub s: Matrix,
    pub st: Matrix,
    pub ds: Matrix,
    pub dst: Matrix,
    pub z: Matrix,
    pub dz: Matrix,
    decays: Matrix,
    pub beta: Matrix,
    /// Gradients of the denominators, decayed from the chunk's start in the second row.
    pub d_denominator: Matrix,
    /// What each token adds to the gradients of the gates: by its cumulative log, by its write to the state.
    pub by_row: Matrix,
}

impl Workspace {
    fn size(key: usize, columns: usize) -> usize {
        CHUNK * (4 * key + 8 * columns + 5 * CHUNK + Decays::ROWS + 5) + 4 * key * columns + 2 * key + 26 * 16
    }

    fn carve<R: Rule>(carver: &mut Carver, key: usize, columns: usize, gated: bool) -> Self {
        let d_o = carver.matrix(CHUNK, columns);
        Self {
            q: carver.matrix(CHUNK, key),
            k: carver.matrix(CHUNK, key),
            kt: carver.matrix(key, CHUNK),
            d_o,
            d_o_start: if gated { carver.matrix(CHUNK, columns) } else { d_o },
            error: carver.matrix(CHUNK, columns),
            u: carver.matrix(CHUNK, columns),
            ut: carver.matrix(columns, CHUNK),
            d_error: carver.matrix(CHUNK, columns),
            dv: carver.matrix(CHUNK, columns),
            dv_start: carver.matrix(CHUNK, columns),
            dq: carver.matrix(if R::NORMALISED { CHUNK } else { 0 }, key),
            p: carver.matrix(CHUNK, CHUNK),
            a: carver.matrix(CHUNK, CHUNK),
            g: carver.matrix(CHUNK, CHUNK),
            h: carver.matrix(CHUNK, CHUNK),
            decay: carver.matrix(CHUNK, CHUNK),
            s: carver.matrix(key, columns),
            st: carver.matrix(columns, key),
            ds: carver.matrix(key, columns),
            dst: carver.matrix(columns, key),
            z: carver.matrix(1, key),
            dz: carver.matrix(1, key),
            decays: carver.matrix(Decays::ROWS, CHUNK),
            beta: carver.matrix(1, CHUNK),
            d_denominator: carver.matrix(2, CHUNK),
            by_row: carver.matrix(2, CHUNK),
        }
    }
}

/// Copies rows that may be absent, as zeros then.
///
/// # Safety
/// As [`copy_in`], if there are any.
#[inline(always)]
unsafe fn copy_or_zero<L: Lanes>(
    to: Matrix,
    padded_rows: usize,
    from: Option<&[f32]>,
    first: usize,
    stride: usize,
    rows: usize,
    columns: usize,
) {
    // SAFETY: vouched for by the caller; nothing is read from an absent source.
    unsafe {
        match from {
            Some(from) => copy_in::<L>(to, padded_rows, from.as_ptr().add(first), stride, rows, columns),
            None => copy_in::<L>(to, padded_rows, std::ptr::null(), 0, 0, 0),
        }
    }
}

/// Loads the gradients of the final state.
#[inline(always)]
unsafe fn start_state<L: Lanes, R: Rule>(x: &BackwardTask<'_, R>, w: &Workspace) {
    let (key, value, columns) = (x.inputs.dims.key, x.inputs.dims.value, x.task.columns.len());
    let state = x.task.state * key * value + x.task.columns.start;
    // SAFETY: lengths were checked; the second part of the columns has no share in the normaliser.
    unsafe {
        copy_or_zero::<L>(w.ds, w.q.stride, x.grads.state, state, value, key, columns);
        if R::NORMALISED {
            let grad = if x.task.split == 0 { x.grads.normaliser } else { None };
            copy_or_zero::<L>(w.dz, 1, grad, x.task.state * key, key, 1, key);
        }
    }
}

#[inline(always)]
unsafe fn run_chunk<L: Lanes, const WIDE: usize, R: Rule>(
    x: &BackwardTask<'_, R>,
    w: &Workspace,
    index: usize,
) {
    let (inputs, task) = (x.inputs, x.task);
    let dims = inputs.dims;
    let (key, value, heads) = (dims.key, dims.value, dims.heads);
    let columns = task.columns.len();
    let place = Place::new(task, heads, index);
    let (tokens, rows) = (place.tokens, place.rows);
    let stride = heads * value;
    let first = place.position * value + task.columns.start;
    let gated = inputs.gate.is_some();
    // SAFETY: the chunk is inside the checked arrays, the matrices have CHUNK rows.
    unsafe {
        load_keys::<L, R>(w.q, inputs.q, place, dims);
        load_keys::<L, R>(w.k, inputs.k, place, dims);
        let mut w = *w;
        if R::DELTA {
            copy_in::<L>(w.error, CHUNK, x.saved.rows.as_ptr().add(first), stride, tokens, columns);
        } else {
            w.u = view_or_copy::<L>(w.u, CHUNK, inputs.v.as_ptr().add(first), stride, tokens, columns);
        }
        let w = &w;
        let decays = Decays::new::<L>(w.decays, inputs.gate, place.position, heads, task.head, tokens);
        let chunk = task.first_chunk + index;
        let state = x.saved.states.as_ptr().add(chunk * key * value + task.columns.start);
        let s = view_or_copy::<L>(w.s, w.q.stride, state, value, key, columns);
        if R::NORMALISED {
            copy_in::<L>(w.z, 1, x.saved.normalisers.as_ptr().add(chunk * key), key, 1, key);
        }
        if gated {
            flush::<L>(w.ds, key, index);
        }
        transpose::<L>(w.k, rows.next_multiple_of(L::COUNT), w.k.stride, w.kt);
        scores::<L, WIDE, R>(w.q, w.k, w.kt, w.p, w.a, Some(w.decay), decays, key, rows);
        row_gradients::<L, R>(x, w, place, decays);
        transpose::<L>(w.u, rows.next_multiple_of(L::COUNT), w.d_o.stride, w.ut);
        transpose::<L>(s, w.q.stride, w.s.stride, w.st);
        transpose::<L>(w.ds, w.q.stride, w.ds.stride, w.dst);
        let dv = x.targets.v.at(first);
        let c = Chunk { w: *w, decays, tokens, rows, key, columns, dv, stride };
        let mut ahead = chunk_ahead::<R>(x, place, index, state);
        let mut row = rows;
        while row > 0 {
            row -= ROWS;
            ahead.ask(SHARES[0]);
            column_tiles!(L, WIDE, w.d_o.stride, write_rows, R; row, &c);
        }
        lower_product::<L, WIDE>(w.d_o, w.ut, w.g, columns, rows);
        if R::NORMALISED {
            denominator_gradients::<L, WIDE>(&c);
        }
        if R::DELTA {
            lower_product::<L, WIDE>(w.dv, w.ut, w.h, columns, rows);
        }
        mask::<L, R>(w, decays, rows);
        let through = if gated { decays.total * inner_product::<L, R>(w, columns) } else { 0.0 };
        let dq = x.targets.q.at(task.split * inputs.q.len() + place.position * key);
        let dk = x.targets.k.at(task.split * inputs.k.len() + place.position * key);
        let mut row = 0;
        while row < rows {
            ahead.ask(SHARES[1]);
            let zero = L::splat(0.0);
            let (mut from_state, mut to_state) = ([zero; ROWS], [zero; ROWS]);
            column_tiles!(L, WIDE, w.q.stride, key_rows, R;
                row, &c, dq, dk, heads * key, &mut from_state, &mut to_state);
            for m in 0..ROWS {
                *w.by_row.at(0, row + m) += from_state[m].sum();
                *w.by_row.at(1, row + m) = to_state[m].sum();
            }
            row += ROWS;
        }
        scalar_gradients::<L, R>(x, w, place, through);
        let mut row = 0;
        while row < key {
            ahead.ask(SHARES[2]);
            column_tiles!(L, WIDE, w.ds.stride, state_rows, R; row, &c);
            row += ROWS;
        }
        if R::NORMALISED {
            add_weighted_rows::<L>(w.dz, decays.total, w.q, w.d_denominator.at(1, 0), rows);
        }
    }
}

/// What the chunk writes, and what the one before it reads.
#[inline(always)]
fn chunk_ahead<R: Rule>(x: &BackwardTask<'_, R>, place: Place, index: usize, state: *const f32) -> Ahead {
    let (inputs, task, to) = (x.inputs, x.task, &x.targets);
    let Dims { key, value, heads, .. } = *inputs.dims;
    let (key_stride, value_stride, columns) = (heads * key, heads * value, task.columns.len());
    let keys = place.position * key;
    let values = place.position * value + task.columns.start;
    let mut ahead = Ahead::new();
    for (to, len) in [(to.q, inputs.q.len()), (to.k, inputs.k.len())] {
        ahead.name(to.at(task.split * len + keys), key_stride, key, place.tokens);
    }
    ahead.name(to.v.at(values), value_stride, columns, place.tokens);
    if index > 0 {
        for from in [inputs.q, inputs.k] {
            let before = from.as_ptr().wrapping_add(keys).wrapping_sub(CHUNK * key_stride);
            ahead.name(before, key_stride, key, CHUNK);
        }
        let written = if R::DELTA { x.saved.rows } else { inputs.v };
        for from in x.grads.o.into_iter().chain([written]) {
            let before = from.as_ptr().wrapping_add(values).wrapping_sub(CHUNK * value_stride);
            ahead.name(before, value_stride, columns, CHUNK);
        }
        ahead.name(state.wrapping_sub(key * value), value, columns, key);
    }
    ahead.spread((SHARES[0] + SHARES[1]) * place.rows / ROWS + SHARES[2] * key.div_ceil(ROWS))
}

/// Shares of the [prefetches](chunk_ahead) for each tile of rows of the writes, the keys and the state, as long as they
/// take.
const SHARES: [usize; 3] = [2, 4, 1];
