//! Operations on the first axis of state tensors.

use burn::tensor::{Int, Slice, Tensor, TensorData};

use crate::MemoryError;

pub(crate) fn check(rows: &[usize], batch: usize) -> Result<(), MemoryError> {
    match rows.iter().find(|row| **row >= batch) {
        Some(row) => Err(MemoryError::Row { row: *row, batch }),
        None => Ok(()),
    }
}

/// Checks rows of a selection, which must not be empty.
pub(crate) fn check_selection(rows: &[usize], batch: usize) -> Result<(), MemoryError> {
    if rows.is_empty() {
        return Err(MemoryError::StateBatch { expected: 1, found: 0 });
    }
    check(rows, batch)
}

pub(crate) fn bytes<const D: usize>(tensor: &Tensor<D>) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}

/// Entries `indices` along `dim`, in storage of their own.
pub(crate) fn gather<const D: usize>(
    tensor: &Tensor<D>,
    dim: usize,
    indices: impl Iterator<Item = usize>,
) -> Tensor<D> {
    let indices: Vec<i64> = indices.map(|i| i as i64).collect();
    let count = indices.len();
    let indices = Tensor::<1, Int>::from_data(TensorData::new(indices, [count]), &tensor.device());
    tensor.clone().select(dim, indices)
}

/// The tensor in storage of its own, where it may be a view of a larger one.
pub(crate) fn own<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    gather(tensor, 0, 0..tensor.dims()[0])
}

pub(crate) fn zero<const D: usize>(tensor: Tensor<D>, rows: &[usize]) -> Tensor<D> {
    rows.iter().fold(tensor, |tensor, row| {
        let mut slices = vec![Slice::full(); D];
        slices[0] = Slice::from(*row..*row + 1);
        tensor.slice_fill(slices.as_slice(), 0.0)
    })
}

/// A number per row, for session files.
pub(crate) fn counters(values: &[usize]) -> TensorData {
    TensorData::new(values.iter().map(|v| *v as i64).collect::<Vec<_>>(), [values.len()])
}
