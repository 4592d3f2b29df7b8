//! What can be wrong when a layer is made or run.

use fastweight_ops::OpError;

/// A layer could not be made or run; the message says what was expected, what came and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MemoryError {
    /// An operator refused its arguments.
    #[error(transparent)]
    Operator(#[from] OpError),
    /// A setting of a layer is out of its range.
    #[error("{layer}: {setting} is {found}, expected {expected}")]
    Setting {
        /// The layer's name in recipes.
        layer: &'static str,
        /// The setting at fault.
        setting: &'static str,
        /// The value that came.
        found: String,
        /// What was expected and what to change.
        expected: String,
    },
    /// The input of a layer has another shape than the layer reads.
    #[error("{layer}: the input has shape {found:?}, expected {expected}")]
    Input {
        /// The layer's name in recipes.
        layer: &'static str,
        /// The shape that came.
        found: Vec<usize>,
        /// The shape that was expected.
        expected: String,
    },
    /// A layer needs more than its input, and it was not handed over.
    #[error(
        "{layer}: {what} are missing; a language model hands them to its layers, and a layer that stands alone takes them from Shared::{field} (forward_shared, step_shared)"
    )]
    Missing {
        /// The layer's name in recipes.
        layer: &'static str,
        /// What it needs, in words.
        what: &'static str,
        /// The field of `Shared` that holds it.
        field: &'static str,
    },
    /// A state of another kind of layer was handed over.
    #[error(
        "a {found} state was given to a layer that carries a {expected} state; use the state this layer returned or its zero_state"
    )]
    StateKind {
        /// The kind the layer carries.
        expected: &'static str,
        /// The kind that came.
        found: &'static str,
    },
    /// The state holds another number of sequences than the input.
    #[error(
        "the state holds {found} sequences, the input has {expected}; select the rows to continue or start from zero_state({expected})"
    )]
    StateBatch {
        /// Sequences of the input: rows, or documents when offsets are given.
        expected: usize,
        /// Sequences of the state.
        found: usize,
    },
    /// A batch row that the state does not have.
    #[error("row {row} does not exist in a state of {batch} rows; rows count from 0")]
    Row {
        /// The row that was asked for.
        row: usize,
        /// Rows of the state.
        batch: usize,
    },
    /// A padded batch and its lengths or mask do not fit together.
    #[error("padding: {reason}")]
    Padding {
        /// What does not fit and what to do.
        reason: String,
    },
    /// A named parameter is missing or has another shape.
    #[error("parameter {name}: {reason}")]
    Parameter {
        /// The parameter's name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Four choices of a rule that have no learning-retaining step together.
    #[error(
        "rule: memory = {memory:?}, bias = {bias:?}, retention = {retention:?}, learner = {learner:?} do not go together: {reason}"
    )]
    Unsound {
        /// The architecture.
        memory: &'static str,
        /// The attentional bias.
        bias: &'static str,
        /// The retention.
        retention: &'static str,
        /// The learner.
        learner: &'static str,
        /// Why, and what to choose instead.
        reason: &'static str,
    },
}
