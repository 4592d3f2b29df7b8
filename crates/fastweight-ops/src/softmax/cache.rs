//! The keys and values that softmax attention remembers.

use burn::tensor::Tensor;

use super::{shape_error, value_error};
use crate::OpError;

/// Keys and values of earlier tokens, one row per sequence.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// Keys `[sequences, held, kv heads, key]`.
    pub k: Tensor<4>,
    /// Values `[sequences, held, kv heads, value]`.
    pub v: Tensor<4>,
    /// How many of the held entries are valid in each row, counted from the first; all when absent.
    pub lengths: Option<Vec<usize>>,
}

impl KvCache {
    /// Valid entries of each row.
    pub fn valid(&self) -> Vec<usize> {
        let [rows, held, ..] = self.k.dims();
        self.lengths.clone().unwrap_or_else(|| vec![held; rows])
    }

    /// Checks that there is one length per row, none above the entries held.
    ///
    /// # Errors
    /// [`OpError::Value`] names what is wrong.
    pub fn check_lengths(&self) -> Result<(), OpError> {
        let [rows, held, ..] = self.k.dims();
        match &self.lengths {
            Some(lengths) if lengths.len() != rows => Err(value_error(
                "cache.lengths",
                format!("{} lengths", lengths.len()),
                format!("one for each of {rows} rows"),
            )),
            Some(lengths) if lengths.iter().any(|&n| n > held) => Err(value_error(
                "cache.lengths",
                format!("{lengths:?}"),
                format!("at most the {held} entries held"),
            )),
            _ => Ok(()),
        }
    }

    /// The cache after `k [N, T, G, K]` and `v [N, T, G, V]`, which follow each row's valid entries.
    ///
    /// The tensors grow to exactly the longest row, so the bytes held are those of valid entries, up to the
    /// raggedness of the rows.
    ///
    /// # Errors
    /// Shapes or lengths that do not fit.
    pub fn append(self, k: Tensor<4>, v: Tensor<4>) -> Result<Self, OpError> {
        self.check_lengths()?;
        let [rows, held, groups, key] = self.k.dims();
        let (time, value) = (k.dims()[1], self.v.dims()[3]);
        for (argument, found, expected) in
            [("k", k.dims(), [rows, time, groups, key]), ("v", v.dims(), [rows, time, groups, value])]
        {
            if found != expected {
                return Err(shape_error(argument, &found, format!("{expected:?} to follow the cache")));
            }
        }
        let Some(lengths) = self.lengths else {
            return Ok(Self {
                k: Tensor::cat(vec![self.k, k], 1),
                v: Tensor::cat(vec![self.v, v], 1),
                lengths: None,
            });
        };
        let longest = lengths.iter().max().copied().unwrap_or(0) + time;
        let place = |held_rows: Tensor<4>, new: Tensor<4>| {
            let width = new.dims()[3];
            let room = Tensor::zeros([rows, longest.saturating_sub(held), groups, width], &new.device());
            let mut all = Tensor::cat(vec![held_rows, room], 1).narrow(1, 0, longest);
            for (row, &start) in lengths.iter().enumerate() {
                let entries = new.clone().narrow(0, row, 1);
                all = all.slice_assign([row..row + 1, start..start + time, 0..groups, 0..width], entries);
            }
            all
        };
        let (k, v) = (place(self.k, k), place(self.v, v));
        Ok(Self { k, v, lengths: Some(lengths.iter().map(|n| n + time).collect()) })
    }

    /// The cache without all but the last `tokens` valid entries of each row.
    ///
    /// What a sliding window of `tokens + 1` needs for the next token.
    pub fn keep_last(self, tokens: usize) -> Self {
        let [_, held, ..] = self.k.dims();
        let Some(lengths) = self.lengths else {
            let kept = held.min(tokens);
            let last = |t: Tensor<4>| entries(t, held - kept, kept);
            return Self { k: last(self.k), v: last(self.v), lengths: None };
        };
        let longest = lengths.iter().max().map_or(0, |&n| n.min(tokens));
        let shift = |t: Tensor<4>| {
            let rows = lengths.iter().enumerate().map(|(row, &n)| {
                let start = n.saturating_sub(tokens).min(held - longest);
                entries(t.clone().narrow(0, row, 1), start, longest)
            });
            Tensor::cat(rows.collect(), 0)
        };
        let (k, v) = (shift(self.k.clone()), shift(self.v.clone()));
        Self { k, v, lengths: Some(lengths.iter().map(|&n| n.min(tokens)).collect()) }
    }
}

/// Entries `start..start + count` of every row, possibly none.
fn entries(held: Tensor<4>, start: usize, count: usize) -> Tensor<4> {
    let [rows, _, groups, width] = held.dims();
    if count == 0 {
        return Tensor::zeros([rows, 0, groups, width], (&held.device(), held.dtype()));
    }
    held.narrow(1, start, count)
}
