//! The backward pass of a head: groups of pieces from the last to the first, in each the weights made again and then
//! every piece led back by hand.

use super::factors::Factors;
use super::head::{Head, Moves};
use super::lanes::{Add, Fold, InnerProduct, Multiply, Negate, Scale, Transpose};
use super::norm::{NormBack, NormBackBack, Reduce, Second};
use super::plan::{Cut, Piece};
use super::products::{Start, Sum, plain, transposed};
use super::work::{LayerWork, Weights};
use crate::deep_memory::InnerLoss;
use crate::kernel::tile::Matrix;
use crate::kernel::workspace::SharedOut;

/// Gradients of the outputs, and where those of the inputs go; null where there is no such input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gradients<'a> {
    pub q: SharedOut,
    pub k: SharedOut,
    pub v: SharedOut,
    pub current: SharedOut,
    pub start: SharedOut,
    pub momentum: SharedOut,
    pub scalars: SharedOut,
    pub o: Option<&'a [f32]>,
    pub after: Option<&'a [f32]>,
    pub after_momentum: Option<&'a [f32]>,
    pub saved: &'a [f32],
}

/// Gradients of a piece's numbers.
struct Numbers {
    factors: Factors,
    rate_momentum_decay: [Vec<f32>; 3],
    threshold: Vec<f32>,
}

impl Head<'_> {
    /// Every piece of the task; returns the gradients of the LayerNorm's weight and bias.
    ///
    /// # Safety
    /// The targets are as large as the call's sizes say, and nobody else writes this head's part of them.
    pub(super) unsafe fn backward(&mut self, cut: &Cut, to: &Gradients<'_>) -> [Vec<f32>; 2] {
        let (count, state) = (self.op.count(), self.task.state);
        let slots = self.work.slots.clone();
        self.load_gradients(cut, to);
        for (g, group) in cut.groups.iter().enumerate().rev() {
            let pieces = &cut.pieces[group.clone()];
            if g == 0 {
                self.load_state(&slots[0]);
            } else {
                let size = self.op.saved_count();
                let saved = &to.saved[(self.task.first_saved + g - 1) * size..][..size];
                self.load_weights(saved, &slots[0].w);
                if self.op.saves_momentum() {
                    self.load_weights(&saved[count..], &slots[0].p);
                }
            }
            // The weights at the start of a piece's chunk.
            let start = |at: usize| match pieces[..=at].iter().rposition(|piece| piece.fresh) {
                Some(first) => slots[first].w.clone(),
                None => self.work.start.clone(),
            };
            let starts: Vec<Vec<Matrix>> = (0..pieces.len()).map(start).collect();
            for (at, piece) in pieces[..pieces.len() - 1].iter().enumerate() {
                self.load(piece, false);
                self.gradients(&starts[at], false);
                let base = if self.op.reading() { &starts[at] } else { &slots[at].w };
                self.write(base, &slots[at], &slots[at + 1], self.moves(piece));
            }
            for (at, piece) in pieces.iter().enumerate().rev() {
                self.load(piece, true);
                // SAFETY: this head's tokens.
                unsafe { self.piece_backward(piece, &starts[at], &slots[at], to) };
            }
        }
        if self.op.takes_start {
            // SAFETY: this head's part.
            unsafe { self.store_weights(&self.work.d_start, to.start.at(state * count)) };
        } else {
            self.add_weights(&self.work.d_start, &self.work.d_after.w);
        }
        // SAFETY: this head's part.
        unsafe {
            self.store_weights(&self.work.d_after.w, to.current.at(state * count));
            if self.op.momentum {
                self.store_weights(&self.work.d_after.p, to.momentum.at(state * count));
            }
        }
        let value = self.op.dims.value;
        [self.work.norm.weight, self.work.norm.bias].map(|sums| {
            let mut sum = vec![0.0; value];
            Reduce { sums, to: sum.as_mut_ptr(), count: value }.run(self.set);
            sum
        })
    }

    fn clear(&self, weights: &[Matrix]) {
        for (x, weight) in self.work.layers.iter().zip(weights) {
            // SAFETY: a weight of the workspace.
            unsafe { std::ptr::write_bytes(weight.start, 0, x.layer.rows * x.layer.stride()) };
        }
    }

    fn add_weights(&self, from: &[Matrix], to: &[Matrix]) {
        for ((x, a), to) in self.work.layers.iter().zip(from).zip(to) {
            Add { a: *a, to: *to, count: x.layer.rows * x.layer.stride() }.run(self.set);
        }
    }

    /// Gradients of the states after the last token.
    fn load_gradients(&self, cut: &Cut, to: &Gradients<'_>) {
        let (work, count, state) = (&self.work, self.op.count(), self.task.state);
        for weights in [&work.d_after.w, &work.d_after.p, &work.d_start] {
            self.clear(weights);
        }
        if let Some(after) = to.after {
            let groups = self.op.weight_groups();
            let after = &after[state * groups * count..][..groups * count];
            self.load_weights(after, &work.d_after.w);
            if groups > 1 {
                self.load_weights(&after[count..], &work.d_start);
            }
        }
        let ended = cut.pieces.last().is_some_and(|piece| piece.ends);
        if ended {
            self.add_weights(&work.d_start, &work.d_after.w);
            self.clear(&work.d_start);
        }
        if let Some(after) = to.after_momentum.filter(|_| !(ended && self.op.reading())) {
            self.load_weights(&after[state * count..], &work.d_after.p);
        }
    }

    /// One piece: its forward pass again, then everything back.
    ///
    /// # Safety
    /// As [`Self::backward`].
    unsafe fn piece_backward(&self, piece: &Piece, start: &[Matrix], slot: &Weights, to: &Gradients<'_>) {
        let work = &self.work;
        let moves = self.moves(piece);
        let base = if self.op.reading() { start } else { &slot.w };
        self.gradients(start, true);
        self.read(base, moves.carried.then_some(&slot.p));
        self.normalise_reading();

        let row = || vec![0.0; work.width];
        let mut numbers = Numbers {
            factors: Factors::zeros(work.width),
            rate_momentum_decay: [row(), row(), row()],
            threshold: row(),
        };
        self.output_backward(piece, to.o);
        self.read_backward(base, slot, moves, &mut numbers.factors);
        self.write_backward(base, slot, moves, &mut numbers.factors);
        self.gradients_backward(start, &mut numbers);
        self.weights_backward(piece, moves);
        self.table.backward(&numbers.factors, &self.scalars, &mut numbers.rate_momentum_decay);

        let (key, value) = (self.op.dims.key, self.op.dims.value);
        // SAFETY: this head's tokens.
        unsafe {
            self.store_tokens(work.d_q, piece, key, work.key_rows, to.q.at(0));
            self.store_tokens(work.d_k, piece, key, work.key_rows, to.k.at(0));
            self.store_tokens(work.d_v, piece, value, work.value_rows, to.v.at(0));
        }
        let size = self.op.dims.batch * self.op.dims.time * self.op.dims.heads;
        let [rate, momentum, decay] = &numbers.rate_momentum_decay;
        let parts = [rate, momentum, decay, &numbers.threshold];
        let there = parts.into_iter().zip(self.op.scalars).filter(|(_, there)| *there);
        for (part, (numbers, _)) in there.enumerate() {
            for (t, number) in numbers.iter().enumerate().take(piece.tokens) {
                let at = part * size + self.token(piece, 1) + t * self.op.dims.heads;
                // SAFETY: this head's token.
                unsafe { *to.scalars.at(at) = *number };
            }
        }
    }

    /// From the output's gradient to that of the last layer's value and of the queries.
    fn output_backward(&self, piece: &Piece, d_o: Option<&[f32]>) {
        let (work, rows) = (&self.work, self.op.dims.value);
        let last = &work.layers[work.layers.len() - 1];
        match d_o {
            Some(d_o) => self.load_values(d_o, piece, work.out),
            None => self.clear_rows(work.out, rows),
        }
        match self.norm {
            Some((weight, _)) => {
                let (d, hat, inverse) = (work.out, work.hat_q, work.inverse_q.start);
                let gradients = Some(work.norm);
                NormBack { d, hat, inverse, weight, second: None, gradients, to: last.d_u, rows }
                    .run(self.set);
            }
            None => self.copy(work.out, last.d_u, rows),
        }
        if self.op.memory.residual {
            self.copy(work.out, work.d_q, rows);
        } else {
            self.clear_rows(work.d_q, self.op.dims.key);
        }
    }

    fn copy(&self, from: Matrix, to: Matrix, rows: usize) {
        // SAFETY: matrices of so many rows in the workspace.
        unsafe { std::ptr::copy_nonoverlapping(from.start, to.start, rows * self.work.width) };
    }

    fn clear_rows(&self, matrix: Matrix, rows: usize) {
        // SAFETY: a matrix of so many rows in the workspace.
        unsafe { std::ptr::write_bytes(matrix.start, 0, rows * self.work.width) };
    }

    /// Back through the reading, layer by layer.
    fn read_backward(&self, base: &[Matrix], slot: &Weights, moves: Moves, d: &mut Factors) {
        let (set, work, width) = (self.set, &self.work, self.work.width);
        let factors = &self.table.factors;
        let tokens = self.scalars.rate.len();
        let square = tokens * width;
        let mix = Matrix { start: factors.mix.as_ptr().cast_mut(), stride: width };
        let d_mix = Matrix { start: d.mix.as_mut_ptr(), stride: width };
        let keep = self.keeps().then_some(factors.keep.as_ptr());
        for (i, x) in work.layers.iter().enumerate().rev() {
            let (layer, d_u) = (x.layer, x.d_u);
            Transpose { from: d_u, rows: layer.columns, columns: width, to: x.d_u_rows }.run(set);

            let [d_taken, d_scores, turned] = work.squares;
            self.sum(d_taken, Start::Zero, &[transposed(x.written, d_u, layer.to)], tokens);
            Multiply { a: d_taken, b: x.scores, sign: -1.0, to: d_mix, count: square, add: true }.run(set);
            Multiply { a: d_taken, b: mix, sign: -1.0, to: d_scores, count: square, add: false }.run(set);
            Transpose { from: x.taken, rows: width, columns: width, to: turned }.run(set);
            self.sum(x.d_written, Start::Zero, &[plain(d_u, turned, tokens)], layer.to);
            Transpose { from: d_scores, rows: width, columns: width, to: turned }.run(set);
            self.sum(x.d_h, Start::Zero, &[plain(x.g, turned, tokens)], layer.from);

            let through = |weight: Matrix, factor: Option<*const f32>, sums: *mut f32, add: bool| {
                self.sum(work.z, Start::Zero, &[plain(weight, d_u, layer.to)], layer.from);
                let rows = layer.from;
                Fold { d: work.z, x: x.g, factor, sign: 1.0, sums, to: work.d_g, add, rows }.run(set);
            };
            through(base[i], keep, d.keep.as_mut_ptr(), false);
            if moves.carried {
                through(slot.p[i], Some(factors.carry.as_ptr()), d.carry.as_mut_ptr(), true);
            }
            self.sum(work.d_g, Start::Target, &[plain(x.h, d_scores, tokens)], layer.inputs);
            let count = layer.inputs * width;
            match i.checked_sub(1).map(|before| work.layers[before]) {
                Some(before) => {
                    let (a, b, to) = (work.d_g, before.slope_q, before.d_u);
                    Multiply { a, b, sign: 1.0, to, count, add: false }.run(set);
                }
                None => Add { a: work.d_g, to: work.d_q, count }.run(set),
            }
        }
    }

    /// Back through the writes, from the gradients of the weights and the momentum after the piece.
    fn write_backward(&self, base: &[Matrix], slot: &Weights, moves: Moves, d: &mut Factors) {
        let (set, work) = (self.set, &self.work);
        let after = &work.d_after;
        for (i, x) in work.layers.iter().enumerate() {
            let (rows, columns) = (x.layer.from, x.layer.columns);
            let along = |a: Matrix, b: Matrix| InnerProduct { a, b, rows, columns }.run(set);
            if self.keeps() {
                d.end_keep += along(after.w[i], base[i]);
            }
            if moves.carried {
                d.end_carry += along(after.w[i], slot.p[i]);
                d.hold += along(after.p[i], slot.p[i]);
            }
            let through = |weight: Matrix, which: usize, sums: *mut f32| {
                let terms = [transposed(weight, self.weigh(x, which), rows)];
                self.sum(x.d_written, Start::Target, &terms, x.layer.to);
                self.sum(work.z, Start::Zero, &[plain(weight, x.written, x.layer.to)], rows);
                let factors = [&self.table.factors.end_mix, &self.table.factors.gather];
                let factor = Some(factors[which].as_ptr());
                Fold { d: work.z, x: x.h, factor, sign: -1.0, sums, to: x.d_h, add: true, rows }.run(set);
            };
            through(after.w[i], 0, d.end_mix.as_mut_ptr());
            if moves.gathers {
                through(after.p[i], 1, d.gather.as_mut_ptr());
            }
        }
    }

    /// Back through the inner gradients: the errors from the first layer on, then the values from the last.
    fn gradients_backward(&self, start: &[Matrix], numbers: &mut Numbers) {
        let (set, work, memory) = (self.set, &self.work, &self.op.memory);
        let (rows, width) = (self.op.dims.value, self.work.width);
        if memory.proximal {
            for x in &work.layers {
                self.shorten_backward(x, &mut numbers.rate_momentum_decay[0]);
            }
        }
        for (pair, start) in work.layers.windows(2).zip(&start[1..]) {
            let (before, x) = (pair[0], pair[1]);
            let count = before.layer.to * width;
            let (a, sign) = (before.d_written, 1.0);
            Multiply { a, b: before.slope, sign, to: x.d_raw, count, add: false }.run(set);
            Multiply { a, b: before.raw, sign, to: before.d_z, count, add: false }.run(set);
            Multiply { a: before.d_z, b: before.curve, sign, to: before.d_z, count, add: false }.run(set);
            let terms = [transposed(*start, x.d_raw, x.layer.inputs)];
            self.sum(x.d_written, Start::Target, &terms, x.layer.to);
        }
        let last = &work.layers[work.layers.len() - 1];
        let (errors, d_error, count) = (self.errors(), work.d_error, rows * width);
        match self.norm {
            Some((weight, _)) => {
                let (d, hat, inverse) = (last.d_written, work.hat, work.inverse.start);
                let (error, d_hat, d_inverse) = (errors.error, work.d_hat, work.d_inverse.start);
                let gradients = work.norm;
                NormBackBack { d, error, hat, inverse, weight, d_error, d_hat, d_inverse, gradients, rows }
                    .run(set);
            }
            None => self.copy(last.d_written, d_error, rows),
        }
        if memory.loss == InnerLoss::DotProduct {
            Negate { x: d_error, to: work.d_v, count }.run(set);
        }
        errors.backward(d_error, &mut numbers.threshold);
        if memory.loss != InnerLoss::DotProduct {
            Negate { x: d_error, to: work.d_v, count }.run(set);
        }
        match memory.residual {
            true => self.copy(d_error, work.d_k, rows),
            false => self.clear_rows(work.d_k, self.op.dims.key),
        }
        match self.norm {
            Some((weight, _)) => {
                let (d, hat, inverse) = (d_error, work.hat, work.inverse.start);
                let second = Some(Second { hat: work.d_hat, inverse: work.d_inverse.start });
                let gradients = Some(work.norm);
                NormBack { d, hat, inverse, weight, second, gradients, to: last.d_z, rows }.run(set);
            }
            None => self.copy(d_error, last.d_z, rows),
        }
        for (i, x) in work.layers.iter().enumerate().rev() {
            Transpose { from: x.d_z, rows: x.layer.columns, columns: width, to: x.d_z_rows }.run(set);
            self.sum(x.d_h, Start::Target, &[plain(start[i], x.d_z, x.layer.to)], x.layer.inputs);
            let count = x.layer.inputs * width;
            match i.checked_sub(1).map(|before| work.layers[before]) {
                Some(before) => {
                    let (a, b, to) = (x.d_h, before.slope, before.d_z);
                    Multiply { a, b, sign: 1.0, to, count, add: true }.run(set);
                }
                None => Add { a: x.d_h, to: work.d_k, count }.run(set),
            }
        }
    }

    /// From the gradient of the shortened errors to that of the errors, in its place.
    fn shorten_backward(&self, x: &LayerWork, d_rate: &mut [f32]) {
        let (set, work) = (self.set, &self.work);
        let (mut shares, mut along) = (vec![0.0; work.width], vec![0.0; work.width]);
        for (t, share) in shares.iter_mut().enumerate().take(self.scalars.rate.len()) {
            // SAFETY: a lane of the piece.
            *share = 1.0 / unsafe { *x.length.at(0, t) };
        }
        let (d, factor, sums) = (x.d_written, Some(shares.as_ptr()), along.as_mut_ptr());
        Fold { d, x: x.written, factor, sign: 1.0, sums, to: d, add: false, rows: x.layer.to }.run(set);
        let mut factor = vec![0.0; work.width];
        for (t, rate) in self.scalars.rate.iter().enumerate() {
            let d_length = -along[t] * shares[t];
            // SAFETY: a lane of the piece.
            d_rate[t] += d_length * unsafe { *x.square.at(0, t) };
            factor[t] = 2.0 * d_length * rate;
        }
        let (to, rows) = (work.z, x.layer.from);
        Scale { x: x.h, factor: factor.as_ptr(), sign: 1.0, to, rows }.run(set);
        Add { a: to, to: x.d_h, count: rows * work.width }.run(set);
    }

    /// The gradients of the weights and the momentum before the piece, from those after it.
    fn weights_backward(&self, piece: &Piece, moves: Moves) {
        let (work, reading) = (&self.work, self.op.reading());
        let factors = &self.table.factors;
        let tokens = self.scalars.rate.len();
        for (i, x) in work.layers.iter().enumerate() {
            let (rows, columns) = (x.layer.from, x.layer.columns);
            let add = |out: Matrix, start: Start, terms: &[_]| {
                Sum { out, start, terms, rows, columns, flush: true }.run(self.set);
            };
            let (e, d_start) = (work.d_after.w[i], work.d_start[i]);
            if moves.carried {
                let f = work.d_after.p[i];
                let start = Start::Blend([(factors.hold, f), (factors.end_carry, e)]);
                add(f, start, &[plain(x.carried, x.d_u_rows, tokens)]);
            }
            let read = plain(self.was_kept(x), x.d_u_rows, tokens);
            let mut terms = vec![plain(x.h, x.d_z_rows, tokens)];
            if i > 0 {
                terms.push(plain(x.d_raw, x.d_rows, tokens));
            }
            let kept = Start::Scaled(factors.end_keep, e);
            if piece.whole() {
                terms.push(read);
                add(e, kept, &terms);
            } else if reading {
                terms.push(read);
                add(d_start, Start::Blend([(1.0, d_start), (1.0, e)]), &terms);
            } else {
                add(e, kept, &[read]);
                add(d_start, Start::Target, &terms);
            }
        }
        if !piece.whole() {
            if reading {
                self.clear(&work.d_after.w);
            }
            if piece.fresh {
                self.add_weights(&work.d_start, &work.d_after.w);
                self.clear(&work.d_start);
            }
        }
        if reading && piece.fresh && self.op.momentum {
            self.clear(&work.d_after.p);
        }
    }
}
