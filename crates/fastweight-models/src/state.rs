//! Session state of a model.

use burn::tensor::TensorData;
use fastweight_memory::{ChannelState, MemoryError, MixerState, State};

/// What a layer carries from token to token.
#[derive(Debug, Clone)]
pub struct LayerState {
    /// The mixer's state.
    pub mixer: MixerState,
    /// The channel mixer's, if it has one.
    pub channel: Option<ChannelState>,
}

impl State for LayerState {
    fn batch(&self) -> usize {
        self.mixer.batch()
    }
    fn bytes(&self) -> usize {
        self.mixer.bytes() + self.channel.as_ref().map_or(0, State::bytes)
    }
    fn select(&self, rows: &[usize]) -> Result<Self, MemoryError> {
        let channel = self.channel.as_ref().map(|channel| channel.select(rows)).transpose()?;
        Ok(Self { mixer: self.mixer.select(rows)?, channel })
    }
    fn clear(self, rows: &[usize]) -> Result<Self, MemoryError> {
        let channel = self.channel.map(|channel| channel.clear(rows)).transpose()?;
        Ok(Self { mixer: self.mixer.clear(rows)?, channel })
    }
    fn detach(self) -> Self {
        Self { mixer: self.mixer.detach(), channel: self.channel.map(State::detach) }
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        let mut named = self.mixer.named_tensors();
        named.extend(self.channel.iter().flat_map(State::named_tensors));
        named
    }
}

/// What a session carries from token to token: the state of every layer.
#[derive(Debug, Clone)]
pub struct ModelState {
    /// One state per layer, in order; of a model of several rounds, those of the first round, then the second, and so on.
    pub layers: Vec<LayerState>,
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
        let layer = |(index, layer): (usize, &LayerState)| {
            layer
                .named_tensors()
                .into_iter()
                .map(move |(name, data)| (format!("blocks.{index}.{name}"), data))
        };
        self.layers.iter().enumerate().flat_map(layer).collect()
    }
}
