//! The experts of a layer, as networks or as a table.

use burn::module::{Module, Param, ParamId};
use burn::tensor::module::embedding as look_up;
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::NAME;
use crate::channel::SwiGlu;
use crate::init::placeholder;
use crate::parameters;
use crate::{LayerContext, MemoryError, RmsNorm, Shared};

/// Bytes of a parameter, float32.
const PARAMETER: usize = size_of::<f32>();
/// Rows of a table that are computed at once.
const ROWS: usize = 1024;

/// Bytes of a layer's experts, from the sizes of their tensors. Router, shared map and the token's own vector, which both
/// forms read alike, do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertBytes {
    /// All that is kept.
    pub stored: usize,
    /// What one token reads: every expert's weights, or one row of the table for each expert.
    pub per_token: usize,
}

/// The experts of a layer.
#[derive(Module, Debug)]
pub enum Experts {
    /// Networks of the token's vector, which is how they are trained.
    Networks(ExpertNetworks),
    /// A table of the networks' outputs.
    Tables(ExpertTables),
}

impl Experts {
    /// The sum of all experts' outputs, `[B, T, width]`, weighed by `gates [B, T, experts]`.
    pub(super) fn forward(
        &self,
        x: &Tensor<3>,
        gates: Tensor<3>,
        shared: &Shared,
    ) -> Result<Tensor<3>, MemoryError> {
        match self {
            Self::Networks(networks) => networks.forward(gates, shared.vectors_of(NAME, x)?),
            Self::Tables(tables) => Ok(tables.forward(gates, shared.ids(NAME, x, tables.vocab())?)),
        }
    }

    /// What the experts hold and what a token reads of it.
    pub fn bytes(&self) -> ExpertBytes {
        let sizes = parameters::list(self).into_iter().map(|info| info.shape.into_iter());
        let stored = sizes.map(|shape| shape.fold(PARAMETER, usize::saturating_mul)).sum();
        let per_token = match self {
            Self::Networks(_) => stored,
            Self::Tables(tables) => tables.row(),
        };
        ExpertBytes { stored, per_token }
    }
}

/// SwiGLUs of the token's vector.
#[derive(Module, Debug)]
pub struct ExpertNetworks {
    /// Normalises the token's vector, once for all experts of the layer.
    pub norm: RmsNorm,
    /// One map an expert.
    pub networks: Vec<SwiGlu>,
}

impl ExpertNetworks {
    pub(super) fn new(experts: usize, hidden: usize, ctx: &LayerContext, device: &Device) -> Self {
        let networks = (0..experts).map(|_| SwiGlu::new(ctx.width, hidden, device)).collect();
        Self { norm: RmsNorm::new(ctx.width, ctx.norm_eps, device), networks }
    }

    fn forward(&self, gates: Tensor<3>, embedded: Tensor<3>) -> Result<Tensor<3>, MemoryError> {
        let shape = embedded.dims();
        let vectors = self.norm.forward(embedded)?;
        let mut sum = Tensor::zeros(shape, (&vectors.device(), vectors.dtype()));
        for (expert, network) in self.networks.iter().enumerate() {
            sum = sum + network.forward(vectors.clone())? * gates.clone().narrow(2, expert, 1);
        }
        Ok(sum)
    }

    /// Every expert's output for every token of `embedding [vocab, width]`.
    ///
    /// # Errors
    /// Vectors of another width.
    pub fn tables(&self, embedding: Tensor<2>) -> Result<ExpertTables, MemoryError> {
        let ([vocab, width], device) = (embedding.dims(), embedding.device());
        if width != self.width() {
            let expected = format!("[vocab, {}] for the vectors of all tokens", self.width());
            return Err(MemoryError::Input { layer: NAME, found: vec![vocab, width], expected });
        }
        // Part by part, so that nothing but the table grows with the vocabulary.
        let mut values = Vec::with_capacity(vocab * self.networks.len() * width);
        for start in (0..vocab).step_by(ROWS) {
            let vectors = self.norm.forward(embedding.clone().narrow(0, start, ROWS.min(vocab - start)))?;
            let outputs = self.networks.iter().map(|network| network.forward(vectors.clone()));
            let outputs = outputs.map(|y| y.map(|y| y.unsqueeze_dim::<3>(1))).collect::<Result<_, _>>()?;
            values.extend(Tensor::cat(outputs, 1).into_data().iter::<f32>());
        }
        let table = Tensor::from_data(TensorData::new(values, [vocab, self.networks.len(), width]), &device);
        Ok(ExpertTables { table: Param::initialized(ParamId::new(), table) })
    }

    fn width(&self) -> usize {
        self.norm.weight.lazy_shape()[0]
    }
}

/// One row for every token and expert.
#[derive(Module, Debug)]
pub struct ExpertTables {
    /// `LUT[id, expert]`, `[vocab, experts, width]`.
    pub table: Param<Tensor<3>>,
}

impl ExpertTables {
    pub(super) fn new(vocab: usize, experts: usize, width: usize, device: &Device) -> Self {
        Self { table: placeholder([vocab, experts, width], device) }
    }

    fn forward(&self, gates: Tensor<3>, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, time] = tokens.dims();
        let table = self.table.val();
        let [vocab, experts, width] = table.dims();
        let rows = look_up(table.reshape([vocab, experts * width]), tokens);
        let rows = rows.reshape([batch, time, experts, width]) * gates.unsqueeze_dim::<4>(3);
        rows.sum_dim(2).squeeze_dim(2)
    }

    /// Tokens that have rows.
    fn vocab(&self) -> usize {
        self.table.lazy_shape()[0]
    }

    /// Bytes of the rows of one token.
    fn row(&self) -> usize {
        let shape = self.table.lazy_shape();
        PARAMETER.saturating_mul(shape[1]).saturating_mul(shape[2])
    }
}
