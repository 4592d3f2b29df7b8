//! What layers know of the tokens themselves: their ids, their vectors, and tables of more vectors by id.

use burn::module::{Module, Param};
use burn::tensor::module::embedding;
use burn::tensor::{Device, Int, Tensor};
use fastweight_ops::{OpError, is_flex};

use crate::context::setting_error;
use crate::init::placeholder;
use crate::{LayerContext, MemoryError, Norm, Shared};

/// Vectors of any token of a model, as its first block reads them.
#[derive(Debug, Clone)]
pub struct TokenVectors {
    /// `[vocab, width]`.
    pub weight: Tensor<2>,
    /// Normalisation of the vectors, if the model has one.
    pub norm: Option<Norm>,
}

impl TokenVectors {
    /// The vectors of `ids [B, T]`, `[B, T, width]`.
    ///
    /// # Errors
    /// A normalisation of another width.
    pub fn of(&self, ids: Tensor<2, Int>) -> Result<Tensor<3>, OpError> {
        let vectors = embedding(self.weight.clone(), ids);
        match &self.norm {
            Some(norm) => norm.forward(vectors),
            None => Ok(vectors),
        }
    }
}

/// A trained vector for each token id, with or without a linear map of the token's embedding added. No weight decay
/// applies to the table.
#[derive(Module, Debug)]
pub struct TokenTable {
    /// `[vocab, channels]`.
    pub token_table: Param<Tensor<2>>,
    /// `[width, channels]`, from the embedding.
    pub from_embedding: Option<Param<Tensor<2>>>,
}

impl TokenTable {
    /// A table of zeros until it is initialised; `width` is that of the embedding that is mapped.
    pub(crate) fn new(vocab: usize, channels: usize, width: Option<usize>, device: &Device) -> Self {
        Self {
            token_table: placeholder([vocab, channels], device),
            from_embedding: width.map(|width| placeholder([width, channels], device)),
        }
    }

    /// Its parameters, without building it; `usize::MAX` when there are more.
    pub(crate) fn parameter_count(vocab: usize, channels: usize, width: Option<usize>) -> usize {
        channels.saturating_mul(vocab.saturating_add(width.unwrap_or(0)))
    }

    /// Tokens that have a vector.
    pub(crate) fn vocab(&self) -> usize {
        self.token_table.lazy_shape()[0]
    }

    /// The vectors of `ids [B, T]`, whose embeddings are `embedded [B, T, width]`: `[B, T, channels]`.
    pub(crate) fn of(&self, ids: Tensor<2, Int>, embedded: &Tensor<3>) -> Tensor<3> {
        let vectors = embedding(self.token_table.val(), ids);
        match &self.from_embedding {
            Some(map) => vectors + embedded.clone().matmul(map.val().unsqueeze()),
            None => vectors,
        }
    }
}

/// Checks that a layer whose parameters belong to tokens knows how many there are, at most `most`.
pub(crate) fn validate_vocab(
    layer: &'static str,
    ctx: &LayerContext,
    most: usize,
) -> Result<(), MemoryError> {
    if ctx.vocab == 0 || ctx.vocab > most {
        let expected = format!(
            "1 to {most}: the layer has vectors for the tokens of a model's vocabulary (LayerContext::vocab)"
        );
        return Err(setting_error(layer, "vocab", ctx.vocab, expected));
    }
    Ok(())
}

impl Shared {
    /// The ids of the tokens that `x [B, T, width]` stands for, each below `vocab` (checked on the CPU).
    pub(crate) fn ids(
        &self,
        layer: &'static str,
        x: &Tensor<3>,
        vocab: usize,
    ) -> Result<Tensor<2, Int>, MemoryError> {
        let ids = self.tokens.clone().ok_or(missing(layer, "token ids", "tokens"))?;
        let [batch, time, _] = x.dims();
        if ids.dims() != [batch, time] {
            let expected = format!("token ids [{batch}, {time}], one for each token read");
            return Err(MemoryError::Input { layer, found: ids.dims().to_vec(), expected });
        }
        if is_flex(&ids.device())
            && let Some(id) = ids.to_data().iter::<i64>().find(|id| !(0..vocab as i64).contains(id))
        {
            return Err(setting_error(layer, "a token id", id, format!("0 to below vocab = {vocab}")));
        }
        Ok(ids)
    }

    /// The vectors of the tokens that `x [B, T, width]` stands for, of its shape.
    pub(crate) fn vectors_of(&self, layer: &'static str, x: &Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        fits(layer, x, self.embedded.clone().ok_or(missing(layer, "the tokens' vectors", "embedded"))?)
    }

    /// What the block reads where its mixer reads `x [B, T, width]`, of its shape.
    pub(crate) fn before_norm(&self, layer: &'static str, x: &Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        fits(layer, x, self.residual.clone().ok_or(missing(layer, "the block's own inputs", "residual"))?)
    }

    /// Vectors of any token.
    pub(crate) fn any_vector(&self, layer: &'static str) -> Result<TokenVectors, MemoryError> {
        self.vectors.clone().ok_or(missing(layer, "vectors of the tokens read before", "vectors"))
    }
}

fn missing(layer: &'static str, what: &'static str, field: &'static str) -> MemoryError {
    MemoryError::Missing { layer, what, field }
}

fn fits(layer: &'static str, x: &Tensor<3>, shared: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
    if shared.dims() != x.dims() {
        let expected = format!("{:?} for all that a model shares", x.dims());
        return Err(MemoryError::Input { layer, found: shared.dims().to_vec(), expected });
    }
    Ok(shared)
}
