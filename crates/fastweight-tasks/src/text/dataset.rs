//! Training crops and held-out windows of a text.

use std::ops::Range;

use crate::stream::{Purpose, Stream};
use crate::text::{Document, TextSource, Tokenizer};
use crate::{IGNORE, TaskError, TokenBatch};

/// Name of the task in errors and random streams.
const TASK: &str = "text";

/// The usual share of a text's bytes that is held out.
pub const HELD_OUT: f64 = 0.05;

/// One part of a text as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Split {
    tokens: Vec<u32>,
    bytes: usize,
    /// Token offsets of its documents, `[0, n1, n1 + n2, ..]`.
    offsets: Vec<usize>,
}

/// A text cut into a training part and a held-out part, its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextDataset {
    train: Split,
    held_out: Split,
    /// Whether the tokens of the held-out part give its text back.
    exact: bool,
}

impl TextDataset {
    /// Holds out the last `held_out` share of the bytes, cut at the start of a character, and encodes both parts.
    ///
    /// Each document is encoded by itself, so no token spans two documents or the cut.
    ///
    /// # Errors
    /// [`TaskError::Setting`] unless `0 < held_out < 1`; [`TaskError::TooShort`] when a part is empty; errors of
    /// the tokenizer.
    pub fn new(source: &TextSource, tokenizer: &Tokenizer, held_out: f64) -> Result<Self, TaskError> {
        if !(held_out > 0.0 && held_out < 1.0) {
            return Err(TaskError::Setting {
                task: TASK,
                setting: "held_out",
                found: held_out.to_string(),
                expected: "a share between 0 and 1".into(),
                advice: format!("the usual share is {HELD_OUT}"),
            });
        }
        let total = source.text().len();
        let cut = source.character_start(total - (total as f64 * held_out).ceil() as usize);
        let held_out = encode(source, tokenizer, cut..total)?;
        let exact = gives_back(source, tokenizer, cut..total, &held_out);
        let dataset = Self { train: encode(source, tokenizer, 0..cut)?, held_out, exact };
        dataset.require_context(1)?;
        Ok(dataset)
    }

    /// A text that is scored as a whole: all of it is held out, and there is no training part.
    ///
    /// # Errors
    /// [`TaskError::TooShort`] when it has less than `context` tokens; errors of the tokenizer.
    pub fn held_out(source: &TextSource, tokenizer: &Tokenizer, context: usize) -> Result<Self, TaskError> {
        let all = 0..source.text().len();
        let held_out = encode(source, tokenizer, all.clone())?;
        let tokens = held_out.tokens.len();
        if tokens < context {
            return Err(TaskError::TooShort { split: "held-out", tokens, needed: context, context });
        }
        let exact = gives_back(source, tokenizer, all, &held_out);
        Ok(Self { train: encode(source, tokenizer, 0..0)?, held_out, exact })
    }

    /// Checks that both parts are long enough for windows of `context` tokens; a training crop takes one more.
    ///
    /// # Errors
    /// [`TaskError::TooShort`] names the part; [`TaskError::Setting`] when `context` is 0.
    pub fn require_context(&self, context: usize) -> Result<(), TaskError> {
        positive("context", context)?;
        let needed = context.saturating_add(1);
        for (split, tokens, needed) in
            [("training", self.train.tokens.len(), needed), ("held-out", self.held_out.tokens.len(), context)]
        {
            if tokens < needed {
                return Err(TaskError::TooShort { split, tokens, needed, context });
            }
        }
        Ok(())
    }

    /// Batch number `index` of the training data of `seed`: crops of `context` tokens at random places, each
    /// token's target being the next one.
    ///
    /// A pure function of its arguments. Crops do not depend on how they are cut into batches.
    ///
    /// # Errors
    /// [`TaskError::TooShort`]; [`TaskError::Setting`] when `batch` or `context` is 0.
    pub fn train_batch(
        &self,
        seed: u64,
        index: u64,
        batch: usize,
        context: usize,
    ) -> Result<TokenBatch, TaskError> {
        positive("batch", batch)?;
        self.require_context(context)?;
        let tokens = &self.train.tokens;
        let starts = (tokens.len() - context) as u64;
        let mut result = TokenBatch::with_capacity(batch, context);
        for row in 0..batch as u64 {
            let example = index.wrapping_mul(batch as u64).wrapping_add(row);
            let start = Stream::new(TASK, &[], Purpose::Train, seed, example).below(starts) as usize;
            result.tokens.extend(&tokens[start..start + context]);
            result.targets.extend(tokens[start + 1..=start + context].iter().map(|&id| i64::from(id)));
            result.batch += 1;
        }
        Ok(result)
    }

    /// How many windows of `context` tokens cover the held-out part.
    pub fn held_out_windows(&self, context: usize) -> usize {
        self.held_out.tokens.len().div_ceil(context.max(1))
    }

    /// Held-out windows `index * batch ..`, in order and without overlap; absent after the last.
    ///
    /// Every held-out token is a target exactly once: the first is predicted from the last training token, the
    /// first of a later window from the token before it. The last window is filled up with unscored zeros at its
    /// end, the last batch has the rows that are left.
    ///
    /// # Errors
    /// [`TaskError::TooShort`]; [`TaskError::Setting`] when `batch` or `context` is 0.
    pub fn held_out_batch(
        &self,
        index: usize,
        batch: usize,
        context: usize,
    ) -> Result<Option<TokenBatch>, TaskError> {
        positive("batch", batch)?;
        self.require_context(context)?;
        let windows = self.held_out_windows(context);
        let first = index.saturating_mul(batch).min(windows);
        let last = first.saturating_add(batch).min(windows);
        if first == last {
            return Ok(None);
        }
        let held_out = &self.held_out.tokens;
        let mut result = TokenBatch::with_capacity(last - first, context);
        for window in first..last {
            let start = window * context;
            let end = (start + context).min(held_out.len());
            let before = if start == 0 { self.train.tokens.last() } else { held_out.get(start - 1) };
            result.tokens.extend(before.into_iter().chain(&held_out[start..end - 1]));
            result.targets.extend(held_out[start..end].iter().map(|&id| i64::from(id)));
            result.batch += 1;
            result.tokens.resize(result.batch * context, 0);
            result.targets.resize(result.batch * context, IGNORE);
        }
        Ok(Some(result))
    }

    /// Tokens of the training part.
    pub fn train_tokens(&self) -> &[u32] {
        &self.train.tokens
    }

    /// Bytes of text in the training part.
    pub fn train_bytes(&self) -> usize {
        self.train.bytes
    }

    /// Token offsets `[0, n1, n1 + n2, ..]` of the documents in the training part. Crops may span them.
    pub fn train_offsets(&self) -> &[usize] {
        &self.train.offsets
    }

    /// Tokens of the held-out part.
    pub fn held_out_tokens(&self) -> &[u32] {
        &self.held_out.tokens
    }

    /// Bytes of text in the held-out part.
    pub fn held_out_bytes(&self) -> usize {
        self.held_out.bytes
    }

    /// Whether the tokens of the held-out part give its text back as it was: only then are its bits per byte those of a
    /// code for it. A tokenizer that has one token for all unknown words, or drops case or spaces, gives too few.
    pub fn is_exact(&self) -> bool {
        self.exact
    }

    /// Token offsets `[0, n1, n1 + n2, ..]` of the documents in the held-out part.
    pub fn held_out_offsets(&self) -> &[usize] {
        &self.held_out.offsets
    }

    /// Held-out bits per byte of a model whose mean loss per held-out token is `nats`.
    pub fn held_out_bits_per_byte(&self, nats: f64) -> f64 {
        bits_per_byte(nats, self.held_out.tokens.len(), self.held_out.bytes)
    }
}

/// Bits per byte of a mean loss in nats per token over `tokens` tokens that stand for `bytes` bytes of text.
pub fn bits_per_byte(nats: f64, tokens: usize, bytes: usize) -> f64 {
    nats / std::f64::consts::LN_2 * tokens as f64 / bytes as f64
}

fn positive(setting: &'static str, value: usize) -> Result<(), TaskError> {
    if value > 0 {
        return Ok(());
    }
    Err(TaskError::Setting {
        task: TASK,
        setting,
        found: "0".into(),
        expected: "at least 1".into(),
        advice: format!("give a {setting} of one or more"),
    })
}

/// The documents of `source` as far as they lie in `part`.
fn texts(source: &TextSource, part: Range<usize>) -> impl Iterator<Item = &str> {
    let inside =
        move |document: &Document| document.bytes.start.max(part.start)..document.bytes.end.min(part.end);
    source.documents().iter().map(inside).filter(|bytes| !bytes.is_empty()).map(|bytes| &source.text()[bytes])
}

/// Encodes [`texts`], each by itself.
fn encode(source: &TextSource, tokenizer: &Tokenizer, part: Range<usize>) -> Result<Split, TaskError> {
    let mut split = Split { tokens: Vec::new(), bytes: part.len(), offsets: vec![0] };
    for text in texts(source, part) {
        split.tokens.extend(tokenizer.encode(text)?);
        split.offsets.push(split.tokens.len());
    }
    Ok(split)
}

/// Whether what [`encode`] made of a part decodes to its texts.
fn gives_back(source: &TextSource, tokenizer: &Tokenizer, part: Range<usize>, split: &Split) -> bool {
    let tokens = split.offsets.windows(2).map(|at| &split.tokens[at[0]..at[1]]);
    texts(source, part).zip(tokens).all(|(text, ids)| tokenizer.decode(ids).is_ok_and(|back| back == text))
}
