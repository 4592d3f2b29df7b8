//! State of a layer around a deep memory.

use burn::tensor::{Tensor, TensorData};
use fastweight_ops::deep_memory::DeepState;

use super::{ConvState, State, rows};
use crate::MemoryError;

/// The change of a deep memory since its start, and the convolutions in front of it.
///
/// Only the change is carried, so that a cleared row is at the start again, wherever the trained start is.
#[derive(Debug, Clone)]
pub struct DeepMemoryState {
    /// Weights at the chunk's start and after the last token, less those before the first token; the momentum; the
    /// positions, which are held on the host and not counted in bytes.
    pub change: DeepState,
    /// The convolutions' states, if the layer has convolutions.
    pub conv: Option<ConvState>,
}

impl State for DeepMemoryState {
    fn batch(&self) -> usize {
        self.change.rows()
    }
    fn bytes(&self) -> usize {
        let inner: usize = self.change.tensors().iter().map(|(_, tensor)| rows::bytes(tensor)).sum();
        inner + self.conv.as_ref().map_or(0, State::bytes)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        rows::check_selection(selected, self.batch())?;
        let positions = selected.iter().map(|row| self.change.positions[*row]).collect();
        let picked = self.change.clone().map(|t| rows::gather(&t, 0, selected.iter().copied()));
        let conv = self.conv.as_ref().map(|conv| conv.select(selected)).transpose()?;
        Ok(Self { change: DeepState { positions, ..picked }, conv })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        rows::check(cleared, self.batch())?;
        let mut change = self.change.map(|t| rows::zero(t, cleared));
        cleared.iter().for_each(|row| change.positions[*row] = 0);
        let conv = self.conv.map(|conv| conv.clear(cleared)).transpose()?;
        Ok(Self { change, conv })
    }
    fn detach(self) -> Self {
        Self { change: self.change.map(Tensor::detach), conv: self.conv.map(State::detach) }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let tensors = self.change.tensors().into_iter();
        let mut named: Vec<_> = tensors.map(|(name, tensor)| (name, tensor.to_data())).collect();
        named.push(("positions".to_owned(), rows::counters(&self.change.positions)));
        named.extend(self.conv.iter().flat_map(State::named_tensors));
        named
    }
}
