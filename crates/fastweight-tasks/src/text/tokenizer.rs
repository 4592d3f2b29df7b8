//! Text to token ids and back.

use std::path::Path;

use crate::TaskError;
use crate::text::StreamDecoder;

/// Most token ids of a tokenizer; models have a vector for each.
const MOST_TOKENS: usize = 1 << 24;

/// How text becomes token ids.
#[derive(Debug, Clone)]
pub enum Tokenizer {
    /// One token a byte; the id is the byte, the vocabulary 256.
    Byte,
    /// A Hugging Face `tokenizer.json`.
    HuggingFace(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// Reads a Hugging Face `tokenizer.json`. Truncation, padding and the dropout of merges that it asks for are switched off,
    /// so that a text has the same tokens every time.
    ///
    /// # Errors
    /// [`TaskError::Read`] or [`TaskError::Tokenizer`].
    pub fn open(path: &Path) -> Result<Self, TaskError> {
        let bytes = std::fs::read(path).map_err(|source| TaskError::Read { path: path.into(), source })?;
        let invalid = |reason: String| TaskError::Tokenizer { path: path.into(), reason };
        let bytes = without_dropout(&bytes).unwrap_or(bytes);
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| invalid(e.to_string()))?;
        tokenizer.with_truncation(None).map_err(|e| invalid(e.to_string()))?;
        tokenizer.with_padding(None);
        if tokenizer.get_vocab(true).is_empty() {
            return Err(invalid("its vocabulary is empty".into()));
        }
        let tokenizer = Self::HuggingFace(Box::new(tokenizer));
        match tokenizer.vocab_size() {
            size if size > MOST_TOKENS => {
                Err(invalid(format!("its largest token id is {}, expected below {MOST_TOKENS}", size - 1)))
            }
            _ => Ok(tokenizer),
        }
    }

    /// Which ids below the vocabulary size stand for a token; absent where all do.
    pub fn known(&self) -> Option<Vec<bool>> {
        let Self::HuggingFace(tokenizer) = self else { return None };
        let known: Vec<bool> =
            (0..self.vocab_size()).map(|id| tokenizer.id_to_token(id as u32).is_some()).collect();
        known.contains(&false).then_some(known)
    }

    /// The vocabulary size a model needs: one more than the largest id.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Byte => 256,
            Self::HuggingFace(tokenizer) => {
                tokenizer.get_vocab(true).values().max().map_or(0, |&largest| largest as usize + 1)
            }
        }
    }

    /// The ids of `text`, without added start or end tokens.
    ///
    /// # Errors
    /// [`TaskError::Encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TaskError> {
        match self {
            Self::Byte => Ok(text.bytes().map(u32::from).collect()),
            Self::HuggingFace(tokenizer) => tokenizer
                .encode_fast(text, false)
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|error| TaskError::Encode { reason: error.to_string() }),
        }
    }

    /// The text of `ids`, special tokens included; bytes that form no character become U+FFFD.
    ///
    /// # Errors
    /// [`TaskError::UnknownToken`], [`TaskError::Decode`].
    pub fn decode(&self, ids: &[u32]) -> Result<String, TaskError> {
        match self {
            Self::Byte => {
                let bytes: Vec<u8> = ids.iter().map(|&id| self.byte(id)).collect::<Result<_, _>>()?;
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Self::HuggingFace(tokenizer) => {
                if let Some(&id) = ids.iter().find(|&&id| tokenizer.id_to_token(id).is_none()) {
                    return Err(TaskError::UnknownToken { id, vocab: self.vocab_size() });
                }
                tokenizer.decode(ids, false).map_err(|error| TaskError::Decode { reason: error.to_string() })
            }
        }
    }

    /// A decoder for tokens that come one by one.
    pub fn stream_decoder(&self) -> StreamDecoder<'_> {
        StreamDecoder::new(self)
    }

    /// The byte of an id of the byte tokenizer.
    pub(crate) fn byte(&self, id: u32) -> Result<u8, TaskError> {
        u8::try_from(id).map_err(|_| TaskError::UnknownToken { id, vocab: self.vocab_size() })
    }
}

/// The definition of a tokenizer that drops merges at random, without that; none for others.
fn without_dropout(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut definition: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    let dropout = definition.get_mut("model")?.get_mut("dropout").filter(|dropout| !dropout.is_null())?;
    *dropout = serde_json::Value::Null;
    serde_json::to_vec(&definition).ok()
}
