//! The short convolution as tensor operations, on any device.

use burn::tensor::Tensor;
use burn::tensor::activation::silu;

use super::ConvSizes;

/// The short convolution of checked arguments; `initial [N, W-1, C]` is always given.
pub fn short_convolution(
    x: Tensor<3>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    initial: Tensor<3>,
    sizes: &ConvSizes,
) -> (Tensor<3>, Tensor<3>) {
    let Some(offsets) = &sizes.offsets else {
        return rows(x, &weight, &bias, initial, sizes.silu);
    };
    let (mut outputs, mut states) = (Vec::new(), Vec::new());
    for (document, range) in offsets.ranges().enumerate() {
        let state = if sizes.width > 1 { initial.clone().narrow(0, document, 1) } else { initial.clone() };
        if range.is_empty() {
            states.push(state);
            continue;
        }
        let (y, state) =
            rows(x.clone().narrow(1, range.start, range.len()), &weight, &bias, state, sizes.silu);
        outputs.push(y);
        states.push(state);
    }
    let y = if outputs.is_empty() { x } else { Tensor::cat(outputs, 1) };
    (y, if sizes.width > 1 { Tensor::cat(states, 0) } else { initial })
}

fn rows(
    x: Tensor<3>,
    weight: &Tensor<2>,
    bias: &Option<Tensor<1>>,
    initial: Tensor<3>,
    activate: bool,
) -> (Tensor<3>, Tensor<3>) {
    let time = x.dims()[1];
    let [channels, width] = weight.dims();
    let state_shape = initial.dims();
    let history = if width > 1 { Tensor::cat(vec![initial, x], 1) } else { x };
    let tap = |w: usize| {
        let factor = weight.clone().narrow(1, w, 1).reshape([1, 1, channels]);
        history.clone().narrow(1, w, time) * factor
    };
    let mut y = tap(0);
    for w in 1..width {
        y = y + tap(w);
    }
    if let Some(bias) = bias {
        y = y + bias.clone().reshape([1, 1, channels]);
    }
    let state = if width > 1 {
        history.narrow(1, time, width - 1)
    } else {
        Tensor::zeros(state_shape, (&y.device(), y.dtype()))
    };
    (if activate { silu(y) } else { y }, state)
}
