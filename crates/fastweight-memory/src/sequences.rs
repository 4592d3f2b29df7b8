//! Sequences in one row of tokens: where they lie, and tokens in another order.

use std::ops::Range;

use burn::tensor::Tensor;
use fastweight_ops::Offsets;

/// Where the tokens of each sequence lie when all rows are seen as one: rows of `time` tokens, or the documents that `offsets` pack
/// in the one row.
pub(crate) fn ranges(batch: usize, time: usize, offsets: Option<&Offsets>) -> Vec<Range<usize>> {
    match offsets {
        Some(offsets) => offsets.ranges().collect(),
        None => (0..batch).map(|row| row * time..(row + 1) * time).collect(),
    }
}

/// Consecutive parts of `x` along a dimension, as long as `lengths` say, which add up to it. Halves of halves: the gradient of a
/// part is as large as what it was cut from, so that cutting each from the whole would take time that grows with the square of
/// their number.
pub(crate) fn cut<const D: usize>(x: Tensor<D>, dim: usize, lengths: &[usize]) -> Vec<Tensor<D>> {
    if lengths.len() <= 1 {
        return vec![x];
    }
    let (first, second) = lengths.split_at(lengths.len() / 2);
    let [from, count] = [first, second].map(|lengths| lengths.iter().sum::<usize>());
    let mut parts = cut(x.clone().narrow(dim, 0, from), dim, first);
    parts.extend(cut(x.narrow(dim, from, count), dim, second));
    parts
}

/// Where each of `0..n` is in an order of them.
pub(crate) fn inverse(order: &[usize]) -> impl Iterator<Item = usize> + use<> {
    let mut places = vec![0; order.len()];
    order.iter().enumerate().for_each(|(place, of)| places[*of] = place);
    places.into_iter()
}
