//! Forward pass of TTT-Linear, a piece of a mini-batch at a time.

use crate::kernel::Dims;
use crate::kernel::simd::{Kernel, Lanes, dispatch};
use crate::kernel::tile::{Matrix, ROWS, copy_in, copy_out, transpose};
use crate::kernel::workspace::{Carver, SharedOut, Unwritten, with_workspace};

use super::cpu::Inputs;
use super::plan::{PIECE, Piece, Plan, Task};
use super::products::{Affine, Correction, Update, add_scaled, fill_triangle, scaled, scores};
use super::rows::{Inner, Norm, clear, inner, output};

/// Outputs of the forward pass.
#[derive(Debug)]
pub(super) struct Outputs {
    /// `[batch, time, heads, value]`.
    pub o: Vec<f32>,
    /// Weights at the start of the mini-batch in progress `[sequences, heads, key + 1, value]`.
    pub weights: Vec<f32>,
    /// What it gathered, likewise.
    pub gathered: Vec<f32>,
    /// For each piece what the backward pass starts from `[pieces, key + 1, value]`: the weights where a
    /// mini-batch starts, what was gathered elsewhere. Empty unless asked for.
    pub saved: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Targets {
    o: SharedOut,
    weights: SharedOut,
    gathered: SharedOut,
    saved: Option<SharedOut>,
}

/// Runs the forward pass.
pub(super) fn forward(inputs: &Inputs<'_>, save: bool) -> Outputs {
    let plan = Plan::new(inputs.dims, inputs.position, inputs.mini_batch);
    let block = (inputs.dims.key + 1) * inputs.dims.value;
    let states = inputs.weights.len();
    let lens = [inputs.v.len(), states, states, if save { plan.saved * block } else { 0 }];
    let mut vectors = lens.map(Unwritten::new);
    let [o, weights, gathered, saved] = vectors.each_mut().map(Unwritten::share);
    let targets = Targets { o, weights, gathered, saved: save.then_some(saved) };
    plan.run(|task| {
        with_workspace(Workspace::size(inputs.dims.key.next_multiple_of(16)), |carver| {
            dispatch(plan.set, ForwardTask { inputs, task, targets, carver });
        });
    });
    let mut lens = lens.into_iter();
    let [o, weights, gathered, saved] = vectors.map(|vector| {
        // SAFETY: the tasks cover every token, state and piece, and write all of their part.
        unsafe { vector.written(lens.next().unwrap_or(0)) }
    });
    Outputs { o, weights, gathered, saved }
}

struct ForwardTask<'a> {
    inputs: &'a Inputs<'a>,
    task: &'a Task<'a>,
    targets: Targets,
    carver: Carver,
}

impl Kernel for ForwardTask<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(mut self) {
        let w = Workspace::carve(&mut self.carver, self.inputs.dims.key.next_multiple_of(L::COUNT));
        // SAFETY: `dispatch` vouches for the instruction set, `Inputs::check` for the lengths.
        unsafe { run_task::<L, WIDE>(&self, &w) }
    }
}

/// What both passes load and compute of a piece.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared {
    /// Queries with the factor on them, keys, values.
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    pub kt: Matrix,
    /// Readings of the keys; normalised; times scale and error; inner gradients.
    x: Matrix,
    pub xh: Matrix,
    pub y: Matrix,
    pub u: Matrix,
    /// `1 / d` of each token.
    pub inverse: Matrix,
    /// Readings of the queries, corrected; and of what the mini-batch gathered.
    pub z: Matrix,
    pub r: Matrix,
    pub p: Matrix,
    pub triangle: Matrix,
    pub eta: Matrix,
    scale: Matrix,
    shift: Matrix,
    mask: Matrix,
    /// Weights and bias at the mini-batch's start, and what it gathered.
    pub w: Matrix,
    pub c: Matrix,
    pub g: Matrix,
    pub gc: Matrix,
}

impl Shared {
    /// Numbers to carve for a padded size.
    pub fn size(padded: usize) -> usize {
        2 * padded * padded + 10 * PIECE * padded + 5 * padded + 2 * PIECE * PIECE + 2 * PIECE + 24 * 16
    }

    pub fn carve(carver: &mut Carver, padded: usize) -> Self {
        let mut row_block = || carver.matrix(PIECE, padded);
        let [q, k, v, x, xh, y, u, z, r] = std::array::from_fn(|_| row_block());
        Self {
            q,
            k,
            v,
            x,
            xh,
            y,
            u,
            z,
            r,
            kt: carver.matrix(padded, PIECE),
            inverse: carver.matrix(1, PIECE),
            p: carver.matrix(PIECE, PIECE),
            triangle: carver.matrix(PIECE, PIECE),
            eta: carver.matrix(1, PIECE),
            scale: carver.matrix(1, padded),
            shift: carver.matrix(1, padded),
            mask: carver.matrix(1, padded),
            w: carver.matrix(padded, padded),
            c: carver.matrix(1, padded),
            g: carver.matrix(padded, padded),
            gc: carver.matrix(1, padded),
        }
    }

    pub fn norm(&self, size: usize) -> Norm {
        Norm {
            scale: self.scale.start,
            shift: self.shift.start,
            mask: self.mask.start,
            padded: self.q.stride,
            share: 1.0 / size as f32,
        }
    }

    pub fn inner_at(&self, row: usize) -> Inner {
        // SAFETY: a row below PIECE.
        unsafe { Inner { xh: self.xh.at(row, 0), y: self.y.at(row, 0), u: self.u.at(row, 0) } }
    }

    /// Loads what all pieces of a head share.
    ///
    /// # Safety
    /// The CPU supports `L`; the inputs were checked.
    #[inline(always)]
    pub unsafe fn start<L: Lanes>(&self, inputs: &Inputs<'_>, head: usize) {
        let size = inputs.dims.value;
        // SAFETY: vouched for by the caller.
        unsafe {
            copy_in::<L>(self.scale, 1, inputs.ln_w.as_ptr().add(head * size), size, 1, size);
            copy_in::<L>(self.shift, 1, inputs.ln_b.as_ptr().add(head * size), size, 1, size);
            for j in 0..self.mask.stride {
                *self.mask.at(0, j) = if j < size { 1.0 } else { 0.0 };
            }
            fill_triangle(self.triangle);
        }
    }

    /// Loads a piece and computes everything up to the corrected readings `z`; weights, and what was
    /// gathered before unless the piece is fresh, are in place.
    ///
    /// # Safety
    /// The CPU supports `L`; the inputs were checked, `position` is that of the piece's first token.
    #[inline(always)]
    pub unsafe fn piece<L: Lanes, const WIDE: usize>(
        &self,
        inputs: &Inputs<'_>,
        piece: &Piece,
        position: usize,
    ) {
        let Dims { key: size, heads, scale, .. } = *inputs.dims;
        let (tokens, rows) = (piece.tokens, piece.tokens.next_multiple_of(ROWS));
        let norm = self.norm(size);
        // SAFETY: the piece is inside the checked arrays, the matrices have PIECE rows.
        unsafe {
            for (to, from) in [(self.q, inputs.q), (self.k, inputs.k), (self.v, inputs.v)] {
                let from = from.as_ptr().add(position * size);
                copy_in::<L>(to, PIECE, from, heads * size, tokens, size);
            }
            scaled::<L>(self.q, scale, self.q, rows);
            for i in 0..PIECE {
                *self.eta.at(0, i) =
                    if i < tokens { *inputs.eta.get_unchecked(position + i * heads) } else { 0.0 };
            }
            transpose::<L>(self.k, PIECE, self.k.stride, self.kt);
            let weights = Affine { a: self.k, b: self.w, bias: Some(self.c), depth: size, rows };
            weights.run::<L, WIDE>(self.x);
            Affine { a: self.q, ..weights }.run::<L, WIDE>(self.z);
            for i in 0..tokens {
                let (x, k, v) = (self.x.at(i, 0), self.k.at(i, 0), self.v.at(i, 0));
                *self.inverse.at(0, i) = inner::<L>(x, k, v, self.inner_at(i), &norm);
            }
            for i in tokens..rows {
                clear::<L>(self.u.at(i, 0), norm.padded);
            }
            scores::<L, WIDE>(self.q, self.kt, self.p, self.triangle, size, rows);
            let gathered = (!piece.fresh).then_some((self.g, self.gc));
            let (p, u, q, eta, z) = (self.p, self.u, self.q, self.eta, self.z);
            Correction { p, u, q, gathered, eta, depth: size, rows, z }.run::<L, WIDE>(self.r);
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Workspace {
    shared: Shared,
    /// Inner gradients times minus the rate of the mini-batch's last token.
    step: Matrix,
}

impl Workspace {
    fn size(padded: usize) -> usize {
        Shared::size(padded) + PIECE * padded + 16
    }

    fn carve(carver: &mut Carver, padded: usize) -> Self {
        Self { shared: Shared::carve(carver, padded), step: carver.matrix(PIECE, padded) }
    }
}

#[inline(always)]
unsafe fn run_task<L: Lanes, const WIDE: usize>(x: &ForwardTask<'_>, w: &Workspace) {
    let (inputs, task, s) = (x.inputs, x.task, &w.shared);
    let Dims { key: size, heads, .. } = *inputs.dims;
    let padded = s.q.stride;
    let block = (size + 1) * size;
    let norm = s.norm(size);
    // SAFETY: `Inputs::check` vouches for the inputs, `Plan` for the targets, `carve` for the matrices.
    unsafe {
        s.start::<L>(inputs, task.head);
        let state = task.state * block;
        let from = inputs.weights.as_ptr().add(state);
        copy_in::<L>(s.w, padded, from, size, size, size);
        copy_in::<L>(s.c, 1, from.add(size * size), size, 1, size);
        let from = inputs.gathered.as_ptr().add(state);
        let rows = if task.fresh { 0 } else { size };
        copy_in::<L>(s.g, padded, from, size, rows, size);
        copy_in::<L>(s.gc, 1, from.add(size * size), size, rows.min(1), size);
        for (index, piece) in task.pieces.iter().enumerate() {
            let position = (task.first_token + piece.start) * heads + task.head;
            if let Some(saved) = x.targets.saved {
                let to = saved.at((task.first_piece + index) * block);
                let (matrix, bias) = if piece.fresh { (s.w, s.c) } else { (s.g, s.gc) };
                copy_out::<L>(matrix, to, size, size, size);
                copy_out::<L>(bias, to.add(size * size), size, 1, size);
            }
            s.piece::<L, WIDE>(inputs, piece, position);
            for i in 0..piece.tokens {
                output::<L>(s.z.at(i, 0), s.r.at(i, 0), &norm);
            }
            copy_out::<L>(s.r, x.targets.o.at(position * size), heads * size, piece.tokens, size);
            let rate = *s.eta.at(0, piece.tokens - 1);
            let update =
                |keep, u| Update { keep, first: (s.k, u), second: None, tokens: piece.tokens, key: size };
            if piece.fresh && piece.ends {
                scaled::<L>(s.u, -rate, w.step, piece.tokens);
                update(true, w.step).run::<L, WIDE>(s.w, s.c);
            } else {
                update(!piece.fresh, s.u).run::<L, WIDE>(s.g, s.gc);
                if piece.ends {
                    add_scaled::<L>(s.w, -rate, s.g, size);
                    add_scaled::<L>(s.c, -rate, s.gc, 1);
                }
            }
        }
        let to = x.targets.weights.at(state);
        copy_out::<L>(s.w, to, size, size, size);
        copy_out::<L>(s.c, to.add(size * size), size, 1, size);
        if task.pieces.last().is_some_and(|last| last.ends) {
            copy_in::<L>(s.g, padded, std::ptr::null(), 0, 0, 0);
            copy_in::<L>(s.gc, 1, std::ptr::null(), 0, 0, 0);
        }
        let to = x.targets.gathered.at(state);
        copy_out::<L>(s.g, to, size, size, size);
        copy_out::<L>(s.gc, to.add(size * size), size, 1, size);
    }
}
