//! Backward pass of the token-recurrent memories: chunks in reverse, tokens in reverse inside them.
//!
//! A chunk's states are computed again from the one saved at its start: first those at the start of every
//! [stretch](STRETCH) of tokens, then, stretch by stretch in reverse and a few value columns at a time, those after each
//! token, so that all a stretch needs stays in the first-level cache. Here the memories lie transposed, keys along the
//! registers, so that the gradients of keys, queries and decays, which sum over the values, add up lane by lane; only `u`
//! and `v` need a sum over lanes.

use std::marker::PhantomData;

use super::{Inputs, Rule, Staged};
use crate::kernel::gates::CHUNK;
use crate::kernel::plan::{Plan, Task};
use crate::kernel::simd::{InstructionSet, Kernel, Lanes, dispatch};
use crate::kernel::tile::{Matrix, copy_in, copy_out};
use crate::kernel::workspace::{Carver, SPREAD, SharedOut, Unwritten, with_workspace};

use super::backward_chunk::run_chunk;

/// What the [forward pass](super::forward::Outputs) saved.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Chunk-start states `[chunks, key, value]`.
    pub states: &'a [f32],
    /// Chunk-start momenta.
    pub momenta: &'a [f32],
    /// `[batch, time, heads, value]`.
    pub rows: &'a [f32],
}

/// Gradients of the outputs; an output without one took no part in the loss.
#[derive(Debug, Clone, Copy)]
pub struct OutputGradients<'a> {
    /// Of `o`.
    pub o: Option<&'a [f32]>,
    /// Of the final states.
    pub state: Option<&'a [f32]>,
    /// Of the final momenta.
    pub momentum_state: Option<&'a [f32]>,
}

/// Gradients of the inputs, each with the shape of its input.
#[derive(Debug, Default)]
pub struct Gradients {
    /// Of the queries.
    pub q: Vec<f32>,
    /// Of what the state is read with.
    pub read: Vec<f32>,
    /// Of what is written with.
    pub write: Vec<f32>,
    /// Of what the values are written with.
    pub value_key: Vec<f32>,
    /// Of the values.
    pub v: Vec<f32>,
    /// Of the log decays, or of the plain ones with momentum.
    pub decay: Vec<f32>,
    /// Of the rates.
    pub rate: Vec<f32>,
    /// Of the momentum factors.
    pub momentum: Vec<f32>,
    /// Of the momentum rates.
    pub momentum_rate: Vec<f32>,
    /// Of the initial states.
    pub state: Vec<f32>,
    /// Of the initial momenta.
    pub momentum_state: Vec<f32>,
}

/// Where the gradients go; all but `v`, the states and gates by column once for every split of the value columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Targets {
    pub q: SharedOut,
    pub read: SharedOut,
    pub write: SharedOut,
    pub value_key: SharedOut,
    pub v: SharedOut,
    pub decay: SharedOut,
    pub rate: SharedOut,
    pub momentum: SharedOut,
    pub momentum_rate: SharedOut,
    state: SharedOut,
    momentum_state: SharedOut,
}

/// Runs the backward pass.
///
/// # Panics
/// When a slice has not the length that the sizes say, or `saved` comes from another call.
pub fn backward<R: Rule>(inputs: &Inputs<'_>, saved: Saved<'_>, grads: OutputGradients<'_>) -> Gradients {
    inputs.check::<R>();
    let plan = Plan::new(inputs.dims, InstructionSet::active());
    check_saved::<R>(inputs, &plan, saved, grads);
    // Splits of the value columns share every gate but those by column.
    let gate_splits = if R::COLUMN_GATES { 1 } else { plan.splits };
    let lens = [
        plan.splits * inputs.q.len(),
        plan.splits * inputs.read.len(),
        plan.splits * inputs.write.len(),
        plan.splits * inputs.value_key.len(),
        inputs.v.len(),
        gate_splits * inputs.decay.len(),
        gate_splits * inputs.rate.len(),
        gate_splits * inputs.momentum.len(),
        plan.splits * inputs.momentum_rate.len(),
        inputs.state.len(),
        inputs.momentum_state.len(),
    ];
    let mut vectors = lens.map(Unwritten::new);
    let [q, read, write, value_key, v, decay, rate, momentum, momentum_rate, state, momentum_state] =
        vectors.each_mut().map(Unwritten::share);
    let targets =
        Targets { q, read, write, value_key, v, decay, rate, momentum, momentum_rate, state, momentum_state };
    plan.run(|task| {
        let key = inputs.dims.key.next_multiple_of(16);
        let columns = task.columns.len().next_multiple_of(16);
        with_workspace(Workspace::size::<R>(key, columns), |carver| {
            let rule = PhantomData::<R>;
            dispatch(plan.set, BackwardTask { inputs, saved, grads, task, targets, carver, rule });
        });
    });
    let mut lens = lens.into_iter();
    let [q, read, write, value_key, v, decay, rate, momentum, momentum_rate, state, momentum_state] = vectors
        .map(|vector| {
            // SAFETY: the tasks cover every token, head, column and split, and write all of their part.
            unsafe { vector.written(lens.next().unwrap_or(0)) }
        });
    let parts = [q, read, write, value_key, momentum_rate];
    let [q, read, write, value_key, momentum_rate] = parts.map(|x| plan.reduce(x));
    let gates = [decay, rate, momentum];
    let [decay, rate, momentum] = gates.map(|x| if R::COLUMN_GATES { x } else { plan.reduce(x) });
    Gradients { q, read, write, value_key, v, decay, rate, momentum, momentum_rate, state, momentum_state }
}

fn check_saved<R: Rule>(inputs: &Inputs<'_>, plan: &Plan, saved: Saved<'_>, grads: OutputGradients<'_>) {
    let starts = plan.chunks * inputs.dims.key * inputs.dims.value;
    assert_eq!(saved.states.len(), starts, "saved states");
    assert_eq!(saved.momenta.len(), if R::MOMENTUM { starts } else { 0 }, "saved momenta");
    assert_eq!(saved.rows.len(), if R::READS { inputs.v.len() } else { 0 }, "saved rows");
    assert!(grads.o.is_none_or(|o| o.len() == inputs.v.len()), "gradient of o");
    assert!(grads.state.is_none_or(|s| s.len() == inputs.state.len()), "gradient of the states");
    let momenta = inputs.momentum_state.len();
    assert!(grads.momentum_state.is_none_or(|p| !R::MOMENTUM || p.len() == momenta), "gradient of momenta");
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
        let (key, value, columns) = (dims.key, dims.value, self.task.columns.len());
        let w = Workspace::carve::<R>(&mut self.carver, key.next_multiple_of(L::COUNT), columns);
        let state = self.task.state * key * value + self.task.columns.start;
        // SAFETY: `dispatch` vouches for the instruction set, the checks for the lengths.
        unsafe {
            transposed_in::<L>(&w, w.ds, self.grads.state, state, value, key, columns);
            if R::MOMENTUM {
                transposed_in::<L>(&w, w.dp, self.grads.momentum_state, state, value, key, columns);
            }
            for index in (0..self.task.tokens.div_ceil(CHUNK)).rev() {
                run_chunk::<L, WIDE, R>(&self, &w, index);
            }
            transposed_out::<L>(&w, w.ds, self.targets.state.at(state), value, key, columns);
            if R::MOMENTUM {
                let to = self.targets.momentum_state.at(state);
                transposed_out::<L>(&w, w.dp, to, value, key, columns);
            }
        }
    }
}

/// Value columns whose states a stretch keeps at a time.
pub(super) const BLOCK: usize = 8;

/// Room for the numbers of a block, at least a register.
pub(super) const LINE: usize = 16;

/// Tokens whose states are kept at a time.
pub(super) const STRETCH: usize = 8;

/// Matrices of one task; `d` before a name is its gradient.
#[derive(Clone, Copy)]
pub(super) struct Workspace {
    pub staged: Staged,
    /// Gradients of the staged inputs, summed over value columns.
    pub d_q: Matrix,
    pub d_read: Matrix,
    pub d_write: Matrix,
    pub d_value_key: Matrix,
    /// Of gates by column those of each column, summed over keys.
    pub d_decay: Matrix,
    /// Gradients of the momentum factors and rates, lane by lane; of factors by column as above.
    pub d_momentum: Matrix,
    pub d_momentum_rate: Matrix,
    /// Token by value column.
    pub d_o: Matrix,
    pub v: Matrix,
    pub rows: Matrix,
    pub u: Matrix,
    pub d_u: Matrix,
    pub d_v: Matrix,
    /// Value column by key: gradients of the state and the momentum.
    pub ds: Matrix,
    pub dp: Matrix,
    /// The same of the values at the start of every stretch, one stretch after another.
    starts: Matrix,
    starts_p: Matrix,
    /// States of [`BLOCK`] columns before the stretch and after each of its tokens.
    pub states: Matrix,
    pub momenta: Matrix,
    /// Gradients of `u` and then of `v` of [`BLOCK`] columns, lane by lane, and their sums; then of decays and momentum
    /// factors by column.
    pub partial: Matrix,
    pub sums: *mut f32,
    /// What the token at hand brings for each column of the block, six lines.
    pub scalars: *mut f32,
    columns: usize,
    /// Key by value column, on the way in and out.
    flat: Matrix,
}

impl Workspace {
    fn size<R: Rule>(key: usize, columns: usize) -> usize {
        let states = if R::MOMENTUM { 2 } else { 1 };
        let history = states * (STRETCH + 1) * BLOCK * key;
        let starts = states * (CHUNK / STRETCH + 1) * key * columns;
        let gates = if R::COLUMN_GATES { columns } else { key };
        let gradients = (5 * key + 2 * gates + 6 * columns) * CHUNK + (Self::partials::<R>() + 8) * LINE;
        Staged::size::<R>(key, columns) + gradients + history + starts + key * columns + 23 * (LINE + SPREAD)
    }

    /// Rows of lanes that a block gathers.
    pub const fn partials<R: Rule>() -> usize {
        if R::COLUMN_GATES { 4 * BLOCK } else { 2 * BLOCK }
    }

    fn carve<R: Rule>(carver: &mut Carver, key: usize, columns: usize) -> Self {
        let columns = columns.next_multiple_of(16);
        let only = |rows: usize| if R::MOMENTUM { rows } else { 0 };
        let gates = if R::COLUMN_GATES { columns } else { key };
        Self {
            staged: Staged::carve::<R>(carver, key, columns),
            d_q: carver.spread(CHUNK, key),
            d_read: carver.spread(CHUNK, key),
            d_write: carver.spread(CHUNK, key),
            d_value_key: carver.spread(CHUNK, key),
            d_decay: carver.spread(CHUNK, gates),
            d_momentum: carver.spread(only(CHUNK), gates),
            d_momentum_rate: carver.spread(if R::SCALES_MOMENTUM { CHUNK } else { 0 }, key),
            d_o: carver.spread(CHUNK, columns),
            v: carver.spread(CHUNK, columns),
            rows: carver.spread(CHUNK, columns),
            u: carver.spread(CHUNK, columns),
            d_u: carver.spread(CHUNK, columns),
            d_v: carver.spread(CHUNK, columns),
            ds: carver.spread(columns, key),
            dp: carver.spread(only(columns), key),
            starts: carver.spread(CHUNK / STRETCH * columns, key),
            starts_p: carver.spread(only(CHUNK / STRETCH * columns), key),
            states: carver.spread((STRETCH + 1) * BLOCK, key),
            momenta: carver.spread(only((STRETCH + 1) * BLOCK), key),
            partial: carver.spread(Self::partials::<R>(), LINE),
            sums: carver.spread(2, LINE).start,
            scalars: carver.spread(6, LINE).start,
            columns,
            flat: carver.spread(key, columns),
        }
    }

    /// The states, value column by key, at the start of token `t`'s stretch.
    #[inline(always)]
    pub fn start(&self, t: usize) -> Matrix {
        Self::nth(self.starts, t / STRETCH * self.columns)
    }

    /// The momenta there.
    #[inline(always)]
    pub fn start_p(&self, t: usize) -> Matrix {
        Self::nth(self.starts_p, t / STRETCH * self.columns)
    }

    #[inline(always)]
    fn nth(starts: Matrix, row: usize) -> Matrix {
        Matrix { start: starts.start.wrapping_add(row * starts.stride), ..starts }
    }
}

/// Loads `[key, value]` numbers transposed, or zeros when there are none.
///
/// # Safety
/// The CPU supports `L`; `first` is the position of the block in `from`.
#[inline(always)]
pub(super) unsafe fn transposed_in<L: Lanes>(
    w: &Workspace,
    to: Matrix,
    from: Option<&[f32]>,
    first: usize,
    value: usize,
    key: usize,
    columns: usize,
) {
    // SAFETY: vouched for by the caller; nothing is read from an absent source.
    unsafe {
        match from {
            Some(from) => copy_in::<L>(w.flat, to.stride, from.as_ptr().add(first), value, key, columns),
            None => copy_in::<L>(w.flat, to.stride, std::ptr::null(), 0, 0, 0),
        }
        crate::kernel::tile::transpose::<L>(w.flat, to.stride, w.flat.stride, to);
    }
}

/// The inverse of [`transposed_in`].
#[inline(always)]
unsafe fn transposed_out<L: Lanes>(
    w: &Workspace,
    from: Matrix,
    to: *mut f32,
    value: usize,
    key: usize,
    columns: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        crate::kernel::tile::transpose::<L>(from, w.flat.stride, from.stride, w.flat);
        copy_out::<L>(w.flat, to, value, key, columns);
    }
}
