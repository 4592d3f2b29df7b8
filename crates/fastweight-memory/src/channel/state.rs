//! State of a channel mixer that reads more than the token at hand.

use burn::tensor::{Tensor, TensorData};

use crate::state::rows;
use crate::{MemoryError, State};

/// What a channel mixer carries from token to token.
#[derive(Debug, Clone)]
pub struct ChannelState {
    /// The last token that entered it, `[N, 1, width]`.
    pub last: Tensor<3>,
}

impl State for ChannelState {
    fn batch(&self) -> usize {
        self.last.dims()[0]
    }
    fn bytes(&self) -> usize {
        rows::bytes(&self.last)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        rows::check_selection(selected, self.batch())?;
        Ok(Self { last: rows::gather(&self.last, 0, selected.iter().copied()) })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        rows::check(cleared, self.batch())?;
        Ok(Self { last: rows::zero(self.last, cleared) })
    }
    fn detach(self) -> Self {
        Self { last: self.last.detach() }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        vec![("channel.last".to_owned(), self.last.to_data())]
    }
}
