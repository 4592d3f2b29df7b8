//! State of the long short-term memory.

use burn::tensor::{Tensor, TensorData};

use super::{State, rows};
use crate::MemoryError;

/// The last output and the cells of an LSTM.
#[derive(Debug, Clone)]
pub struct LstmState {
    /// What the last token read, `[N, hidden]`.
    pub hidden: Tensor<2>,
    /// The cells, `[N, hidden]`.
    pub cell: Tensor<2>,
}

impl State for LstmState {
    fn batch(&self) -> usize {
        self.hidden.dims()[0]
    }
    fn bytes(&self) -> usize {
        rows::bytes(&self.hidden) + rows::bytes(&self.cell)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        rows::check_selection(selected, self.batch())?;
        let select = |tensor| rows::gather(tensor, 0, selected.iter().copied());
        Ok(Self { hidden: select(&self.hidden), cell: select(&self.cell) })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        rows::check(cleared, self.batch())?;
        Ok(Self { hidden: rows::zero(self.hidden, cleared), cell: rows::zero(self.cell, cleared) })
    }
    fn detach(self) -> Self {
        Self { hidden: self.hidden.detach(), cell: self.cell.detach() }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        vec![("hidden".to_owned(), self.hidden.to_data()), ("cell".to_owned(), self.cell.to_data())]
    }
}
