//! What a model is trained on and scored by.

use std::path::Path;

use fastweight_tasks::formal::{self, FormalConfig};
use fastweight_tasks::recall::{self, RecallConfig};
use fastweight_tasks::text::{HELD_OUT, TextDataset, TextSource, Tokenizer};
use fastweight_tasks::{IGNORE, TaskError, TokenBatch};
use serde::{Deserialize, Serialize};

use crate::checkpoint::crc32;
use crate::error::TrainError;
use crate::recipe::{TaskKind, TaskRecipe};

/// What a score measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Share of right answers, in `[0, 1]`; higher is better.
    Accuracy,
    /// Share of strings, up to twice as long as any trained on, in which every answer is right, in `[0, 1]`; higher
    /// is better.
    Strings,
    /// Held-out bits per byte of text; lower is better.
    BitsPerByte,
}

impl Metric {
    /// Its name in words.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Accuracy => "accuracy",
            Metric::Strings => "long strings right",
            Metric::BitsPerByte => "bits per byte",
        }
    }

    /// Whether a higher score is better.
    pub fn higher_is_better(self) -> bool {
        self != Metric::BitsPerByte
    }

    /// Whether score `a` is at least as good as `b`.
    pub fn reaches(self, a: f64, b: f64) -> bool {
        if self.higher_is_better() { a >= b } else { a <= b }
    }
}

/// A task with its data at hand.
#[derive(Debug, Clone)]
pub enum Task {
    /// Multi-query associative recall.
    Recall(RecallConfig),
    /// Strings of a formal language.
    Formal(FormalConfig),
    /// Next-token prediction on a text.
    Text(Box<TextTask>),
}

/// A text as a task.
#[derive(Debug, Clone)]
pub struct TextTask {
    /// Training part and held-out part.
    pub dataset: TextDataset,
    /// How text becomes tokens.
    pub tokenizer: Tokenizer,
    /// Tokens in a training window.
    pub context: usize,
    fingerprint: String,
}

impl TextTask {
    /// A text cut into training windows of `context` tokens and a held-out end of a `held_out` share.
    ///
    /// # Errors
    /// Those of [`TextDataset::new`]; [`TaskError::TooShort`] when a part has no whole window.
    pub fn new(
        source: &TextSource,
        tokenizer: Tokenizer,
        held_out: f64,
        context: usize,
    ) -> Result<Self, TaskError> {
        let dataset = TextDataset::new(source, &tokenizer, held_out)?;
        dataset.require_context(context)?;
        Ok(Self { dataset, tokenizer, context, fingerprint: fingerprint(source) })
    }

    /// A text that is scored as a whole and not trained on, for a model of `context` tokens.
    ///
    /// # Errors
    /// Those of [`TextDataset::held_out`].
    pub fn scored_whole(
        source: &TextSource,
        tokenizer: Tokenizer,
        context: usize,
    ) -> Result<Self, TaskError> {
        let dataset = TextDataset::held_out(source, &tokenizer, context)?;
        Ok(Self { dataset, tokenizer, context, fingerprint: fingerprint(source) })
    }
}

/// Identifies a text by its content.
pub(crate) fn fingerprint(source: &TextSource) -> String {
    let text = source.text().as_bytes();
    format!("{} bytes, crc32 {}", text.len(), crc32(text))
}

/// What the fingerprint of a text ends with where a tokenizer of this content reads it.
pub(crate) fn tokenizer_mark(path: &Path) -> Result<String, TrainError> {
    let file = std::fs::read(path).map_err(|source| TrainError::io("read the tokenizer", path, source))?;
    Ok(format!("{TOKENIZER_MARK}{}", crc32(&file)))
}

pub(crate) const TOKENIZER_MARK: &str = ", tokenizer crc32 ";

impl Task {
    /// Opens the task of a recipe; `data` takes the place of the recipe's text.
    ///
    /// # Errors
    /// The sizes make no task, the text or tokenizer cannot be read, the text is too short, or there is none.
    pub fn open(recipe: &TaskRecipe, data: Option<&Path>) -> Result<Task, TrainError> {
        match recipe.kind {
            TaskKind::Recall | TaskKind::FormalLanguage if data.is_some() => Err(TrainError::Argument {
                name: "the data",
                found: "a path".into(),
                expected: match recipe.kind {
                    TaskKind::Recall => "none, because a recall task makes its own",
                    _ => "none, because a formal_language task makes its own",
                },
            }),
            TaskKind::Recall => {
                let Some(config) = recipe.recall() else {
                    return Err(TrainError::Argument {
                        name: "the recall task",
                        found: "without its sizes".into(),
                        expected: "`vocab`, `length` and `pairs` in [task]",
                    });
                };
                config.validate()?;
                Ok(Task::Recall(config))
            }
            TaskKind::FormalLanguage => {
                let Some(config) = recipe.formal() else {
                    return Err(TrainError::Argument {
                        name: "the formal language",
                        found: "without a name".into(),
                        expected: "`language` in [task], such as \"parity\"",
                    });
                };
                config.validate()?;
                Ok(Task::Formal(config))
            }
            TaskKind::Text => {
                let Some(path) = data.or(recipe.data.as_deref()) else {
                    return Err(TrainError::Argument {
                        name: "the text",
                        found: "missing".into(),
                        expected: "a UTF-8 file or a folder of them, as `data = \"...\"` in [task] or given with the command",
                    });
                };
                let tokenizer = match &recipe.tokenizer {
                    Some(path) => Tokenizer::open(path)?,
                    None => Tokenizer::Byte,
                };
                let held_out = recipe.held_out.unwrap_or(HELD_OUT);
                let context = recipe.context.unwrap_or_default();
                let mut text = TextTask::new(&TextSource::open(path)?, tokenizer, held_out, context)?;
                if let Some(path) = &recipe.tokenizer {
                    text.fingerprint += &tokenizer_mark(path)?;
                }
                Ok(Task::Text(Box::new(text)))
            }
        }
    }

    /// Token ids a model of this task must know.
    pub fn vocab(&self) -> usize {
        match self {
            Task::Recall(config) => config.vocab,
            Task::Formal(config) => config.vocab(),
            Task::Text(text) => text.tokenizer.vocab_size(),
        }
    }

    /// Tokens in one training sequence, in the longest one where they differ.
    pub fn length(&self) -> usize {
        match self {
            Task::Recall(config) => config.length,
            Task::Formal(config) => config.longest,
            Task::Text(text) => text.context,
        }
    }

    /// Tokens in the average training sequence.
    pub fn mean_length(&self) -> f64 {
        match self {
            Task::Formal(config) => config.mean_length(),
            Task::Recall(_) | Task::Text(_) => self.length() as f64,
        }
    }

    /// What its score measures.
    pub fn metric(&self) -> Metric {
        match self {
            Task::Recall(_) => Metric::Accuracy,
            Task::Formal(_) => Metric::Strings,
            Task::Text(_) => Metric::BitsPerByte,
        }
    }

    /// The tokenizer of a text task.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Task::Recall(_) | Task::Formal(_) => None,
            Task::Text(text) => Some(&text.tokenizer),
        }
    }

    /// What a reader of its scores should know.
    pub fn caution(&self) -> Option<&'static str> {
        match self {
            Task::Text(text) if !text.dataset.is_exact() => Some(
                "the tokenizer does not give the text back as it was (it has one token for all unknown words, or drops case or \
                 spaces): what it drops costs no bits, so bits per byte are too low to compare with others",
            ),
            _ => None,
        }
    }

    /// Identifies the data, for checkpoints and results.
    pub fn fingerprint(&self) -> String {
        match self {
            Task::Recall(_) | Task::Formal(_) => "generated".into(),
            Task::Text(text) => text.fingerprint.clone(),
        }
    }

    /// `rows` sequences of the kind that models are trained on, other ones than in a training with this seed; of a text that
    /// is scored as a whole, its first.
    ///
    /// # Errors
    /// `rows` is zero.
    pub(crate) fn sample(&self, seed: u64, rows: usize) -> Result<TokenBatch, TaskError> {
        match self {
            Task::Text(text) if text.dataset.train_tokens().is_empty() => {
                let windows = text.dataset.held_out_tokens().chunks_exact(text.context).take(rows);
                let tokens: Vec<u32> = windows.flatten().copied().collect();
                let (batch, time) = (tokens.len() / text.context, text.context);
                Ok(TokenBatch { targets: vec![IGNORE; tokens.len()], tokens, batch, time, documents: None })
            }
            _ => self.train_batch(seed, u64::from(u32::MAX), rows),
        }
    }

    /// Training batch number `index` of `seed`, a pure function of its arguments.
    ///
    /// # Errors
    /// `batch` is zero.
    pub fn train_batch(&self, seed: u64, index: u64, batch: usize) -> Result<TokenBatch, TaskError> {
        match self {
            Task::Recall(config) => recall::batch(config, seed, index, batch),
            Task::Formal(config) => formal::batch(config, seed, index, batch),
            Task::Text(text) => text.dataset.train_batch(seed, index, batch, text.context),
        }
    }
}
