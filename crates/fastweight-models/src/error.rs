//! What can be wrong when a model is described, made or run.

use fastweight_memory::MemoryError;
use fastweight_ops::OpError;

/// A model could not be made or run; the message says what was expected, what came and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// A size or option of the configuration does not fit.
    #[error("model: {setting} is {found}, expected {expected}")]
    Setting {
        /// The setting at fault.
        setting: &'static str,
        /// The value that came.
        found: String,
        /// What was expected and what to change.
        expected: String,
    },
    /// A mixer or channel mixer of a layer does not fit.
    #[error("layer {layer}: {source}")]
    Layer {
        /// The layer's index, from 0.
        layer: usize,
        /// What is wrong with its mixers, input or state.
        source: MemoryError,
    },
    /// An operator of the model refused its arguments.
    #[error(transparent)]
    Operator(#[from] OpError),
    /// A token id outside the vocabulary.
    #[error(
        "token id {id} does not exist in a vocabulary of {vocab}; the tokenizer and the model must have the same vocabulary"
    )]
    Token {
        /// The id that came.
        id: i64,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A state of a model with another number of layers.
    #[error("the state holds {found} layers, the model has {expected}; use a state of this model")]
    StateLayers {
        /// Layers of the model.
        expected: usize,
        /// Layers of the state.
        found: usize,
    },
    /// A preset that does not exist.
    #[error("{0}")]
    Preset(String),
}
