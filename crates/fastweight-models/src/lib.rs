//! Language models of memory blocks, and presets by name.
//!
//! A [`LanguageModel`] is an embedding, blocks of a mixer and a channel mixer with a normalisation before each, a last
//! normalisation and an output head. [`ModelConfig`] describes it, counts its parameters and state bytes without
//! building it, and makes it from a seed. What a session carries is a [`ModelState`].

mod block;
mod config;
mod error;
mod experts;
mod language_model;
mod ledger;
pub mod presets;
mod rounds;
mod state;

pub use block::Block;
pub use config::ModelConfig;
pub use error::ModelError;
pub use experts::LayerExperts;
pub use language_model::{Embedding, LanguageModel, Reading};
pub use ledger::{LayerBytes, StateBytes};
pub use rounds::{HaltingConfig, Pondering, Rounds};
pub use state::{LayerState, ModelState};

pub use fastweight_memory::channel::ExpertBytes;
pub use fastweight_memory::parameters::{ParameterGroup, ParameterInfo};
pub use fastweight_memory::{ChannelMixerConfig, MixerConfig, NormKind, State};
