//! State of a matrix memory that is written with momentum.

use burn::tensor::{Tensor, TensorData};

use super::{MatrixState, State, rows};
use crate::MemoryError;

/// A matrix memory and the momentum of its writes.
#[derive(Debug, Clone)]
pub struct MomentumState {
    /// The memory and its convolutions.
    pub matrix: MatrixState,
    /// The momentum, key first, `[N, H, K, V]`.
    pub momentum: Tensor<4>,
}

impl State for MomentumState {
    fn batch(&self) -> usize {
        self.matrix.batch()
    }
    fn bytes(&self) -> usize {
        self.matrix.bytes() + rows::bytes(&self.momentum)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        let matrix = self.matrix.select(selected)?;
        Ok(Self { matrix, momentum: rows::gather(&self.momentum, 0, selected.iter().copied()) })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        let matrix = self.matrix.clear(cleared)?;
        Ok(Self { matrix, momentum: rows::zero(self.momentum, cleared) })
    }
    fn detach(self) -> Self {
        Self { matrix: self.matrix.detach(), momentum: self.momentum.detach() }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named = self.matrix.named_tensors();
        named.push(("momentum".to_owned(), self.momentum.to_data()));
        named
    }
}
