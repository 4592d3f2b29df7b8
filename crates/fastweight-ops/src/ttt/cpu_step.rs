//! One token of TTT-Linear: the weights are read once, what is gathered is read and written once.

use std::ops::Range;

use rayon::prelude::*;

use crate::kernel::Dims;
use crate::kernel::simd::{InstructionSet, Kernel, Lanes, dispatch};
use crate::kernel::step::share_units;
use crate::kernel::tile::{Matrix, column_tiles, copy_in, copy_out};
use crate::kernel::workspace::{Carver, SharedOut, with_workspace};

use super::rows::{Inner, Norm, inner, output};

/// Inputs of one token for every row of the batch, contiguous.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs<'a> {
    /// Sizes, with one token; `key` equals `value`.
    pub dims: &'a Dims,
    /// Where in its mini-batch each row is; what a row at position 0 gathered is not read.
    pub position: &'a [usize],
    /// `[batch, heads, key]`.
    pub q: &'a [f32],
    /// `[batch, heads, key]`.
    pub k: &'a [f32],
    /// `[batch, heads, value]`.
    pub v: &'a [f32],
    /// `[batch, heads]`.
    pub eta: &'a [f32],
    /// `[heads, value]`.
    pub ln_w: &'a [f32],
    /// `[heads, value]`.
    pub ln_b: &'a [f32],
    /// Weights at the mini-batch's start `[batch, heads, key, value]`.
    pub weights: &'a [f32],
    /// Bias at the mini-batch's start `[batch, heads, value]`.
    pub bias: &'a [f32],
}

/// Adds the token to `gathered [batch, heads, key, value]` and `gathered_bias [batch, heads, value]`, and reads
/// the outputs `[batch, heads, value]`. The weights stay; see [`learn`] for the end of a mini-batch.
///
/// # Panics
/// When a slice has not the length that the sizes say.
pub fn step(inputs: StepInputs<'_>, gathered: &mut [f32], gathered_bias: &mut [f32], out: &mut [f32]) {
    let Dims { batch, heads, key, value, .. } = *inputs.dims;
    let units = batch * heads;
    assert_eq!(key, value, "values are as wide as keys");
    assert_eq!(inputs.position.len(), batch, "positions");
    for (what, len) in [
        ("q", inputs.q.len()),
        ("k", inputs.k.len()),
        ("v", inputs.v.len()),
        ("bias", inputs.bias.len()),
        ("gathered_bias", gathered_bias.len()),
        ("output", out.len()),
    ] {
        assert_eq!(len, units * value, "length of {what}");
    }
    assert_eq!(inputs.eta.len(), units, "length of eta");
    assert_eq!((inputs.ln_w.len(), inputs.ln_b.len()), (heads * value, heads * value), "lengths of LN");
    assert_eq!(inputs.weights.len(), units * key * value, "length of the weights");
    assert_eq!(gathered.len(), units * key * value, "length of gathered");
    let numbers = gathered.len();
    let targets = Targets {
        gathered: SharedOut::new(gathered),
        gathered_bias: SharedOut::new(gathered_bias),
        out: SharedOut::new(out),
    };
    let set = InstructionSet::active();
    let padded = key.next_multiple_of(16);
    let run = |units: Range<usize>| {
        with_workspace(Workspace::ROWS * (padded + 16), |carver| {
            dispatch(set, StepTask { inputs, units, targets, carver });
        });
    };
    share_units(units, numbers, run);
}

/// The end of a mini-batch in the rows where `ends`: `weights -= eta gathered`, likewise the bias.
///
/// `weights [batch, heads, key, value]`, `bias [batch, heads, value]`, `eta [batch, heads]` of the last token.
pub fn learn(
    ends: &[bool],
    eta: &[f32],
    (weights, gathered): (&mut [f32], &[f32]),
    (bias, gathered_bias): (&mut [f32], &[f32]),
) {
    let heads = eta.len() / ends.len().max(1);
    let units = eta.len().max(1);
    for (to, from) in [(weights, gathered), (bias, gathered_bias)] {
        let size = (to.len() / units).max(1);
        let pairs = to.par_chunks_exact_mut(size).zip(from.par_chunks_exact(size)).with_min_len(4);
        pairs.enumerate().filter(|(unit, _)| ends[unit / heads]).for_each(|(unit, (to, from))| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to -= eta[unit] * from);
        });
    }
}

#[derive(Clone, Copy)]
struct Targets {
    gathered: SharedOut,
    gathered_bias: SharedOut,
    out: SharedOut,
}

struct StepTask<'a> {
    inputs: StepInputs<'a>,
    /// Positions among the states `[batch, heads]`; tasks have disjoint ranges.
    units: Range<usize>,
    targets: Targets,
    carver: Carver,
}

/// Padded rows of one token.
#[derive(Clone, Copy)]
struct Workspace {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    x: Matrix,
    xh: Matrix,
    y: Matrix,
    u: Matrix,
    z: Matrix,
    r: Matrix,
    scale: Matrix,
    shift: Matrix,
    mask: Matrix,
    gathered_bias: Matrix,
}

impl Workspace {
    const ROWS: usize = 13;
}

impl Kernel for StepTask<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(mut self) {
        let size = self.inputs.dims.key;
        let padded = size.next_multiple_of(L::COUNT);
        let rows: [Matrix; Workspace::ROWS] = std::array::from_fn(|_| self.carver.matrix(1, padded));
        let [q, k, v, x, xh, y, u, z, r, scale, shift, mask, gathered_bias] = rows;
        let w = Workspace { q, k, v, x, xh, y, u, z, r, scale, shift, mask, gathered_bias };
        // SAFETY: `dispatch` vouches for the instruction set, `step` for the lengths; each unit is in range
        // and this task's own.
        unsafe {
            for j in 0..padded {
                *mask.at(0, j) = if j < size { 1.0 } else { 0.0 };
            }
            for unit in self.units.clone() {
                run_unit::<L, WIDE>(&self, &w, unit);
            }
        }
    }
}

#[inline(always)]
unsafe fn run_unit<L: Lanes, const WIDE: usize>(task: &StepTask<'_>, w: &Workspace, unit: usize) {
    let inputs = &task.inputs;
    let Dims { key: size, heads, scale, .. } = *inputs.dims;
    let (head, row) = (unit % heads, unit / heads);
    // SAFETY: vouched for by the caller.
    unsafe {
        let load_row = |to: Matrix, from: &[f32], at: usize| {
            copy_in::<L>(to, 1, from.as_ptr().add(at * size), size, 1, size);
        };
        load_row(w.q, inputs.q, unit);
        load_row(w.k, inputs.k, unit);
        load_row(w.v, inputs.v, unit);
        load_row(w.scale, inputs.ln_w, head);
        load_row(w.shift, inputs.ln_b, head);
        // The bias starts both readings.
        load_row(w.x, inputs.bias, unit);
        load_row(w.z, inputs.bias, unit);
        let fresh = *inputs.position.get_unchecked(row) == 0;
        let bias = task.targets.gathered_bias.at(unit * size);
        copy_in::<L>(w.gathered_bias, 1, bias, size, usize::from(!fresh), size);
        for j in 0..size {
            *w.q.at(0, j) *= scale;
        }
        let norm = Norm {
            scale: w.scale.start,
            shift: w.shift.start,
            mask: w.mask.start,
            padded: w.q.stride,
            share: 1.0 / size as f32,
        };
        let weights = inputs.weights.as_ptr().add(unit * size * size);
        column_tiles!(L, WIDE, w.q.stride, read_tile; w, weights, size);
        let to = Inner { xh: w.xh.start, y: w.y.start, u: w.u.start };
        inner::<L>(w.x.start, w.k.start, w.v.start, to, &norm);
        let gathered = task.targets.gathered.at(unit * size * size);
        column_tiles!(L, WIDE, w.q.stride, gather_tile; w, gathered, size, fresh);
        copy_out::<L>(w.gathered_bias, bias, size, 1, size);
        let rate = L::splat(-*inputs.eta.get_unchecked(unit));
        let mut j = 0;
        while j < norm.padded {
            let z = rate.mul_add(L::load(w.r.at(0, j)), L::load(w.z.at(0, j)));
            z.store(w.z.at(0, j));
            j += L::COUNT;
        }
        output::<L>(w.z.start, w.r.start, &norm);
        copy_out::<L>(w.r, task.targets.out.at(unit * size), size, 1, size);
    }
}

/// How many columns of a register are inside the matrix.
#[inline(always)]
fn inside<L: Lanes>(column: usize, size: usize) -> usize {
    size.saturating_sub(column).min(L::COUNT)
}

#[inline(always)]
unsafe fn load_inside<L: Lanes>(from: *const f32, count: usize) -> L {
    // SAFETY: vouched for by the caller.
    unsafe { if count == L::COUNT { L::load(from) } else { L::load_partial(from, count) } }
}

/// `x += W^T k`, `z += W^T q` for some columns.
#[inline(always)]
unsafe fn read_tile<L: Lanes, const N: usize>(
    column: usize,
    w: &Workspace,
    weights: *const f32,
    size: usize,
) {
    // SAFETY: called on columns inside the rows; loads stay inside the matrix.
    unsafe {
        let at = |n: usize| column + n * L::COUNT;
        let mut x: [L; N] = std::array::from_fn(|n| L::load(w.x.at(0, at(n))));
        let mut z: [L; N] = std::array::from_fn(|n| L::load(w.z.at(0, at(n))));
        for i in 0..size {
            let (k, q) = (L::splat(*w.k.at(0, i)), L::splat(*w.q.at(0, i)));
            for n in 0..N {
                let count = inside::<L>(at(n), size);
                let weight = load_inside::<L>(weights.wrapping_add(i * size + at(n)), count);
                x[n] = k.mul_add(weight, x[n]);
                z[n] = q.mul_add(weight, z[n]);
            }
        }
        for n in 0..N {
            x[n].store(w.x.at(0, at(n)));
            z[n].store(w.z.at(0, at(n)));
        }
    }
}

/// `G += k u^T`, `g += u`, `r = G^T q + g` for some columns; from zero where the mini-batch is fresh.
#[inline(always)]
unsafe fn gather_tile<L: Lanes, const N: usize>(
    column: usize,
    w: &Workspace,
    gathered: *mut f32,
    size: usize,
    fresh: bool,
) {
    // SAFETY: called on columns inside the rows; loads and stores stay inside the matrix.
    unsafe {
        let at = |n: usize| column + n * L::COUNT;
        let u: [L; N] = std::array::from_fn(|n| L::load(w.u.at(0, at(n))));
        let mut r: [L; N] = std::array::from_fn(|n| L::load(w.gathered_bias.at(0, at(n))).add(u[n]));
        for (n, r) in r.iter().enumerate() {
            r.store(w.gathered_bias.at(0, at(n)));
        }
        for i in 0..size {
            let (k, q) = (L::splat(*w.k.at(0, i)), L::splat(*w.q.at(0, i)));
            for n in 0..N {
                let count = inside::<L>(at(n), size);
                let cell = gathered.wrapping_add(i * size + at(n));
                let before = if fresh { L::splat(0.0) } else { load_inside::<L>(cell, count) };
                let after = k.mul_add(u[n], before);
                r[n] = q.mul_add(after, r[n]);
                if count == L::COUNT {
                    after.store(cell);
                } else {
                    after.store_partial(cell, count);
                }
            }
        }
        for (n, r) in r.iter().enumerate() {
            r.store(w.r.at(0, at(n)));
        }
    }
}
