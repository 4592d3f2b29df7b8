//! A language model: tokens to logits.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::module::linear as affine;
use burn::tensor::{Device, Int, Tensor};
use fastweight_memory::init::placeholder;
use fastweight_memory::parameters::{self, ParameterInfo};
use fastweight_memory::{MemoryError, Norm, Shared, State, TokenVectors};
use fastweight_ops::{Offsets, is_flex};

use crate::{Block, ModelConfig, ModelError, ModelState};

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
/// `norm.weight`, `head.weight`.
#[derive(Module, Debug)]
pub struct LanguageModel {
    /// Vectors of the tokens; the output head too when the head is tied.
    pub embedding: Embedding,
    /// Normalisation of the embeddings before the first block, if the model has one.
    pub embedding_norm: Option<Norm>,
    /// The blocks, first to last.
    pub blocks: Vec<Block>,
    /// Normalisation before the head.
    pub norm: Norm,
    /// The output head, `[width, vocab]`, unless it is tied to the embedding.
    pub head: Option<Linear>,
    #[module(skip)]
    pub(crate) config: ModelConfig,
}

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
    /// A token outside the vocabulary (checked on the CPU), or a state or offsets that do not fit.
    pub fn hidden(
        &self,
        tokens: Tensor<2, Int>,
        state: Option<ModelState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, ModelState), ModelError> {
        self.check_tokens(&tokens)?;
        let states = match state {
            None => vec![None; self.blocks.len()],
            Some(state) => {
                self.check_state(&state)?;
                state.layers.into_iter().map(Some).collect()
            }
        };
        let (mut x, mut shared) = self.embed(tokens)?;
        let mut layers = Vec::with_capacity(self.blocks.len());
        for (layer, (block, state)) in self.blocks.iter().zip(states).enumerate() {
            let (y, state) =
                block.forward(x, state, offsets, &mut shared).map_err(|e| layer_error(layer, e))?;
            x = y;
            layers.push(state);
        }
        Ok((self.norm.forward(x)?, ModelState { layers }))
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
        let mut x = embedded.squeeze_dim::<2>(1);
        let mut layers = Vec::with_capacity(self.blocks.len());
        for (layer, (block, state)) in self.blocks.iter().zip(state.layers).enumerate() {
            let (y, state) = block.step(x, state, &mut shared).map_err(|e| layer_error(layer, e))?;
            x = y;
            layers.push(state);
        }
        Ok((self.logits(self.norm.forward(x)?), ModelState { layers }))
    }

    /// The state of `batch` sequences before their first token.
    pub fn zero_state(&self, batch: usize, device: &Device) -> ModelState {
        ModelState { layers: self.blocks.iter().map(|block| block.zero_state(batch, device)).collect() }
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
        let (expected, found) = (self.blocks.len(), state.layers.len());
        if expected != found {
            return Err(ModelError::StateLayers { expected, found });
        }
        let batch = state.batch();
        match state.layers.iter().position(|layer| layer.batch() != batch) {
            Some(layer) => {
                let found = state.layers[layer].batch();
                Err(layer_error(layer, MemoryError::StateBatch { expected: batch, found }))
            }
            None => Ok(()),
        }
    }
}

fn layer_error(layer: usize, source: MemoryError) -> ModelError {
    ModelError::Layer { layer, source }
}
