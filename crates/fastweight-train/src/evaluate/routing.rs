//! What a model decides for each token: which memories read it, and how many rounds it takes.

use burn::tensor::Tensor;
use fastweight_models::LanguageModel;
use serde::Serialize;

use super::{EVALUATION_SEED, device_of};
use crate::diagnose::diverged;
use crate::error::TrainError;
use crate::task::Task;
use crate::trainer::{offsets, token_tensor};

/// Sequences of the task that are read.
const SEQUENCES: usize = 16;

/// How tokens spread in a layer that routes them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerLoad {
    /// The layer, from 0.
    pub layer: usize,
    /// Share of the tokens that each memory is chosen for.
    pub share: Vec<f32>,
    /// The load-balance figure: 1 where all memories are as busy, higher where a few take most tokens.
    pub balance: f32,
}

/// What a model decided for the tokens of some sequences.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Routing {
    /// The layers that route tokens, in the order they are passed, round by round.
    pub loads: Vec<LayerLoad>,
    /// Mean rounds of a token, where tokens halt.
    pub mean_rounds: Option<f64>,
}

/// What `model` decides for 16 sequences of `task` that no training has seen as such; none for a model that decides nothing.
///
/// # Errors
/// The model refuses its input.
pub fn routing(model: &LanguageModel, task: &Task) -> Result<Option<Routing>, TrainError> {
    let config = model.config();
    if !config.routes() && config.halting.is_none() {
        return Ok(None);
    }
    let batch = task.sample(EVALUATION_SEED, SEQUENCES)?;
    let tokens = token_tensor(&batch, &device_of(model));
    let reading =
        model.read(tokens, None, offsets(&batch).as_ref()).map_err(|error| diverged(error, model, None))?;
    let numbers = |x: &Tensor<1>| x.clone().into_data().iter::<f32>().collect::<Vec<f32>>();
    let loads = config.routing_layers().zip(&reading.loads).map(|(layer, load)| LayerLoad {
        layer,
        share: numbers(&load.share),
        balance: numbers(&load.balance).iter().sum(),
    });
    let mean_rounds = reading.pondering.as_ref().map(|pondering| pondering.mean_rounds());
    Ok(Some(Routing { loads: loads.collect(), mean_rounds }))
}
