//! Forward pass of the matrix memories, [`CHUNK`] tokens at a time.
//!
//! With `c_i` the cumulative log gate inside a chunk and `S` the state at its start, the writes are
//! `u_i = beta_i (v_i - exp(c_i) S^T k_i + sum_{j<i} A_ij u_j)`, `A_ij = -exp(c_i - c_j) k_i.k_j`
//! (the WY form of the delta rule, arXiv 2406.06484 and 2412.06464; `u_i = v_i` for the additive rules),
//! the outputs `o_i = scale (exp(c_i) S^T q_i + sum_{j<=i} P_ij u_j)`, and the next state
//! `exp(c_n) S + sum_i exp(c_n - c_i) k_i u_i^T`. The triangular system is solved by forward substitution
//! in registers, four rows at a time.

use std::marker::PhantomData;

use super::ahead::Ahead;
use super::dims::Dims;
use super::forward_rows::{Chunk, output_rows, state_rows};
use super::gates::{CHUNK, Decays};
use super::memory::{Inputs, Place, Rule, add_weighted_rows, denominators, flush, load_keys, scores};
use super::plan::{Plan, Task};
use super::simd::{InstructionSet, Kernel, Lanes, dispatch};
use super::tile::{Matrix, ROWS, column_tiles, copy_in, copy_out, transpose, view_or_copy};
use super::workspace::{Carver, SharedOut, Unwritten, with_workspace};

/// Outputs of the forward pass, and what the backward pass wants to see again.
#[derive(Debug, Default)]
pub struct Outputs {
    /// `[batch, time, heads, value]`.
    pub o: Vec<f32>,
    /// Final states `[sequences, heads, key, value]`.
    pub state: Vec<f32>,
    /// Final normalisers `[sequences, heads, key]`, for the normalised rule.
    pub normaliser: Vec<f32>,
    /// For the backward pass, if asked for.
    pub saved: SavedVectors,
}

/// What the forward pass leaves for the backward pass: a state every [`CHUNK`] tokens and, for the delta
/// rule, one row of value size a token.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Chunk-start states `[chunks, key, value]`, the chunks of a head one after the other.
    pub states: &'a [f32],
    /// `[batch, time, heads, value]`: prediction errors `v - S^T k` of the delta rule.
    pub rows: &'a [f32],
    /// Chunk-start normalisers `[chunks, key]`.
    pub normalisers: &'a [f32],
}

/// [`Saved`], owned.
#[derive(Debug, Default)]
pub struct SavedVectors {
    /// See [`Saved::states`].
    pub states: Vec<f32>,
    /// See [`Saved::rows`].
    pub rows: Vec<f32>,
    /// See [`Saved::normalisers`].
    pub normalisers: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Targets {
    o: SharedOut,
    state: SharedOut,
    normaliser: SharedOut,
    saved_states: SharedOut,
    saved_rows: SharedOut,
    saved_normalisers: SharedOut,
}

/// Runs the forward pass.
///
/// # Panics
/// When a slice of `inputs` has not the length its sizes say.
pub fn forward<R: Rule>(inputs: &Inputs<'_>, save: bool) -> Outputs {
    inputs.check::<R>();
    let plan = Plan::new(inputs.dims, InstructionSet::active());
    let state_size = inputs.dims.key * inputs.dims.value;
    let rows_saved = save && R::DELTA;
    let lens = [
        inputs.v.len(),
        inputs.state_len(),
        inputs.normaliser.len(),
        if save { plan.chunks * state_size } else { 0 },
        if rows_saved { inputs.v.len() } else { 0 },
        if save && R::NORMALISED { plan.chunks * inputs.dims.key } else { 0 },
    ];
    let mut vectors = lens.map(Unwritten::new);
    let shared = vectors.each_mut().map(Unwritten::share);
    let unless_empty = |i: usize| if lens[i] > 0 { shared[i] } else { SharedOut::null() };
    let targets = Targets {
        o: shared[0],
        state: shared[1],
        normaliser: shared[2],
        saved_states: unless_empty(3),
        saved_rows: unless_empty(4),
        saved_normalisers: unless_empty(5),
    };
    plan.run(|task| {
        let key = inputs.dims.key.next_multiple_of(16);
        let columns = task.columns.len().next_multiple_of(16);
        with_workspace(Workspace::size(key, columns), |carver| {
            dispatch(plan.set, ForwardTask { inputs, task, targets, carver, rule: PhantomData::<R> });
        });
    });
    let mut lens = lens.into_iter();
    let [o, state, normaliser, states, rows, normalisers] = vectors.map(|vector| {
        // SAFETY: the tasks cover every token, head, column and chunk, and write all of their part.
        unsafe { vector.written(lens.next().unwrap_or(0)) }
    });
    Outputs { o, state, normaliser, saved: SavedVectors { states, rows, normalisers } }
}

struct ForwardTask<'a, R> {
    inputs: &'a Inputs<'a>,
    task: &'a Task,
    targets: Targets,
    carver: Carver,
    rule: PhantomData<R>,
}

impl<R: Rule> Kernel for ForwardTask<'_, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        // SAFETY: `dispatch` vouches for the instruction set, `Inputs::check` for the lengths.
        unsafe { run_task::<L, WIDE, R>(self.inputs, self.task, self.targets, self.carver) }
    }
}

/// Matrices of one task, named as in the module's formulas.
#[derive(Clone, Copy)]
pub(super) struct Workspace {
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    /// Writes; for the additive rules the values themselves.
    pub u: Matrix,
    /// Writes, decayed to the chunk's end; the values themselves for the additive rules without a gate.
    pub u_end: Matrix,
    pub kt: Matrix,
    pub p: Matrix,
    pub a: Matrix,
    pub s: Matrix,
    pub z: Matrix,
    pub decays: Matrix,
    pub beta: Matrix,
    pub out_scale: Matrix,
}

impl Workspace {
    fn size(key: usize, columns: usize) -> usize {
        let rows = CHUNK * (3 * key + 4 * columns + 2 * CHUNK + Decays::ROWS + 2);
        rows + key * columns + key + 16 * 16
    }

    fn carve<R: Rule>(carver: &mut Carver, key: usize, columns: usize, gated: bool) -> Self {
        let v = carver.matrix(CHUNK, columns);
        Self {
            q: carver.matrix(CHUNK, key),
            k: carver.matrix(CHUNK, key),
            v,
            u: if R::DELTA { carver.matrix(CHUNK, columns) } else { v },
            u_end: if R::DELTA || gated { carver.matrix(CHUNK, columns) } else { v },
            kt: carver.matrix(key, CHUNK),
            p: carver.matrix(CHUNK, CHUNK),
            a: carver.matrix(CHUNK, CHUNK),
            s: carver.matrix(key, columns),
            z: carver.matrix(1, key),
            decays: carver.matrix(Decays::ROWS, CHUNK),
            beta: carver.matrix(1, CHUNK),
            out_scale: carver.matrix(1, CHUNK),
        }
    }
}

#[inline(always)]
unsafe fn run_task<L: Lanes, const WIDE: usize, R: Rule>(
    inputs: &Inputs<'_>,
    task: &Task,
    targets: Targets,
    mut carver: Carver,
) {
    let dims = inputs.dims;
    let (key, value, heads) = (dims.key, dims.value, dims.heads);
    let columns = task.columns.len();
    let w = Workspace::carve::<R>(
        &mut carver,
        key.next_multiple_of(L::COUNT.max(ROWS)),
        columns.next_multiple_of(L::COUNT),
        inputs.gate.is_some(),
    );
    let padded = w.q.stride;
    let stride = heads * value;
    let state = task.state * key * value + task.columns.start;
    // SAFETY: `Inputs::check` vouches for the inputs, `Plan` for the targets, `carve` for the matrices.
    unsafe {
        copy_in::<L>(w.s, padded, inputs.state.as_ptr().add(state), value, key, columns);
        if R::NORMALISED {
            copy_in::<L>(w.z, 1, inputs.normaliser.as_ptr().add(task.state * key), key, 1, key);
        }
        let chunks = task.tokens.div_ceil(CHUNK);
        for index in 0..chunks {
            let place = Place::new(task, heads, index);
            let first = place.position * value + task.columns.start;
            let w = load_chunk::<L, R>(w, inputs, task, place);
            let decays =
                Decays::new::<L>(w.decays, inputs.gate, place.position, heads, task.head, place.tokens);
            if inputs.gate.is_some() {
                flush::<L>(w.s, key, index);
            }
            save_start::<L, R>(&w, task, targets, index, key, value);
            transpose::<L>(w.k, place.rows.next_multiple_of(L::COUNT), padded, w.kt);
            scores::<L, WIDE, R>(w.q, w.k, w.kt, w.p, w.a, None, decays, key, place.rows);
            row_factors::<L, R>(&w, inputs, place, decays);
            let chunk = Chunk {
                w,
                decays,
                tokens: place.tokens,
                key,
                columns,
                o: targets.o.at(first),
                saved_row: (!targets.saved_rows.is_null()).then(|| targets.saved_rows.at(first)),
                stride,
            };
            let mut ahead = chunk_ahead(inputs, task, targets, place, index);
            let mut row = 0;
            while row < place.rows {
                ahead.ask(SHARES[0]);
                column_tiles!(L, WIDE, w.s.stride, output_rows, R; row, &chunk);
                row += ROWS;
            }
            let mut row = 0;
            while row < key {
                ahead.ask(SHARES[1]);
                column_tiles!(L, WIDE, w.s.stride, state_rows; row, &chunk);
                row += ROWS;
            }
            if R::NORMALISED {
                add_weighted_rows::<L>(w.z, decays.total, w.k, decays.until_end(0), place.rows);
            }
        }
        copy_out::<L>(w.s, targets.state.at(state), value, key, columns);
        if R::NORMALISED && task.split == 0 {
            copy_out::<L>(w.z, targets.normaliser.at(task.state * key), key, 1, key);
        }
    }
}

/// Loads the chunk's q, k and v. What the additive rules read once, or only to decay it, stays where it lies: what is
/// copied drives the state out of the first-level cache.
#[inline(always)]
unsafe fn load_chunk<L: Lanes, R: Rule>(
    mut w: Workspace,
    inputs: &Inputs<'_>,
    task: &Task,
    place: Place,
) -> Workspace {
    let Dims { heads, key, value, .. } = *inputs.dims;
    let (stride, columns) = (heads * value, task.columns.len());
    // SAFETY: `place` is inside the arrays, whose lengths were checked.
    unsafe {
        load_keys::<L, R>(w.k, inputs.k, place, inputs.dims);
        if R::DELTA || R::NORMALISED {
            load_keys::<L, R>(w.q, inputs.q, place, inputs.dims);
        } else {
            let from = inputs.q.as_ptr().add(place.position * key);
            w.q = view_or_copy::<L>(w.q, CHUNK, from, heads * key, place.tokens, key);
        }
        let from = inputs.v.as_ptr().add(place.position * value + task.columns.start);
        if !R::DELTA && inputs.gate.is_some() {
            w.v = view_or_copy::<L>(w.v, CHUNK, from, stride, place.tokens, columns);
            w.u = w.v;
        } else {
            copy_in::<L>(w.v, CHUNK, from, stride, place.tokens, columns);
        }
    }
    w
}

/// Saves the state at the start of the `index`-th chunk of the task.
#[inline(always)]
unsafe fn save_start<L: Lanes, R: Rule>(
    w: &Workspace,
    task: &Task,
    targets: Targets,
    index: usize,
    key: usize,
    value: usize,
) {
    let chunk = task.first_chunk + index;
    // SAFETY: the plan counted the chunks.
    unsafe {
        if !targets.saved_states.is_null() {
            let to = targets.saved_states.at(chunk * key * value + task.columns.start);
            copy_out::<L>(w.s, to, value, key, task.columns.len());
        }
        if R::NORMALISED && !targets.saved_normalisers.is_null() && task.split == 0 {
            copy_out::<L>(w.z, targets.saved_normalisers.at(chunk * key), key, 1, key);
        }
    }
}

/// Factors of the chunk's rows: write rates, output factors, and for the additive rules the values
/// decayed to the chunk's end.
#[inline(always)]
unsafe fn row_factors<L: Lanes, R: Rule>(w: &Workspace, inputs: &Inputs<'_>, place: Place, decays: Decays) {
    // SAFETY: rows below CHUNK; `beta` was checked to reach the last token.
    unsafe {
        if R::NORMALISED {
            denominators::<L>(w.q, w.p, w.z, decays, place.rows, w.out_scale.start);
        }
        for i in 0..place.rows {
            let factor = w.out_scale.at(0, i);
            *factor = if R::NORMALISED { 1.0 / *factor } else { inputs.dims.scale };
            if R::DELTA {
                let position = place.position + i * inputs.dims.heads;
                *w.beta.at(0, i) = if i < place.tokens { *inputs.beta.get_unchecked(position) } else { 0.0 };
            } else if inputs.gate.is_some() {
                let decay = L::splat(*decays.until_end(i));
                let mut j = 0;
                while j < w.u_end.stride {
                    L::load(w.v.at(i, j)).mul(decay).store(w.u_end.at(i, j));
                    j += L::COUNT;
                }
            }
        }
    }
}

/// What the next chunk reads and writes.
#[inline(always)]
fn chunk_ahead(inputs: &Inputs<'_>, task: &Task, to: Targets, place: Place, index: usize) -> Ahead {
    let Dims { key, value, heads, .. } = *inputs.dims;
    let columns = task.columns.len();
    let tokens = task.tokens.saturating_sub((index + 1) * CHUNK).min(CHUNK);
    let position = place.position + CHUNK * heads;
    let values = position * value + task.columns.start;
    let mut ahead = Ahead::new();
    for from in [inputs.q, inputs.k] {
        ahead.name(from.as_ptr().wrapping_add(position * key), heads * key, key, tokens);
    }
    ahead.name(inputs.v.as_ptr().wrapping_add(values), heads * value, columns, tokens);
    if tokens > 0 && !to.saved_states.is_null() {
        let state = (task.first_chunk + index + 1) * key * value + task.columns.start;
        ahead.name(to.saved_states.at(state), value, columns, key);
    }
    for to in [to.o, to.saved_rows].into_iter().filter(|to| !to.is_null()) {
        ahead.name(to.at(values), heads * value, columns, tokens);
    }
    ahead.spread(SHARES[0] * place.rows / ROWS + SHARES[1] * key.div_ceil(ROWS))
}

/// Shares of the [prefetches](chunk_ahead) for each tile of rows of the outputs and the state, as long as they take.
const SHARES: [usize; 2] = [2, 1];
