//! Where the bytes of a session are.

use fastweight_memory::StateSize;

/// Bytes of one layer's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerBytes {
    /// The round that the state belongs to, from 0.
    pub round: usize,
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Its mixer's name.
    pub mixer: &'static str,
    /// Bytes that stay fixed and bytes that grow with the tokens read.
    pub size: StateSize,
}

/// Bytes of one session's state, layer by layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateBytes {
    /// Tokens read.
    pub tokens: usize,
    /// Every layer, in order, round by round.
    pub layers: Vec<LayerBytes>,
}

impl StateBytes {
    /// Bytes that do not depend on the number of tokens.
    pub fn fixed(&self) -> usize {
        self.layers.iter().map(|layer| layer.size.fixed).fold(0, usize::saturating_add)
    }

    /// Bytes held for the tokens read.
    pub fn growing(&self) -> usize {
        self.layers.iter().map(|layer| layer.size.growing).fold(0, usize::saturating_add)
    }

    /// All bytes.
    pub fn total(&self) -> usize {
        self.fixed().saturating_add(self.growing())
    }
}
