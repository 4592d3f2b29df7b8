//! What layers around one matrix memory share: they say what they read and which operator they run.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fastweight_ops::{Offsets, OpError, SequenceOptions};

use super::{sequence_options, zero_matrix};
use crate::projection::{Heads, QkvSizes, check_sequence, check_token, merge_heads, merge_token, token};
use crate::{ConvState, LayerContext, MatrixState, MemoryError, State};

/// A layer around one matrix memory; `matrix_layer!` makes it a [`Layer`](super::Layer).
pub(crate) trait MatrixLayer: Module {
    /// The layer's name in recipes.
    const NAME: &'static str;
    /// Factor on the reading, `1 / sqrt(K)` when absent.
    const SCALE: Option<f32> = None;
    /// What the memory reads of every token besides q, k and v: tensors `[B, T, ..]`.
    type Gates;

    fn ctx(&self) -> &LayerContext;
    fn qkv_sizes(&self) -> QkvSizes;

    /// What the memory reads of `x [B, T, width]`.
    fn read(
        &self,
        x: Tensor<3>,
        conv: Option<ConvState>,
        offsets: Option<&Offsets>,
    ) -> Result<(Heads, Self::Gates), MemoryError>;

    /// The operator over a sequence: `[q, k, v]` to readings `[B, T, H, V]` and the memory after it.
    fn run(
        &self,
        qkv: [Tensor<4>; 3],
        gates: Self::Gates,
        memory: Option<Tensor<4>>,
        options: &SequenceOptions,
    ) -> Result<(Tensor<4>, Tensor<4>), OpError>;

    /// The operator over one token: `[q, k, v]` to readings `[B, H, V]` and the memory after it; gates have T = 1.
    fn run_token(
        &self,
        qkv: [Tensor<3>; 3],
        gates: Self::Gates,
        memory: Tensor<4>,
    ) -> Result<(Tensor<3>, Tensor<4>), OpError>;

    /// Readings of all heads `[B, T, H * V]` and the layer's input to its output `[B, T, width]`.
    fn output(&self, o: Tensor<3>, x: Tensor<3>) -> Result<Tensor<3>, MemoryError>;
}

pub(super) fn forward<L: MatrixLayer>(
    layer: &L,
    x: Tensor<3>,
    state: Option<MatrixState>,
    offsets: Option<&Offsets>,
) -> Result<(Tensor<3>, MatrixState), MemoryError> {
    check_sequence(L::NAME, layer.ctx().width, &x, offsets, state.as_ref().map(State::batch))?;
    let (memory, conv) = state.map_or((None, None), MatrixState::into_parts);
    let (Heads { q, k, v, conv }, gates) = layer.read(x.clone(), conv, offsets)?;
    let (o, memory) = layer.run([q, k, v], gates, memory, &sequence_options(offsets, L::SCALE))?;
    Ok((layer.output(merge_heads(o), x)?, MatrixState { memory, conv }))
}

pub(super) fn step<L: MatrixLayer>(
    layer: &L,
    x: Tensor<2>,
    state: MatrixState,
) -> Result<(Tensor<2>, MatrixState), MemoryError> {
    check_token(L::NAME, layer.ctx().width, &x, state.batch())?;
    let x = x.unsqueeze_dim::<3>(1);
    let (Heads { q, k, v, conv }, gates) = layer.read(x.clone(), state.conv, None)?;
    let (o, memory) = layer.run_token([q, k, v].map(token), gates, state.memory)?;
    Ok((layer.output(merge_token(o), x)?.squeeze_dim(1), MatrixState { memory, conv }))
}

pub(super) fn zero_state<L: MatrixLayer>(layer: &L, batch: usize, device: &Device) -> MatrixState {
    zero_matrix(layer.ctx(), &layer.qkv_sizes(), batch, device)
}

/// Implements [`Layer`](super::Layer) for a [`MatrixLayer`].
macro_rules! matrix_layer {
    ($layer:ty) => {
        impl $crate::layers::Layer for $layer {
            type State = $crate::MatrixState;

            fn forward(
                &self,
                x: burn::tensor::Tensor<3>,
                state: Option<$crate::MatrixState>,
                offsets: Option<&fastweight_ops::Offsets>,
            ) -> Result<(burn::tensor::Tensor<3>, $crate::MatrixState), $crate::MemoryError> {
                $crate::layers::matrix::forward(self, x, state, offsets)
            }

            fn step(
                &self,
                x: burn::tensor::Tensor<2>,
                state: $crate::MatrixState,
            ) -> Result<(burn::tensor::Tensor<2>, $crate::MatrixState), $crate::MemoryError> {
                $crate::layers::matrix::step(self, x, state)
            }

            fn zero_state(&self, batch: usize, device: &burn::tensor::Device) -> $crate::MatrixState {
                $crate::layers::matrix::zero_state(self, batch, device)
            }
        }
    };
}
pub(super) use matrix_layer;
