//! Reading checkpoints back, with every byte verified.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use fastweight_memory::parameters;
use fastweight_models::LanguageModel;
use safetensors::{Dtype, SafeTensors};

use super::state::{FileEntry, RunState, VERSION};
use super::{CHECKPOINTS, CheckpointError, OPTIMIZER, STATE, WEIGHTS, list};
use crate::error::TrainError;
use crate::run::RECIPE;

/// Differences that an error lists.
const LISTED: usize = 3;

/// A verified checkpoint in memory.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub folder: PathBuf,
    /// Where the run stood.
    pub state: RunState,
    weights: Vec<(String, TensorData)>,
    moments: Vec<(String, TensorData)>,
}

/// Reads and verifies the checkpoint in `folder`.
///
/// # Errors
/// A file is missing, cut short or changed, or the format is newer than this program.
pub fn load(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    let state = read_state(folder)?;
    let read = |name: &str| -> Result<Vec<(String, TensorData)>, CheckpointError> {
        let file = folder.join(name);
        let bytes = verified(&file, state.files.get(name))?;
        decode(&bytes).map_err(|reason| CheckpointError::Broken { file, reason })
    };
    Ok(Checkpoint { weights: read(WEIGHTS)?, moments: read(OPTIMIZER)?, folder: folder.to_path_buf(), state })
}

/// Where the run stood at a checkpoint, without reading its weights.
fn read_state(folder: &Path) -> Result<RunState, CheckpointError> {
    let path = folder.join(STATE);
    let broken = |reason: String| CheckpointError::Broken { file: path.clone(), reason };
    let text = fs::read_to_string(&path).map_err(|error| broken(format!("cannot be read ({error})")))?;
    let damaged = |error: serde_json::Error| broken(format!("is damaged ({error})"));
    match version(&serde_json::from_str(&text).map_err(damaged)?) {
        Version::Readable => {}
        Version::Newer(found) => return Err(CheckpointError::Newer { file: path, found }),
        Version::Unknown(found) => {
            return Err(broken(format!("is not a checkpoint of fastweight (its version is {found})")));
        }
    }
    let state: RunState = serde_json::from_str(&text).map_err(damaged)?;
    if !state.matches(&text) {
        return Err(broken("was changed after it was written (its checksum differs)".into()));
    }
    Ok(state)
}

/// The state of the newest checkpoint of `run` whose state can be read, or of the checkpoint `run` is, without reading
/// weights; none where there is none.
pub fn peek(run: &Path) -> Option<RunState> {
    if run.join(STATE).is_file() {
        return read_state(run).ok();
    }
    list(run).iter().rev().find_map(|folder| read_state(folder).ok())
}

enum Version {
    Readable,
    Newer(String),
    Unknown(String),
}

/// What the version in a `state.json` says.
fn version(state: &serde_json::Value) -> Version {
    let Some(found) = state.get("version") else { return Version::Unknown("missing".into()) };
    match (found.as_u64(), found.as_f64()) {
        (Some(number), _) if (1..=u64::from(VERSION)).contains(&number) => Version::Readable,
        (Some(number), _) if number > u64::from(VERSION) => Version::Newer(found.to_string()),
        // Larger than any integer type.
        (None, Some(number)) if number >= u64::MAX as f64 => Version::Newer(found.to_string()),
        _ => Version::Unknown(found.to_string()),
    }
}

/// The newest checkpoint of `run` that can be used, and a sentence for each newer one that cannot.
///
/// # Errors
/// There is no such folder or no checkpoint in it, none can be used, or one is of a newer format (which is not skipped,
/// since carrying on from an older one would overwrite it).
pub fn newest(run: &Path) -> Result<(Checkpoint, Vec<String>), CheckpointError> {
    let mut skipped = Vec::new();
    for folder in list(run).into_iter().rev() {
        match load(&folder) {
            Ok(checkpoint) => {
                let step = checkpoint.state.step;
                let note = |error: CheckpointError| match error {
                    CheckpointError::Broken { file, reason } => {
                        format!(
                            "the checkpoint file {} {reason}; using the older checkpoint of step {step}",
                            file.display()
                        )
                    }
                    other => other.to_string(),
                };
                return Ok((checkpoint, skipped.into_iter().map(note).collect()));
            }
            Err(newer @ CheckpointError::Newer { .. }) => return Err(newer),
            Err(error) => skipped.push(error),
        }
    }
    let folder = run.to_path_buf();
    Err(match skipped.into_iter().next() {
        Some(CheckpointError::Broken { file, reason }) => {
            let broken = format!("{} {reason}", file.display());
            if is_export(run) {
                CheckpointError::BrokenExport { folder, broken }
            } else {
                CheckpointError::AllBroken { folder, newest: broken }
            }
        }
        Some(other) => other,
        None if !run.exists() => CheckpointError::Missing { folder },
        None if !run.is_dir() => CheckpointError::NotAFolder { folder },
        None if run.join(CHECKPOINTS).is_dir() || run.join(RECIPE).is_file() => {
            CheckpointError::None { folder }
        }
        None => CheckpointError::NotARun { folder },
    })
}

/// Whether the checkpoints of `run` were written by an export: a training writes its recipe before them.
pub(crate) fn is_export(run: &Path) -> bool {
    !run.join(RECIPE).is_file() && !list(run).is_empty()
}

impl Checkpoint {
    /// `model` with every parameter replaced by the checkpoint's, nothing re-initialised.
    ///
    /// # Errors
    /// The checkpoint is of another model; the first differing names or shapes are listed.
    pub fn restore(&mut self, model: LanguageModel) -> Result<LanguageModel, TrainError> {
        let weights = std::mem::take(&mut self.weights);
        let differences = differences(&parameters::list(&model), &weights);
        if !differences.is_empty() {
            let more = differences.len().saturating_sub(LISTED);
            let mut difference = differences[..differences.len().min(LISTED)].join("; ");
            if more > 0 {
                difference.push_str(&format!("; and {more} more"));
            }
            let folder = self.folder.clone();
            return Err(CheckpointError::OtherModel { folder, difference }.into());
        }
        let mut weights: std::collections::HashMap<_, _> = weights.into_iter().collect();
        Ok(parameters::import(model, |info| weights.remove(&info.name))?)
    }

    /// The optimizer's moments, moved out.
    pub fn take_moments(&mut self) -> Vec<(String, TensorData)> {
        std::mem::take(&mut self.moments)
    }
}

fn differences(model: &[parameters::ParameterInfo], weights: &[(String, TensorData)]) -> Vec<String> {
    let stored =
        |name: &str| weights.iter().find(|(known, _)| known == name).map(|(_, data)| data.shape().to_vec());
    let missing = model.iter().filter_map(|info| match stored(&info.name) {
        Some(shape) if shape == info.shape => None,
        Some(shape) => {
            Some(format!("{} is {shape:?} in the checkpoint and {:?} in the model", info.name, info.shape))
        }
        None => Some(format!("{} is not in the checkpoint", info.name)),
    });
    let extra = weights
        .iter()
        .filter(|(name, _)| !model.iter().any(|info| info.name == *name))
        .map(|(name, _)| format!("{name} is not in the model"));
    missing.chain(extra).collect()
}

fn verified(file: &Path, expected: Option<&FileEntry>) -> Result<Vec<u8>, CheckpointError> {
    let broken = |reason: String| CheckpointError::Broken { file: file.to_path_buf(), reason };
    let expected = expected.ok_or_else(|| broken(format!("is not listed in {STATE}")))?;
    let bytes = fs::read(file).map_err(|error| broken(format!("cannot be read ({error})")))?;
    if bytes.len() as u64 != expected.bytes {
        return Err(broken(format!("has {} bytes, expected {}", bytes.len(), expected.bytes)));
    }
    if FileEntry::of(&bytes) != *expected {
        return Err(broken("was changed after it was written (its checksum differs)".into()));
    }
    Ok(bytes)
}

fn decode(bytes: &[u8]) -> Result<Vec<(String, TensorData)>, String> {
    let tensors =
        SafeTensors::deserialize(bytes).map_err(|error| format!("is not a safetensors file ({error})"))?;
    let value = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        if view.dtype() != Dtype::F32 {
            return Err(format!("holds {name} as {:?}, expected F32", view.dtype()));
        }
        let values =
            view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok((name, TensorData::new::<f32, _>(values, view.shape().to_vec())))
    };
    tensors.tensors().into_iter().map(value).collect()
}
