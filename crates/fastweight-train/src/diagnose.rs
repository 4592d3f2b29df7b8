//! Where a value that is not finite comes from.

use burn::tensor::{Int, Tensor, TensorData};
use fastweight_memory::{MemoryError, parameters};
use fastweight_models::{LanguageModel, ModelError};
use fastweight_ops::OpError;

use crate::error::TrainError;

/// The first place, in the order of the forward pass, that is not finite: a parameter, else a block's output.
pub(crate) fn first_non_finite(model: &LanguageModel, tokens: Tensor<2, Int>) -> Result<String, TrainError> {
    if let Some(name) = broken_parameter(model) {
        return Ok(format!("the parameter {name}"));
    }
    let (mut x, mut shared) = model.embed(tokens)?;
    let passes = (0..model.config().rounds)
        .flat_map(|round| model.blocks.iter().enumerate().map(move |at| (round, at)));
    for (round, (layer, block)) in passes {
        if layer == 0 {
            x = model.signal(x, round);
        }
        let normed = block.mixer_norm.forward(x.clone()).map_err(MemoryError::from)?;
        let mixed = match block.mixer.forward_shared(normed, None, None, &mut shared.clone()) {
            Ok((mixed, _)) => mixed,
            Err(MemoryError::Operator(OpError::Gate { .. })) => return Ok(gate_of(layer)),
            Err(error) => return Err(error.into()),
        };
        if !is_finite(&mixed) {
            return Ok(format!("the output of the mixer of layer {layer}"));
        }
        x = block.forward(x, None, None, &mut shared)?.0;
        if !is_finite(&x) {
            return Ok(format!("the output of the MLP of layer {layer}"));
        }
    }
    Ok("the logits".into())
}

fn is_finite(x: &Tensor<3>) -> bool {
    x.clone().into_data().iter::<f32>().all(f32::is_finite)
}

fn gate_of(layer: usize) -> String {
    format!("the gate of layer {layer}")
}

/// An error of a model's forward pass as what it is when the model has diverged: a gate that is not a number, or any
/// refusal of a model with a parameter that is not finite.
pub(crate) fn diverged(error: ModelError, model: &LanguageModel, step: Option<usize>) -> TrainError {
    let place = match &error {
        ModelError::Layer { layer, source: MemoryError::Operator(OpError::Gate { .. }) } => {
            Some(gate_of(*layer))
        }
        ModelError::Operator(OpError::Gate { argument, .. }) => Some(format!("the {argument}")),
        _ => None,
    };
    let gate = place.is_some();
    let place = broken_parameter(model).map(|name| format!("the parameter {name}")).or(place);
    match place {
        Some(place) => {
            let what = if gate { "a gate" } else { "a weight" };
            TrainError::NonFinite { step, what, place }
        }
        None => error.into(),
    }
}

/// `error` with the step at which it stopped the training.
pub(crate) fn at_step(error: TrainError, step: usize) -> TrainError {
    match error {
        TrainError::NonFinite { step: None, what, place } => {
            TrainError::NonFinite { step: Some(step), what, place }
        }
        other => other,
    }
}

fn broken_parameter(model: &LanguageModel) -> Option<String> {
    let broken = |data: &TensorData| data.iter::<f32>().any(|value| !value.is_finite());
    parameters::export(model).into_iter().find(|(_, data)| broken(data)).map(|(name, _)| name)
}
