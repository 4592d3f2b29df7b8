//! Lookup experts: experts of the token alone, which become tables after training.

mod config;
mod experts;

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::activation::softmax;

pub use config::MoleConfig;
pub use experts::{ExpertBytes, ExpertNetworks, ExpertTables, Experts};

use super::SwiGlu;
use crate::projection::check_sequence;
use crate::{MemoryError, Shared};

const NAME: &str = MoleConfig::NAME;

/// A mixture of lookup experts (MoLE, Jie et al. 2025, 2503.15798).
///
/// `y = shared(h) + sum_j g_j(h) expert_j(norm(e))`, `g = softmax(W_r h)` over all experts, with the hidden state h and
/// the embedding e of the token at hand. Since an expert reads nothing but the token, its outputs for the whole vocabulary
/// fit in a table, `LUT[id, j] = expert_j(norm(embedding[id]))`, which gives the same map to float rounding and reads one
/// row of `width` numbers an expert and token instead of the expert's weights ([`Mole::to_tables`]).
///
/// The authors' models have GELU networks for both kinds of maps; here shared map and experts are SwiGLUs, as elsewhere
/// in this library. Router and shared map read h after the block's normalisation, the experts e
/// after an RMS normalisation that each layer has for itself. No auxiliary loss balances the experts: all are active, so
/// none can starve.
#[derive(Module, Debug)]
pub struct Mole {
    /// Weighs the experts, `width -> experts`.
    pub router: Linear,
    /// The map of the hidden state.
    pub shared: Option<SwiGlu>,
    /// The maps of the token.
    pub experts: Experts,
    #[module(skip)]
    pub(super) width: usize,
}

impl Mole {
    /// Maps every token of `x [B, T, width]` alone.
    ///
    /// # Errors
    /// An input of another shape, or a model that did not hand over its tokens ([`Shared::tokens`], for tables) or their
    /// vectors ([`Shared::embedded`], for networks).
    pub fn forward(&self, x: Tensor<3>, shared: &Shared) -> Result<Tensor<3>, MemoryError> {
        check_sequence(NAME, self.width, &x, None, None)?;
        let gates = softmax(self.router.forward(x.clone()), 2);
        let routed = self.experts.forward(&x, gates, shared)?;
        match &self.shared {
            Some(map) => Ok(map.forward(x)? + routed),
            None => Ok(routed),
        }
    }

    /// The same map with a table in place of the experts, computed from the vectors of all tokens,
    /// `embedding [vocab, width]`. Experts that are tables already stay as they are.
    ///
    /// # Errors
    /// Vectors of another width.
    pub fn to_tables(&self, embedding: Tensor<2>) -> Result<Self, MemoryError> {
        let experts = match &self.experts {
            Experts::Networks(networks) => Experts::Tables(networks.tables(embedding)?),
            tables @ Experts::Tables(_) => tables.clone(),
        };
        Ok(Self { experts, ..self.clone() })
    }
}
