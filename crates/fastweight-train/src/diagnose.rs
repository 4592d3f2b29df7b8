//! Where a value that is not finite comes from.

use burn::tensor::module::embedding;
use burn::tensor::{Int, Tensor};
use fastweight_memory::{MemoryError, parameters};
use fastweight_models::LanguageModel;

use crate::error::TrainError;

/// The first place, in the order of the forward pass, that is not finite: a parameter, else a block's output.
pub(crate) fn first_non_finite(model: &LanguageModel, tokens: Tensor<2, Int>) -> Result<String, TrainError> {
    for (name, data) in parameters::export(model) {
        if data.as_slice::<f32>().is_ok_and(|values| values.iter().any(|x| !x.is_finite())) {
            return Ok(format!("the parameter {name}"));
        }
    }
    let mut x = embedding(model.embedding.weight.val(), tokens);
    for (layer, block) in model.blocks.iter().enumerate() {
        let mixed = block
            .mixer
            .forward(block.mixer_norm.forward(x.clone()).map_err(MemoryError::from)?, None, None)?
            .0;
        if !is_finite(&mixed) {
            return Ok(format!("the output of the mixer of layer {layer}"));
        }
        x = block.forward(x, None, None)?.0;
        if !is_finite(&x) {
            return Ok(format!("the output of the MLP of layer {layer}"));
        }
    }
    Ok("the logits".into())
}

fn is_finite(x: &Tensor<3>) -> bool {
    x.clone().into_data().iter::<f32>().all(f32::is_finite)
}
