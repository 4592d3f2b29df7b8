//! Token shift: every token beside the one before it, as RWKV mixes them.

use burn::tensor::Tensor;
use fastweight_ops::short_conv::short_convolution;
use fastweight_ops::{Offsets, OpError, Path};

/// The token before each token of `x [B, T, width]` (zero, or `last [N, 1, width]`, before the first), and the last
/// tokens `[N, 1, width]`. Restarts at every offset.
///
/// # Errors
/// A state or offsets that do not fit.
pub(crate) fn token_shift(
    x: Tensor<3>,
    last: Option<Tensor<3>>,
    offsets: Option<&Offsets>,
) -> Result<(Tensor<3>, Tensor<3>), OpError> {
    let [_, _, width] = x.dims();
    let options = (&x.device(), x.dtype());
    // A convolution over two tokens that takes the older one.
    let taps = Tensor::cat(vec![Tensor::ones([width, 1], options), Tensor::zeros([width, 1], options)], 1);
    short_convolution(x, taps, None, last, false, offsets, Path::Auto)
}
