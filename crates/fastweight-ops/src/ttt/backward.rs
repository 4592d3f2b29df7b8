//! Backward pass of TTT-Linear: the pieces in reverse, from what the forward pass saved.
//!
//! `dW` is the gradient of the weights of the piece's mini-batch, `dG` that of what is gathered at the piece's
//! end: `-eta dW` where the mini-batch ends. With `Z = W^T q - eta R`, `R_t = sum_s P_ts u_s` and `E = -eta dZ`
//! the gradients of the inner gradients are `du = K dG + P^T E`; `rows` takes them through the normalisation.

use crate::kernel::Dims;
use crate::kernel::simd::{Kernel, Lanes, dispatch};
use crate::kernel::tile::{Matrix, ROWS, copy_in, copy_out, lower_product, transpose};
use crate::kernel::workspace::{Carver, SharedOut, Unwritten, with_workspace};

use super::cpu::Inputs;
use super::forward::Shared;
use super::plan::{PIECE, Piece, Plan, Task};
use super::products::{Update, inner_product, mask, scaled};
use super::products_backward::{KeyGradients, WriteGradients};
use super::rows::{NormGradients, clear, inner_backward, output_backward};

/// Gradients of the outputs; an output without one took no part in the loss.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutputGradients<'a> {
    pub o: Option<&'a [f32]>,
    pub weights: Option<&'a [f32]>,
    pub gathered: Option<&'a [f32]>,
}

/// Gradients of the inputs, each with the shape of its input.
#[derive(Debug)]
pub(super) struct Gradients {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub eta: Vec<f32>,
    pub ln_w: Vec<f32>,
    pub ln_b: Vec<f32>,
    pub weights: Vec<f32>,
    pub gathered: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Targets {
    q: SharedOut,
    k: SharedOut,
    v: SharedOut,
    eta: SharedOut,
    /// Once for each sequence.
    ln_w: SharedOut,
    ln_b: SharedOut,
    weights: SharedOut,
    gathered: SharedOut,
}

/// Runs the backward pass.
pub(super) fn backward(inputs: &Inputs<'_>, saved: &[f32], grads: OutputGradients<'_>) -> Gradients {
    let plan = Plan::new(inputs.dims, inputs.position, inputs.mini_batch);
    let dims = inputs.dims;
    let states = inputs.weights.len();
    assert_eq!(saved.len(), plan.saved * (dims.key + 1) * dims.value, "saved states");
    assert!(grads.o.is_none_or(|o| o.len() == inputs.v.len()), "gradient of o");
    assert!(grads.weights.is_none_or(|w| w.len() == states), "gradient of the weights");
    assert!(grads.gathered.is_none_or(|g| g.len() == states), "gradient of what was gathered");
    let norm = dims.states() * dims.heads * dims.value;
    let tokens = inputs.q.len();
    let lens = [tokens, tokens, tokens, inputs.eta.len(), norm, norm, states, states];
    let mut vectors = lens.map(Unwritten::new);
    let [q, k, v, eta, ln_w, ln_b, weights, gathered] = vectors.each_mut().map(Unwritten::share);
    let targets = Targets { q, k, v, eta, ln_w, ln_b, weights, gathered };
    plan.run(|task| {
        with_workspace(Workspace::size(dims.key.next_multiple_of(16)), |carver| {
            dispatch(plan.set, BackwardTask { inputs, saved, grads, task, targets, carver });
        });
    });
    let mut lens = lens.into_iter();
    let [q, k, v, eta, ln_w, ln_b, weights, gathered] = vectors.map(|vector| {
        // SAFETY: the tasks cover every token and state, and write all of their part.
        unsafe { vector.written(lens.next().unwrap_or(0)) }
    });
    let [ln_w, ln_b] = [ln_w, ln_b].map(|parts| sum_over_sequences(&parts, dims.heads * dims.value));
    Gradients { q, k, v, eta, ln_w, ln_b, weights, gathered }
}

/// Sums `[sequences, heads, value]` over the sequences, in float64 and in their order.
fn sum_over_sequences(parts: &[f32], size: usize) -> Vec<f32> {
    let mut sums = vec![0f64; size];
    for part in parts.chunks_exact(size) {
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

struct BackwardTask<'a> {
    inputs: &'a Inputs<'a>,
    saved: &'a [f32],
    grads: OutputGradients<'a>,
    task: &'a Task<'a>,
    targets: Targets,
    carver: Carver,
}

impl Kernel for BackwardTask<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(mut self) {
        let w = Workspace::carve(&mut self.carver, self.inputs.dims.key.next_multiple_of(L::COUNT));
        // SAFETY: `dispatch` vouches for the instruction set, the checks for the lengths.
        unsafe { run_task::<L, WIDE>(&self, &w) }
    }
}

#[derive(Debug, Clone, Copy)]
struct Workspace {
    shared: Shared,
    /// Output gradients, then gradients of the corrected readings.
    dz: Matrix,
    /// `-eta dz`.
    write: Matrix,
    /// Gradients of the inner gradients, then of the errors.
    du: Matrix,
    /// Gradients of the keys' readings.
    dx: Matrix,
    ut: Matrix,
    dp: Matrix,
    wt: Matrix,
    gt: Matrix,
    dt: Matrix,
    dw: Matrix,
    dc: Matrix,
    dg: Matrix,
    dgc: Matrix,
    d_scale: Matrix,
    d_shift: Matrix,
    d_eta: Matrix,
}

impl Workspace {
    fn size(padded: usize) -> usize {
        let blocks = 5 * PIECE * padded + PIECE * PIECE + PIECE;
        Shared::size(padded) + 5 * padded * padded + blocks + 4 * padded + 17 * 16
    }

    fn carve(carver: &mut Carver, padded: usize) -> Self {
        Self {
            shared: Shared::carve(carver, padded),
            dz: carver.matrix(PIECE, padded),
            write: carver.matrix(PIECE, padded),
            du: carver.matrix(PIECE, padded),
            dx: carver.matrix(PIECE, padded),
            ut: carver.matrix(padded, PIECE),
            dp: carver.matrix(PIECE, PIECE),
            wt: carver.matrix(padded, padded),
            gt: carver.matrix(padded, padded),
            dt: carver.matrix(padded, padded),
            dw: carver.matrix(padded, padded),
            dc: carver.matrix(1, padded),
            dg: carver.matrix(padded, padded),
            dgc: carver.matrix(1, padded),
            d_scale: carver.matrix(1, padded),
            d_shift: carver.matrix(1, padded),
            d_eta: carver.matrix(1, PIECE),
        }
    }
}

/// Copies a packed state `[key + 1, value]` into a matrix and a bias row, zeros when there is none.
#[inline(always)]
unsafe fn copy_state<L: Lanes>(to: Matrix, bias: Matrix, from: Option<*const f32>, size: usize) {
    // SAFETY: the caller vouches for the state and the matrices.
    unsafe {
        let rows = if from.is_some() { size } else { 0 };
        let from = from.unwrap_or(std::ptr::null());
        copy_in::<L>(to, to.stride, from, size, rows, size);
        copy_in::<L>(bias, 1, from.wrapping_add(size * size), size, rows.min(1), size);
    }
}

#[inline(always)]
unsafe fn run_task<L: Lanes, const WIDE: usize>(x: &BackwardTask<'_>, w: &Workspace) {
    let (inputs, task) = (x.inputs, x.task);
    let size = inputs.dims.key;
    let block = (size + 1) * size;
    let state = task.state * block;
    // SAFETY: the lengths were checked, the matrices are carved for the size.
    unsafe {
        w.shared.start::<L>(inputs, task.head);
        let grad = |grads: Option<&[f32]>| grads.map(|grads| grads.as_ptr().wrapping_add(state));
        copy_state::<L>(w.dw, w.dc, grad(x.grads.weights), size);
        copy_state::<L>(w.dg, w.dgc, grad(x.grads.gathered), size);
        clear::<L>(w.d_scale.start, w.d_scale.stride);
        clear::<L>(w.d_shift.start, w.d_shift.stride);
        for (index, piece) in task.pieces.iter().enumerate().rev() {
            run_piece::<L, WIDE>(x, w, index, piece);
        }
        if task.fresh {
            copy_state::<L>(w.dg, w.dgc, None, size);
        }
        for (targets, matrix, bias) in [(x.targets.weights, w.dw, w.dc), (x.targets.gathered, w.dg, w.dgc)] {
            copy_out::<L>(matrix, targets.at(state), size, size, size);
            copy_out::<L>(bias, targets.at(state + size * size), size, 1, size);
        }
        copy_out::<L>(w.d_scale, x.targets.ln_w.at(task.state * size), size, 1, size);
        copy_out::<L>(w.d_shift, x.targets.ln_b.at(task.state * size), size, 1, size);
    }
}

#[inline(always)]
unsafe fn run_piece<L: Lanes, const WIDE: usize>(
    x: &BackwardTask<'_>,
    w: &Workspace,
    index: usize,
    piece: &Piece,
) {
    let (inputs, task, s) = (x.inputs, x.task, &w.shared);
    let Dims { key: size, heads, scale, .. } = *inputs.dims;
    let block = (size + 1) * size;
    let (tokens, rows) = (piece.tokens, piece.tokens.next_multiple_of(ROWS));
    let position = (task.first_token + piece.start) * heads + task.head;
    let stride = heads * size;
    let padded = s.q.stride;
    let norm = s.norm(size);
    let grads = NormGradients { scale: w.d_scale.start, shift: w.d_shift.start };
    // SAFETY: the piece is inside the checked arrays, the matrices have PIECE rows.
    unsafe {
        let saved = |piece: usize| x.saved.as_ptr().add((task.first_piece + piece) * block);
        let initial = inputs.weights.as_ptr().add(task.state * block);
        copy_state::<L>(s.w, s.c, Some(piece.weights.map_or(initial, saved)), size);
        if !piece.fresh {
            copy_state::<L>(s.g, s.gc, Some(saved(index)), size);
        }
        s.piece::<L, WIDE>(inputs, piece, position);

        // Outputs.
        match x.grads.o {
            Some(d_o) => {
                copy_in::<L>(w.dz, PIECE, d_o.as_ptr().add(position * size), stride, tokens, size);
            }
            None => copy_in::<L>(w.dz, PIECE, std::ptr::null(), 0, 0, 0),
        }
        for i in 0..tokens {
            let (dz, write) = (w.dz.at(i, 0), w.write.at(i, 0));
            let (z, r, eta, zh) = (s.z.at(i, 0), s.r.at(i, 0), *s.eta.at(0, i), w.dx.at(i, 0));
            *w.d_eta.at(0, i) = output_backward::<L>(z, dz, r, eta, zh, dz, write, grads, &norm);
        }
        for i in tokens..rows {
            clear::<L>(w.write.at(i, 0), padded);
        }

        // The state at the piece's end.
        let last = tokens - 1;
        let rate = *s.eta.at(0, last);
        let (d, d_bias, factor) = if piece.ends { (w.dw, w.dc, -rate) } else { (w.dg, w.dgc, 1.0) };
        let (k, p, u, write) = (s.k, s.p, s.u, w.write);
        let writes = WriteGradients { k, d, d_bias, factor, p, write, u, key: size, rows };
        let mut along = writes.run::<L, WIDE>(w.du);
        if piece.ends {
            if !piece.fresh {
                along += inner_product::<L>(w.dw, s.g, size) + inner_product::<L>(w.dc, s.gc, 1);
            }
            *w.d_eta.at(0, last) -= along;
        }

        // Scores, then the inner gradients down to the keys' readings.
        transpose::<L>(s.u, PIECE, padded, w.ut);
        lower_product::<L, WIDE>(w.write, w.ut, w.dp, size, rows);
        mask::<L>(w.dp, s.triangle, 0.0, rows);
        for i in 0..tokens {
            let target = (s.k.at(i, 0).cast_const(), s.v.at(i, 0).cast_const());
            let inverse = *s.inverse.at(0, i);
            let du = w.du.at(i, 0);
            inner_backward::<L>(du, s.inner_at(i), inverse, target, w.dx.at(i, 0), grads, &norm);
        }

        transpose::<L>(s.w, padded, padded, w.wt);
        transpose::<L>(d, padded, padded, w.dt);
        if !piece.fresh {
            transpose::<L>(s.g, padded, padded, w.gt);
        }
        if piece.ends {
            scaled::<L>(s.u, factor, s.u, rows);
        }
        KeyGradients {
            dz: w.dz,
            dx: w.dx,
            wt: w.wt,
            write: w.write,
            gt: (!piece.fresh).then_some(w.gt),
            u: s.u,
            dt: w.dt,
            dp: w.dp,
            q: s.q,
            k: s.k,
            d_error: w.du,
            scale,
            key: size,
            tokens,
            rows,
            to_q: x.targets.q.at(position * size),
            to_k: x.targets.k.at(position * size),
            stride,
        }
        .run::<L, WIDE>();
        scaled::<L>(w.du, -1.0, w.du, rows);
        copy_out::<L>(w.du, x.targets.v.at(position * size), stride, tokens, size);
        for i in 0..tokens {
            *x.targets.eta.at(position + i * heads) = *w.d_eta.at(0, i);
        }

        // The state at the piece's start.
        if !piece.fresh {
            if piece.ends {
                scaled::<L>(w.dw, factor, w.dg, size);
                scaled::<L>(w.dc, factor, w.dgc, 1);
            }
            let update = Update { keep: true, first: (s.q, w.write), second: None, tokens, key: size };
            update.run::<L, WIDE>(w.dg, w.dgc);
        }
        let second = Some((s.k, w.dx));
        let update = Update { keep: true, first: (s.q, w.dz), second, tokens, key: size };
        update.run::<L, WIDE>(w.dw, w.dc);
    }
}
