//! Deep linear attention: a deep memory that takes in every value, whatever it knows already.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::deep_memory::{DeepGate, DeepMemory, DeepTokens, InnerLoss};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::LayerConfig;
use super::deep::{DeepOptions, FADING_NORM_EPS, InnerNetwork, deep_layer, validate_shift};
use crate::projection::{Heads, Projection, Qkv, QkvSizes, linear};
use crate::{ConvState, LayerContext, MemoryError, RmsNorm, StateSize};

/// Configuration of [`Dla`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DlaConfig {
    /// Width of the short convolution on q, k and v; 0 for none.
    pub conv_width: usize,
    /// Largest rate of a write, above 0.
    pub theta_max: f32,
    /// Linear layers of the memory, 1 to 4.
    pub depth: usize,
    /// Hidden channels of the memory for each key channel.
    pub expansion: usize,
    /// Tokens between two points where gradients are taken.
    pub chunk: usize,
    /// Taken from the forgetting before its sigmoid: the memory begins by forgetting about `e^-shift` a token. Below about
    /// `ln(context)` gradients may overflow: forgetting that outruns the writes leaves the LayerNorm nothing to normalise.
    pub forget_shift: f32,
}

impl Default for DlaConfig {
    fn default() -> Self {
        Self { conv_width: 4, theta_max: 0.1, depth: 2, expansion: 4, chunk: 16, forget_shift: 8.0 }
    }
}

/// Deep linear attention, DLA (Behrouz et al. 2025, 2505.23735), the baseline of the Miras and Hope papers: linear
/// attention whose memory is a network.
///
/// Short convolution and SiLU on q, k, v; unit q and k. The memory `M(x) = x + LN(f(x))` of each head, f of linear layers with GELU
/// between, starts at trained weights and takes one step on the dot product a token, `W_t = (1 - alpha_t) W_{t-1} + theta_t grad <M(k_t), v_t>`,
/// gradients at the chunk's start; `o_t = M_{W_t}(q_t)`, RMS-normalised and gated by `silu(W_g x)`. `theta = theta_max sigmoid(W x)`,
/// `alpha = sigmoid(W x - forget_shift)`, one a head; without momentum. The LayerNorm is what bounds it: the dot product alone has no
/// minimum. `value_dim` equals `head_dim`.
#[derive(Module, Debug)]
pub struct Dla {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Rate before the sigmoid, one a head.
    pub theta: Linear,
    /// Forgetting before the sigmoid, one a head.
    pub alpha: Linear,
    /// The memory before the first token.
    pub memory: InnerNetwork,
    /// Output gate.
    pub gate: Linear,
    /// Normalisation of each head's reading.
    pub norm: RmsNorm,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: DlaConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl DlaConfig {
    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::new(ctx, self.conv_width)
    }

    pub(crate) fn options(&self) -> DeepOptions {
        let Self { depth, expansion, chunk, .. } = *self;
        DeepOptions {
            layer: Self::NAME,
            conv_width: self.conv_width,
            memory: DeepMemory {
                depth,
                expansion,
                chunk,
                norm_eps: FADING_NORM_EPS,
                loss: InnerLoss::DotProduct,
                ..DeepMemory::default()
            },
            momentum: false,
            chunk: "chunk",
            rate: ("theta_max", self.theta_max),
            channel_gates: false,
        }
    }
}

impl LayerConfig for DlaConfig {
    const NAME: &'static str = "dla";
    type Layer = Dla;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        validate_shift(Self::NAME, self.forget_shift)?;
        self.options().validate(ctx)
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Dla, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(true, device);
        let per_head = || linear(ctx.width, ctx.heads, device);
        Ok(Dla {
            q,
            k,
            v,
            theta: per_head(),
            alpha: per_head(),
            memory: InnerNetwork::new(&self.options(), ctx, device),
            gate: linear(ctx.width, ctx.value_width(), device),
            norm: RmsNorm::new(ctx.value_dim, ctx.norm_eps, device),
            o: linear(ctx.value_width(), ctx.width, device),
            config: self.clone(),
            ctx: ctx.clone(),
        })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let output = ctx.value_dim + 2 * ctx.value_width() * ctx.width;
        let inner = self.options().parameter_count(ctx);
        self.qkv(ctx).parameter_count() + 2 * ctx.heads * ctx.width + inner + output
    }

    fn state_size(&self, ctx: &LayerContext, _tokens: usize) -> StateSize {
        self.options().state_size(ctx, &self.qkv(ctx))
    }

    fn deep_training_bytes(&self, ctx: &LayerContext) -> Option<usize> {
        Some(self.options().training_bytes(ctx))
    }
}

impl Dla {
    fn read_tokens(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(DeepTokens, Option<ConvState>), MemoryError> {
        let rate = Some(DeepGate::Heads(sigmoid(self.theta.forward(x.clone())) * self.config.theta_max));
        let decay = Some(DeepGate::Heads(sigmoid(self.alpha.forward(x.clone()) - self.config.forget_shift)));
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let Heads { q, k, v, conv } = qkv.unit(x, conv, offsets, self.ctx.heads, self.ctx.heads)?;
        Ok((DeepTokens { q, k, v, rate, momentum: None, decay, threshold: None }, conv))
    }
}

deep_layer!(Dla, DlaConfig);
