//! A language model: tokens to logits.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::module::linear as affine;
use burn::tensor::{Device, Int, Tensor};
use fastweight_memory::init::placeholder;
use fastweight_memory::layers::MemoryLoad;
use fastweight_memory::parameters::{self, ParameterInfo};
use fastweight_memory::{MemoryError, Norm, Shared, State, TokenVectors};
use fastweight_ops::{Offsets, is_flex};

use crate::rounds::{Halting, Pondering, Rounds};
use crate::{Block, LayerState, ModelConfig, ModelError, ModelState};

/// A vector for every token.
#[derive(Module, Debug)]
pub struct Embedding {
    /// `[vocab, width]`.
    pub weight: Param<Tensor<2>>,
}

impl Embedding {
    /// Vectors of `width` channels for `vocab` tokens, zero until they are initialised.
    pub fn new(vocab: usize, width: usize, device: &Device) -> Self {
        Self { weight: placeholder([vocab, width], device) }
    }
}

/// Embedding, blocks, a last normalisation and the output head.
///
/// Parameters are named by their place: `embedding.weight`, `blocks.0.mixer.q.weight`, `blocks.0.mlp.up.weight`,
/// `norm.weight`, `head.weight`. In a model of several rounds (Universal Transformer) the blocks are applied as often, each round
/// with its own signal and session state; tokens may halt before the last, see [`HaltingConfig`](crate::HaltingConfig).
#[derive(Module, Debug)]
pub struct LanguageModel {
    /// Vectors of the tokens; the output head too when the head is tied.
    pub embedding: Embedding,
    /// Normalisation of the embeddings before the first block, if the model has one.
    pub embedding_norm: Option<Norm>,
    /// The blocks, first to last.
    pub blocks: Vec<Block>,
    /// What repeats the blocks, in a model of several rounds.
    pub rounds: Option<Rounds>,
    /// Normalisation before the head.
    pub norm: Norm,
    /// The output head, `[width, vocab]`, unless it is tied to the embedding.
    pub head: Option<Linear>,
    #[module(skip)]
    pub(crate) config: ModelConfig,
}

/// What a model makes of a sequence.
#[derive(Debug, Clone)]
pub struct Reading {
    /// Normalised channels before the head, `[B, T, width]`.
    pub hidden: Tensor<3>,
    /// The state after the tokens.
    pub state: ModelState,
    /// How tokens spread in the layers that route them, in order, round by round.
    pub loads: Vec<MemoryLoad>,
    /// How long the tokens took, where they halt.
    pub pondering: Option<Pondering<3>>,
}

/// The channels after the last round, the state of every layer and round, and how long the tokens took.
type Passed<const D: usize> = (Tensor<D>, ModelState, Option<Pondering<D>>);

impl LanguageModel {
    /// The model's description.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Every parameter with its name, shape, weight-decay group and identity, first to last.
    pub fn parameters(&self) -> Vec<ParameterInfo> {
        parameters::list(self)
    }

    /// Reads `tokens [B, T]`; returns next-token logits `[B, T, vocab]` and the state after the tokens.
    ///
    /// Without a state every row starts a new sequence. With offsets the tokens are one row of documents and the
    /// state holds one sequence per document.
    ///
    /// # Errors
    /// Those of [`LanguageModel::hidden`].
    pub fn forward(
        &self,
        tokens: Tensor<2, Int>,
        state: Option<ModelState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, ModelState), ModelError> {
        let (hidden, state) = self.hidden(tokens, state, offsets)?;
        Ok((self.logits(hidden), state))
    }

    /// As [`LanguageModel::forward`], but the normalised channels before the head, `[B, T, width]`.
    ///
    /// # Errors
    /// Those of [`LanguageModel::read`].
    pub fn hidden(
        &self,
        tokens: Tensor<2, Int>,
        state: Option<ModelState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, ModelState), ModelError> {
        let reading = self.read(tokens, state, offsets)?;
        Ok((reading.hidden, reading.state))
    }

    /// As [`LanguageModel::hidden`], with what a training adds to its loss.
    ///
    /// # Errors
    /// A token outside the vocabulary (checked on the CPU), or a state or offsets that do not fit.
    pub fn read(
        &self,
        tokens: Tensor<2, Int>,
        state: Option<ModelState>,
        offsets: Option<&Offsets>,
    ) -> Result<Reading, ModelError> {
        self.check_tokens(&tokens)?;
        if let Some(state) = &state {
            self.check_state(state)?;
        }
        let (x, mut shared) = self.embed(tokens)?;
        let (x, state, pondering) =
            self.pass(x, state, |block, x, state| block.forward(x, state, offsets, &mut shared))?;
        Ok(Reading { hidden: self.norm.forward(x)?, state, loads: shared.loads, pondering })
    }

    /// What a training adds to its loss for a reading, `[1]`: the load-balance losses times `balance`, and the ponder cost times
    /// its factor. None where there is neither.
    pub fn auxiliary_loss(&self, reading: &Reading, balance: f64) -> Option<Tensor<1>> {
        let loads = reading.loads.iter().filter(|_| balance != 0.0);
        let balances = loads.map(|load| load.balance.clone() * balance);
        let cost = self.config.halting.as_ref().map_or(0.0, |halting| halting.ponder_cost);
        let ponder =
            reading.pondering.iter().filter(|_| cost != 0.0).map(|pondering| pondering.cost() * cost);
        balances.chain(ponder).reduce(|sum, loss| sum + loss)
    }

    /// All blocks, round after round; `run` reads `x` with a block and that block's state of the round.
    fn pass<const D: usize>(
        &self,
        mut x: Tensor<D>,
        state: Option<ModelState>,
        mut run: impl FnMut(&Block, Tensor<D>, Option<LayerState>) -> Result<(Tensor<D>, LayerState), MemoryError>,
    ) -> Result<Passed<D>, ModelError> {
        let mut states = state.into_iter().flat_map(|state| state.layers);
        let mut layers = Vec::with_capacity(self.passes());
        let halt = self.rounds.as_ref().and_then(|rounds| rounds.halt.as_ref());
        let mut halting =
            halt.zip(self.config.halting.as_ref()).map(|(halt, config)| Halting::new(halt, config, &x));
        let last = self.config.rounds - 1;
        for round in 0..=last {
            let before = x.clone();
            x = self.signal(x, round);
            for (layer, block) in self.blocks.iter().enumerate() {
                let (y, state) = run(block, x, states.next()).map_err(|e| layer_error(layer, e))?;
                x = y;
                layers.push(state);
            }
            if let Some(halting) = &mut halting {
                x = halting.round(before, x, round == last);
            }
        }
        let state = ModelState { layers };
        Ok(match halting.map(Halting::end) {
            Some((x, pondering)) => (x, state, Some(pondering)),
            None => (x, state, None),
        })
    }

    /// `x [.., width]` as a round, from 0, begins with it: the same in a model of one round.
    pub fn signal<const D: usize>(&self, x: Tensor<D>, round: usize) -> Tensor<D> {
        match &self.rounds {
            Some(rounds) => rounds.signal(x, round),
            None => x,
        }
    }

    /// Blocks times rounds.
    fn passes(&self) -> usize {
        self.blocks.len() * self.config.rounds
    }

    /// Logits `[.., vocab]` of the channels before the head, `[.., width]`: one matrix product.
    pub fn logits<const D: usize>(&self, hidden: Tensor<D>) -> Tensor<D> {
        match &self.head {
            Some(head) => head.forward(hidden),
            None => affine(hidden, self.embedding.weight.val().transpose(), None),
        }
    }

    /// Reads one token per row, `tokens [B]`; returns next-token logits `[B, vocab]` and the state after it.
    ///
    /// # Errors
    /// A token outside the vocabulary (checked on the CPU), or a state that does not fit.
    pub fn step(
        &self,
        tokens: Tensor<1, Int>,
        state: ModelState,
    ) -> Result<(Tensor<2>, ModelState), ModelError> {
        let tokens = tokens.unsqueeze_dim::<2>(1);
        self.check_tokens(&tokens)?;
        self.check_state(&state)?;
        let (embedded, mut shared) = self.embed(tokens)?;
        let x = embedded.squeeze_dim::<2>(1);
        let (x, state, _) = self.pass(x, Some(state), |block, x: Tensor<2>, state| {
            let state = state.unwrap_or_else(|| block.zero_state(x.dims()[0], &x.device()));
            block.step(x, state, &mut shared)
        })?;
        Ok((self.logits(self.norm.forward(x)?), state))
    }

    /// The state of `batch` sequences before their first token.
    pub fn zero_state(&self, batch: usize, device: &Device) -> ModelState {
        let blocks = self.blocks.iter().cycle().take(self.passes());
        ModelState { layers: blocks.map(|block| block.zero_state(batch, device)).collect() }
    }

    /// What the first block reads of `tokens [B, T]`, which are not checked, and what all blocks share.
    ///
    /// # Errors
    /// An operator of the model that refuses its arguments.
    pub fn embed(&self, tokens: Tensor<2, Int>) -> Result<(Tensor<3>, Shared), ModelError> {
        let vectors = TokenVectors { weight: self.embedding.weight.val(), norm: self.embedding_norm.clone() };
        let x = vectors.of(tokens.clone())?;
        let shared = Shared {
            first_value: None,
            tokens: Some(tokens),
            embedded: Some(x.clone()),
            residual: None,
            vectors: Some(vectors),
            loads: Vec::new(),
        };
        Ok((x, shared))
    }

    /// Tokens must be one row and one column at least, and inside the vocabulary. Their values are read on the
    /// CPU only; other devices would have to wait for them.
    fn check_tokens(&self, tokens: &Tensor<2, Int>) -> Result<(), ModelError> {
        let [batch, time] = tokens.dims();
        if batch == 0 || time == 0 {
            let found = format!("[{batch}, {time}]");
            let expected = "at least one row and one token".into();
            return Err(ModelError::Setting { setting: "tokens", found, expected });
        }
        let vocab = self.config.vocab;
        if !is_flex(&tokens.device()) {
            return Ok(());
        }
        let data = tokens.to_data();
        match data.iter::<i64>().find(|id| !(0..vocab as i64).contains(id)) {
            Some(id) => Err(ModelError::Token { id, vocab }),
            None => Ok(()),
        }
    }

    fn check_state(&self, state: &ModelState) -> Result<(), ModelError> {
        let (expected, found) = (self.passes(), state.layers.len());
        if expected != found {
            return Err(ModelError::StateLayers { expected, found });
        }
        let batch = state.batch();
        match state.layers.iter().position(|layer| layer.batch() != batch) {
            Some(layer) => {
                let found = state.layers[layer].batch();
                Err(layer_error(
                    layer % self.blocks.len(),
                    MemoryError::StateBatch { expected: batch, found },
                ))
            }
            None => Ok(()),
        }
    }
}

fn layer_error(layer: usize, source: MemoryError) -> ModelError {
    ModelError::Layer { layer, source }
}
