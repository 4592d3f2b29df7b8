//! One token of the token-recurrent memories, in place.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by register")]

use std::marker::PhantomData;
use std::ops::Range;

use super::forward::store_some;
use super::{Inputs, Rule, Staged};
use crate::kernel::memory::Place;
use crate::kernel::simd::{InstructionSet, Kernel, Lanes, dispatch};
use crate::kernel::step::{read, share_units};
use crate::kernel::workspace::{Carver, SharedOut, with_workspace};

/// Registers across a block of value columns.
const BLOCK: usize = 4;

/// Writes one token for every row of the batch to its state `[batch, heads, key, value]` (and momentum, for
/// the rule with one; else empty) and reads the outputs `[batch, heads, value]`.
///
/// `inputs` has one token a row; its `state` and `momentum_state` are not read.
///
/// # Panics
/// When a slice has not the length that the sizes say.
pub fn step<R: Rule>(inputs: &Inputs<'_>, state: &mut [f32], momentum: &mut [f32], out: &mut [f32]) {
    Inputs { state, momentum_state: momentum, ..*inputs }.check::<R>();
    let dims = inputs.dims;
    assert_eq!(dims.time, 1, "one token");
    assert_eq!(out.len(), inputs.v.len(), "length of the output");
    let (units, numbers) = (dims.batch * dims.heads, state.len());
    let targets = Targets {
        state: SharedOut::new(state),
        momentum: SharedOut::new(momentum),
        out: SharedOut::new(out),
    };
    let set = InstructionSet::active();
    let run = |units: Range<usize>| {
        let size = Staged::size::<R>(dims.key.next_multiple_of(16), dims.value.next_multiple_of(16));
        with_workspace(size, |carver| {
            dispatch(set, StepTask { inputs, units, targets, carver, rule: PhantomData::<R> });
        });
    };
    share_units(units, numbers, run);
}

#[derive(Clone, Copy)]
struct Targets {
    state: SharedOut,
    momentum: SharedOut,
    out: SharedOut,
}

struct StepTask<'a, R> {
    inputs: &'a Inputs<'a>,
    /// Positions among the states `[batch, heads]`; tasks have disjoint ranges.
    units: Range<usize>,
    targets: Targets,
    carver: Carver,
    rule: PhantomData<R>,
}

/// One head of one sequence.
struct Token<R> {
    staged: Staged,
    v: *const f32,
    out: *mut f32,
    state: *mut f32,
    momentum: *mut f32,
    key: usize,
    value: usize,
    rule: PhantomData<R>,
}

impl<R: Rule> Kernel for StepTask<'_, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(mut self) {
        let (key, value) = (self.inputs.dims.key, self.inputs.dims.value);
        let [keys, columns] = [key, value].map(|size| size.next_multiple_of(L::COUNT));
        let staged = Staged::carve::<R>(&mut self.carver, keys, columns);
        for unit in self.units {
            // SAFETY: `dispatch` vouches for the instruction set, `step` for the lengths; `unit` is in range
            // and this task's own.
            unsafe {
                staged.load::<L, R>(self.inputs, Place { tokens: 1, rows: 1, position: unit }, &(0..value));
                let token = Token {
                    staged,
                    v: self.inputs.v.as_ptr().add(unit * value),
                    out: self.targets.out.at(unit * value),
                    state: self.targets.state.at(unit * key * value),
                    momentum: self.targets.momentum.at(if R::MOMENTUM { unit * key * value } else { 0 }),
                    key,
                    value,
                    rule: PhantomData::<R>,
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

/// `N` registers of value columns; the last of them holds `last` columns.
#[inline(always)]
unsafe fn block<L: Lanes, const N: usize, R: Rule>(t: &Token<R>, column: usize, last: usize) {
    // SAFETY: columns below `value`; partial loads and stores keep to `last`.
    unsafe {
        let staged = &t.staged;
        let zero = [L::splat(0.0); N];
        let (mut v, mut reading, mut output) = (zero, zero, zero);
        for n in 0..N {
            v[n] = read::<L>(t.v.add(column + n * L::COUNT), last);
        }
        if R::READS {
            for i in 0..t.key {
                let a = L::splat(*staged.read.at(0, i));
                for n in 0..N {
                    let s = read::<L>(t.state.add(i * t.value + column + n * L::COUNT), last);
                    reading[n] = a.mul_add(s, reading[n]);
                }
            }
        }
        let mut u = if R::READS { reading } else { v };
        if R::CORRECTS {
            for n in 0..N {
                u[n] = v[n].sub(reading[n]).mul(staged.rate::<L, R>(0, column + n * L::COUNT));
            }
        }
        let (mut mu, mut decay) = (zero, zero);
        for n in 0..N {
            if R::COLUMN_GATES {
                mu[n] = L::load(staged.momenta::<R>(0, column + n * L::COUNT));
                decay[n] = L::load(staged.decays(0, column + n * L::COUNT));
            } else if R::MOMENTUM {
                mu[n] = L::splat(*staged.momenta::<R>(0, 0));
            }
        }
        let beta = L::splat(if R::SCALES_MOMENTUM { staged.momentum_rate(0) } else { 1.0 });
        for i in 0..t.key {
            let x = L::splat(*staged.write.at(0, i));
            let w = if R::COLUMN_GATES { x } else { L::splat(*staged.decay.at(0, i)) };
            let q = L::splat(*staged.q.at(0, i));
            let y = if R::ADDS_VALUE { L::splat(*staged.value_key.at(0, i)) } else { x };
            for n in 0..N {
                let cell = i * t.value + column + n * L::COUNT;
                let w = if R::COLUMN_GATES { decay[n] } else { w };
                let mut s = read::<L>(t.state.add(cell), last).mul(w);
                if R::MOMENTUM {
                    let p = x.mul_add(u[n], read::<L>(t.momentum.add(cell), last).mul(mu[n])).flush_tiny();
                    store_some(p, t.momentum.add(cell), last);
                    s = if R::SCALES_MOMENTUM { beta.mul_add(p, s) } else { s.add(p) };
                } else {
                    s = x.mul_add(u[n], s);
                }
                if R::ADDS_VALUE {
                    s = y.mul_add(v[n], s);
                }
                let s = s.flush_tiny();
                store_some(s, t.state.add(cell), last);
                output[n] = q.mul_add(s, output[n]);
            }
        }
        for n in 0..N {
            store_some(output[n], t.out.add(column + n * L::COUNT), last);
        }
    }
}
