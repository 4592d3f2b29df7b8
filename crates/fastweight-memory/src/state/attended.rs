//! States of a memory with attention beside it: the architectures of Titans.

use burn::tensor::{Tensor, TensorData};

use super::{KvState, MixerState, State, rows};
use crate::MemoryError;

/// A memory, and the keys and values of the attention beside or behind it.
#[derive(Debug, Clone)]
pub struct MemoryAttentionState {
    /// The memory's state.
    pub memory: Box<MixerState>,
    /// Keys and values of the window.
    pub attention: KvState,
}

/// Tensors of a part, their names behind its name.
fn part(name: &'static str, state: &impl State) -> impl Iterator<Item = (String, TensorData)> {
    state.named_tensors().into_iter().map(move |(own, tensor)| (format!("{name}.{own}"), tensor))
}

impl State for MemoryAttentionState {
    fn batch(&self) -> usize {
        self.attention.batch()
    }
    fn bytes(&self) -> usize {
        self.memory.bytes() + self.attention.bytes()
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        let memory = Box::new(self.memory.select(selected)?);
        Ok(Self { memory, attention: self.attention.select(selected)? })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        let memory = Box::new(self.memory.clear(cleared)?);
        Ok(Self { memory, attention: self.attention.clear(cleared)? })
    }
    fn detach(self) -> Self {
        Self { memory: Box::new(self.memory.detach()), attention: self.attention.detach() }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        part("memory", &*self.memory).chain(part("attention", &self.attention)).collect()
    }
}

/// A memory that is read as it was at the start of a segment, and the segment in progress.
#[derive(Debug, Clone)]
pub struct SegmentState {
    /// The memory's state after the last token.
    pub memory: Box<MixerState>,
    /// Its weights `[N, H, in, out]` at the start of the segment that the last token belongs to, as its state holds them.
    pub start: Vec<Tensor<4>>,
    /// State of the convolution on the queries of what is recalled, `[N, conv width - 1, heads K]`, if there is one.
    pub recall: Option<Tensor<3>>,
    /// Keys and values of the segment in progress, two entries a token: of what it recalled, and its own.
    pub attention: KvState,
}

impl SegmentState {
    fn map(
        self,
        memory: MixerState,
        attention: KvState,
        weights: impl Fn(Tensor<4>) -> Tensor<4>,
        recall: impl Fn(Tensor<3>) -> Tensor<3>,
    ) -> Self {
        Self {
            memory: Box::new(memory),
            start: self.start.into_iter().map(weights).collect(),
            recall: self.recall.map(recall),
            attention,
        }
    }
}

impl State for SegmentState {
    fn batch(&self) -> usize {
        self.attention.batch()
    }
    fn bytes(&self) -> usize {
        let start: usize = self.start.iter().map(rows::bytes).sum();
        let recall = self.recall.as_ref().map_or(0, rows::bytes);
        self.memory.bytes() + start + recall + self.attention.bytes()
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        let (memory, attention) = (self.memory.select(selected)?, self.attention.select(selected)?);
        let indices = || selected.iter().copied();
        let this = self.clone();
        Ok(this.map(
            memory,
            attention,
            |t| rows::gather(&t, 0, indices()),
            |t| rows::gather(&t, 0, indices()),
        ))
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        let (memory, attention) =
            (self.memory.clone().clear(cleared)?, self.attention.clone().clear(cleared)?);
        Ok(self.map(memory, attention, |t| rows::zero(t, cleared), |t| rows::zero(t, cleared)))
    }
    fn detach(self) -> Self {
        let (memory, attention) = (self.memory.clone().detach(), self.attention.clone().detach());
        self.map(memory, attention, Tensor::detach, Tensor::detach)
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let start = self.start.iter().enumerate();
        let start = start.map(|(layer, tensor)| (format!("segment_start.{layer}"), tensor.to_data()));
        let recall = self.recall.iter().map(|tensor| ("recall".to_owned(), tensor.to_data()));
        let attention = part("attention", &self.attention);
        part("memory", &*self.memory).chain(start).chain(recall).chain(attention).collect()
    }
}
