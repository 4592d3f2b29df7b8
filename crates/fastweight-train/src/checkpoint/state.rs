//! `state.json`: where a run stands.

use std::collections::BTreeMap;
use std::io;

use fastweight_models::ModelConfig;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::recipe::TaskRecipe;

/// Version of the format this program writes, and the newest it reads.
pub const VERSION: u32 = 1;

/// Stands where the checksum goes while the checksum is computed.
const BLANK: &str = "\"checksum\": \"00000000\"";

/// Where a run stands. The data of step n is a function of `seed` and n, so these counters are all there is to
/// restore of data order and randomness.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Format version.
    pub version: u32,
    /// CRC-32 of this file with eight zeros here, in hexadecimal.
    pub checksum: String,
    /// Name of the model.
    pub name: String,
    /// Optimizer steps taken.
    pub step: usize,
    /// Training batches drawn, the index of the next one.
    pub data_index: u64,
    /// Training tokens read.
    pub tokens: u64,
    /// Seconds of training, evaluation not counted.
    pub seconds: f64,
    /// Seed of the weights and the data.
    pub seed: u64,
    /// Latest score, if there was an evaluation.
    pub score: Option<f64>,
    /// Best score so far.
    pub best_score: Option<f64>,
    /// Evaluations so far: step and score.
    pub scores: Vec<(usize, f64)>,
    /// Loss of the last steps: step and loss.
    pub losses: Vec<(usize, f64)>,
    /// Fingerprint of the recipe's task, training and model.
    pub recipe: String,
    /// Fingerprint of the training data.
    pub data: String,
    /// The task, with the text it was trained on.
    pub task: TaskRecipe,
    /// The model.
    pub model: ModelConfig,
    /// The other files of the checkpoint.
    pub files: BTreeMap<String, FileEntry>,
}

/// Length and checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Bytes.
    pub bytes: u64,
    /// CRC-32 in hexadecimal.
    pub crc32: String,
}

impl FileEntry {
    /// Of a file with this content.
    pub fn of(content: &[u8]) -> Self {
        FileEntry { bytes: content.len() as u64, crc32: crc32(content) }
    }
}

/// CRC-32 in hexadecimal.
pub(crate) fn crc32(content: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(content))
}

impl RunState {
    /// The text of `state.json`, checksum filled in.
    pub(super) fn to_text(&self) -> io::Result<String> {
        let blank = RunState { checksum: "00000000".into(), ..self.clone() };
        let text = serde_json::to_string_pretty(&blank).map_err(io::Error::other)?;
        let sum = crc32(text.as_bytes());
        Ok(text.replacen(BLANK, &format!("\"checksum\": \"{sum}\""), 1))
    }

    /// Checks that every score and loss is a number, which JSON could not hold otherwise.
    pub(super) fn require_finite(&self) -> Result<(), TrainError> {
        let broken =
            |values: &[(usize, f64)]| values.iter().find(|(_, x)| !x.is_finite()).map(|(step, _)| *step);
        let ends = [self.score, self.best_score].into_iter().flatten().all(f64::is_finite);
        let (what, step) = match (broken(&self.losses), broken(&self.scores)) {
            (Some(step), _) => ("the loss", step),
            (None, Some(step)) => ("the score", step),
            (None, None) if !ends => ("the score", self.step),
            (None, None) => return Ok(()),
        };
        let place = format!("the record of step {step}");
        Err(TrainError::NonFinite { step: Some(self.step), what, place })
    }

    /// Whether `text` is the state it was written as.
    pub(super) fn matches(&self, text: &str) -> bool {
        let written = format!("\"checksum\": \"{}\"", self.checksum);
        crc32(text.replacen(&written, BLANK, 1).as_bytes()) == self.checksum
    }
}
