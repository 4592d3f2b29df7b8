//! Reading a memory, its inner losses and their gradients in closed form.

use super::super::{Bias, Memory, Rule};
use super::{Layer, Weights};

/// Added to the squared norm of a momentum before Newton-Schulz divides by its root.
pub(in crate::rule) const NEWTON_SCHULZ_EPS: f64 = 1e-14;
/// Coefficients of the Newton-Schulz iteration of Muon.
pub(in crate::rule) const NEWTON_SCHULZ: [f64; 3] = [3.4445, -4.7750, 2.0315];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `W^T x`.
fn transposed_times(layer: &Layer, x: &[f64]) -> Vec<f64> {
    (0..layer.cols).map(|j| (0..layer.rows).map(|i| layer.at(i, j) * x[i]).sum()).collect()
}

/// `x y^T`.
fn outer(x: &[f64], y: &[f64]) -> Layer {
    Layer::new(x.len(), y.len(), x.iter().flat_map(|x| y.iter().map(move |y| x * y)).collect())
}

/// `M(x)`.
pub fn read(rule: &Rule, memory: &[Layer], x: &[f64]) -> Vec<f64> {
    match rule.memory {
        Memory::Vector => memory[0].values.iter().zip(x).map(|(s, x)| s * x).collect(),
        Memory::Matrix => transposed_times(&memory[0], x),
        Memory::Mlp => {
            let hidden: Vec<f64> =
                transposed_times(&memory[0], x).into_iter().map(|a| a * sigmoid(a)).collect();
            transposed_times(&memory[1], &hidden).into_iter().zip(x).map(|(y, x)| x + y).collect()
        }
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The inner loss of a reading `y` and a value.
pub(super) fn loss_of(rule: &Rule, y: &[f64], v: &[f64]) -> f64 {
    let e: Vec<f64> = y.iter().zip(v).map(|(y, v)| y - v).collect();
    match rule.bias {
        Bias::DotProduct => -y.iter().zip(v).map(|(y, v)| y * v).sum::<f64>(),
        Bias::Squared => 0.5 * norm(&e).powi(2),
        Bias::Huber if norm(&e) <= rule.huber_delta => 0.5 * norm(&e).powi(2),
        Bias::Huber => rule.huber_delta * (norm(&e) - 0.5 * rule.huber_delta),
        Bias::Lp => e.iter().map(|e| e.abs().powf(rule.p)).sum(),
    }
}

/// The inner loss of a pair.
pub fn loss(rule: &Rule, memory: &[Layer], k: &[f64], v: &[f64]) -> f64 {
    loss_of(rule, &read(rule, memory, k), v)
}

/// The gradient of the loss by the reading.
fn slope(rule: &Rule, y: &[f64], v: &[f64]) -> Vec<f64> {
    let e: Vec<f64> = y.iter().zip(v).map(|(y, v)| y - v).collect();
    let length = norm(&e);
    let part = |e: f64| match (rule.bias, rule.smooth) {
        (Bias::Lp, true) => rule.p * (10.0 * e).tanh() * (e * e + 1e-6).sqrt().powf(rule.p - 1.0),
        (Bias::Lp, false) if e == 0.0 => 0.0,
        (Bias::Lp, false) => rule.p * e.signum() * e.abs().powf(rule.p - 1.0),
        (Bias::Huber, _) if length > rule.huber_delta => rule.huber_delta * e / length,
        _ => e,
    };
    match rule.bias {
        Bias::DotProduct => v.iter().map(|v| -v).collect(),
        _ => e.into_iter().map(part).collect(),
    }
}

/// The gradient of the inner loss of a pair by every weight.
pub fn gradient(rule: &Rule, memory: &[Layer], k: &[f64], v: &[f64]) -> Weights {
    let g = slope(rule, &read(rule, memory, k), v);
    match rule.memory {
        Memory::Vector => vec![Layer::new(k.len(), 1, k.iter().zip(&g).map(|(k, g)| k * g).collect())],
        Memory::Matrix => vec![outer(k, &g)],
        Memory::Mlp => {
            let inputs = transposed_times(&memory[0], k);
            let hidden: Vec<f64> = inputs.iter().map(|a| a * sigmoid(*a)).collect();
            let slopes: Vec<f64> = (0..inputs.len())
                .map(|i| {
                    let back: f64 = (0..g.len()).map(|j| memory[1].at(i, j) * g[j]).sum();
                    let s = sigmoid(inputs[i]);
                    back * s * (1.0 + inputs[i] * (1.0 - s))
                })
                .collect();
            vec![outer(k, &slopes), outer(&hidden, &g)]
        }
    }
}

/// Five Newton-Schulz iterations: `X / |X|_F`, then `X <- a X + (b A + c A A) X` with `A = X X^T`; close to the
/// orthogonal factor of `X`, zero for zero.
pub fn newton_schulz(momentum: &Layer) -> Layer {
    let [a, b, c] = NEWTON_SCHULZ;
    let (rows, cols) = (momentum.rows, momentum.cols);
    let length = (momentum.values.iter().map(|x| x * x).sum::<f64>() + NEWTON_SCHULZ_EPS).sqrt();
    let mut x = Layer::new(rows, cols, momentum.values.iter().map(|x| x / length).collect());
    let product = |left: &Layer, right: &Layer| {
        let entry = |i: usize, j: usize| (0..left.cols).map(|l| left.at(i, l) * right.at(l, j)).sum();
        let entries = (0..left.rows).flat_map(|i| (0..right.cols).map(move |j| (i, j)));
        Layer::new(left.rows, right.cols, entries.map(|(i, j)| entry(i, j)).collect())
    };
    for _ in 0..5 {
        let transposed = (0..cols).flat_map(|j| (0..rows).map(move |i| (i, j)));
        let transposed = Layer::new(cols, rows, transposed.map(|(i, j)| x.at(i, j)).collect());
        let gram = product(&x, &transposed);
        let square = product(&gram, &gram);
        let polynomial = gram.values.iter().zip(&square.values).map(|(g, s)| b * g + c * s).collect();
        let change = product(&Layer::new(rows, rows, polynomial), &x);
        x.values.iter_mut().zip(change.values).for_each(|(x, change)| *x = a * *x + change);
    }
    x
}
