//! Short causal depthwise convolution over time, with a carried state.
//!
//! `y_t = act(bias + sum_w weight[w] x_{t - (W-1) + w})` channel by channel; the state is the last `W - 1`
//! inputs, oldest first. It gives each token its close neighbours before a memory reads it (Dao et al. 2022,
//! 2212.14052; Yang et al. 2024, 2412.06464).

pub mod composed;
pub mod cpu;
pub mod reference;

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::check::Arguments;
use crate::fused::apply;
use crate::{Offsets, OpError, Path};

const OPERATOR: &str = "short_convolution";

/// Sizes of one call.
#[derive(Debug, Clone)]
pub struct ConvSizes {
    /// Rows of the batch.
    pub batch: usize,
    /// Tokens in a row.
    pub time: usize,
    /// Channels, each convolved alone.
    pub channels: usize,
    /// Taps of the filter, the current token's included.
    pub width: usize,
    /// Whether SiLU follows.
    pub silu: bool,
    /// Documents packed in the one row, if any.
    pub offsets: Option<Offsets>,
}

/// Convolves `x [B, T, C]` with `weight [C, W]`, the last tap on the current token, then SiLU if asked.
///
/// `initial [N, W-1, C]` holds the inputs before token 0, zeros when absent; `N` is the batch, or the number of
/// documents. Returns `y [B, T, C]` and the last `W - 1` inputs of each sequence, `[N, W-1, C]`.
///
/// # Errors
/// Shapes or offsets that do not fit.
pub fn short_convolution(
    x: Tensor<3>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    initial: Option<Tensor<3>>,
    silu: bool,
    offsets: Option<&Offsets>,
    path: Path,
) -> Result<(Tensor<3>, Tensor<3>), OpError> {
    let [batch, time, channels] = x.dims();
    let [_, width] = weight.dims();
    let arguments = Arguments::new(OPERATOR, &x);
    if batch == 0 || channels == 0 || width == 0 {
        let (argument, found) =
            if width == 0 { ("weight", weight.dims().to_vec()) } else { ("x", x.dims().to_vec()) };
        let expected = "at least one row, one channel and one tap".into();
        return Err(OpError::Shape { operator: OPERATOR, argument, found, expected });
    }
    arguments.tensor("weight", &weight, [channels, width])?;
    if let Some(bias) = &bias {
        arguments.tensor("bias", bias, [channels])?;
    }
    arguments.offsets(offsets, batch, time)?;
    let states = offsets.map_or(batch, Offsets::documents);
    let initial = match initial {
        Some(initial) => {
            arguments.tensor("initial", &initial, [states, width - 1, channels])?;
            initial
        }
        None => Tensor::zeros([states, width - 1, channels], (&x.device(), x.dtype())),
    };
    let fused = path.is_fused(OPERATOR, &x)?;
    let sizes = ConvSizes { batch, time, channels, width, silu, offsets: offsets.cloned() };
    if !fused {
        return Ok(composed::short_convolution(x, weight, bias, initial, &sizes));
    }
    let mut inputs = vec![x.into_dispatch(), weight.into_dispatch(), initial.into_dispatch()];
    inputs.extend(bias.map(Tensor::into_dispatch));
    let [y, state, _] = apply(Arc::new(cpu::FusedShortConv { sizes }), inputs);
    Ok((Tensor::from_dispatch(y), Tensor::from_dispatch(state)))
}
