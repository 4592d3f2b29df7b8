//! Sizes that every matrix-memory kernel needs.

use std::ops::Range;

use crate::Offsets;

/// Sizes of a sequence operator: `q, k [batch, time, heads, key]`, `v [batch, time, heads, value]`.
#[derive(Debug, Clone)]
pub struct Dims {
    /// Rows of the batch.
    pub batch: usize,
    /// Tokens in a row.
    pub time: usize,
    /// Heads.
    pub heads: usize,
    /// Key size of a head.
    pub key: usize,
    /// Value size of a head.
    pub value: usize,
    /// Factor on the output.
    pub scale: f32,
    /// Documents packed in the one row, if any.
    pub offsets: Option<Offsets>,
}

impl Dims {
    /// Independent sequences, each with a state of its own: rows, or the documents of the one row.
    pub fn states(&self) -> usize {
        self.offsets.as_ref().map_or(self.batch, Offsets::documents)
    }

    /// Row and token range of each sequence, in the order of the states.
    pub fn sequences(&self) -> Vec<(usize, Range<usize>)> {
        match &self.offsets {
            Some(offsets) => offsets.ranges().map(|range| (0, range)).collect(),
            None => (0..self.batch).map(|row| (row, 0..self.time)).collect(),
        }
    }
}
