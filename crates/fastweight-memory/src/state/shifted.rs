//! State of a matrix memory whose inputs are mixed with the token before.

use burn::tensor::{Tensor, TensorData};

use super::{State, rows};
use crate::MemoryError;

/// A matrix memory and the last token read.
#[derive(Debug, Clone)]
pub struct ShiftedState {
    /// The memory, key first, `[N, H, K, V]`.
    pub memory: Tensor<4>,
    /// The last token that entered the layer, `[N, 1, width]`.
    pub last: Tensor<3>,
}

impl State for ShiftedState {
    fn batch(&self) -> usize {
        self.memory.dims()[0]
    }
    fn bytes(&self) -> usize {
        rows::bytes(&self.memory) + rows::bytes(&self.last)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        rows::check_selection(selected, self.batch())?;
        Ok(Self {
            memory: rows::gather(&self.memory, 0, selected.iter().copied()),
            last: rows::gather(&self.last, 0, selected.iter().copied()),
        })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        rows::check(cleared, self.batch())?;
        Ok(Self { memory: rows::zero(self.memory, cleared), last: rows::zero(self.last, cleared) })
    }
    fn detach(self) -> Self {
        Self { memory: self.memory.detach(), last: self.last.detach() }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        vec![("memory".to_owned(), self.memory.to_data()), ("last".to_owned(), self.last.to_data())]
    }
}
