//! Tasks and data: what a language model reads, what it is asked, and how its answers are scored.
//!
//! Everything is a pure function of its arguments, the seed among them. Nothing here knows a model or a
//! tensor: a batch is plain numbers, [`TokenBatch`].
//!
//! - [`recall`]: multi-query associative recall, the task that separates memories.
//! - [`formal`]: strings of formal languages, the task that shows what a state can track.
//! - [`text`]: text files, tokenizers, training crops and held-out windows.

mod batch;
mod error;
pub mod formal;
mod names;
pub mod recall;
mod score;
mod stream;
pub mod text;

pub use batch::{IGNORE, TokenBatch};
pub use error::TaskError;
pub use score::{Tally, score};
