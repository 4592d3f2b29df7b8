//! Maps that several layers share.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::silu;
use burn::tensor::module::linear as affine;
use burn::tensor::{Device, Tensor};
use fastweight_ops::norm::{l2_normalise, rms_norm};
use fastweight_ops::short_conv::short_convolution;
use fastweight_ops::{Offsets, OpError, Path};

use crate::init::placeholder;
use crate::layers::L2_EPS;
use crate::{ConvState, LayerContext, MemoryError};

/// A linear map `[.., inputs] -> [.., outputs]` without bias, zero until it is initialised.
pub fn linear(inputs: usize, outputs: usize, device: &Device) -> Linear {
    Linear { weight: placeholder([inputs, outputs], device), bias: None }
}

/// RMS normalisation over the last channels, `x / sqrt(mean x^2 + eps) * weight` (Zhang and Sennrich 2019).
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// One factor a channel, `[channels]`.
    pub weight: Param<Tensor<1>>,
    eps: f64,
}

impl RmsNorm {
    /// A normalisation of `channels` channels, weight zero until it is initialised.
    pub fn new(channels: usize, eps: f64, device: &Device) -> Self {
        Self { weight: placeholder([channels], device), eps }
    }

    /// Normalises `x [.., channels]`.
    ///
    /// # Errors
    /// Another number of channels.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        rms_norm(x, self.weight.val(), self.eps as f32)
    }

    /// Normalises each head of `x [B, T, heads * channels]` and multiplies by `silu(gate)` if there is one.
    pub(crate) fn heads(&self, x: Tensor<3>, gate: Option<Tensor<3>>) -> Result<Tensor<3>, OpError> {
        fastweight_ops::norm::gated_rms_norm(x, gate, self.weight.val(), self.eps as f32)
    }
}

/// A linear map without bias that passes through a few channels.
#[derive(Module, Debug)]
pub struct LowRankLinear {
    /// To the few channels, `[inputs, rank]`.
    pub reduce: Linear,
    /// From them, `[rank, outputs]`.
    pub expand: Linear,
}

impl LowRankLinear {
    pub(crate) fn new(inputs: usize, rank: usize, outputs: usize, device: &Device) -> Self {
        Self { reduce: linear(inputs, rank, device), expand: linear(rank, outputs, device) }
    }

    /// Its parameters, without building it.
    pub(crate) fn parameter_count(inputs: usize, rank: usize, outputs: usize) -> usize {
        rank * (inputs + outputs)
    }

    /// `x [.., inputs]` to `[.., outputs]`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.expand.forward(self.reduce.forward(x))
    }
}

/// A linear map followed by a short causal convolution and SiLU, both optional: the way into a memory.
#[derive(Module, Debug)]
pub struct Projection {
    /// `[width, channels]`.
    pub weight: Param<Tensor<2>>,
    /// Filters of the convolution, `[channels, conv width]`, the last tap on the current token.
    pub conv: Option<Param<Tensor<2>>>,
    silu: bool,
}

impl Projection {
    /// A projection to `channels` channels; `conv_width` 0 means no convolution.
    pub(crate) fn new(width: usize, channels: usize, conv_width: usize, silu: bool, device: &Device) -> Self {
        let conv = (conv_width > 0).then(|| placeholder([channels, conv_width], device));
        Self { weight: placeholder([width, channels], device), conv, silu }
    }

    /// Its parameters, without building it.
    pub(crate) fn parameter_count(width: usize, channels: usize, conv_width: usize) -> usize {
        channels * (width + conv_width)
    }

    /// `x [B, T, width]` to `[B, T, channels]`, and the convolution's state `[N, conv width - 1, channels]`.
    ///
    /// # Errors
    /// A state that does not fit.
    pub fn forward(
        &self,
        x: Tensor<3>,
        state: Option<Tensor<3>>,
        offsets: Option<&Offsets>,
    ) -> Result<(Tensor<3>, Option<Tensor<3>>), OpError> {
        let y = affine(x, self.weight.val(), None);
        match &self.conv {
            None if self.silu => Ok((silu(y), None)),
            None => Ok((y, None)),
            Some(conv) => {
                let (y, state) =
                    short_convolution(y, conv.val(), None, state, self.silu, offsets, Path::Auto)?;
                Ok((y, Some(state)))
            }
        }
    }
}

/// The query, key and value projections of a layer.
pub(crate) struct Qkv<'a> {
    pub q: &'a Projection,
    pub k: &'a Projection,
    pub v: &'a Projection,
}

/// What a layer's memory reads.
pub(crate) struct Heads {
    /// `[B, T, heads, K]`
    pub q: Tensor<4>,
    /// `[B, T, kv heads, K]`
    pub k: Tensor<4>,
    /// `[B, T, kv heads, V]`
    pub v: Tensor<4>,
    pub conv: Option<ConvState>,
}

impl Qkv<'_> {
    /// Projects `x [B, T, width]` and cuts it into heads; `kv_heads` of them for keys and values.
    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
        heads: usize,
        kv_heads: usize,
    ) -> Result<Heads, MemoryError> {
        let (q_state, k_state, v_state) = match conv {
            Some(ConvState { q, k, v }) => (Some(q), Some(k), Some(v)),
            None => (None, None, None),
        };
        let (q, q_state) = self.q.forward(x.clone(), q_state, offsets)?;
        let (k, k_state) = self.k.forward(x.clone(), k_state, offsets)?;
        let (v, v_state) = self.v.forward(x, v_state, offsets)?;
        let conv = match (q_state, k_state, v_state) {
            (Some(q), Some(k), Some(v)) => Some(ConvState { q, k, v }),
            _ => None,
        };
        Ok(Heads { q: split_heads(q, heads), k: split_heads(k, kv_heads), v: split_heads(v, kv_heads), conv })
    }

    /// [`Qkv::forward`] with unit queries and keys.
    pub(crate) fn unit(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
        heads: usize,
        kv_heads: usize,
    ) -> Result<Heads, MemoryError> {
        let Heads { q, k, v, conv } = self.forward(x, conv, offsets, heads, kv_heads)?;
        Ok(Heads { q: l2_normalise(q, L2_EPS), k: l2_normalise(k, L2_EPS), v, conv })
    }
}

/// `[B, T, heads * dim]` to `[B, T, heads, dim]`.
pub(crate) fn split_heads(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, time, channels] = x.dims();
    x.reshape([batch, time, heads, channels / heads])
}

/// `[B, T, heads, dim]` to `[B, T, heads * dim]`.
pub(crate) fn merge_heads(x: Tensor<4>) -> Tensor<3> {
    let [batch, time, heads, dim] = x.dims();
    x.reshape([batch, time, heads * dim])
}

/// The one token of `[B, 1, heads, dim]`, `[B, heads, dim]`.
pub(crate) fn token(x: Tensor<4>) -> Tensor<3> {
    x.squeeze_dim(1)
}

/// `[B, heads, dim]` to `[B, 1, heads * dim]`.
pub(crate) fn merge_token(x: Tensor<3>) -> Tensor<3> {
    let [batch, heads, dim] = x.dims();
    x.reshape([batch, 1, heads * dim])
}

/// Checks the input `[B, T, width]`, the offsets and the number of sequences in the state.
pub(crate) fn check_sequence(
    layer: &'static str,
    width: usize,
    x: &Tensor<3>,
    offsets: Option<&Offsets>,
    states: Option<usize>,
) -> Result<(), MemoryError> {
    let [batch, time, channels] = x.dims();
    if channels != width || batch == 0 || time == 0 {
        let expected = format!("[batch, time, {width}] with at least one row and one token");
        return Err(MemoryError::Input { layer, found: vec![batch, time, channels], expected });
    }
    if let Some(offsets) = offsets {
        if batch != 1 {
            return Err(OpError::PackedBatch { operator: layer, batch }.into());
        }
        Offsets::new(offsets.as_slice(), time)?;
    }
    check_states(offsets.map_or(batch, Offsets::documents), states)
}

/// Checks the input `[B, width]` of a step and the number of sequences in the state.
pub(crate) fn check_token(
    layer: &'static str,
    width: usize,
    x: &Tensor<2>,
    states: usize,
) -> Result<(), MemoryError> {
    let [batch, channels] = x.dims();
    if channels != width || batch == 0 {
        let expected = format!("[batch, {width}] with at least one row");
        return Err(MemoryError::Input { layer, found: vec![batch, channels], expected });
    }
    check_states(batch, Some(states))
}

fn check_states(expected: usize, found: Option<usize>) -> Result<(), MemoryError> {
    match found {
        Some(found) if found != expected => Err(MemoryError::StateBatch { expected, found }),
        _ => Ok(()),
    }
}

/// Checks the shape of a state's tensor.
pub(crate) fn check_state<const D: usize>(
    layer: &'static str,
    state: &Tensor<D>,
    expected: [usize; D],
) -> Result<(), MemoryError> {
    if state.dims() == expected {
        return Ok(());
    }
    let (found, expected) = (state.dims().to_vec(), format!("{expected:?}"));
    Err(OpError::Shape { operator: layer, argument: "the state", found, expected }.into())
}

/// Sizes of the three projections of a layer: width, query/key/value channels, convolution width.
pub(crate) struct QkvSizes {
    pub width: usize,
    pub channels: [usize; 3],
    pub conv_width: usize,
}

impl QkvSizes {
    /// As many key and value heads as query heads.
    pub(crate) fn new(ctx: &LayerContext, conv_width: usize) -> Self {
        Self::grouped(ctx, ctx.heads, conv_width)
    }

    /// `kv_heads` key and value heads.
    pub(crate) fn grouped(ctx: &LayerContext, kv_heads: usize, conv_width: usize) -> Self {
        let channels = [ctx.key_width(), kv_heads * ctx.head_dim, kv_heads * ctx.value_dim];
        Self { width: ctx.width, channels, conv_width }
    }

    pub(crate) fn build(&self, silu: bool, device: &Device) -> [Projection; 3] {
        self.channels.map(|channels| Projection::new(self.width, channels, self.conv_width, silu, device))
    }

    pub(crate) fn parameter_count(&self) -> usize {
        self.channels.iter().map(|c| Projection::parameter_count(self.width, *c, self.conv_width)).sum()
    }

    /// Zero convolution states of `batch` sequences, if there is a convolution.
    pub(crate) fn zero_conv(&self, batch: usize, device: &Device) -> Option<ConvState> {
        (self.conv_width > 0).then(|| {
            let [q, k, v] =
                self.channels.map(|channels| Tensor::zeros([batch, self.conv_width - 1, channels], device));
            ConvState { q, k, v }
        })
    }

    /// Elements of one sequence's convolution states.
    pub(crate) fn conv_elements(&self) -> usize {
        self.conv_width.saturating_sub(1) * self.channels.iter().sum::<usize>()
    }
}
