//! The network on tensors: its value, and the gradient of the inner loss in closed form.
//!
//! Everything is a differentiable tensor operation, so that gradients of the outer loss flow through the inner
//! ones. Rows, documents and heads share one leading dimension M.

use burn::tensor::Tensor;

use super::pieces::{activate, normalise, normalise_back};
use super::{DeepMemory, InnerLoss};

/// The network of every row and head.
#[derive(Debug, Clone)]
pub(super) struct Network<'a> {
    pub(super) memory: &'a DeepMemory,
    /// Weight and bias of the LayerNorm, `[M,1,V]` each.
    pub(super) norm: Option<(Tensor<3>, Tensor<3>)>,
    /// Whether fused pieces exist for the tensors.
    pub(super) fused: bool,
}

/// Gradients of `S` tokens for every layer: that of a weight is `h^T diag(factors) d`.
#[derive(Debug, Clone)]
pub(super) struct Gradients {
    /// Inputs of the layers, `[M,S,in]`.
    pub(super) inputs: Vec<Tensor<3>>,
    /// Errors of the layers, `[M,S,out]`.
    pub(super) errors: Vec<Tensor<3>>,
}

impl Gradients {
    /// Errors over `1 + rate |h|^2`, rates `[M,S,1]` or of each layer `[M,S,out]`: each layer's exact proximal step.
    pub(super) fn proximal(mut self, rates: &[Tensor<3>]) -> Self {
        for ((h, d), rate) in self.inputs.iter().zip(&mut self.errors).zip(rates.iter().cycle()) {
            let length = h.clone().square().sum_dim(2) * rate.clone() + 1.0;
            *d = d.clone() / length;
        }
        self
    }
}

impl Network<'_> {
    /// `M(x)` of `x [M,S,K]`, where `layer(i, h)` is the value of layer i for its input.
    pub(super) fn value(&self, x: Tensor<3>, layer: impl Fn(usize, Tensor<3>) -> Tensor<3>) -> Tensor<3> {
        let mut z = layer(0, self.with_bias(x.clone()));
        for i in 1..self.memory.depth {
            let (h, _) = activate(self.memory.activation, z, self.fused);
            z = layer(i, self.with_bias(h));
        }
        let y = match &self.norm {
            None => z,
            Some((weight, bias)) => {
                normalise(z, self.memory.norm_eps, self.fused).0 * weight.clone() + bias.clone()
            }
        };
        if self.memory.residual { y + x } else { y }
    }

    /// The gradient of the inner loss of every token at the same weights.
    pub(super) fn gradients(
        &self,
        weights: &[Tensor<3>],
        k: Tensor<3>,
        v: Tensor<3>,
        threshold: Option<Tensor<3>>,
    ) -> Gradients {
        let mut inputs = vec![self.with_bias(k.clone())];
        let mut slopes = Vec::new();
        let mut z = inputs[0].clone().matmul(weights[0].clone());
        for weight in &weights[1..] {
            let (h, slope) = activate(self.memory.activation, z, self.fused);
            let h = self.with_bias(h);
            z = h.clone().matmul(weight.clone());
            inputs.push(h);
            slopes.push(slope);
        }
        let target = if self.memory.residual { v.clone() - k } else { v.clone() };
        let mut d = match &self.norm {
            None => self.error(z, target, v, threshold),
            Some((weight, bias)) => {
                let (hat, inverse) = normalise(z, self.memory.norm_eps, self.fused);
                let y = hat.clone() * weight.clone() + bias.clone();
                let d = self.error(y, target, v, threshold) * weight.clone();
                normalise_back(d, hat, inverse, self.fused)
            }
        };
        let mut errors = vec![d.clone()];
        for (weight, slope) in weights[1..].iter().zip(slopes).rev() {
            d = d.matmul(self.without_bias(weight).swap_dims(1, 2)) * slope;
            errors.push(d.clone());
        }
        errors.reverse();
        Gradients { inputs, errors }
    }

    /// The inner loss's gradient with respect to `M(k)`, where `y - target = M(k) - v`.
    fn error(
        &self,
        y: Tensor<3>,
        target: Tensor<3>,
        v: Tensor<3>,
        threshold: Option<Tensor<3>>,
    ) -> Tensor<3> {
        match self.memory.loss {
            InnerLoss::Squared => y - target,
            InnerLoss::DotProduct => v.neg(),
            InnerLoss::Huber => {
                let e = y - target;
                let square = e.clone().square().sum_dim(2);
                let outside = match &threshold {
                    Some(threshold) => square.clone().greater(threshold.clone().square()),
                    None => square.clone().greater_elem(1.0),
                };
                // The root's derivative is infinite at zero, which is inside the threshold.
                let norm = square.ones_like().mask_where(outside.clone(), square).sqrt();
                let shrink = match threshold {
                    Some(threshold) => threshold / norm,
                    None => norm.recip(),
                };
                e * shrink.ones_like().mask_where(outside, shrink)
            }
            InnerLoss::Power { p, smooth: true } => {
                let e = y - target;
                let size = (e.clone().square() + 1e-6).powf_scalar((p - 1.0) / 2.0);
                e.mul_scalar(10.0).tanh() * size.mul_scalar(p)
            }
            InnerLoss::Power { p, .. } => {
                let e = y - target;
                if p == 2.0 {
                    return e.mul_scalar(2.0);
                }
                if p == 3.0 {
                    return e.clone() * e.abs().mul_scalar(3.0);
                }
                // The power's derivative may be infinite at zero, where the sign is zero.
                let size = e.clone().abs().clamp_min(f64::from(f32::MIN_POSITIVE)).powf_scalar(p - 1.0);
                e.sign() * size.mul_scalar(p)
            }
        }
    }

    fn with_bias(&self, h: Tensor<3>) -> Tensor<3> {
        if !self.memory.bias {
            return h;
        }
        let [rows, tokens, _] = h.dims();
        let ones = Tensor::ones([rows, tokens, 1], (&h.device(), h.dtype()));
        Tensor::cat(vec![h, ones], 2)
    }

    fn without_bias(&self, weight: &Tensor<3>) -> Tensor<3> {
        let [_, from, _] = weight.dims();
        if self.memory.bias { weight.clone().narrow(1, 0, from - 1) } else { weight.clone() }
    }
}
