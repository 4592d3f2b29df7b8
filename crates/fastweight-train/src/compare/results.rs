//! Results on disk: JSON lines, each flushed and synced as it is made.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use fastweight_models::ModelConfig;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::evaluate::LengthScore;

/// File of finished trainings.
pub const RESULTS: &str = "results.jsonl";

/// File of the report in a comparison's folder, which the command writes.
pub const REPORT: &str = "report.html";
/// File of learning-rate trials.
const TRIALS: &str = "trials.jsonl";

/// The result of one model on one task with one seed: one line of [`RESULTS`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The model.
    pub model: String,
    /// The task; empty in results of before tasks had names.
    #[serde(default)]
    pub task: String,
    /// Its seed.
    pub seed: u64,
    /// Final score.
    pub score: f64,
    /// Trained parameters.
    pub params: usize,
    /// Bytes a session holds after one training sequence, from its tensors.
    pub state_bytes: usize,
    /// Training tokens per second.
    pub train_tokens_per_s: f64,
    /// Tokens per second of one session decoding one by one.
    pub decode_tokens_per_s: f64,
    /// Seconds of training, evaluation not counted.
    pub seconds: f64,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Optimizer steps.
    pub steps: usize,
    /// Training tokens.
    pub tokens: u64,
    /// Scores on the way, by training tokens.
    pub curve: Vec<(u64, f64)>,
    /// Losses on the way, by training tokens.
    pub losses: Vec<(u64, f64)>,
    /// Recall: accuracy by number of pairs.
    pub by_pairs: Vec<(usize, f64)>,
    /// Formal language: at the training lengths, then beyond them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bins: Vec<LengthScore>,
    /// Formal language: on strings of single lengths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_length: Vec<LengthScore>,
    /// The model's configuration.
    pub config: ModelConfig,
    /// Identifies recipe and data.
    pub key: String,
}

impl Entry {
    /// The figures of a result as one line of JSON.
    pub fn line(&self) -> String {
        let mut line = serde_json::json!({
            "model": self.model,
            "task": self.task,
            "seed": self.seed,
            "score": self.score,
            "params": self.params,
            "state_bytes": self.state_bytes,
            "train_tokens_per_s": self.train_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "seconds": self.seconds,
            "learning_rate": self.learning_rate,
            "state_grows": self.config.state_grows(),
        });
        if !self.bins.is_empty() {
            line["bins"] = serde_json::json!(self.bins);
        }
        line.to_string()
    }
}

/// One trial of a learning rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The model.
    pub model: String,
    /// The learning rate.
    pub learning_rate: f64,
    /// Its score; absent when the training diverged.
    pub score: Option<f64>,
    /// Mean training loss of the trial's last steps, which decides between equal scores.
    #[serde(default)]
    pub loss: Option<f64>,
    /// Identifies recipe and data.
    pub key: String,
}

/// The results of a folder.
#[derive(Debug)]
pub(super) struct Results {
    folder: PathBuf,
    entries: Vec<Entry>,
    trials: Vec<Trial>,
}

impl Results {
    /// Reads the results in `folder`, or removes them when `restart`.
    pub fn open(folder: &Path, restart: bool) -> Result<Self, TrainError> {
        for path in [folder.join(RESULTS), folder.join(TRIALS)] {
            if restart
                && let Err(source) = fs::remove_file(&path)
                && source.kind() != io::ErrorKind::NotFound
            {
                return Err(TrainError::io("remove", &path, source));
            }
        }
        let entries = read_lines(&folder.join(RESULTS))?;
        let trials = read_lines(&folder.join(TRIALS))?;
        Ok(Results { folder: folder.to_path_buf(), entries, trials })
    }

    /// How many results there are.
    pub fn count(&self) -> usize {
        self.entries.len()
    }

    pub fn find(&self, model: &str, seed: u64, key: &str) -> Option<Entry> {
        self.entries.iter().rev().find(|e| e.model == model && e.seed == seed && e.key == key).cloned()
    }

    pub fn find_trial(&self, model: &str, key: &str) -> Option<Trial> {
        self.trials.iter().rev().find(|trial| trial.model == model && trial.key == key).cloned()
    }

    pub fn append(&mut self, entry: &Entry) -> Result<(), TrainError> {
        let figures = [entry.score, entry.train_tokens_per_s, entry.decode_tokens_per_s, entry.seconds];
        let on_the_way = entry.curve.iter().chain(&entry.losses).map(|(_, value)| *value);
        let by_pairs = entry.by_pairs.iter().map(|(_, value)| *value);
        if !figures.into_iter().chain(on_the_way).chain(by_pairs).all(f64::is_finite) {
            // JSON has no such numbers.
            let place = format!("the result of {} with seed {}", entry.model, entry.seed);
            return Err(TrainError::NonFinite { step: Some(entry.steps), what: "a figure", place });
        }
        append_line(&self.folder.join(RESULTS), entry)?;
        self.entries.push(entry.clone());
        Ok(())
    }

    pub fn append_trial(&mut self, trial: &Trial) -> Result<(), TrainError> {
        append_line(&self.folder.join(TRIALS), trial)?;
        self.trials.push(trial.clone());
        Ok(())
    }
}

/// The records of a JSON lines file. What follows the last line break was cut short by an interruption and is removed.
fn read_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, TrainError> {
    let text = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(TrainError::io("read the results in", path, source)),
    };
    let whole = text.iter().rposition(|&b| b == b'\n').map_or(0, |last| last + 1);
    if whole < text.len() {
        let cut = || OpenOptions::new().write(true).open(path)?.set_len(whole as u64);
        cut().map_err(|source| TrainError::io("repair the last line of", path, source))?;
    }
    let lines = text[..whole].split(|&b| b == b'\n').enumerate().filter(|(_, line)| !line.is_empty());
    let parse = |(index, line): (usize, &[u8])| {
        serde_json::from_slice(line).map_err(|error| TrainError::Folder {
            path: path.to_path_buf(),
            reason: format!("has a line {} that is not a result ({error})", index + 1),
        })
    };
    lines.map(parse).collect()
}

fn append_line(path: &Path, record: &impl Serialize) -> Result<(), TrainError> {
    let write = || -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        let mut file: File = OpenOptions::new().append(true).create(true).open(path)?;
        file.write_all(&line)?;
        file.sync_all()
    };
    write().map_err(|source| TrainError::io("append the result to", path, source))
}
