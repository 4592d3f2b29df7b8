//! Causal softmax attention with rotary positions, grouped key heads and an optional window.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use fastweight_ops::Offsets;
use fastweight_ops::softmax::{SoftmaxOptions, softmax_attention};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Layer, LayerConfig, STATE_ELEMENT, rotate_pair, step_as_sequence};
use crate::context::{MOST_WINDOW, setting_error, validate_conv};
use crate::projection::{Projection, Qkv, QkvSizes, check_sequence, linear, merge_heads};
use crate::{KvState, LayerContext, MemoryError, State, StateSize};

const NAME: &str = SoftmaxAttentionConfig::NAME;

/// Configuration of [`SoftmaxAttention`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SoftmaxAttentionConfig {
    /// Tokens a token sees, itself included; all earlier ones when absent.
    #[schemars(range(min = 1, max = MOST_WINDOW))]
    pub window: Option<usize>,
    /// Key and value heads, a divisor of the query heads; as many as query heads when absent.
    #[schemars(range(min = 1))]
    pub kv_heads: Option<usize>,
    /// Rotary positions on queries and keys.
    pub rope: bool,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Width of the short convolution on q, k and v; 0 for none.
    #[schemars(range(max = crate::context::MOST_CONV_WIDTH))]
    pub conv_width: usize,
}

impl Default for SoftmaxAttentionConfig {
    fn default() -> Self {
        Self { window: None, kv_heads: None, rope: true, rope_base: 10_000.0, conv_width: 0 }
    }
}

/// Softmax attention (Vaswani et al. 2017), `o_t = sum_i softmax_i(q_t . k_i / sqrt K) v_i`.
#[derive(Module, Debug)]
pub struct SoftmaxAttention {
    /// Queries.
    pub q: Projection,
    /// Keys.
    pub k: Projection,
    /// Values.
    pub v: Projection,
    /// Output map.
    pub o: Linear,
    #[module(skip)]
    config: SoftmaxAttentionConfig,
    #[module(skip)]
    ctx: LayerContext,
}

impl SoftmaxAttentionConfig {
    fn kv_heads(&self, ctx: &LayerContext) -> usize {
        self.kv_heads.unwrap_or(ctx.heads)
    }

    /// Entries that the next token sees beside itself, where there is a window.
    fn keep(&self) -> Option<usize> {
        self.window.map(|window| window.saturating_sub(1))
    }

    fn qkv(&self, ctx: &LayerContext) -> QkvSizes {
        QkvSizes::grouped(ctx, self.kv_heads(ctx), self.conv_width)
    }
}

impl LayerConfig for SoftmaxAttentionConfig {
    const NAME: &'static str = "softmax_attention";
    type Layer = SoftmaxAttention;

    fn conv_width(&self) -> usize {
        self.conv_width
    }

    fn state_grows(&self) -> bool {
        self.window.is_none()
    }

    fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        if self.rope {
            ctx.validate_rotary(NAME, self.rope_base)?
        } else {
            ctx.validate(NAME)?
        }
        validate_conv(NAME, self.conv_width)?;
        if self.window == Some(0) {
            return Err(setting_error(
                NAME,
                "window",
                0,
                "at least 1 (a token sees itself), or leave it out",
            ));
        }
        if let Some(window) = self.window.filter(|window| *window > MOST_WINDOW) {
            let expected = format!("at most {MOST_WINDOW}, or leave it out to see all tokens");
            return Err(setting_error(NAME, "window", window, expected));
        }
        let kv_heads = self.kv_heads(ctx);
        if kv_heads == 0 || !ctx.heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of heads = {}", ctx.heads);
            return Err(setting_error(NAME, "kv_heads", kv_heads, expected));
        }
        Ok(())
    }

    fn build(&self, ctx: &LayerContext, device: &Device) -> Result<SoftmaxAttention, MemoryError> {
        self.validate(ctx)?;
        let [q, k, v] = self.qkv(ctx).build(false, device);
        let o = linear(ctx.value_width(), ctx.width, device);
        Ok(SoftmaxAttention { q, k, v, o, config: self.clone(), ctx: ctx.clone() })
    }

    fn parameter_count(&self, ctx: &LayerContext) -> usize {
        self.qkv(ctx).parameter_count() + ctx.value_width() * ctx.width
    }

    fn state_size(&self, ctx: &LayerContext, tokens: usize) -> StateSize {
        let held = self.keep().map_or(tokens, |keep| tokens.min(keep));
        let entry = self.kv_heads(ctx) * (ctx.head_dim + ctx.value_dim);
        StateSize {
            fixed: self.qkv(ctx).conv_elements() * STATE_ELEMENT,
            growing: held * entry * STATE_ELEMENT,
        }
    }
}

impl Layer for SoftmaxAttention {
    type State = KvState;

    fn forward(
        &self,
        x: Tensor<3>,
        state: Option<KvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, KvState), MemoryError> {
        check_sequence(NAME, self.ctx.width, &x, offsets, state.as_ref().map(State::batch))?;
        let sequences = offsets.map_or(x.dims()[0], Offsets::documents);
        let mut state = state.unwrap_or_else(|| KvState::empty(sequences, self.config.keep(), None));
        let qkv = Qkv { q: &self.q, k: &self.k, v: &self.v };
        let kv_heads = self.config.kv_heads(&self.ctx);
        let heads = qkv.forward(x, state.conv.take(), offsets, self.ctx.heads, kv_heads)?;
        let (q, k) = if self.config.rope {
            rotate_pair(heads.q, heads.k, &state.positions, offsets, self.config.rope_base)?
        } else {
            (heads.q, heads.k)
        };
        let options = SoftmaxOptions {
            window: self.config.window,
            offsets: offsets.cloned(),
            ..SoftmaxOptions::default()
        };
        let o = softmax_attention(q, k.clone(), heads.v.clone(), state.cache(), &options)?;
        let state = state.append(k, heads.v, offsets, heads.conv)?;
        Ok((self.o.forward(merge_heads(o)), state))
    }

    fn step(&self, x: Tensor<2>, state: KvState) -> Result<(Tensor<2>, KvState), MemoryError> {
        step_as_sequence(self, NAME, self.ctx.width, x, state)
    }

    fn zero_state(&self, batch: usize, device: &Device) -> KvState {
        KvState::empty(batch, self.config.keep(), self.config.qkv(&self.ctx).zero_conv(batch, device))
    }
}
