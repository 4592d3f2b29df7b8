//! States of matrix memories: fixed size, whatever the number of tokens read.

use burn::tensor::{Tensor, TensorData};

use super::{State, rows};
use crate::MemoryError;

/// The last `conv width - 1` inputs of the short convolutions, oldest first.
#[derive(Debug, Clone)]
pub struct ConvState {
    /// Of the queries, `[N, conv width - 1, channels]`.
    pub q: Tensor<3>,
    /// Of the keys.
    pub k: Tensor<3>,
    /// Of the values.
    pub v: Tensor<3>,
}

impl ConvState {
    fn map(self, mut f: impl FnMut(Tensor<3>) -> Tensor<3>) -> Self {
        Self { q: f(self.q), k: f(self.k), v: f(self.v) }
    }
}

impl State for ConvState {
    fn batch(&self) -> usize {
        self.q.dims()[0]
    }
    fn bytes(&self) -> usize {
        rows::bytes(&self.q) + rows::bytes(&self.k) + rows::bytes(&self.v)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        rows::check_selection(selected, self.batch())?;
        Ok(self.clone().map(|t| rows::gather(&t, 0, selected.iter().copied())))
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        rows::check(cleared, self.batch())?;
        Ok(self.map(|t| rows::zero(t, cleared)))
    }
    fn detach(self) -> Self {
        self.map(Tensor::detach)
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        [("conv.q", &self.q), ("conv.k", &self.k), ("conv.v", &self.v)]
            .map(|(name, tensor)| (name.to_owned(), tensor.to_data()))
            .into()
    }
}

/// A matrix memory and the short convolutions in front of it.
#[derive(Debug, Clone)]
pub struct MatrixState {
    /// The memory, key first, `[N, H, K, V]`.
    pub memory: Tensor<4>,
    /// The convolutions' states, if the layer has convolutions.
    pub conv: Option<ConvState>,
}

impl MatrixState {
    /// The memory, and the convolutions' states.
    pub(crate) fn into_parts(self) -> (Option<Tensor<4>>, Option<ConvState>) {
        (Some(self.memory), self.conv)
    }
}

impl State for MatrixState {
    fn batch(&self) -> usize {
        self.memory.dims()[0]
    }
    fn bytes(&self) -> usize {
        rows::bytes(&self.memory) + self.conv.as_ref().map_or(0, State::bytes)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        rows::check_selection(selected, self.batch())?;
        let conv = self.conv.as_ref().map(|conv| conv.select(selected)).transpose()?;
        Ok(Self { memory: rows::gather(&self.memory, 0, selected.iter().copied()), conv })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        rows::check(cleared, self.batch())?;
        let conv = self.conv.map(|conv| conv.clear(cleared)).transpose()?;
        Ok(Self { memory: rows::zero(self.memory, cleared), conv })
    }
    fn detach(self) -> Self {
        Self { memory: self.memory.detach(), conv: self.conv.map(State::detach) }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named = vec![("memory".to_owned(), self.memory.to_data())];
        named.extend(self.conv.iter().flat_map(State::named_tensors));
        named
    }
}

/// A matrix memory whose keys carry rotary positions.
#[derive(Debug, Clone)]
pub struct RotaryState {
    /// The memory and its convolutions.
    pub matrix: MatrixState,
    /// Tokens read by each row: the position of its next token. Held on the host, not counted in bytes.
    pub positions: Vec<usize>,
}

impl State for RotaryState {
    fn batch(&self) -> usize {
        self.matrix.batch()
    }
    fn bytes(&self) -> usize {
        self.matrix.bytes()
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        let matrix = self.matrix.select(selected)?;
        Ok(Self { matrix, positions: selected.iter().map(|row| self.positions[*row]).collect() })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        let matrix = self.matrix.clear(cleared)?;
        let mut positions = self.positions;
        cleared.iter().for_each(|row| positions[*row] = 0);
        Ok(Self { matrix, positions })
    }
    fn detach(self) -> Self {
        Self { matrix: self.matrix.detach(), ..self }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named = self.matrix.named_tensors();
        named.push(("positions".to_owned(), rows::counters(&self.positions)));
        named
    }
}

/// A matrix memory with the sum of its keys.
#[derive(Debug, Clone)]
pub struct NormalisedState {
    /// The memory and its convolutions.
    pub matrix: MatrixState,
    /// The sum of all feature-mapped keys, `[N, H, K]`.
    pub normaliser: Tensor<3>,
}

impl State for NormalisedState {
    fn batch(&self) -> usize {
        self.matrix.batch()
    }
    fn bytes(&self) -> usize {
        self.matrix.bytes() + rows::bytes(&self.normaliser)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        let matrix = self.matrix.select(selected)?;
        Ok(Self { matrix, normaliser: rows::gather(&self.normaliser, 0, selected.iter().copied()) })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        let matrix = self.matrix.clear(cleared)?;
        Ok(Self { matrix, normaliser: rows::zero(self.normaliser, cleared) })
    }
    fn detach(self) -> Self {
        Self { matrix: self.matrix.detach(), normaliser: self.normaliser.detach() }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named = self.matrix.named_tensors();
        named.push(("normaliser".to_owned(), self.normaliser.to_data()));
        named
    }
}
