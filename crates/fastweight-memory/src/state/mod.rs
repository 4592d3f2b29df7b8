//! Session state: what a layer carries from one token to the next, apart from its trained parameters.

mod attended;
mod dea;
mod deep;
mod kv;
mod lstm;
mod matrix;
mod momentum;
pub(crate) mod rows;
mod rule;
mod shifted;
mod ttt;

use burn::tensor::TensorData;

pub use attended::{MemoryAttentionState, SegmentState};
pub use dea::DeaState;
pub use deep::DeepMemoryState;
pub use kv::KvState;
pub use lstm::LstmState;
pub use matrix::{ConvState, MatrixState, NormalisedState, RotaryState};
pub use momentum::MomentumState;
pub use rule::RuleMemoryState;
pub use shifted::ShiftedState;
pub use ttt::TttMemoryState;

use crate::MemoryError;

/// State of several sequences, one per batch row.
///
/// A clone is a fork: nothing written to one is seen by the other.
pub trait State: Sized + Clone {
    /// Sequences held.
    fn batch(&self) -> usize;

    /// Bytes of all tensors held, for all rows together.
    fn bytes(&self) -> usize;

    /// The given rows in the given order; a row may be taken several times.
    ///
    /// # Errors
    /// [`MemoryError::Row`] for a row that does not exist.
    fn select(&self, rows: &[usize]) -> Result<Self, MemoryError>;

    /// The same state with the given rows as at the start of a sequence.
    ///
    /// # Errors
    /// [`MemoryError::Row`] for a row that does not exist.
    fn clear(self, rows: &[usize]) -> Result<Self, MemoryError>;

    /// The same values, cut off from the computation that gave them: no gradient flows into earlier tokens.
    fn detach(self) -> Self;

    /// Every tensor and counter with a stable name, for session files.
    fn named_tensors(&self) -> Vec<(String, TensorData)>;
}

/// Bytes of one sequence's state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateSize {
    /// The part that does not depend on the number of tokens.
    pub fixed: usize,
    /// The part that holds one entry per token read (up to the window, if there is one).
    pub growing: usize,
}

impl StateSize {
    /// Both parts.
    pub fn total(&self) -> usize {
        self.fixed + self.growing
    }
}

/// State of any mixer.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)]
pub enum MixerState {
    /// A matrix memory: linear attention, Lightning Attention, Mamba-2, GLA, HGRN2, DeltaNet, Gated DeltaNet, KDA, Comba,
    /// DeltaProduct, SRWM.
    Matrix(MatrixState),
    /// A matrix memory with token positions: RetNet.
    Rotary(RotaryState),
    /// A matrix memory with its normaliser: ELU+1 linear attention.
    Normalised(NormalisedState),
    /// Keys and values: softmax attention.
    Kv(KvState),
    /// A matrix memory and its momentum: Titans.
    Momentum(MomentumState),
    /// An inner model that learns in mini-batches: TTT-Linear.
    Ttt(TttMemoryState),
    /// A deep memory: TTT-MLP, Titans with an MLP memory, DLA, mixture of memories.
    Deep(DeepMemoryState),
    /// A memory with attention beside it: Titans MAG and MAL.
    MemoryAttention(MemoryAttentionState),
    /// A memory and a segment in progress: Titans MAC.
    Segment(SegmentState),
    /// The memory of any rule: `rule`, Moneta, Yaad, Memora.
    Rule(RuleMemoryState),
    /// A matrix memory and the last token: RWKV-7.
    Shifted(ShiftedState),
    /// A matrix memory and an entry for every token: RWKV-7 with DEA.
    Dea(DeaState),
    /// The cells of an LSTM.
    Lstm(LstmState),
}

macro_rules! each {
    ($state:expr, $inner:ident => $result:expr) => {
        match $state {
            MixerState::Matrix($inner) => $result,
            MixerState::Rotary($inner) => $result,
            MixerState::Normalised($inner) => $result,
            MixerState::Kv($inner) => $result,
            MixerState::Momentum($inner) => $result,
            MixerState::Ttt($inner) => $result,
            MixerState::Deep($inner) => $result,
            MixerState::MemoryAttention($inner) => $result,
            MixerState::Segment($inner) => $result,
            MixerState::Rule($inner) => $result,
            MixerState::Shifted($inner) => $result,
            MixerState::Dea($inner) => $result,
            MixerState::Lstm($inner) => $result,
        }
    };
}

impl MixerState {
    /// The kind of state in one word.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Matrix(_) => "matrix",
            Self::Rotary(_) => "rotary matrix",
            Self::Normalised(_) => "normalised matrix",
            Self::Kv(_) => "key-value",
            Self::Momentum(_) => "momentum matrix",
            Self::Ttt(_) => "test-time training",
            Self::Deep(_) => "deep memory",
            Self::MemoryAttention(_) => "memory and attention",
            Self::Segment(_) => "segment",
            Self::Rule(_) => "rule",
            Self::Shifted(_) => "token-shifted matrix",
            Self::Dea(_) => "token-shifted matrix and token cache",
            Self::Lstm(_) => "long short-term",
        }
    }
}

impl State for MixerState {
    fn batch(&self) -> usize {
        each!(self, state => state.batch())
    }
    fn bytes(&self) -> usize {
        each!(self, state => state.bytes())
    }
    fn select(&self, rows: &[usize]) -> Result<Self, MemoryError> {
        each!(self, state => Ok(state.select(rows)?.into()))
    }
    fn clear(self, rows: &[usize]) -> Result<Self, MemoryError> {
        each!(self, state => Ok(state.clear(rows)?.into()))
    }
    fn detach(self) -> Self {
        each!(self, state => state.detach().into())
    }
    fn named_tensors(&self) -> Vec<(String, TensorData)> {
        each!(self, state => state.named_tensors())
    }
}

macro_rules! conversions {
    ($($variant:ident $state:ident $kind:literal),*) => {$(
        impl From<$state> for MixerState {
            fn from(state: $state) -> Self {
                Self::$variant(state)
            }
        }
        impl TryFrom<MixerState> for $state {
            type Error = MemoryError;
            fn try_from(state: MixerState) -> Result<Self, MemoryError> {
                match state {
                    MixerState::$variant(state) => Ok(state),
                    other => Err(MemoryError::StateKind { expected: $kind, found: other.kind() }),
                }
            }
        }
    )*};
}

conversions!(
    Matrix MatrixState "matrix",
    Rotary RotaryState "rotary matrix",
    Normalised NormalisedState "normalised matrix",
    Kv KvState "key-value",
    Momentum MomentumState "momentum matrix",
    Ttt TttMemoryState "test-time training",
    Deep DeepMemoryState "deep memory",
    MemoryAttention MemoryAttentionState "memory and attention",
    Segment SegmentState "segment",
    Rule RuleMemoryState "rule",
    Shifted ShiftedState "token-shifted matrix",
    Dea DeaState "token-shifted matrix and token cache",
    Lstm LstmState "long short-term"
);
