//! Sequence models whose memory learns while they read.
//!
//! One name for the library crates below it, and a [`prelude`] with what most programs need. The
//! command of the same name is built on exactly these.

pub use fastweight_memory as memory;
pub use fastweight_models as models;
pub use fastweight_ops as ops;
pub use fastweight_tasks as tasks;
pub use fastweight_train as train;

/// What most programs need: `use fastweight::prelude::*`.
pub mod prelude {
    pub use burn::tensor::{Device, Int, Tensor};
    pub use fastweight_memory::{LayerContext, Mixer, MixerConfig, MixerState, State};
    pub use fastweight_models::{LanguageModel, ModelConfig, ModelState, presets};
    pub use fastweight_ops::{Offsets, Path, SequenceOptions};
    pub use fastweight_tasks::{TokenBatch, recall, text};
    pub use fastweight_train::{Recipe, Task, TrainError, Trainer};
}

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
