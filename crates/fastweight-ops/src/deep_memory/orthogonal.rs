//! Newton-Schulz on the momentum: what the weights take up is nearly orthogonal (Muon, Atlas 2505.23735).
//!
//! The step is not linear in the momentum, so there is no dual form: the matrices of a chunk's tokens are formed,
//! and memory is a weight for each token.

use burn::tensor::Tensor;

use super::factors::Tokenwise;
use super::network::Network;
use super::pieces::blend;

/// Coefficients of the quintic step, and the steps taken.
pub(super) const QUINTIC: [f64; 3] = [3.4445, -4.7750, 2.0315];
pub(super) const STEPS: usize = 5;
/// Added to the squared norm that a matrix is divided by.
pub(super) const TINY: f64 = 1e-14;

/// `X <- a X + (b A + c A^2) X`, `A = X X^T`, five times from `x [N,in,out]` over its Frobenius norm.
fn newton_schulz(x: Tensor<3>) -> Tensor<3> {
    let [_, from, to] = x.dims();
    let tall = from > to;
    let x = if tall { x.swap_dims(1, 2) } else { x };
    let norm = (x.clone().square().sum_dim(2).sum_dim(1) + TINY).sqrt();
    let mut x = x / norm;
    let [a, b, c] = QUINTIC;
    for _ in 0..STEPS {
        let square = x.clone().matmul(x.clone().swap_dims(1, 2));
        let inner = square.clone().mul_scalar(b) + square.clone().matmul(square).mul_scalar(c);
        x = x.clone().mul_scalar(a) + inner.matmul(x);
    }
    if tall { x.swap_dims(1, 2) } else { x }
}

/// The weights of one layer after each of a chunk's tokens, `[M,C,in,out]`, and its momentum after the last.
///
/// `base` and `momentum` are those before the first token; `h` and `d` the layer's inputs and errors `[M,S,*]`.
pub(super) fn weights(
    network: &Network,
    factors: &Tokenwise,
    keep: Option<Tensor<3>>,
    base: &Tensor<3>,
    momentum: Option<&Tensor<3>>,
    h: &Tensor<3>,
    d: &Tensor<3>,
) -> (Tensor<4>, Tensor<3>) {
    let [rows, from, to] = base.dims();
    let [_, tokens, sources] = factors.gather.dims();
    let weighed = h.clone().unsqueeze_dim::<4>(1) * factors.gather.clone().unsqueeze_dim::<4>(3);
    let weighed = weighed.reshape([rows * tokens, sources, from]);
    let errors = d.clone().unsqueeze_dim::<4>(1).expand([rows, tokens, sources, to]);
    let errors = errors.reshape([rows * tokens, sources, to]);
    let mut p = weighed.swap_dims(1, 2).matmul(errors).neg();
    if let (Some(momentum), Some(hold)) = (momentum, &factors.hold) {
        let held = momentum.clone().unsqueeze_dim::<4>(1) * hold.clone().unsqueeze_dim::<4>(3);
        p = p + held.reshape([rows * tokens, from, to]);
    }
    let last = p.clone().reshape([rows, tokens, from * to]).narrow(1, tokens - 1, 1);
    let steps = newton_schulz(p).reshape([rows, tokens, from * to]);
    let kept = base.clone().reshape([rows, 1, from * to]).expand([rows, tokens, from * to]);
    let kept = blend(kept, keep, None, network.fused);
    let all = kept + factors.retained.clone().matmul(steps);
    (all.reshape([rows, tokens, from, to]), last.reshape([rows, from, to]))
}

/// `h_t W_t` for every token, `[M,C,out]`.
pub(super) fn apply_each(h: Tensor<3>, weights: Tensor<4>) -> Tensor<3> {
    let [rows, tokens, from, to] = weights.dims();
    let h = h.reshape([rows * tokens, 1, from]);
    h.matmul(weights.reshape([rows * tokens, from, to])).reshape([rows, tokens, to])
}
