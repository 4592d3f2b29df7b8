//! Text as data for language models: files, tokenizers, training crops and held-out windows.
//!
//! [`TextSource`] reads a file or a folder, [`Tokenizer`] turns it into ids, and [`TextDataset`] cuts them
//! into batches. The last part of the bytes is held out: no training crop reaches it, and every one of its
//! tokens is a target exactly once, so bits per byte can be compared with a compressor's.

mod dataset;
mod decoder;
mod source;
mod tokenizer;

pub use dataset::{HELD_OUT, TextDataset, bits_per_byte};
pub use decoder::StreamDecoder;
pub use source::{Document, TextSource};
pub use tokenizer::Tokenizer;
