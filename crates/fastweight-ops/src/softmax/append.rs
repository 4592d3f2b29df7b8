//! How the cache of softmax attention grows: in place, into room reserved ahead, so that a token does not cost a copy
//! of all earlier ones.

use std::ops::Range;

use burn::tensor::{Int, Tensor, TensorData};

use super::{KvCache, OPERATOR};
use crate::check::tracked;
use crate::fused::step_in_place;
use crate::{Offsets, OpError, Path};

/// Entries for which room is made where `wanted` have to be held: an eighth more, and 32. A token's attention reads
/// the whole cache, so that copying it once in so many tokens is a small part of the work.
pub fn reserved(wanted: usize) -> usize {
    wanted.saturating_add(wanted / 8 + 32)
}

/// What a row of the longer cache holds: old entries, then new tokens.
struct Row {
    /// Old entries that stay.
    kept: Range<usize>,
    /// Row of the new tensors, and the tokens there.
    fresh: (usize, Range<usize>),
}

impl Row {
    fn length(&self) -> usize {
        self.kept.len() + self.fresh.1.len()
    }
}

impl KvCache {
    /// The cache after `k [B, T, G, K]` and `v [B, T, G, V]` were read (documents of one row, with offsets); none while
    /// it holds nothing.
    ///
    /// Each row keeps at least its last `keep` entries, all of them when absent. Without an earlier cache, on devices
    /// without fused kernels and where a gradient is needed, the tensors are exactly as long as the longest row.
    /// Otherwise they have [`reserved`] room, and are written in place when nobody else holds them.
    ///
    /// # Errors
    /// [`OpError::Shape`] for `k` and `v` that do not fit the cache.
    pub fn append(
        held: Option<Self>,
        k: Tensor<4>,
        v: Tensor<4>,
        offsets: Option<&Offsets>,
        keep: Option<usize>,
    ) -> Result<Option<Self>, OpError> {
        let [batch, time, groups, _] = k.dims();
        let sources: Vec<(usize, Range<usize>)> = match offsets {
            Some(offsets) => offsets.ranges().map(|range| (0, range)).collect(),
            None => (0..batch).map(|row| (row, 0..time)).collect(),
        };
        let keep = keep.unwrap_or(usize::MAX);
        let Some(held) = held else {
            let lengths = vec![0; sources.len()];
            let rows = rows(&lengths, &sources, keep);
            let join = |new: Tensor<4>| assemble(None, Some(new), &rows);
            return Ok((longest(&rows) > 0).then(|| Self::of(join(k), join(v), &rows)));
        };
        held.check(sources.len(), groups, &k, &v)?;
        let lengths = held.valid();
        let capacity = held.k.dims()[1];
        let trimmed = rows(&lengths, &sources, keep);
        if longest(&trimmed) == 0 {
            return Ok(None);
        }
        let gradients = tracked([&held.k, &held.v]) || tracked([&k, &v]);
        if gradients || !Path::Auto.is_fused(OPERATOR, &k)? {
            let join = |old: Tensor<4>, new: Tensor<4>| assemble(Some(old), Some(new), &trimmed);
            return Ok(Some(Self::of(join(held.k, k), join(held.v, v), &trimmed)));
        }
        let all = rows(&lengths, &sources, usize::MAX);
        let fits = longest(&all) <= capacity;
        let rows = if fits { all } else { trimmed };
        let room = if fits { capacity } else { capacity.max(reserved(longest(&rows))) };
        let join = |old, new| {
            if room == capacity { move_rows(old, new, &rows) } else { grow(old, new, &rows, room) }
        };
        Ok(Some(Self::of(join(held.k, k), join(held.v, v), &rows)))
    }

    /// The last `keep` entries of each row, all when absent, in storage of exactly their size; none where no row holds
    /// any.
    pub fn compact(&self, keep: Option<usize>) -> Option<Self> {
        let none = vec![(0, 0..0); self.k.dims()[0]];
        let rows = rows(&self.valid(), &none, keep.unwrap_or(usize::MAX));
        let cut = |held: &Tensor<4>| assemble(Some(held.clone()), None, &rows);
        (longest(&rows) > 0).then(|| Self::of(cut(&self.k), cut(&self.v), &rows))
    }

    fn of(k: Tensor<4>, v: Tensor<4>, rows: &[Row]) -> Self {
        let held = k.dims()[1];
        let full = rows.iter().all(|row| row.length() == held);
        Self { k, v, lengths: (!full).then(|| rows.iter().map(Row::length).collect()) }
    }

    fn check(&self, sequences: usize, groups: usize, k: &Tensor<4>, v: &Tensor<4>) -> Result<(), OpError> {
        self.check_lengths()?;
        let [held, time] = [self.k.dims()[1], k.dims()[1]];
        for (argument, cached, new) in [("k", &self.k, k), ("v", &self.v, v)] {
            let [.., size] = cached.dims();
            let batch = k.dims()[0];
            if new.dims() != [batch, time, groups, size] || cached.dims() != [sequences, held, groups, size] {
                let expected = format!("new tokens of the cache's {:?}", cached.dims());
                return Err(super::shape_error(argument, &new.dims(), expected));
            }
        }
        Ok(())
    }
}

/// The rows of a cache that keeps the last `keep` of all entries.
fn rows(lengths: &[usize], sources: &[(usize, Range<usize>)], keep: usize) -> Vec<Row> {
    let row = |(&length, (source, range)): (&usize, &(usize, Range<usize>))| {
        let fresh = range.len().min(keep);
        let kept = length.min(keep - fresh);
        Row { kept: length - kept..length, fresh: (*source, range.end - fresh..range.end) }
    };
    lengths.iter().zip(sources).map(row).collect()
}

fn longest(rows: &[Row]) -> usize {
    rows.iter().map(Row::length).max().unwrap_or(0)
}

/// The rows by tensor operations, in storage of exactly the longest one's size, the others filled up with zeros.
fn assemble(held: Option<Tensor<4>>, new: Option<Tensor<4>>, rows: &[Row]) -> Tensor<4> {
    let longest = longest(rows);
    let alike = |row: &Row, index: usize| {
        row.kept == rows[0].kept && row.fresh.1 == rows[0].fresh.1 && row.fresh.0 == index
    };
    let fresh =
        |tensor: &Option<Tensor<4>>, range: &Range<usize>| tensor.clone().filter(|_| !range.is_empty());
    let whole = new.as_ref().or(held.as_ref()).is_some_and(|tensor| tensor.dims()[0] == rows.len());
    if whole && rows.iter().enumerate().all(|(index, row)| alike(row, if new.is_some() { index } else { 0 }))
    {
        let (kept, tokens) = (&rows[0].kept, &rows[0].fresh.1);
        let parts = [(fresh(&held, kept), kept), (fresh(&new, tokens), tokens)];
        return join(
            parts.into_iter().filter_map(|(tensor, range)| Some((tensor?, range.clone()))).collect(),
        );
    }
    let row = |(index, row): (usize, &Row)| {
        let of = |tensor: Option<Tensor<4>>, at: usize, range: &Range<usize>| {
            Some(tensor?.narrow(0, at, 1).narrow(1, range.start, range.len()))
        };
        let kept = of(fresh(&held, &row.kept), index, &row.kept);
        let tokens = of(fresh(&new, &row.fresh.1), row.fresh.0, &row.fresh.1);
        let fill = longest - row.length();
        let like = held.as_ref().or(new.as_ref()).filter(|_| fill > 0);
        let fill = like.map(|like| {
            let [_, _, groups, size] = like.dims();
            Tensor::zeros([1, fill, groups, size], (&like.device(), like.dtype()))
        });
        Tensor::cat([kept, tokens, fill].into_iter().flatten().collect(), 1)
    };
    Tensor::cat(rows.iter().enumerate().map(row).collect(), 0)
}

/// Ranges of tokens joined; one alone is copied out of its tensor unless it is all of it.
fn join(mut parts: Vec<(Tensor<4>, Range<usize>)>) -> Tensor<4> {
    if parts.len() > 1 {
        let cut = |(tensor, range): (Tensor<4>, Range<usize>)| tensor.narrow(1, range.start, range.len());
        return Tensor::cat(parts.into_iter().map(cut).collect(), 1);
    }
    let (tensor, range) = parts.remove(0);
    if range == (0..tensor.dims()[1]) {
        return tensor;
    }
    let indices: Vec<i64> = range.map(|at| at as i64).collect();
    let count = indices.len();
    let indices = Tensor::<1, Int>::from_data(TensorData::new(indices, [count]), &tensor.device());
    tensor.select(1, indices)
}

/// Sizes of a cache tensor in numbers: of a row and of an entry, and of a row of the new tokens.
fn strides(held: &Tensor<4>, new: &Tensor<4>) -> [usize; 3] {
    let ([_, capacity, groups, size], [_, time, ..]) = (held.dims(), new.dims());
    let entry = groups * size;
    [capacity * entry, entry, time * entry]
}

/// Writes the rows where they are.
fn move_rows(held: Tensor<4>, new: Tensor<4>, rows: &[Row]) -> Tensor<4> {
    let [width, entry, time] = strides(&held, &new);
    let (_, held) = step_in_place(held, vec![new.into_dispatch()], &[1], |held, inputs, _| {
        for (to, row) in held.chunks_exact_mut(width).zip(rows) {
            let kept = row.kept.len() * entry;
            if row.kept.start > 0 {
                to.copy_within(row.kept.start * entry..row.kept.end * entry, 0);
            }
            write(&mut to[kept..], inputs[0], row, entry, time);
        }
    });
    held
}

/// Writes the rows to a tensor with room for `room` entries.
fn grow(held: Tensor<4>, new: Tensor<4>, rows: &[Row], room: usize) -> Tensor<4> {
    let [width, entry, time] = strides(&held, &new);
    let [count, _, groups, size] = held.dims();
    let larger = Tensor::zeros([count, room, groups, size], &held.device());
    let inputs = vec![held.into_dispatch(), new.into_dispatch()];
    let (_, larger) = step_in_place(larger, inputs, &[1], |larger, inputs, _| {
        for (index, (to, row)) in larger.chunks_exact_mut(room * entry).zip(rows).enumerate() {
            let kept = row.kept.len() * entry;
            let from = index * width + row.kept.start * entry;
            to[..kept].copy_from_slice(&inputs[0][from..from + kept]);
            write(&mut to[kept..], inputs[1], row, entry, time);
        }
    });
    larger
}

/// Writes a row's new tokens.
fn write(to: &mut [f32], new: &[f32], row: &Row, entry: usize, time: usize) {
    let (source, range) = &row.fresh;
    let from = source * time + range.start * entry;
    let count = range.len() * entry;
    to[..count].copy_from_slice(&new[from..from + count]);
}
