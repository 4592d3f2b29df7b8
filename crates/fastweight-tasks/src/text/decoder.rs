//! Token ids that come one by one, as text that can be shown at once.

use crate::TaskError;
use crate::text::Tokenizer;

/// Turns tokens into text piece by piece. A character whose bytes are spread over several tokens is held
/// back until it is whole.
#[derive(Debug, Clone)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// Bytes of an unfinished character (byte tokenizer).
    bytes: Vec<u8>,
    /// Tokens already shown that the next ones are decoded together with, then the tokens held back.
    window: Vec<u32>,
    /// How many tokens of `window` have been shown.
    shown: usize,
}

impl<'a> StreamDecoder<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, bytes: Vec::new(), window: Vec::new(), shown: 0 }
    }

    /// Takes one token and returns the text that is now certain, which may be empty.
    ///
    /// Bytes that cannot begin or continue a character become U+FFFD.
    ///
    /// # Errors
    /// [`TaskError::UnknownToken`], [`TaskError::Decode`]; the token is then dropped.
    pub fn push(&mut self, id: u32) -> Result<String, TaskError> {
        match self.tokenizer {
            Tokenizer::Byte => {
                self.bytes.push(self.tokenizer.byte(id)?);
                Ok(take_whole_characters(&mut self.bytes))
            }
            Tokenizer::HuggingFace(_) => {
                self.window.push(id);
                let text = self.held_text();
                if text.is_err() {
                    self.window.pop();
                }
                let text = text?;
                if text.is_empty() || text.ends_with(char::REPLACEMENT_CHARACTER) {
                    return Ok(String::new());
                }
                self.window.drain(..self.shown);
                self.shown = self.window.len();
                Ok(text)
            }
        }
    }

    /// Ends the stream: what is still held back, an unfinished character as U+FFFD.
    ///
    /// # Errors
    /// [`TaskError::Decode`].
    pub fn finish(self) -> Result<String, TaskError> {
        match self.tokenizer {
            Tokenizer::Byte => Ok(String::from_utf8_lossy(&self.bytes).into_owned()),
            Tokenizer::HuggingFace(_) if self.shown == self.window.len() => Ok(String::new()),
            Tokenizer::HuggingFace(_) => self.held_text(),
        }
    }

    /// The text that the tokens held back add to the shown ones.
    ///
    /// They are decoded together because a tokenizer may treat the first token of a text differently.
    fn held_text(&self) -> Result<String, TaskError> {
        let before = self.tokenizer.decode(&self.window[..self.shown])?;
        let all = self.tokenizer.decode(&self.window)?;
        match all.strip_prefix(&before) {
            Some(added) => Ok(added.into()),
            // A run of byte tokens with an invalid byte is replaced as a whole, what was shown included.
            None => self.tokenizer.decode(&self.window[self.shown..]),
        }
    }
}

/// Removes from `bytes` everything but an unfinished last character, and returns it as text.
fn take_whole_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(bytes) {
            Ok(valid) => {
                text.push_str(valid);
                bytes.clear();
                return text;
            }
            Err(error) => {
                let valid = error.valid_up_to();
                text.push_str(&String::from_utf8_lossy(&bytes[..valid]));
                let Some(invalid) = error.error_len() else {
                    bytes.drain(..valid);
                    return text;
                };
                text.push(char::REPLACEMENT_CHARACTER);
                bytes.drain(..valid + invalid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_stream_keeps_a_short_window() {
        let definition = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"#;
        let tokenizer = Tokenizer::HuggingFace(Box::new(definition.parse().unwrap()));
        let mut decoder = tokenizer.stream_decoder();
        assert_eq!(decoder.push(0).unwrap(), "a");
        for _ in 0..100 {
            assert_eq!(decoder.push(0).unwrap(), " a");
            assert!(decoder.window.len() <= 2);
        }
    }
}
