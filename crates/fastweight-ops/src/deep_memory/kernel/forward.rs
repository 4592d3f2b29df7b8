//! The forward pass of a head: piece after piece, its weights in scratch memory.

use super::head::{Head, Moves};
use super::lanes::{LoadWeight, StoreWeight};
use super::plan::{Cut, Piece};
use super::work::Weights;
use crate::kernel::tile::Matrix;
use crate::kernel::workspace::SharedOut;

/// Where the forward pass writes; null where nothing is wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Targets {
    /// `[B,T,H,V]`.
    pub o: SharedOut,
    /// `[N,H,groups,count]`.
    pub weights: SharedOut,
    /// `[N,H,count]`.
    pub momentum: SharedOut,
    /// The weights, and the momentum behind them, at the start of every group but the first of a sequence.
    pub saved: SharedOut,
}

impl Head<'_> {
    /// Loads the weights of all layers from a head's numbers.
    pub(super) fn load_weights(&self, from: &[f32], to: &[Matrix]) {
        for (x, to) in self.work.layers.iter().zip(to) {
            let layer = x.layer;
            let from = from[layer.offset..].as_ptr();
            let (rows, columns) = (layer.from, layer.to);
            LoadWeight { from, rows, columns, to: *to, padded: layer.rows }.run(self.set);
        }
    }

    /// Writes the weights of all layers to a head's numbers.
    ///
    /// # Safety
    /// `to` has room for them, and nobody else uses it.
    pub(super) unsafe fn store_weights(&self, from: &[Matrix], to: *mut f32) {
        for (x, from) in self.work.layers.iter().zip(from) {
            let layer = x.layer;
            let to = to.wrapping_add(layer.offset);
            StoreWeight { from: *from, rows: layer.from, columns: layer.to, to }.run(self.set);
        }
    }

    /// Loads what the call brings: weights and momentum before the first token, those at the chunk's start.
    pub(super) fn load_state(&self, slot: &Weights) {
        let first = self.task.state * self.op.count();
        self.load_weights(&self.inputs.current[first..], &slot.w);
        if let Some(momentum) = self.inputs.momentum {
            self.load_weights(&momentum[first..], &slot.p);
        }
        let start = self.inputs.start.unwrap_or(self.inputs.current);
        self.load_weights(&start[first..], &self.work.start);
    }

    /// Weights at which a piece's gradients are taken, where those before it are in `slot`.
    pub(super) fn start<'a>(&'a self, piece: &Piece, slot: &'a Weights) -> &'a [Matrix] {
        if piece.fresh { &slot.w } else { &self.work.start }
    }

    /// A chunk of several pieces begins: its weights have to last.
    pub(super) fn keep_start(&self, piece: &Piece, slot: &Weights) {
        if piece.fresh && !piece.ends {
            self.copy_weights(&slot.w, &self.work.start);
        }
    }

    pub(super) fn copy_weights(&self, from: &[Matrix], to: &[Matrix]) {
        for ((x, from), to) in self.work.layers.iter().zip(from).zip(to) {
            // SAFETY: two weights of the same size in the workspace.
            unsafe { std::ptr::copy_nonoverlapping(from.start, to.start, x.layer.rows * x.layer.stride()) };
        }
    }

    /// The weights that a piece keeps of, and adds its writes to.
    pub(super) fn base<'a>(&'a self, piece: &Piece, slot: &'a Weights) -> &'a [Matrix] {
        if self.op.reading() { self.start(piece, slot) } else { &slot.w }
    }

    /// One piece from the weights in `before` to those in `after`, which may be the same.
    pub(super) fn piece(&self, piece: &Piece, before: &Weights, after: &Weights, moves: Moves) {
        self.keep_start(piece, before);
        self.write(self.base(piece, before), before, after, moves);
    }

    /// Every piece of the task.
    ///
    /// # Safety
    /// The targets are as large as the call's sizes say, and nobody else writes this head's part of them.
    pub(super) unsafe fn forward(&mut self, cut: &Cut, to: Targets) {
        let (count, value) = (self.op.count(), self.op.dims.value);
        let slot = self.work.slots[0].clone();
        self.load_state(&slot);
        for (g, group) in cut.groups.iter().enumerate() {
            if g > 0 && !to.saved.is_null() {
                let size = self.op.saved_count();
                let at = to.saved.at((self.task.first_saved + g - 1) * size);
                // SAFETY: this group's part of what is saved.
                unsafe {
                    self.store_weights(&slot.w, at);
                    if self.op.saves_momentum() {
                        self.store_weights(&slot.p, at.wrapping_add(count));
                    }
                }
            }
            for piece in &cut.pieces[group.clone()] {
                let moves = self.moves(piece);
                self.load(piece, true);
                self.gradients(self.start(piece, &slot), false);
                self.read(self.base(piece, &slot), moves.carried.then_some(&slot.p));
                self.output();
                // SAFETY: this head's tokens.
                unsafe { self.store_tokens(self.work.out, piece, value, self.work.value_rows, to.o.at(0)) };
                self.piece(piece, &slot, &slot, moves);
            }
        }
        let last = cut.pieces.last();
        let groups = self.op.weight_groups();
        // SAFETY: this head's part of the states.
        unsafe {
            let at = to.weights.at(self.task.state * groups * count);
            self.store_weights(&slot.w, at);
            if groups > 1 {
                let ended = last.is_some_and(|piece| piece.ends);
                let start = if ended { &slot.w } else { &self.work.start };
                self.store_weights(start, at.wrapping_add(count));
            }
            // Where the reading token's rate counts, a chunk begins without momentum; the target is zero.
            let cleared = self.op.reading() && last.is_some_and(|piece| piece.ends);
            if self.op.momentum && !cleared {
                self.store_weights(&slot.p, to.momentum.at(self.task.state * count));
            }
        }
    }
}
