//! What layers around one deep memory share: its trained start, its checks, and the way through the layer.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use fastweight_ops::deep_memory::{
    DeepGate, DeepMemory, DeepNorm, DeepState, DeepTokens, RateOf, deep_memory,
};
use fastweight_ops::{Offsets, OpError, Path};

use super::STATE_ELEMENT;
use crate::context::{MOST_WINDOW, setting_error, validate_conv, validate_rate};
use crate::init::placeholder;
use crate::projection::{QkvSizes, check_sequence, merge_heads, split_heads};
use crate::{ConvState, DeepMemoryState, LayerContext, MemoryError, State, StateSize};

/// Most hidden channels of an inner network for each key channel.
const MOST_EXPANSION: usize = 64;

/// Added to the variance in the LayerNorm of memories that forget. What they read before it may fade, and the gradient through
/// the norm grows by the inverse of what is left, once a chunk and layer: with 1e-6 three of ten trainings at depth 4 met a
/// gradient beyond float32 within 1,000 steps, with 1e-4 none of fourteen.
pub(super) const FADING_NORM_EPS: f64 = 1e-4;

/// Options of a deep memory, and what its rates are called.
pub(crate) struct DeepOptions {
    pub layer: &'static str,
    pub conv_width: usize,
    pub memory: DeepMemory,
    /// Whether writes gather momentum.
    pub momentum: bool,
    /// The name of the option that is the chunk.
    pub chunk: &'static str,
    /// The option that is the largest rate.
    pub rate: (&'static str, f32),
    /// Whether every output of the memory's weights has gates of its own.
    pub channel_gates: bool,
}

impl DeepOptions {
    /// Checks the inner network alone: what its size is computed from.
    pub(crate) fn validate_memory(&self) -> Result<(), MemoryError> {
        let DeepMemory { depth, expansion, chunk, .. } = self.memory;
        let settings = [
            ("depth", depth, 4, "linear layers; 2 is usual"),
            ("expansion", expansion, MOST_EXPANSION, "hidden channels a key channel; 4 is usual"),
            (self.chunk, chunk, MOST_WINDOW, "tokens; 16 is usual"),
        ];
        for (setting, value, most, what) in settings {
            if value == 0 || value > most {
                let expected = format!("1 to {most} {what}");
                return Err(setting_error(self.layer, setting, value, expected));
            }
        }
        Ok(())
    }

    pub(super) fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        ctx.validate(self.layer)?;
        validate_conv(self.layer, self.conv_width)?;
        if ctx.value_dim != ctx.head_dim {
            let expected = format!("head_dim = {}: the inner model adds to its input", ctx.head_dim);
            return Err(setting_error(self.layer, "value_dim", ctx.value_dim, expected));
        }
        self.validate_memory()?;
        let (setting, rate) = self.rate;
        validate_rate(self.layer, setting, rate, "0.1")
    }

    /// Whether the state has a third set of weights: momentum, or the gradients gathered in a mini-batch.
    fn moves(&self) -> bool {
        self.momentum || self.memory.rate == RateOf::Reading
    }

    /// Numbers of a gate, all heads together.
    pub(super) fn gate_width(&self, ctx: &LayerContext) -> usize {
        let outputs = self.memory.output_count(ctx.head_dim, ctx.value_dim);
        ctx.heads * if self.channel_gates { outputs } else { 1 }
    }

    /// Parameters of the trained start and the LayerNorm.
    pub(super) fn parameter_count(&self, ctx: &LayerContext) -> usize {
        let head = self.memory.weight_count(ctx.head_dim, ctx.value_dim) + 2 * ctx.value_dim;
        ctx.heads * head
    }

    pub(super) fn state_size(&self, ctx: &LayerContext, qkv: &QkvSizes) -> StateSize {
        let weights = ctx.heads * self.memory.weight_count(ctx.head_dim, ctx.value_dim);
        let inner = weights * (2 + usize::from(self.moves()));
        StateSize { fixed: (inner + qkv.conv_elements()) * STATE_ELEMENT, growing: 0 }
    }

    /// Bytes that all heads keep of a token for the backward pass.
    pub(super) fn training_bytes(&self, ctx: &LayerContext) -> usize {
        let (key, value) = (ctx.head_dim, ctx.value_dim);
        let bytes = match self.channel_gates {
            true => self.memory.training_bytes_with_output_gates(key, value, self.moves()),
            false => self.memory.training_bytes(key, value, self.moves()),
        };
        ctx.heads * bytes
    }
}

/// Checks what is taken from the forgetting before its sigmoid.
pub(super) fn validate_shift(layer: &'static str, shift: f32) -> Result<(), MemoryError> {
    if shift.is_finite() {
        return Ok(());
    }
    Err(setting_error(layer, "forget_shift", shift, "a number, such as 4"))
}

/// A gate of the memory from its numbers `[B, T, gate_width]`: one a head, or one an output of the memory's weights.
pub(super) fn gate(x: Tensor<3>, heads: usize) -> DeepGate {
    match x.dims()[2] == heads {
        true => DeepGate::Heads(x),
        false => DeepGate::Outputs(split_heads(x, heads)),
    }
}

/// `[H, in, out]` of weights `[N, H, in, out]`.
pub(super) fn layer_shape(weight: &Tensor<4>) -> [usize; 3] {
    let [_, heads, from, to] = weight.dims();
    [heads, from, to]
}

/// Checks that a state's weights `[N, H, in, out]` are those of a memory with layers `[H, in, out]`.
pub(super) fn check_weights(weights: &[Tensor<4>], layers: &[[usize; 3]]) -> Result<(), OpError> {
    let found: Vec<[usize; 3]> = weights.iter().map(layer_shape).collect();
    if found == layers {
        return Ok(());
    }
    let expected = format!("[heads, in, out] of the layers one after the other: {layers:?}");
    let found = found.concat();
    Err(OpError::Shape { operator: "deep_memory", argument: "state", found, expected })
}

/// A linear layer of every head's inner network before the first token.
#[derive(Module, Debug)]
pub struct InnerLayer {
    /// Weights `[H, in, out]`.
    pub start: Param<Tensor<3>>,
    /// Bias `[H, out]`, if the network has biases.
    pub start_bias: Option<Param<Tensor<2>>>,
}

/// The inner network `x + LN(f(x))` of every head: its weights before the first token, and its LayerNorm.
#[derive(Module, Debug)]
pub struct InnerNetwork {
    /// The linear layers of f, from the key on.
    pub layers: Vec<InnerLayer>,
    /// Scale of the LayerNorm, `[H, V]`.
    pub ln_weight: Param<Tensor<2>>,
    /// Shift of the LayerNorm, `[H, V]`.
    pub ln_bias: Param<Tensor<2>>,
    #[module(skip)]
    memory: DeepMemory,
    moves: bool,
}

impl InnerNetwork {
    pub(super) fn new(options: &DeepOptions, ctx: &LayerContext, device: &Device) -> Self {
        let LayerContext { heads, head_dim, value_dim, .. } = *ctx;
        let bias = options.memory.bias;
        let layer = |[rows, out]: [usize; 2]| InnerLayer {
            start: placeholder([heads, rows - usize::from(bias), out], device),
            start_bias: bias.then(|| placeholder([heads, out], device)),
        };
        Self {
            layers: options.memory.weight_shapes(head_dim, value_dim).into_iter().map(layer).collect(),
            ln_weight: placeholder([heads, value_dim], device),
            ln_bias: placeholder([heads, value_dim], device),
            memory: options.memory.clone(),
            moves: options.moves(),
        }
    }

    /// What the network does with a token.
    pub fn memory(&self) -> &DeepMemory {
        &self.memory
    }

    /// The LayerNorm as the operator takes it.
    pub(super) fn norm(&self) -> DeepNorm {
        DeepNorm { weight: self.ln_weight.val(), bias: self.ln_bias.val() }
    }

    /// Weights before the first token, `[H, in, out]` for each layer; a bias is the last row.
    fn start(&self) -> Vec<Tensor<3>> {
        let layer = |layer: &InnerLayer| match &layer.start_bias {
            None => layer.start.val(),
            Some(bias) => Tensor::cat(vec![layer.start.val(), bias.val().unsqueeze_dim(1)], 1),
        };
        self.layers.iter().map(layer).collect()
    }

    /// Adds the trained start `sign` times to weights `[N, H, in, out]`.
    ///
    /// # Errors
    /// Weights of another network.
    pub(super) fn shifted(&self, weights: Vec<Tensor<4>>, sign: f64) -> Result<Vec<Tensor<4>>, OpError> {
        let start = self.start();
        check_weights(&weights, &start.iter().map(Tensor::dims).collect::<Vec<_>>())?;
        let start = start.into_iter().map(|start| start.unsqueeze_dim::<4>(0) * sign);
        Ok(weights.into_iter().zip(start).map(|(weight, start)| weight + start).collect())
    }

    fn shift(&self, state: DeepState, sign: f64) -> Result<DeepState, OpError> {
        let start = self.shifted(state.start, sign)?;
        Ok(DeepState { start, current: self.shifted(state.current, sign)?, ..state })
    }

    /// Reads and writes a sequence; `change` is the state less the trained start.
    fn run(
        &self,
        tokens: DeepTokens,
        change: DeepState,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<4>, DeepState), OpError> {
        let state = self.shift(change, 1.0)?;
        let (o, end) = deep_memory(&self.memory, tokens, Some(&self.norm()), state, offsets, Path::Auto)?;
        Ok((o, self.shift(end, -1.0)?))
    }

    /// No change yet, in any of `batch` rows.
    fn zero_change(&self, batch: usize, device: &Device) -> DeepState {
        let zeros = |layer: Tensor<3>| {
            let [heads, from, to] = layer.dims();
            Tensor::zeros([batch, heads, from, to], device)
        };
        let state = DeepState::new(self.start().into_iter().map(zeros).collect());
        if self.moves { state.with_momentum() } else { state }
    }
}

/// A layer around one deep memory; `deep_layer!` makes it a [`Layer`](super::Layer).
pub(crate) trait DeepLayer: Module {
    /// The layer's name in recipes.
    const NAME: &'static str;

    fn ctx(&self) -> &LayerContext;
    fn qkv_sizes(&self) -> QkvSizes;
    fn network(&self) -> &InnerNetwork;

    /// What the memory reads of `x [B, T, width]`.
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(DeepTokens, Option<ConvState>), MemoryError>;

    /// Readings of all heads `[B, T, H * V]` and the layer's input to its output `[B, T, width]`.
    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError>;
}

pub(super) fn forward<L: DeepLayer>(
    layer: &L,
    x: Tensor<3>,
    state: Option<DeepMemoryState>,
    offsets: Option<&Offsets>,
) -> Result<(Tensor<3>, DeepMemoryState), MemoryError> {
    check_sequence(L::NAME, layer.ctx().width, &x, offsets, state.as_ref().map(State::batch))?;
    let sequences = offsets.map_or(x.dims()[0], Offsets::documents);
    let DeepMemoryState { change, conv } = state.unwrap_or_else(|| zero_state(layer, sequences, &x.device()));
    let (tokens, conv) = layer.read(x.clone(), conv, offsets)?;
    let (o, change) = layer.network().run(tokens, change, offsets)?;
    Ok((layer.output(merge_heads(o), x)?, DeepMemoryState { change, conv }))
}

pub(super) fn zero_state<L: DeepLayer>(layer: &L, batch: usize, device: &Device) -> DeepMemoryState {
    DeepMemoryState {
        change: layer.network().zero_change(batch, device),
        conv: layer.qkv_sizes().zero_conv(batch, device),
    }
}

/// Implements [`DeepLayer`] and [`Layer`](super::Layer) for a layer with `config`, `ctx`, `memory`, `gate`, `norm` and `o` that has a
/// `read_tokens` of its own, as [`DeepLayer::read`].
macro_rules! deep_layer {
    ($layer:ty, $config:ty) => {
        impl $crate::layers::deep::DeepLayer for $layer {
            const NAME: &'static str = <$config as $crate::layers::LayerConfig>::NAME;

            fn ctx(&self) -> &$crate::LayerContext {
                &self.ctx
            }

            fn qkv_sizes(&self) -> $crate::projection::QkvSizes {
                self.config.qkv(&self.ctx)
            }

            fn network(&self) -> &$crate::layers::InnerNetwork {
                &self.memory
            }

            fn read(
                &self,
                x: burn::tensor::Tensor<3>,
                conv: Option<$crate::ConvState>,
                offsets: Option<&fastweight_ops::Offsets>,
            ) -> Result<
                (fastweight_ops::deep_memory::DeepTokens, Option<$crate::ConvState>),
                $crate::MemoryError,
            > {
                self.read_tokens(x, conv, offsets)
            }

            fn output(
                &self,
                o: burn::tensor::Tensor<3>,
                x: burn::tensor::Tensor<3>,
            ) -> Result<burn::tensor::Tensor<3>, $crate::MemoryError> {
                Ok(self.o.forward(self.norm.heads(o, Some(self.gate.forward(x)))?))
            }
        }

        impl $crate::layers::Layer for $layer {
            type State = $crate::DeepMemoryState;

            fn forward(
                &self,
                x: burn::tensor::Tensor<3>,
                state: Option<$crate::DeepMemoryState>,
                offsets: Option<&fastweight_ops::Offsets>,
            ) -> Result<(burn::tensor::Tensor<3>, $crate::DeepMemoryState), $crate::MemoryError> {
                $crate::layers::deep::forward(self, x, state, offsets)
            }

            fn step(
                &self,
                x: burn::tensor::Tensor<2>,
                state: $crate::DeepMemoryState,
            ) -> Result<(burn::tensor::Tensor<2>, $crate::DeepMemoryState), $crate::MemoryError> {
                let name = <Self as $crate::layers::deep::DeepLayer>::NAME;
                $crate::layers::step_as_sequence(self, name, self.ctx.width, x, state)
            }

            fn zero_state(&self, batch: usize, device: &burn::tensor::Device) -> $crate::DeepMemoryState {
                $crate::layers::deep::zero_state(self, batch, device)
            }
        }
    };
}
pub(super) use deep_layer;
