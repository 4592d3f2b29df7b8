//! State of RWKV-7 with DEA: a fixed memory, and a small entry for every token read.

use burn::tensor::{Tensor, TensorData};

use super::{KvState, ShiftedState, State, rows};
use crate::MemoryError;

/// A time mix's state beside the cache of an attention over all tokens.
#[derive(Debug, Clone)]
pub struct DeaState {
    /// The time mix's.
    pub time_mix: ShiftedState,
    /// For each token what its key is made from, `[N, P, 1, rank]`, and its value, `[N, P, 1, rank + 1]`: the last number is
    /// the token's id, which float32 holds exactly below 2^24.
    pub cache: KvState,
    /// The last token's query, `[N, 1, query_dim]`.
    pub last_query: Tensor<3>,
}

impl State for DeaState {
    fn batch(&self) -> usize {
        self.time_mix.batch()
    }
    fn bytes(&self) -> usize {
        self.time_mix.bytes() + self.cache.bytes() + rows::bytes(&self.last_query)
    }
    fn select(&self, selected: &[usize]) -> Result<Self, MemoryError> {
        Ok(Self {
            time_mix: self.time_mix.select(selected)?,
            cache: self.cache.select(selected)?,
            last_query: rows::gather(&self.last_query, 0, selected.iter().copied()),
        })
    }
    fn clear(self, cleared: &[usize]) -> Result<Self, MemoryError> {
        Ok(Self {
            time_mix: self.time_mix.clear(cleared)?,
            cache: self.cache.clear(cleared)?,
            last_query: rows::zero(self.last_query, cleared),
        })
    }
    fn detach(self) -> Self {
        Self {
            time_mix: self.time_mix.detach(),
            cache: self.cache.detach(),
            last_query: self.last_query.detach(),
        }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named = self.time_mix.named_tensors();
        let cache = self.cache.named_tensors().into_iter();
        named.extend(cache.map(|(name, data)| (format!("dea.{name}"), data)));
        named.push(("dea.last_query".to_owned(), self.last_query.to_data()));
        named
    }
}
