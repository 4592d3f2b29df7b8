//! Channel mixers: maps on each token between the mixers of a model.

mod config;
mod mole;
mod state;
mod swiglu;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;

use crate::{MemoryError, Shared};

pub use config::{ChannelMixerConfig, MOST_HIDDEN};
pub use mole::{ExpertBytes, ExpertNetworks, ExpertTables, Experts, Mole, MoleConfig};
pub use state::ChannelState;
pub use swiglu::{SwiGlu, SwiGluConfig};

/// One of the channel mixers; parameters keep the map's own names.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, missing_docs)]
pub enum ChannelMixer {
    SwiGlu(SwiGlu),
    Mole(Mole),
}

impl ChannelMixer {
    /// Maps `x [B, T, width]`; returns `[B, T, width]` and the state after it, if the mixer has one.
    ///
    /// Without a state every sequence starts empty. With offsets `x` is one row of documents and the state holds one
    /// sequence per document. One token after another gives what all at once give.
    ///
    /// # Errors
    /// An input, state or offsets that do not fit, or something missing of what the model shares.
    pub fn forward(
        &self,
        x: Tensor<3>,
        _state: Option<ChannelState>,
        _offsets: Option<&Offsets>,
        shared: &Shared,
    ) -> Result<(Tensor<3>, Option<ChannelState>), MemoryError> {
        match self {
            Self::SwiGlu(map) => Ok((map.forward(x)?, None)),
            Self::Mole(map) => Ok((map.forward(x, shared)?, None)),
        }
    }

    /// The state of `batch` sequences before their first token, if the mixer has one.
    pub fn zero_state(&self, _batch: usize, _device: &Device) -> Option<ChannelState> {
        match self {
            Self::SwiGlu(_) | Self::Mole(_) => None,
        }
    }

    /// The same map with lookup experts as tables of their outputs for `embedding [vocab, width]`, the vectors of all
    /// tokens; any other map as it is.
    ///
    /// # Errors
    /// Vectors of another width.
    pub fn to_tables(&self, embedding: Tensor<2>) -> Result<Self, MemoryError> {
        match self {
            Self::Mole(map) => Ok(Self::Mole(map.to_tables(embedding)?)),
            other => Ok(other.clone()),
        }
    }

    /// Bytes of the lookup experts, if the map has them.
    pub fn expert_bytes(&self) -> Option<ExpertBytes> {
        match self {
            Self::Mole(map) => Some(map.experts.bytes()),
            _ => None,
        }
    }
}
