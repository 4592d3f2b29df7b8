//! Session state of a model.

use burn::tensor::TensorData;
use fastweight_memory::{MemoryError, MixerState, State};

/// What a session carries from token to token: the state of every layer's mixer.
#[derive(Debug, Clone)]
pub struct ModelState {
    /// One state per layer, in order.
    pub layers: Vec<MixerState>,
}

impl State for ModelState {
    fn batch(&self) -> usize {
        self.layers.first().map_or(0, State::batch)
    }
    fn bytes(&self) -> usize {
        self.layers.iter().map(State::bytes).sum()
    }
    fn select(&self, rows: &[usize]) -> Result<Self, MemoryError> {
        let layers = self.layers.iter().map(|layer| layer.select(rows)).collect::<Result<_, _>>()?;
        Ok(Self { layers })
    }
    fn clear(self, rows: &[usize]) -> Result<Self, MemoryError> {
        let layers = self.layers.into_iter().map(|layer| layer.clear(rows)).collect::<Result<_, _>>()?;
        Ok(Self { layers })
    }
    fn detach(self) -> Self {
        Self { layers: self.layers.into_iter().map(State::detach).collect() }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let layer = |(index, layer): (usize, &MixerState)| {
            layer
                .named_tensors()
                .into_iter()
                .map(move |(name, data)| (format!("blocks.{index}.{name}"), data))
        };
        self.layers.iter().enumerate().flat_map(layer).collect()
    }
}
