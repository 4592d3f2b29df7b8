//! One piece of a head's tokens forward: the gradients at the chunk's start, the reading, the writing.

use super::FusedDeep;
use super::Inputs;
use super::factors::{Rules, Scalars, Table};
use super::lanes::{Activate, Affine, LoadTokens, Multiply, Negate, Scale, Squares, StoreTokens, Transpose};
use super::loss::Errors;
use super::norm::{NormBack, Normalise};
use super::plan::{Piece, Task};
use super::products::{Start, Sum, Term, plain, transposed};
use super::work::{LayerWork, Weights, Work};
use crate::deep_memory::{InnerLoss, RateOf};
use crate::kernel::simd::InstructionSet;
use crate::kernel::tile::Matrix;

/// A head of a sequence with its scratch memory.
pub(super) struct Head<'a> {
    pub op: &'a FusedDeep,
    pub inputs: &'a Inputs<'a>,
    pub task: &'a Task,
    pub set: InstructionSet,
    pub work: Work,
    pub table: Table,
    pub scalars: Scalars,
    /// Weight and bias of the LayerNorm.
    pub norm: Option<(*const f32, *const f32)>,
}

/// What a piece does with the momentum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moves {
    /// There is one before it that counts.
    pub carried: bool,
    /// The one after it counts.
    pub gathers: bool,
}

impl<'a> Head<'a> {
    pub fn new(
        op: &'a FusedDeep,
        inputs: &'a Inputs<'a>,
        task: &'a Task,
        set: InstructionSet,
        work: Work,
    ) -> Self {
        let value = op.dims.value;
        let norm = inputs.norm.map(|norm| {
            let (weight, bias) = norm.split_at(norm.len() / 2);
            (weight[task.head * value..].as_ptr(), bias[task.head * value..].as_ptr())
        });
        let rules = Rules { reading: op.reading(), before: op.memory.read_before_write };
        let table = Table::new(work.width, rules);
        Self { op, inputs, task, set, work, table, scalars: Scalars::default(), norm }
    }

    /// What the piece does with the momentum.
    pub fn moves(&self, piece: &Piece) -> Moves {
        match self.op.memory.rate {
            RateOf::Written => Moves { carried: self.op.momentum, gathers: self.op.momentum },
            RateOf::Reading => Moves { carried: !piece.fresh, gathers: !piece.ends },
        }
    }

    /// `out = start + sum of terms` over the lanes.
    pub fn sum(&self, out: Matrix, start: Start, terms: &[Term], rows: usize) {
        Sum { out, start, terms, rows, columns: self.work.width, flush: false }.run(self.set);
    }

    /// Position of a token's first number in an array `[B,T,H,size]`.
    pub fn token(&self, piece: &Piece, size: usize) -> usize {
        ((self.task.first_token + piece.start) * self.op.dims.heads + self.task.head) * size
    }

    fn load_tokens(&self, from: &[f32], piece: &Piece, size: usize, rows: Matrix, to: Matrix) {
        let from = from[self.token(piece, size)..].as_ptr();
        let stride = self.op.dims.heads * size;
        LoadTokens { from, stride, count: piece.tokens, size, rows, to }.run(self.set);
    }

    /// Loads an array like the values.
    pub fn load_values(&self, from: &[f32], piece: &Piece, to: Matrix) {
        self.load_tokens(from, piece, self.op.dims.value, self.work.value_rows, to);
    }

    /// Writes columns to an array `[B,T,H,size]`.
    ///
    /// # Safety
    /// `to` is such an array, and nobody else uses these tokens of it.
    pub unsafe fn store_tokens(&self, from: Matrix, piece: &Piece, size: usize, rows: Matrix, to: *mut f32) {
        let to = to.wrapping_add(self.token(piece, size));
        let stride = self.op.dims.heads * size;
        StoreTokens { from, to, stride, count: piece.tokens, size, rows }.run(self.set);
    }

    /// Loads the tokens of a piece, and makes its factors.
    pub fn load(&mut self, piece: &Piece, reads: bool) {
        let first = self.work.layers[0];
        let key = self.op.dims.key;
        if reads {
            self.load_tokens(self.inputs.q, piece, key, self.work.key_rows, first.g);
        }
        self.load_tokens(self.inputs.k, piece, key, self.work.key_rows, first.h);
        self.load_values(self.inputs.v, piece, self.work.v);
        first.set_bias();
        let at = self.token(piece, 1);
        let numbers = |from: &[f32]| -> Vec<f32> {
            (0..piece.tokens).map(|t| from[at + t * self.op.dims.heads]).collect()
        };
        self.scalars = Scalars {
            rate: self.inputs.rate.map_or_else(|| vec![1.0; piece.tokens], numbers),
            momentum: self.inputs.scalar_momentum.map(numbers),
            decay: self.inputs.decay.map(numbers),
            threshold: self.inputs.threshold.map(numbers),
        };
        self.table.fill(&self.scalars);
    }

    /// The error of what the memory returns for the keys, from its gap.
    pub fn errors(&self) -> Errors<'_> {
        Errors {
            loss: self.op.memory.loss,
            gap: self.work.gap,
            error: if self.op.memory.loss == InnerLoss::Squared { self.work.gap } else { self.work.error },
            rows: self.op.dims.value,
            tokens: self.scalars.rate.len(),
            threshold: self.scalars.threshold.as_deref(),
        }
    }

    /// Inputs and errors of every layer at the weights `start`; `curves` also what the backward pass needs of them.
    pub fn gradients(&self, start: &[Matrix], curves: bool) {
        let (set, work, memory) = (self.set, &self.work, &self.op.memory);
        let rows = self.op.dims.value;
        for (i, x) in work.layers.iter().enumerate() {
            self.sum(work.z, Start::Zero, &[transposed(start[i], x.h, x.layer.from)], x.layer.to);
            if let Some(next) = work.layers.get(i + 1) {
                let curve = curves.then_some(x.curve);
                let count = x.layer.to * work.width;
                let (z, value, slope) = (work.z, next.h, x.slope);
                Activate { z, value, slope, curve, count, activation: memory.activation }.run(set);
            }
        }
        let last = work.layers[work.layers.len() - 1];
        let mut y = work.z;
        if self.norm.is_some() {
            let (x, hat, inverse) = (work.z, work.hat, work.inverse.start);
            Normalise { x, hat, inverse, rows, eps: memory.norm_eps as f32 }.run(set);
            y = work.hat;
        }
        let plus = memory.residual.then_some(work.layers[0].h);
        Affine { x: y, norm: self.norm, plus, minus: Some(work.v), to: work.gap, rows }.run(set);
        let errors = self.errors();
        match memory.loss {
            InnerLoss::Squared => {}
            InnerLoss::DotProduct => {
                Negate { x: work.v, to: work.error, count: rows * work.width }.run(set);
            }
            _ => errors.forward(),
        }
        match self.norm {
            Some((weight, _)) => {
                let (d, hat, inverse) = (errors.error, work.hat, work.inverse.start);
                let to = last.d;
                NormBack { d, hat, inverse, weight, second: None, gradients: None, to, rows }.run(set);
            }
            None => {
                let to = last.d;
                Affine { x: errors.error, norm: None, plus: None, minus: None, to, rows }.run(set);
            }
        }
        for i in (1..work.layers.len()).rev() {
            let (x, before) = (work.layers[i], work.layers[i - 1]);
            self.sum(before.raw, Start::Zero, &[plain(start[i], x.d, x.layer.to)], x.layer.inputs);
            let count = before.layer.to * work.width;
            Multiply { a: before.raw, b: before.slope, sign: 1.0, to: before.d, count, add: false }.run(set);
        }
        for x in &work.layers {
            if memory.proximal {
                self.shorten(x);
            }
            let (from, rows, columns, to) = (x.written, x.layer.columns, work.width, x.written_rows);
            Transpose { from, rows, columns, to }.run(set);
            if memory.proximal && curves {
                Transpose { from: x.d, rows, columns, to: x.d_rows }.run(set);
            }
        }
    }

    /// Divides a layer's errors by `1 + rate |h|^2`.
    fn shorten(&self, x: &LayerWork) {
        Squares { x: x.h, sums: x.square.start, rows: x.layer.from }.run(self.set);
        let mut shares = vec![0.0; self.work.width];
        for (t, rate) in self.scalars.rate.iter().enumerate() {
            // SAFETY: a lane of the piece.
            unsafe {
                let length = 1.0 + rate * *x.square.at(0, t);
                *x.length.at(0, t) = length;
                shares[t] = 1.0 / length;
            }
        }
        let (factor, to) = (shares.as_ptr(), x.written);
        Scale { x: x.d, factor, sign: 1.0, to, rows: x.layer.to }.run(self.set);
    }

    /// The value of the last layer for the queries, to `z`, from the weights `base` and the momentum before the piece.
    pub fn read(&self, base: &[Matrix], momentum: Option<&[Matrix]>) {
        let (set, work) = (self.set, &self.work);
        let tokens = self.scalars.rate.len();
        let factors = &self.table.factors;
        let mix = Matrix { start: factors.mix.as_ptr().cast_mut(), stride: work.width };
        let count = tokens * work.width;
        for (i, x) in work.layers.iter().enumerate() {
            let layer = x.layer;
            self.sum(x.scores, Start::Zero, &[transposed(x.h, x.g, layer.from)], tokens);
            Multiply { a: x.scores, b: mix, sign: -1.0, to: x.taken, count, add: false }.run(set);
            let kept = self.kept(x);
            let mut terms = vec![transposed(base[i], kept, layer.from), plain(x.written, x.taken, tokens)];
            if let Some(momentum) = momentum {
                let (factor, to) = (factors.carry.as_ptr(), x.carried);
                Scale { x: x.g, factor, sign: 1.0, to, rows: layer.from }.run(set);
                terms.push(transposed(momentum[i], x.carried, layer.from));
            }
            self.sum(work.z, Start::Zero, &terms, layer.to);
            if let Some(next) = work.layers.get(i + 1) {
                let (z, value, slope, curve) = (work.z, next.g, x.slope_q, None);
                let count = layer.to * work.width;
                Activate { z, value, slope, curve, count, activation: self.op.memory.activation }.run(set);
            }
        }
    }

    /// Whether readers keep less than all of the weights before the piece.
    pub fn keeps(&self) -> bool {
        self.scalars.decay.is_some() && !self.op.reading()
    }

    /// The inputs of the queries times what they keep.
    fn kept(&self, x: &LayerWork) -> Matrix {
        if !self.keeps() {
            return x.g;
        }
        let (factor, to) = (self.table.factors.keep.as_ptr(), x.kept);
        Scale { x: x.g, factor, sign: 1.0, to, rows: x.layer.from }.run(self.set);
        x.kept
    }

    /// The inputs of the queries times what they keep, where [`Self::read`] left them.
    pub fn was_kept(&self, x: &LayerWork) -> Matrix {
        if self.keeps() { x.kept } else { x.g }
    }

    /// What the memory returns for the queries, to `out`, from the value of the last layer.
    pub fn output(&self) {
        let (work, rows) = (&self.work, self.op.dims.value);
        self.normalise_reading();
        let x = if self.norm.is_some() { work.hat_q } else { work.z };
        let plus = self.op.memory.residual.then_some(work.layers[0].g);
        Affine { x, norm: self.norm, plus, minus: None, to: work.out, rows }.run(self.set);
    }

    /// The normalised value of the last layer for the queries.
    pub fn normalise_reading(&self) {
        if self.norm.is_some() {
            let (x, hat, inverse) = (self.work.z, self.work.hat_q, self.work.inverse_q.start);
            let (rows, eps) = (self.op.dims.value, self.op.memory.norm_eps as f32);
            Normalise { x, hat, inverse, rows, eps }.run(self.set);
        }
    }

    /// The keys' inputs times minus what the weights (0) and the momentum (1) after the piece take up.
    pub fn weigh(&self, x: &LayerWork, which: usize) -> Matrix {
        let factors = &self.table.factors;
        let factor = [&factors.end_mix, &factors.gather][which].as_ptr();
        let to = x.weighed[which];
        Scale { x: x.h, factor, sign: -1.0, to, rows: x.layer.from }.run(self.set);
        to
    }

    /// The weights and the momentum after the piece, to `after`, which may be those before it; `base` are the
    /// weights that the writes are added to.
    pub fn write(&self, base: &[Matrix], before: &Weights, after: &Weights, moves: Moves) {
        let factors = &self.table.factors;
        let tokens = self.scalars.rate.len();
        for (i, x) in self.work.layers.iter().enumerate() {
            let store = |out: Matrix, start: Start, weighed: Matrix| {
                let terms = [plain(weighed, x.written_rows, tokens)];
                let (rows, columns) = (x.layer.from, x.layer.columns);
                Sum { out, start, terms: &terms, rows, columns, flush: true }.run(self.set);
            };
            let kept = (factors.end_keep, base[i]);
            let start = match moves.carried {
                true => Start::Blend([kept, (factors.end_carry, before.p[i])]),
                false => Start::Scaled(kept.0, kept.1),
            };
            store(after.w[i], start, self.weigh(x, 0));
            if moves.gathers {
                let start = match moves.carried {
                    true => Start::Scaled(factors.hold, before.p[i]),
                    false => Start::Zero,
                };
                store(after.p[i], start, self.weigh(x, 1));
            }
        }
    }
}
