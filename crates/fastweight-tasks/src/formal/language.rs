//! The languages: their symbols, and the answer after every symbol.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::TaskError;
use crate::names::closest;
use crate::stream::Stream;

/// A formal language whose membership a model tracks, step by step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Language {
    /// Bits whose number of ones is odd. Every bit is drawn with equal chances; the answer after each is whether
    /// the number of ones so far is odd.
    Parity,
}

impl Language {
    /// Every language.
    pub const ALL: [Language; 1] = [Language::Parity];

    /// The name used in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Language::Parity => "parity",
        }
    }

    /// The language called `name`.
    ///
    /// # Errors
    /// [`TaskError::UnknownLanguage`] with the nearest known name.
    pub fn by_name(name: &str) -> Result<Self, TaskError> {
        let known = || Self::ALL.map(|language| language.name().to_string());
        Self::ALL.into_iter().find(|language| language.name() == name).ok_or_else(|| {
            let suggestion = closest(name, known());
            TaskError::UnknownLanguage { name: name.into(), suggestion, known: known().into() }
        })
    }

    /// Different symbols a string is made of: the token ids `[0, symbols)`.
    pub fn symbols(self) -> usize {
        match self {
            Language::Parity => 2,
        }
    }

    /// Different answers: the token ids `[symbols, symbols + answers)`, apart from the symbols so that an embedding
    /// shared with the head does not confuse them.
    pub fn answers(self) -> usize {
        match self {
            Language::Parity => 2,
        }
    }

    /// Share of right answers of a model that knows only how often each answer occurs.
    pub fn chance(self) -> f64 {
        match self {
            Language::Parity => 0.5,
        }
    }

    /// Adds a random string of `length` symbols to `tokens`, and the answer after each to `targets`.
    pub(super) fn draw(
        self,
        stream: &mut Stream,
        length: usize,
        tokens: &mut Vec<u32>,
        targets: &mut Vec<i64>,
    ) {
        match self {
            Language::Parity => {
                let mut odd = 0;
                for _ in 0..length {
                    let bit = stream.below(2);
                    odd ^= bit;
                    tokens.push(bit as u32);
                    targets.push((self.symbols() as u64 + odd) as i64);
                }
            }
        }
    }
}
