//! One token of the matrix memories, in place: the state is read and written once.
//!
//! A task walks the value columns in blocks of a few registers; the sums over the keys stay in registers,
//! and the second walk over a block finds it in the first-level cache.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by row and register")]

use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;

use super::dims::Dims;
use super::gates::Gate;
use super::memory::{EPSILON, Rule, copy_mapped};
use super::simd::{EXP_FLOOR, InstructionSet, Kernel, Lanes, dispatch};
use super::tile::Matrix;
use super::workspace::{Carver, SharedOut, with_workspace};

/// Registers across a block of value columns.
const BLOCK: usize = 4;

/// Numbers of state under which one thread does the work.
const SERIAL_NUMBERS: usize = 1 << 16;

/// Inputs of one token for every row of the batch, contiguous; the gate is [`Gate::PerHead`] for a fixed
/// decay or [`Gate::PerToken`] with `[batch, heads]`.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs<'a> {
    /// Sizes, with one token.
    pub dims: &'a Dims,
    /// `[batch, heads, key]`.
    pub q: &'a [f32],
    /// `[batch, heads, key]`.
    pub k: &'a [f32],
    /// `[batch, heads, value]`.
    pub v: &'a [f32],
    /// `[batch, heads]`; empty unless the rule is the delta rule.
    pub beta: &'a [f32],
    /// Log gates.
    pub gate: Gate<'a>,
}

/// Writes the token to every state `[batch, heads, key, value]` (and normaliser `[batch, heads, key]`, for
/// the normalised rule; else empty) and reads the outputs `[batch, heads, value]`.
///
/// # Panics
/// When a slice has not the length that the sizes say.
pub fn step<R: Rule>(inputs: StepInputs<'_>, state: &mut [f32], normaliser: &mut [f32], out: &mut [f32]) {
    let dims = inputs.dims;
    let (key, value, heads) = (dims.key, dims.value, dims.heads);
    let units = dims.batch * heads;
    assert_eq!(inputs.q.len(), units * key, "length of q");
    assert_eq!(inputs.k.len(), units * key, "length of k");
    assert_eq!(inputs.v.len(), units * value, "length of v");
    assert_eq!(inputs.beta.len(), if R::DELTA { units } else { 0 }, "length of beta");
    assert_eq!(state.len(), units * key * value, "length of the state");
    assert_eq!(out.len(), units * value, "length of the output");
    assert_eq!(normaliser.len(), if R::NORMALISED { units * key } else { 0 }, "length of the normaliser");
    match inputs.gate {
        Gate::None => {}
        Gate::PerHead(gate) => assert_eq!(gate.len(), heads, "length of the gate"),
        Gate::PerToken(gate) => assert_eq!(gate.len(), units, "length of the gate"),
    }
    let targets = Targets {
        state: SharedOut::new(state),
        normaliser: SharedOut::new(normaliser),
        out: SharedOut::new(out),
    };
    let set = InstructionSet::active();
    let run = |units: Range<usize>| {
        with_workspace(2 * key.next_multiple_of(16) + 64, |carver| {
            dispatch(set, StepTask { inputs, units, targets, carver, rule: PhantomData::<R> });
        });
    };
    share_units(units, state.len(), run);
}

/// Runs the states `0..units` in as many parts as there are threads, or in one when `numbers` of state are few.
pub(crate) fn share_units(units: usize, numbers: usize, run: impl Fn(Range<usize>) + Sync) {
    let parts = if numbers < SERIAL_NUMBERS { 1 } else { rayon::current_num_threads().min(units) };
    if parts < 2 {
        run(0..units);
    } else {
        let bound = |part: usize| part * units / parts;
        (0..parts).into_par_iter().with_max_len(1).for_each(|part| run(bound(part)..bound(part + 1)));
    }
}

#[derive(Clone, Copy)]
struct Targets {
    state: SharedOut,
    normaliser: SharedOut,
    out: SharedOut,
}

struct StepTask<'a, R> {
    inputs: StepInputs<'a>,
    /// Positions among the states `[batch, heads]`; tasks have disjoint ranges.
    units: Range<usize>,
    targets: Targets,
    carver: Carver,
    rule: PhantomData<R>,
}

impl<R: Rule> Kernel for StepTask<'_, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(mut self) {
        let dims = self.inputs.dims;
        let (key, value) = (dims.key, dims.value);
        let padded = key.next_multiple_of(L::COUNT);
        let mapped = [self.carver.matrix(1, padded), self.carver.matrix(1, padded)];
        for unit in self.units {
            // SAFETY: `dispatch` vouches for the instruction set, `step` for the lengths; `unit` is in range
            // and this task's own.
            unsafe {
                let gate = self.inputs.gate.at(unit, unit % dims.heads);
                let mut q = self.inputs.q.as_ptr().add(unit * key);
                let mut k = self.inputs.k.as_ptr().add(unit * key);
                let decay = if self.inputs.gate.is_some() { decay(gate) } else { 1.0 };
                let mut scale = dims.scale;
                if R::NORMALISED {
                    q = map::<L>(mapped[0], q, key);
                    k = map::<L>(mapped[1], k, key);
                    scale = 1.0
                        / (step_normaliser(self.targets.normaliser.at(unit * key), q, k, key, decay)
                            + EPSILON);
                }
                let token = Token {
                    q,
                    k,
                    v: self.inputs.v.as_ptr().add(unit * value),
                    out: self.targets.out.at(unit * value),
                    state: self.targets.state.at(unit * key * value),
                    overlap: dot(q, k, key),
                    beta: if R::DELTA { self.inputs.beta[unit] } else { 1.0 },
                    decay,
                    scale,
                    key,
                    value,
                };
                let mut column = 0;
                while column + BLOCK * L::COUNT <= value {
                    block::<L, BLOCK, R>(&token, column, L::COUNT);
                    column += BLOCK * L::COUNT;
                }
                while column < value {
                    block::<L, 1, R>(&token, column, (value - column).min(L::COUNT));
                    column += L::COUNT;
                }
            }
        }
    }
}

/// One head of one sequence.
struct Token {
    q: *const f32,
    k: *const f32,
    v: *const f32,
    out: *mut f32,
    state: *mut f32,
    /// `q . k`.
    overlap: f32,
    beta: f32,
    decay: f32,
    scale: f32,
    key: usize,
    value: usize,
}

/// `exp(gate)` as the chunked kernels take it.
fn decay(gate: f32) -> f32 {
    if gate < EXP_FLOOR { 0.0 } else { gate.exp() }
}

#[inline(always)]
unsafe fn dot(q: *const f32, k: *const f32, key: usize) -> f32 {
    let mut sum = 0.0;
    for i in 0..key {
        // SAFETY: both have `key` numbers.
        sum += unsafe { *q.add(i) * *k.add(i) };
    }
    sum
}

/// Copies a token's q or k and maps it.
#[inline(always)]
unsafe fn map<L: Lanes>(to: Matrix, from: *const f32, key: usize) -> *const f32 {
    // SAFETY: `from` has `key` numbers, `to` is padded to whole registers.
    unsafe { copy_mapped::<L>(to, 1, from, key, 1, key) };
    to.start
}

/// Decays the normaliser, adds the key, returns its product with the query.
#[inline(always)]
unsafe fn step_normaliser(z: *mut f32, q: *const f32, k: *const f32, key: usize, decay: f32) -> f32 {
    let mut sum = 0.0;
    for i in 0..key {
        // SAFETY: all three have `key` numbers.
        unsafe {
            let next = decay * *z.add(i) + *k.add(i);
            *z.add(i) = next;
            sum += *q.add(i) * next;
        }
    }
    sum
}

/// `N` registers of value columns; the last of them holds `last` columns.
#[inline(always)]
unsafe fn block<L: Lanes, const N: usize, R: Rule>(t: &Token, column: usize, last: usize) {
    // SAFETY: columns below `value`; partial loads and stores keep to `last`.
    unsafe {
        let decay = L::splat(t.decay);
        let state = t.state.add(column);
        let mut write = [decay; N];
        for n in 0..N {
            write[n] = read::<L>(t.v.add(column + n * L::COUNT), last);
        }
        let mut reading = [L::splat(0.0); N];
        if R::DELTA {
            let mut expected = reading;
            for i in 0..t.key {
                let (k, q) = (L::splat(*t.k.add(i)), L::splat(*t.q.add(i)));
                for n in 0..N {
                    let s = read::<L>(state.add(i * t.value + n * L::COUNT), last);
                    expected[n] = k.mul_add(s, expected[n]);
                    reading[n] = q.mul_add(s, reading[n]);
                }
            }
            let (beta, overlap) = (L::splat(t.beta), L::splat(t.overlap));
            for n in 0..N {
                write[n] = write[n].sub(decay.mul(expected[n])).mul(beta);
                reading[n] = overlap.mul_add(write[n], decay.mul(reading[n]));
            }
        }
        for i in 0..t.key {
            let (k, q) = (L::splat(*t.k.add(i)), L::splat(*t.q.add(i)));
            for n in 0..N {
                let at = state.add(i * t.value + n * L::COUNT);
                let s = k.mul_add(write[n], decay.mul(read::<L>(at, last))).flush_tiny();
                if !R::DELTA {
                    reading[n] = q.mul_add(s, reading[n]);
                }
                write_back(s, at, last);
            }
        }
        for n in 0..N {
            write_back(reading[n].mul(L::splat(t.scale)), t.out.add(column + n * L::COUNT), last);
        }
    }
}

/// `count` lanes, at most a whole register.
///
/// # Safety
/// The CPU supports `L`; that many numbers are readable.
#[inline(always)]
pub(super) unsafe fn read<L: Lanes>(from: *const f32, count: usize) -> L {
    // SAFETY: vouched for by the caller.
    unsafe { if count == L::COUNT { L::load(from) } else { L::load_partial(from, count) } }
}

#[inline(always)]
unsafe fn write_back<L: Lanes>(x: L, to: *mut f32, count: usize) {
    // SAFETY: vouched for by the caller.
    unsafe { if count == L::COUNT { x.store(to) } else { x.store_partial(to, count) } }
}
