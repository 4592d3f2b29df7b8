//! Text from a trained model, token by token.

use burn::tensor::{Device, Tensor, TensorData};
use fastweight_models::{LanguageModel, ModelState};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::error::TrainError;
use crate::evaluate::{device_of, single};

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token (the first of equals).
    pub temperature: f64,
    /// Only the most likely tokens whose probabilities add up to this share are drawn from; 1 keeps all.
    pub top_p: f64,
    /// Start of the random choices.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 1.0, top_p: 1.0, seed: 0 }
    }
}

/// Endless token ids that continue a prompt. The same model, prompt and sampling give the same tokens.
#[derive(Debug)]
pub struct Generator<'a> {
    model: &'a LanguageModel,
    device: Device,
    sampling: Sampling,
    random: ChaCha8Rng,
    /// Ids that may be chosen; all when absent.
    known: Option<Vec<bool>>,
    /// Logits of the next token, and the state after the tokens so far.
    next: Option<(Vec<f32>, ModelState)>,
}

impl<'a> Generator<'a> {
    /// Reads `prompt`. `model` comes without gradients.
    ///
    /// # Errors
    /// An empty prompt, a token the model does not know, a temperature below 0 or a `top_p` outside (0, 1].
    pub fn new(model: &'a LanguageModel, prompt: &[u32], sampling: Sampling) -> Result<Self, TrainError> {
        let argument = |name, found: String, expected| Err(TrainError::Argument { name, found, expected });
        if prompt.is_empty() {
            return argument("the prompt", "empty".into(), "at least one token to continue");
        }
        let vocab = model.config().vocab;
        if let Some(id) = prompt.iter().find(|id| **id as usize >= vocab) {
            return argument("the prompt", format!("token {id}"), "token ids below the model's vocabulary");
        }
        if !(sampling.temperature.is_finite() && sampling.temperature >= 0.0) {
            return argument(
                "the temperature",
                sampling.temperature.to_string(),
                "0 (most likely token) or more",
            );
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            return argument("top-p", sampling.top_p.to_string(), "a share in (0, 1]");
        }
        let device = device_of(model);
        let ids: Vec<i64> = prompt.iter().map(|&id| i64::from(id)).collect();
        let count = ids.len();
        let tokens = Tensor::from_data(TensorData::new(ids, [1, count]), &device);
        let (logits, state) = model.forward(tokens, None, None)?;
        let last = logits.slice([0..1, count - 1..count, 0..vocab]).flatten::<1>(0, 2);
        let random = ChaCha8Rng::seed_from_u64(sampling.seed);
        Ok(Generator { model, device, sampling, random, known: None, next: Some((values(last)?, state)) })
    }

    /// Chooses among the ids for which `known` is true only: a tokenizer may have none for some.
    #[must_use]
    pub fn only(mut self, known: Option<Vec<bool>>) -> Self {
        self.known = known;
        self
    }

    fn advance(&mut self, logits: &mut [f32], state: ModelState) -> Result<u32, TrainError> {
        for (logit, known) in logits.iter_mut().zip(self.known.iter().flatten()) {
            *logit = if *known { *logit } else { f32::NEG_INFINITY };
        }
        let random = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let id = choose(logits, &self.sampling, random);
        let (logits, state) = self.model.step(single(id as i64, &self.device), state)?;
        self.next = Some((values(logits.flatten::<1>(0, 1))?, state));
        Ok(id as u32)
    }
}

/// Ends only after an error.
impl Iterator for Generator<'_> {
    type Item = Result<u32, TrainError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (mut logits, state) = self.next.take()?;
        Some(self.advance(&mut logits, state))
    }
}

fn values(logits: Tensor<1>) -> Result<Vec<f32>, TrainError> {
    logits.into_data().try_to_vec::<f32>().map_err(|reason| TrainError::device("the logits", reason))
}

/// The token that `random`, uniform in `[0, 1)`, falls on.
fn choose(logits: &[f32], sampling: &Sampling, random: f64) -> usize {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // Stable, so equal logits keep the order of their ids.
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let first = order.first().copied().unwrap_or_default();
    if sampling.temperature == 0.0 {
        return first;
    }
    let highest = f64::from(logits.get(first).copied().unwrap_or_default());
    let weight = |&id: &usize| ((f64::from(logits[id]) - highest) / sampling.temperature).exp();
    let weights: Vec<f64> = order.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let mut kept = 0.0;
    let size = weights.iter().position(|weight| {
        kept += weight;
        kept >= sampling.top_p * total
    });
    let size = size.map_or(weights.len(), |last| last + 1);
    let mut threshold = random * weights[..size].iter().sum::<f64>();
    let drawn = weights[..size].iter().position(|weight| {
        threshold -= weight;
        threshold < 0.0
    });
    order.get(drawn.unwrap_or(size.saturating_sub(1))).copied().unwrap_or(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_follow_temperature_and_top_p() {
        let logits = [0.0, 2.0, 1.0, 2.0];
        let at =
            |temperature, top_p, random| choose(&logits, &Sampling { temperature, top_p, seed: 0 }, random);
        assert_eq!(at(0.0, 1.0, 0.99), 1, "greedy takes the first of equals");
        assert_eq!(at(1.0, 1.0, 0.0), 1);
        assert_eq!(at(1.0, 1.0, 0.999_999), 0, "the least likely comes last");
        assert_eq!(at(1.0, 0.5, 0.999_999), 3, "two equal tokens hold more than half");
        assert_eq!(at(1.0, 1e-9, 0.999_999), 1, "at least one token stays");
        assert_eq!(at(1e-3, 1.0, 0.999_999), 3, "cold is close to greedy");
    }
}
