//! What can be wrong with the arguments of an operator.

/// An argument of an operator does not fit; nothing was computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum OpError {
    /// A tensor's shape does not agree with the others.
    #[error(
        "{operator}: {argument} has shape {found:?}, expected {expected}; check the axis order [batch, time, heads, dim]"
    )]
    Shape {
        /// The operator that was called.
        operator: &'static str,
        /// The argument at fault.
        argument: &'static str,
        /// The shape that came.
        found: Vec<usize>,
        /// The shape that was expected, in words or numbers.
        expected: String,
    },
    /// Document offsets do not cut the row into documents.
    #[error("offsets {offsets:?} do not cut {time} tokens into documents: {reason}")]
    Offsets {
        /// The offsets that came.
        offsets: Vec<usize>,
        /// Tokens in the row.
        time: usize,
        /// Which rule they break and what to do.
        reason: String,
    },
    /// Documents are packed in one row, so a batch of several rows cannot have offsets.
    #[error(
        "{operator}: offsets pack documents into one row, but the batch has {batch} rows; reshape them into one row of {batch} x time tokens"
    )]
    PackedBatch {
        /// The operator that was called.
        operator: &'static str,
        /// Rows that came.
        batch: usize,
    },
    /// A log gate is above zero or not a number.
    #[error(
        "{operator}: {argument} is {value} at flat position {position}; a log gate must be <= 0 (the state is multiplied by its exponential)"
    )]
    Gate {
        /// The operator that was called.
        operator: &'static str,
        /// The gate's name.
        argument: &'static str,
        /// The offending value.
        value: f32,
        /// Its position in the flattened tensor.
        position: usize,
    },
    /// A number option is out of its range.
    #[error("{operator}: {argument} is {found}, expected {expected}")]
    Value {
        /// The operator that was called.
        operator: &'static str,
        /// The option at fault.
        argument: &'static str,
        /// The value that came.
        found: String,
        /// The range that was expected.
        expected: String,
    },
    /// [`Path::Fused`](crate::Path::Fused) was asked for where no fused kernel exists.
    #[error(
        "{operator}: no fused kernel for this device and element type ({found}); use Path::Auto or Path::Composed"
    )]
    NoFusedKernel {
        /// The operator that was called.
        operator: &'static str,
        /// Device and element type that came.
        found: String,
    },
}
