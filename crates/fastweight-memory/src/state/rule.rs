//! State of a layer whose memory follows any rule.

use burn::tensor::TensorData;

use super::{ConvState, State};
use crate::MemoryError;
use crate::rule::RuleState;

/// The change of a rule's state since its start, and the convolutions in front of it.
///
/// Only the change is carried, so that a cleared row is at the start again, wherever the trained start is.
#[derive(Debug, Clone)]
pub struct RuleMemoryState {
    /// The rule's state less the state before the first token.
    pub change: RuleState,
    /// The convolutions' states, if the layer has convolutions.
    pub conv: Option<ConvState>,
}

impl State for RuleMemoryState {
    fn batch(&self) -> usize {
        self.change.batch()
    }
    fn bytes(&self) -> usize {
        self.change.bytes() + self.conv.as_ref().map_or(0, State::bytes)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        let conv = self.conv.as_ref().map(|conv| conv.select(selected)).transpose()?;
        Ok(Self { change: self.change.select(selected)?, conv })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        let conv = self.conv.map(|conv| conv.clear(cleared)).transpose()?;
        Ok(Self { change: self.change.zero_rows(cleared)?, conv })
    }
    fn detach(self) -> Self {
        Self { change: self.change.map(burn::tensor::Tensor::detach), conv: self.conv.map(State::detach) }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named = self.change.named_tensors();
        named.extend(self.conv.iter().flat_map(State::named_tensors));
        named
    }
}
