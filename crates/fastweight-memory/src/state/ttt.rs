//! State of a layer whose inner model learns in mini-batches.

use burn::tensor::TensorData;
use fastweight_ops::ttt::TttState;

use super::{ConvState, State, rows};
use crate::MemoryError;

/// The change of an inner model since its start, its mini-batch in progress, and the convolutions in front of it.
///
/// Only the change is carried, so that a cleared row is at the start again, wherever the trained start is.
#[derive(Debug, Clone)]
pub struct TttMemoryState {
    /// Weights and bias less those before the first token; what the mini-batch gathered; its position, which is
    /// held on the host and not counted in bytes.
    pub change: TttState,
    /// The convolutions' states, if the layer has convolutions.
    pub conv: Option<ConvState>,
}

impl TttMemoryState {
    /// What the operator left, in storage of its own: some of it are views of larger tensors.
    pub(crate) fn new(change: TttState, conv: Option<ConvState>) -> Self {
        let change = TttState {
            weights: rows::own(&change.weights),
            bias: rows::own(&change.bias),
            gathered: rows::own(&change.gathered),
            gathered_bias: rows::own(&change.gathered_bias),
            rate: rows::own(&change.rate),
            position: change.position,
        };
        Self { change, conv }
    }
}

impl State for TttMemoryState {
    fn batch(&self) -> usize {
        self.change.position.len()
    }
    fn bytes(&self) -> usize {
        let TttState { weights, bias, gathered, gathered_bias, rate, .. } = &self.change;
        let inner = rows::bytes(weights) + rows::bytes(bias) + rows::bytes(rate);
        let gathered = rows::bytes(gathered) + rows::bytes(gathered_bias);
        inner + gathered + self.conv.as_ref().map_or(0, State::bytes)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        rows::check_selection(selected, self.batch())?;
        let indices = || selected.iter().copied();
        let change = TttState {
            weights: rows::gather(&self.change.weights, 0, indices()),
            bias: rows::gather(&self.change.bias, 0, indices()),
            gathered: rows::gather(&self.change.gathered, 0, indices()),
            gathered_bias: rows::gather(&self.change.gathered_bias, 0, indices()),
            rate: rows::gather(&self.change.rate, 0, indices()),
            position: indices().map(|row| self.change.position[row]).collect(),
        };
        let conv = self.conv.as_ref().map(|conv| conv.select(selected)).transpose()?;
        Ok(Self { change, conv })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        rows::check(cleared, self.batch())?;
        let TttState { weights, bias, gathered, gathered_bias, rate, mut position } = self.change;
        cleared.iter().for_each(|row| position[*row] = 0);
        let change = TttState {
            weights: rows::zero(weights, cleared),
            bias: rows::zero(bias, cleared),
            gathered: rows::zero(gathered, cleared),
            gathered_bias: rows::zero(gathered_bias, cleared),
            rate: rows::zero(rate, cleared),
            position,
        };
        let conv = self.conv.map(|conv| conv.clear(cleared)).transpose()?;
        Ok(Self { change, conv })
    }
    fn detach(self) -> Self {
        let TttState { weights, bias, gathered, gathered_bias, rate, position } = self.change;
        let change = TttState {
            weights: weights.detach(),
            bias: bias.detach(),
            gathered: gathered.detach(),
            gathered_bias: gathered_bias.detach(),
            rate: rate.detach(),
            position,
        };
        Self { change, conv: self.conv.map(State::detach) }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let TttState { weights, bias, gathered, gathered_bias, rate, position } = &self.change;
        let mut named = vec![
            ("weights".to_owned(), weights.to_data()),
            ("bias".to_owned(), bias.to_data()),
            ("gathered".to_owned(), gathered.to_data()),
            ("gathered_bias".to_owned(), gathered_bias.to_data()),
            ("rate".to_owned(), rate.to_data()),
            ("position".to_owned(), rows::counters(position)),
        ];
        named.extend(self.conv.iter().flat_map(State::named_tensors));
        named
    }
}
