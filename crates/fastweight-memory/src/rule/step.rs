//! The pieces of a rule's step as tensor operations. Weights are `[B, H, rows, cols]`, rows of tokens `[B, H, n, dim]`.

use burn::tensor::Tensor;
use burn::tensor::activation::{log_softmax, sigmoid, silu};

use super::reference::{NEWTON_SCHULZ, NEWTON_SCHULZ_EPS};
use super::rows::{Axis, Pairs, Rows};
use super::{Bias, Memory, Retention, Rule};

/// Floor of an entry of `A / max |A|` under the root of the mirror map, which has an infinite slope at zero.
const MIRROR_FLOOR: f64 = 1e-12;
/// Floor of `max |A|`, so that a memory at zero stays at zero.
const LARGEST_FLOOR: f64 = 1e-30;

fn transpose(x: Tensor<4>) -> Tensor<4> {
    x.swap_dims(2, 3)
}

/// `M(x)` for rows `x [B, H, n, K]`.
pub(super) fn read(rule: &Rule, weights: &[Tensor<4>], x: Tensor<4>) -> Tensor<4> {
    match rule.memory {
        Memory::Vector => x * transpose(weights[0].clone()),
        Memory::Matrix => x.matmul(weights[0].clone()),
        Memory::Mlp => x.clone() + silu(x.matmul(weights[0].clone())).matmul(weights[1].clone()),
    }
}

/// The gradient of the loss by the reading; `threshold` is that of the Huber loss, the rule's when absent.
fn slope(rule: &Rule, y: Tensor<4>, v: Tensor<4>, threshold: Option<&Tensor<4>>) -> Tensor<4> {
    let e = match rule.bias {
        Bias::DotProduct => return v.neg(),
        _ => y - v,
    };
    match rule.bias {
        Bias::Huber => {
            let square = e.clone().square().sum_dim(3);
            match threshold {
                Some(threshold) => {
                    let bound = square.max_pair(threshold.clone().square());
                    e * (threshold.clone() / bound.sqrt())
                }
                None => {
                    let bound = square.clamp_min(rule.huber_delta * rule.huber_delta);
                    e * bound.sqrt().recip().mul_scalar(rule.huber_delta)
                }
            }
        }
        Bias::Lp if rule.smooth => {
            let size = e.clone().square().add_scalar(1e-6).powf_scalar(0.5 * (rule.p - 1.0));
            e.mul_scalar(10.0).tanh() * size.mul_scalar(rule.p)
        }
        Bias::Lp => e.clone().sign() * e.abs().powf_scalar(rule.p - 1.0).mul_scalar(rule.p),
        Bias::DotProduct | Bias::Squared => e,
    }
}

/// Gradients of the pairs' losses at one memory, each the outer product of a left and a right row, two a weight.
pub(super) struct Factors(Vec<(Tensor<4>, Tensor<4>)>);

impl Factors {
    pub(super) fn new(rule: &Rule, weights: &[Tensor<4>], pairs: &Pairs) -> Self {
        let (k, v, threshold) = (pairs.k.clone(), pairs.v.clone(), pairs.threshold.as_ref());
        match rule.memory {
            Memory::Mlp => {
                let inputs = k.clone().matmul(weights[0].clone());
                let s = sigmoid(inputs.clone());
                let hidden = inputs.clone() * s.clone();
                let y = k.clone() + hidden.clone().matmul(weights[1].clone());
                let g = slope(rule, y, v, threshold);
                let back = g.clone().matmul(transpose(weights[1].clone()));
                let bend = s.clone() * (inputs * (s.neg() + 1.0) + 1.0);
                Self(vec![(k, back * bend), (hidden, g)])
            }
            _ if rule.bias == Bias::DotProduct => Self(vec![(k, v.neg())]),
            _ => {
                let y = read(rule, weights, k.clone());
                Self(vec![(k, slope(rule, y, v, threshold))])
            }
        }
    }

    /// The left and right rows `[B, H, S, rows]` and `[B, H, S, cols]` of every weight.
    pub(super) fn pairs(self, rule: &Rule) -> Vec<(Tensor<4>, Tensor<4>)> {
        match rule.memory {
            // A vector's gradient is the product of both, in a column.
            Memory::Vector => {
                let column = |(left, right): (Tensor<4>, Tensor<4>)| {
                    let ones = right.clone().narrow(3, 0, 1).ones_like();
                    (left * right, ones)
                };
                self.0.into_iter().map(column).collect()
            }
            _ => self.0,
        }
    }

    /// The sum over pairs `first..first + count` of their gradients times `rates`, one a weight, `[B, H, count, 1]` or
    /// `[B, H, count, cols]`.
    pub(super) fn gradient(&self, rule: &Rule, first: usize, rates: &[Tensor<4>]) -> Vec<Tensor<4>> {
        let sum = |((left, right), rate): (&(Tensor<4>, Tensor<4>), &Tensor<4>)| {
            let count = rate.dims()[2];
            let (left, right) = (left.clone().narrow(2, first, count), right.clone().narrow(2, first, count));
            match rule.memory {
                Memory::Vector => transpose((left * right * rate.clone()).sum_dim(2)),
                _ => transpose(left).matmul(right * rate.clone()),
            }
        };
        self.0.iter().zip(rates).map(sum).collect()
    }
}

/// The anchor of the retention in the space where it adds gradients: `memory`, decayed by one token.
pub(super) fn anchor(rule: &Rule, memory: &[Tensor<4>], token: &Rows) -> Vec<Tensor<4>> {
    let decayed = |(index, layer): (usize, &Tensor<4>)| {
        let layer = layer.clone();
        let kept = match &token.decays[index] {
            None => layer.clone(),
            Some(decay) if decay.axis == Axis::Rows => transpose(decay.factors.clone()) * layer.clone(),
            Some(decay) => decay.factors.clone() * layer.clone(),
        };
        let rate = &token.rates[index];
        match (rule.retention, rule.memory) {
            (Retention::Directed, Memory::Vector) => {
                kept - layer * transpose(token.k.clone().square() * rate.clone())
            }
            (Retention::Directed, _) => {
                let reading = token.k.clone().matmul(layer);
                kept - transpose(token.k.clone() * rate.clone()).matmul(reading)
            }
            _ => kept,
        }
    };
    memory.iter().enumerate().map(decayed).collect()
}

/// The retention after the learner's direction was added to the anchor.
pub(super) fn retain(rule: &Rule, sum: Tensor<4>, rate: &Tensor<4>) -> Tensor<4> {
    match rule.retention {
        Retention::Kl => log_softmax(sum, 2),
        Retention::ElasticNet => soft_threshold(sum, rate.clone().mul_scalar(rule.l1)),
        _ => sum,
    }
}

fn soft_threshold(x: Tensor<4>, by: Tensor<4>) -> Tensor<4> {
    x.clone().sign() * (x.abs() - by).clamp_min(0.0)
}

/// The weights that are read, from the space where the retention adds gradients.
pub(super) fn primal(rule: &Rule, memory: &[Tensor<4>]) -> Vec<Tensor<4>> {
    let map = |layer: &Tensor<4>| match rule.retention {
        Retention::Kl => layer.clone().exp(),
        Retention::Lq => lq(rule, layer.clone()),
        _ => layer.clone(),
    };
    memory.iter().map(map).collect()
}

/// `A / |A|_q^(q-2)`, or the mirror map; computed from `A / max |A|`, so that no power overflows.
fn lq(rule: &Rule, a: Tensor<4>) -> Tensor<4> {
    let largest = a.clone().detach().abs().max_dim(3).max_dim(2).clamp_min(LARGEST_FLOOR);
    let x = a / largest.clone();
    let powers = |exponent: f64| {
        let power = match exponent {
            4.0 => x.clone().square().square(),
            2.0 => x.clone().square(),
            _ => x.clone().abs().powf_scalar(exponent),
        };
        power.sum_dim(3).sum_dim(2).clamp_min(LARGEST_FLOOR)
    };
    if rule.mirror {
        let r = rule.q / (rule.q - 1.0);
        let root = x.clone().abs().clamp_min(MIRROR_FLOOR).powf_scalar(r - 1.0);
        x.clone().sign() * root * (largest * powers(r).powf_scalar((2.0 - r) / r))
    } else {
        let q = rule.q;
        let factor = largest.powf_scalar(3.0 - q) * powers(q).powf_scalar((2.0 - q) / q);
        x * factor
    }
}

/// Five Newton-Schulz iterations on every matrix; a tall one is turned, which changes nothing but the cost.
pub(super) fn newton_schulz(momentum: Tensor<4>) -> Tensor<4> {
    let [.., rows, cols] = momentum.dims();
    let [a, b, c] = NEWTON_SCHULZ;
    let turn = |x: Tensor<4>| if rows > cols { transpose(x) } else { x };
    let length = momentum.clone().square().sum_dim(2).sum_dim(3).add_scalar(NEWTON_SCHULZ_EPS).sqrt();
    let mut x = turn(momentum / length);
    for _ in 0..5 {
        let gram = x.clone().matmul(transpose(x.clone()));
        let polynomial = gram.clone().mul_scalar(b) + gram.clone().matmul(gram).mul_scalar(c);
        x = x.clone().mul_scalar(a) + polynomial.matmul(x);
    }
    turn(x)
}

/// The exact minimiser of a loss that is not linear and its retention, and the history after it.
pub(super) fn proximal(
    rule: &Rule,
    anchor: Tensor<4>,
    token: &Rows,
    history: Option<Tensor<4>>,
) -> (Tensor<4>, Option<Tensor<4>>) {
    let (k, eta) = (token.k.clone(), token.rates[0].clone());
    let error = read(rule, std::slice::from_ref(&anchor), k.clone()) - token.v.clone();
    match (rule.memory, history) {
        (Memory::Vector, Some(inverse)) => {
            let curved = transpose(k.clone().square() * eta.clone()) * inverse.clone();
            let inverse = inverse / (curved + 1.0);
            (anchor - inverse.clone() * transpose(k * error * eta), Some(inverse))
        }
        (Memory::Vector, None) => {
            let divisor = transpose(k.clone().square() * eta.clone()) + 1.0;
            let memory = if rule.retention == Retention::ElasticNet {
                let sum = anchor + transpose(k * token.v.clone() * eta.clone());
                soft_threshold(sum, eta.mul_scalar(rule.l1)) / divisor
            } else {
                anchor - transpose(k * error * eta) / divisor
            };
            (memory, None)
        }
        (_, Some(inverse)) => {
            let direction = k.clone().matmul(inverse.clone());
            let square = (direction.clone() * k).sum_dim(3);
            let write = direction.clone() * (eta.clone() / (eta * square + 1.0));
            let inverse = inverse - transpose(write.clone()).matmul(direction);
            (anchor - transpose(write).matmul(error), Some(inverse))
        }
        (_, None) => {
            let divisor = k.clone().square().sum_dim(3) * eta.clone() + 1.0;
            let mut factor = eta / divisor.clone();
            if rule.bias == Bias::Huber {
                // Beyond the bound the error that is left lies on the linear part of the loss.
                let bound = divisor.mul_scalar(rule.huber_delta);
                let square = error.clone().square().sum_dim(3);
                factor = factor * bound.clone() / square.max_pair(bound.square()).sqrt();
            }
            (anchor - transpose(k * factor).matmul(error), None)
        }
    }
}
