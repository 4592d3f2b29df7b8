//! Blocks that are applied in several rounds, as in the Universal Transformer, and tokens that halt on the way.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_memory::init::placeholder;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Embedding, ModelError};

/// When tokens halt: adaptive computation time (Graves 2016, 1603.08983) for each token, as in the Universal Transformer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "a table such as { threshold = 0.99, ponder_cost = 0.01 }, or {} for these numbers"
)]
pub struct HaltingConfig {
    /// Sum of halting probabilities at which a token halts, above 0 and up to 1.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub threshold: f64,
    /// Factor on the ponder cost in the training loss: the mean over the tokens of rounds plus remainder.
    #[schemars(range(min = 0))]
    pub ponder_cost: f64,
}

impl Default for HaltingConfig {
    fn default() -> Self {
        Self { threshold: 0.99, ponder_cost: 0.01 }
    }
}

impl HaltingConfig {
    /// Checks the numbers, and that there are rounds to leave out.
    ///
    /// # Errors
    /// [`ModelError::Setting`] says what to change.
    pub(crate) fn validate(&self, rounds: usize) -> Result<(), ModelError> {
        let fault = |found: String, expected: &str| {
            Err(ModelError::Setting { setting: "halting", found, expected: expected.into() })
        };
        if rounds < 2 {
            return fault(format!("given for {rounds} round"), "rounds of 2 or more, or no halting");
        }
        if !(self.threshold > 0.0 && self.threshold <= 1.0) {
            return fault(format!("threshold = {}", self.threshold), "a threshold in (0, 1], such as 0.99");
        }
        if !(self.ponder_cost >= 0.0 && self.ponder_cost.is_finite()) {
            return fault(format!("ponder_cost = {}", self.ponder_cost), "0 or more, such as 0.01");
        }
        Ok(())
    }
}

/// What a model of several rounds has beside its blocks.
#[derive(Module, Debug)]
pub struct Rounds {
    /// The timestep signal: a learned vector for each round, `[rounds, width]`, added to the residual stream before it. Positions
    /// within the sequence are the mixers' own matter.
    pub embedding: Embedding,
    /// Halting probability of a token before the sigmoid, with a bias that starts at one; where tokens halt.
    pub halt: Option<Linear>,
}

impl Rounds {
    pub(crate) fn new(rounds: usize, width: usize, halting: bool, device: &Device) -> Self {
        let halt =
            || Linear { weight: placeholder([width, 1], device), bias: Some(placeholder([1], device)) };
        Self { embedding: Embedding::new(rounds, width, device), halt: halting.then(halt) }
    }

    /// Its parameters, without building it.
    pub(crate) fn parameter_count(rounds: usize, width: usize, halting: bool) -> usize {
        let signal = rounds.saturating_mul(width);
        signal.saturating_add(if halting { width.saturating_add(1) } else { 0 })
    }

    /// `x [.., width]` with the signal of a round, from 0, added.
    pub fn signal<const D: usize>(&self, x: Tensor<D>, round: usize) -> Tensor<D> {
        let [_, width] = self.embedding.weight.dims();
        let mut shape = [1; D];
        shape[D - 1] = width;
        x + self.embedding.weight.val().narrow(0, round, 1).reshape(shape)
    }
}

/// How long tokens took, for tokens of shape `[..]`.
#[derive(Debug, Clone)]
pub struct Pondering<const D: usize> {
    /// Rounds that each token took part in, `[.., 1]`.
    pub rounds: Tensor<D>,
    /// What its last round weighs: one less the halting probabilities of the rounds before, `[.., 1]`.
    pub remainder: Tensor<D>,
}

impl<const D: usize> Pondering<D> {
    /// Mean rounds of a token.
    pub fn mean_rounds(&self) -> f64 {
        f64::from(self.rounds.clone().mean().into_scalar::<f32>())
    }

    /// Mean over the tokens of rounds plus remainder, `[1]`; gradients flow through the remainder.
    pub fn cost(&self) -> Tensor<1> {
        (self.rounds.clone() + self.remainder.clone()).mean()
    }
}

/// Tokens on their way through the rounds.
pub(crate) struct Halting<'a, const D: usize> {
    halt: &'a Linear,
    threshold: f64,
    /// One for tokens that have not halted, else zero, `[.., 1]`.
    running: Tensor<D>,
    /// Weights given so far, `[.., 1]`.
    spent: Tensor<D>,
    /// Weighted sum of the rounds' outputs, `[.., width]`.
    output: Tensor<D>,
    pondering: Pondering<D>,
}

impl<'a, const D: usize> Halting<'a, D> {
    /// All tokens of `x [.., width]` before the first round.
    pub fn new(halt: &'a Linear, config: &HaltingConfig, x: &Tensor<D>) -> Self {
        let mut shape = x.dims();
        let options = (&x.device(), x.dtype());
        let output = Tensor::zeros(shape, options);
        shape[D - 1] = 1;
        let zeros = || Tensor::zeros(shape, options);
        Self {
            halt,
            threshold: config.threshold,
            running: Tensor::ones(shape, options),
            spent: zeros(),
            output,
            pondering: Pondering { rounds: zeros(), remainder: zeros() },
        }
    }

    /// Takes up a round's output; returns what goes into the next round: halted tokens as they were `before`.
    pub fn round(&mut self, before: Tensor<D>, after: Tensor<D>, last: bool) -> Tensor<D> {
        let running = self.running.clone();
        let halted = running.clone().neg() + 1.0;
        let x = after * running.clone() + before * halted;
        let left = self.spent.clone().neg() + 1.0;
        let (weight, stopping) = if last {
            (running.clone() * left.clone(), running.clone())
        } else {
            let probability = sigmoid(self.halt.forward(x.clone()));
            let sum = (self.spent.clone() + probability.clone()).detach();
            let stopping = sum.greater_equal_elem(self.threshold as f32).float() * running.clone();
            let going = running.clone() - stopping.clone();
            (stopping.clone() * left.clone() + going * probability, stopping)
        };
        self.output = self.output.clone() + x.clone() * weight.clone();
        self.spent = self.spent.clone() + weight;
        self.pondering.rounds = self.pondering.rounds.clone() + running.clone();
        self.pondering.remainder = self.pondering.remainder.clone() + stopping.clone() * left;
        self.running = running - stopping;
        x
    }

    /// Mean of the rounds' outputs by their weights, and how long the tokens took.
    pub fn end(self) -> (Tensor<D>, Pondering<D>) {
        (self.output, self.pondering)
    }
}
