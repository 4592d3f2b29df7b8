//! Sequences read side by side, token by token, for layers that have no parallel form.

use std::cmp::Reverse;
use std::ops::Range;

use burn::tensor::Tensor;
use fastweight_ops::Offsets;

use crate::sequences::{cut, inverse, ranges};
use crate::state::rows;

/// The order of such a reading: all first tokens, then all second ones, and so on.
///
/// Longer sequences come first, so that those that still read are the first rows, and nothing is computed for padding.
pub(crate) struct Lockstep {
    /// Where in the input, `row * time + token`, each token of the reading is.
    order: Vec<usize>,
    /// Sequences that have a token, step by step.
    reading: Vec<usize>,
    /// The sequence of each row while they read.
    rows: Vec<usize>,
}

impl Lockstep {
    /// Rows of `time` tokens, or the documents that `offsets` pack in the one row.
    pub fn new(batch: usize, time: usize, offsets: Option<&Offsets>) -> Self {
        let ranges = ranges(batch, time, offsets);
        let mut rows: Vec<usize> = (0..ranges.len()).collect();
        rows.sort_by_key(|row| Reverse(ranges[*row].len()));
        let (mut order, mut reading) = (Vec::with_capacity(batch * time), Vec::new());
        for t in 0..ranges.iter().map(Range::len).max().unwrap_or(0) {
            let tokens = rows.iter().map(|row| &ranges[*row]).take_while(|range| range.len() > t);
            let before = order.len();
            order.extend(tokens.map(|range| range.start + t));
            reading.push(order.len() - before);
        }
        Self { order, reading, rows }
    }

    /// Reads `x [B, T, channels]` with `step(token [rows, channels], states) -> (reading [rows, outputs], states)`; `states`
    /// have a row for each sequence. Returns `[B, T, outputs]` and the states after each sequence's last token.
    pub fn run<const D: usize, const S: usize>(
        &self,
        x: Tensor<3>,
        states: [Tensor<D>; S],
        mut step: impl FnMut(Tensor<2>, [Tensor<D>; S]) -> (Tensor<2>, [Tensor<D>; S]),
    ) -> (Tensor<3>, [Tensor<D>; S]) {
        let [batch, time, channels] = x.dims();
        let tokens = rows::gather(&x.reshape([batch * time, channels]), 0, self.order.iter().copied());
        let mut states = states.map(|state| rows::gather(&state, 0, self.rows.iter().copied()));
        let (mut held, mut ended) = (self.rows.len(), Vec::new());
        let mut outputs = Vec::with_capacity(self.reading.len());
        for (token, &reading) in cut(tokens, 0, &self.reading).into_iter().zip(&self.reading) {
            if reading < held {
                ended.push(states.each_ref().map(|s| s.clone().narrow(0, reading, held - reading)));
                states = states.map(|state| state.narrow(0, 0, reading));
                held = reading;
            }
            let (y, next) = step(token, states);
            states = next;
            outputs.push(y);
        }
        ended.push(states);
        ended.reverse();
        let states = std::array::from_fn(|i| {
            let all = Tensor::cat(ended.iter().map(|states| states[i].clone()).collect(), 0);
            rows::gather(&all, 0, inverse(&self.rows))
        });
        let y = rows::gather(&Tensor::cat(outputs, 0), 0, inverse(&self.order));
        let [_, channels] = y.dims();
        (y.reshape([batch, time, channels]), states)
    }
}
