//! Memory layers: sequence mixers with typed session states.
//!
//! A layer is made from a configuration and a [`LayerContext`] (`Config::init(&context, &device)`), reads a
//! sequence with `forward(x, state, offsets) -> (y, state)` and one token with `step(x, state) -> (y, state)`.
//! `forward` of `n` tokens followed by steps equals one longer `forward`; a batch row never sees another row,
//! and a document packed in a row never sees another document.
//!
//! Trained parameters live in the layer (`burn` modules), session state in types that implement [`State`].
//! [`MixerConfig`] names every layer for recipes, [`rule`] is the
//! algebra of memory rules: four choices that make a rule, and every named rule by its choices. [`channel`] has the maps on each
//! token that stand between the mixers of a model.

pub mod channel;
mod choice;
mod config;
mod context;
mod error;
pub mod init;
pub mod layers;
mod lockstep;
mod mixer;
pub mod names;
mod norm;
pub mod padding;
pub mod parameters;
mod projection;
pub mod rule;
mod sequences;
mod state;
mod token_shift;
mod token_table;

pub use channel::{
    ChannelMixer, ChannelMixerConfig, ChannelState, DeepEmbed, Rwkv7ChannelMix, Rwkv7DeepEmbed, SwiGlu,
};
pub use config::MixerConfig;
pub use context::{LayerContext, MOST_HEAD_CHANNELS, MOST_LAYERS, MOST_WIDTH};
pub use error::MemoryError;
pub use layers::{Layer, LayerConfig};
pub use mixer::{Mixer, Shared};
pub use norm::{LayerNorm, Norm, NormKind};
pub use projection::{LowRankLinear, Projection, RmsNorm, linear};
pub use state::{
    ConvState, DeaState, DeepMemoryState, KvState, LstmState, MatrixState, MemoryAttentionState, MixerState,
    MomentumState, NormalisedState, RotaryState, RuleMemoryState, SegmentState, ShiftedState, State,
    StateSize, TttMemoryState,
};
pub use token_table::{TokenTable, TokenVectors};
