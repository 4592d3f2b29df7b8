//! Small float64 products on row-major slices, for the plain loops that define the operators.

use std::ops::Range;

use crate::Offsets;
use crate::kernel::Dims;

impl Dims {
    /// Range of a token's numbers in a tensor `[B,T,H,size]`.
    pub(crate) fn token(&self, row: usize, t: usize, head: usize, size: usize) -> Range<usize> {
        let start = ((row * self.time + t) * self.heads + head) * size;
        start..start + size
    }

    /// Range of a memory in `[N,H,K,V]`.
    pub(crate) fn memory(&self, sequence: usize, head: usize) -> Range<usize> {
        let size = self.key * self.value;
        let start = (sequence * self.heads + head) * size;
        start..start + size
    }

    /// Memories `[N,H,K,V]`, zero when there are none.
    pub(crate) fn memories(&self, initial: Option<&[f64]>) -> Vec<f64> {
        or_zeros(initial, self.states() * self.heads * self.key * self.value)
    }
}

/// Row and token range of each independent sequence: rows, or the documents of the one row.
pub(crate) fn sequences(batch: usize, time: usize, offsets: Option<&Offsets>) -> Vec<(usize, Range<usize>)> {
    match offsets {
        Some(offsets) => offsets.ranges().map(|range| (0, range)).collect(),
        None => (0..batch).map(|row| (row, 0..time)).collect(),
    }
}

/// `sum_i a_i b_i`.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `y += factor * x`.
pub(crate) fn add_scaled(y: &mut [f64], factor: f64, x: &[f64]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * x);
}

/// `y *= factor`.
pub(crate) fn multiply(y: &mut [f64], factor: f64) {
    y.iter_mut().for_each(|y| *y *= factor);
}

/// Multiplies row `c` of a memory `s [K,V]` with `exp(gate[c])`.
pub(crate) fn decay_rows(s: &mut [f64], gate: &[f64]) {
    let value = s.len() / gate.len();
    gate.iter().zip(s.chunks_exact_mut(value)).for_each(|(g, row)| multiply(row, g.exp()));
}

/// The gradient of the `gate` of [`decay_rows`]: `exp(gate[c])` times the product of row `c` of the gradient after
/// the decay with the memory `before` it.
pub(crate) fn decay_rows_back(gate: &[f64], after: &[f64], before: &[f64]) -> Vec<f64> {
    let value = before.len() / gate.len();
    let rows = after.chunks_exact(value).zip(before.chunks_exact(value));
    gate.iter().zip(rows).map(|(g, (after, before))| g.exp() * dot(after, before)).collect()
}

/// What a memory `s [K,V]` returns for a key: `s^T k`.
pub(crate) fn read(s: &[f64], k: &[f64], value: usize) -> Vec<f64> {
    let mut out = vec![0.0; value];
    k.iter().zip(s.chunks_exact(value)).for_each(|(&k, row)| add_scaled(&mut out, k, row));
    out
}

/// The transpose of [`read`]: `s v`.
pub(crate) fn read_back(s: &[f64], v: &[f64]) -> Vec<f64> {
    s.chunks_exact(v.len()).map(|row| dot(row, v)).collect()
}

/// `s += k v^T`.
pub(crate) fn write(s: &mut [f64], k: &[f64], v: &[f64]) {
    k.iter().zip(s.chunks_exact_mut(v.len())).for_each(|(&k, row)| add_scaled(row, k, v));
}

/// `values`, or zeros when there are none.
pub(crate) fn or_zeros(values: Option<&[f64]>, length: usize) -> Vec<f64> {
    values.map_or_else(|| vec![0.0; length], <[f64]>::to_vec)
}
