//! The definition of a deep memory: one token after the other, in float64.
//!
//! Gradients of the tensor form are compared with finite differences of this.

use crate::kernel::Dims;
use crate::reference::{add_scaled, dot, multiply, read, read_back, write};

use super::gates::spans;
use super::orthogonal::{QUINTIC, STEPS, TINY};
use super::{Activation, DeepMemory, InnerLoss, RateOf};

/// Inputs, row-major in the layout of [`deep_memory`](super::deep_memory).
#[derive(Debug, Clone)]
pub struct Inputs<'a> {
    /// The memory.
    pub memory: &'a DeepMemory,
    /// Sizes and documents; the scale is not used.
    pub dims: &'a Dims,
    /// Queries `[B,T,H,K]`.
    pub q: &'a [f64],
    /// Keys `[B,T,H,K]`.
    pub k: &'a [f64],
    /// Values `[B,T,H,V]`.
    pub v: &'a [f64],
    /// Rates, 1 when absent.
    pub rate: Option<Gate<'a>>,
    /// Momentum factors, 0 when absent.
    pub momentum: Option<Gate<'a>>,
    /// Forgotten shares, 0 when absent.
    pub decay: Option<Gate<'a>>,
    /// Thresholds of the Huber loss `[B,T,H]`, 1 when absent.
    pub threshold: Option<&'a [f64]>,
    /// Weight and bias of the LayerNorm, `[H,V]` each; no LayerNorm when absent.
    pub norm: Option<(&'a [f64], &'a [f64])>,
    /// States before the first token.
    pub state: State,
}

/// A gate, as [`DeepGate`](super::DeepGate).
#[derive(Debug, Clone, Copy)]
pub enum Gate<'a> {
    /// One number a head, `[B,T,H]`.
    Heads(&'a [f64]),
    /// One number for every output of every weight, `[B,T,H,outputs]`.
    Outputs(&'a [f64]),
}

impl Gate<'_> {
    /// The numbers of the outputs `from..from + count` of the token and head at the flat place `at` of `[B,T,H]`, where a
    /// head has `outputs`.
    fn columns(self, at: usize, outputs: usize, [from, count]: [usize; 2]) -> Vec<f64> {
        match self {
            Self::Heads(x) => vec![x[at]; count],
            Self::Outputs(x) => x[at * outputs + from..][..count].to_vec(),
        }
    }
}

/// A state, each layer `[N,H,in,out]`.
#[derive(Debug, Clone)]
pub struct State {
    /// Weights at the chunk's start.
    pub start: Vec<Vec<f64>>,
    /// Weights now.
    pub current: Vec<Vec<f64>>,
    /// Momentum, or minus the gradients gathered in the chunk.
    pub momentum: Vec<Vec<f64>>,
    /// The last `window - 1` tokens `[N,H,window-1,K+V+2]`: key, value, rate, threshold.
    pub recent: Vec<f64>,
    /// Tokens had so far, one number for each state.
    pub positions: Vec<usize>,
}

/// The output `[B,T,H,V]` and the final states.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// Output.
    pub o: Vec<f64>,
    /// Final states.
    pub state: State,
}

/// The activation and its derivative.
pub fn activate(activation: Activation, x: f64) -> (f64, f64) {
    match activation {
        Activation::Gelu => {
            let c = (2.0 / std::f64::consts::PI).sqrt();
            let t = (c * (x + 0.044715 * x.powi(3))).tanh();
            let slope = c * (1.0 + 3.0 * 0.044715 * x * x);
            (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
        }
        Activation::Silu => {
            let s = 1.0 / (1.0 + (-x).exp());
            (x * s, s * (1.0 + x * (1.0 - s)))
        }
    }
}

/// The inner loss of `y = M(k)` and its gradient with respect to `y`.
pub fn inner_loss(loss: InnerLoss, y: &[f64], v: &[f64], threshold: f64) -> (f64, Vec<f64>) {
    let e: Vec<f64> = y.iter().zip(v).map(|(y, v)| y - v).collect();
    match loss {
        InnerLoss::Squared => (0.5 * dot(&e, &e), e),
        InnerLoss::DotProduct => (-dot(y, v), v.iter().map(|v| -v).collect()),
        InnerLoss::Huber => {
            let norm = dot(&e, &e).sqrt();
            if norm <= threshold {
                return (0.5 * norm * norm, e);
            }
            let gradient = e.iter().map(|e| threshold * e / norm).collect();
            (threshold * norm - 0.5 * threshold * threshold, gradient)
        }
        InnerLoss::Power { p, smooth } => {
            let value = e.iter().map(|e| e.abs().powf(p)).sum();
            let gradient = |e: &f64| match smooth {
                true => p * (10.0 * e).tanh() * (e * e + 1e-6).powf((p - 1.0) / 2.0),
                false if *e == 0.0 => 0.0,
                false => p * e.signum() * e.abs().powf(p - 1.0),
            };
            (value, e.iter().map(gradient).collect())
        }
    }
}

/// The network of one head.
#[derive(Debug, Clone, Copy)]
pub struct Network<'a> {
    /// The memory.
    pub memory: &'a DeepMemory,
    /// `[in, out]` of each layer.
    pub shapes: &'a [[usize; 2]],
    /// Weight and bias of the LayerNorm, `[V]` each.
    pub norm: Option<(&'a [f64], &'a [f64])>,
}

/// A LayerNorm before its weight and bias: the normalised vector and one over the deviation.
fn normalised(x: &[f64], eps: f64) -> (Vec<f64>, f64) {
    let count = x.len() as f64;
    let mean = x.iter().sum::<f64>() / count;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    let inverse = 1.0 / (variance + eps).sqrt();
    (x.iter().map(|x| (x - mean) * inverse).collect(), inverse)
}

impl Network<'_> {
    /// Inputs of the layers, values before the activation, and what the last layer returns.
    fn layers(&self, weights: &[&[f64]], x: &[f64]) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let (mut inputs, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (Vec::new(), Vec::new());
        for (layer, [_, to]) in self.shapes.iter().enumerate() {
            let mut input = match values.last() {
                None => x.to_vec(),
                Some(z) => z.iter().map(|&z| activate(self.memory.activation, z).0).collect(),
            };
            if self.memory.bias {
                input.push(1.0);
            }
            values.push(read(weights[layer], &input, *to));
            inputs.push(input);
        }
        (inputs, values)
    }

    fn finish(&self, x: &[f64], f: &[f64]) -> Vec<f64> {
        let mut y = match self.norm {
            None => f.to_vec(),
            Some((weight, bias)) => {
                let (hat, _) = normalised(f, self.memory.norm_eps);
                hat.iter().zip(weight).zip(bias).map(|((hat, w), b)| hat * w + b).collect()
            }
        };
        if self.memory.residual {
            add_scaled(&mut y, 1.0, x);
        }
        y
    }

    /// `M(x)`.
    pub fn value(&self, weights: &[&[f64]], x: &[f64]) -> Vec<f64> {
        let (_, values) = self.layers(weights, x);
        self.finish(x, &values[values.len() - 1])
    }

    /// The inner loss of one token.
    pub fn loss(&self, weights: &[&[f64]], k: &[f64], v: &[f64], threshold: f64) -> f64 {
        inner_loss(self.memory.loss, &self.value(weights, k), v, threshold).0
    }

    /// Each layer's input `h` and error `d`; the gradient of its weight is `h d^T`.
    pub fn gradient(
        &self,
        weights: &[&[f64]],
        k: &[f64],
        v: &[f64],
        threshold: f64,
    ) -> Vec<(Vec<f64>, Vec<f64>)> {
        let (inputs, values) = self.layers(weights, k);
        let f = &values[values.len() - 1];
        let (_, mut d) = inner_loss(self.memory.loss, &self.finish(k, f), v, threshold);
        if let Some((weight, _)) = self.norm {
            let (hat, inverse) = normalised(f, self.memory.norm_eps);
            d.iter_mut().zip(weight).for_each(|(d, w)| *d *= w);
            let count = d.len() as f64;
            let (mean, along) = (d.iter().sum::<f64>() / count, dot(&d, &hat) / count);
            d.iter_mut().zip(&hat).for_each(|(d, hat)| *d = (*d - mean - hat * along) * inverse);
        }
        let mut errors = vec![d];
        for layer in (1..self.shapes.len()).rev() {
            let back = read_back(weights[layer], &errors[errors.len() - 1]);
            let slopes = values[layer - 1].iter().map(|&z| activate(self.memory.activation, z).1);
            errors.push(back.iter().zip(slopes).map(|(d, slope)| d * slope).collect());
        }
        inputs.into_iter().zip(errors.into_iter().rev()).collect()
    }
}

/// Token by token: at a chunk's first token the weights there become the point where gradients are taken; then
/// `P = momentum P - sum rate G` over the window, `W = (1 - decay) W + P` for every layer, `o = M_W(q)`, column by
/// column of a weight.
pub fn forward(x: &Inputs) -> Outputs {
    let Dims { heads, key, value, .. } = *x.dims;
    let shapes = x.memory.weight_shapes(key, value);
    let (outputs, spans) = (x.memory.output_count(key, value), spans(x.memory, key, value));
    let mut o = vec![0.0; x.v.len()];
    let mut state = x.state.clone();
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let norm = x.norm.map(|(w, b)| {
                let range = head * value..(head + 1) * value;
                (&w[range.clone()], &b[range])
            });
            let network = Network { memory: x.memory, shapes: &shapes, norm };
            for (i, t) in tokens.clone().enumerate() {
                let boundary = (x.state.positions[n] + i).is_multiple_of(x.memory.chunk);
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                let at = x.dims.token(row, t, head, 1).start;
                let gate = |gate: Option<Gate>, layer: usize, otherwise: f64| match gate {
                    None => vec![otherwise; spans[layer][1]],
                    Some(gate) => gate.columns(at, outputs, spans[layer]),
                };
                let span = |layer: usize| {
                    let size = shapes[layer][0] * shapes[layer][1];
                    (n * heads + head) * size..(n * heads + head + 1) * size
                };
                if x.memory.read_before_write {
                    let weights = slices(&state.current, &span);
                    o[values.clone()].copy_from_slice(&network.value(&weights, &x.q[keys.clone()]));
                }
                if boundary {
                    for layer in 0..shapes.len() {
                        let now = state.current[layer][span(layer)].to_vec();
                        state.start[layer][span(layer)].copy_from_slice(&now);
                        if x.memory.rate == RateOf::Reading {
                            state.momentum[layer][span(layer)].fill(0.0);
                        }
                    }
                }
                let size = key + value + 2;
                let window = (x.memory.window - 1) * size;
                let kept = (n * heads + head) * window..(n * heads + head + 1) * window;
                let mut tokens = state.recent[kept.clone()].to_vec();
                tokens.extend(&x.k[keys.clone()]);
                tokens.extend(&x.v[values.clone()]);
                // Outputs' rates are those of the token itself: they have no window.
                let rate = match x.rate {
                    Some(Gate::Heads(rate)) => rate[at],
                    _ => 1.0,
                };
                tokens.extend([rate, x.threshold.map_or(1.0, |threshold| threshold[at])]);
                state.recent[kept].copy_from_slice(&tokens[size..]);
                for layer in 0..shapes.len() {
                    if x.memory.rate == RateOf::Written {
                        let factors = gate(x.momentum, layer, 0.0);
                        multiply_columns(&mut state.momentum[layer][span(layer)], &factors);
                    }
                }
                for token in tokens.chunks_exact(size) {
                    let (rate, threshold) = (token[size - 2], token[size - 1]);
                    let weights = slices(&state.start, &span);
                    let gradient =
                        network.gradient(&weights, &token[..key], &token[key..key + value], threshold);
                    for (layer, (h, mut d)) in gradient.into_iter().enumerate() {
                        let rates = match x.rate {
                            Some(Gate::Outputs(_)) => gate(x.rate, layer, 1.0),
                            _ => vec![rate; d.len()],
                        };
                        let step = |rate: f64| match x.memory.rate {
                            RateOf::Reading => -1.0,
                            RateOf::Written if x.memory.proximal => -rate / (1.0 + rate * dot(&h, &h)),
                            RateOf::Written => -rate,
                        };
                        d.iter_mut().zip(rates).for_each(|(d, rate)| *d *= step(rate));
                        write(&mut state.momentum[layer][span(layer)], &h, &d);
                    }
                }
                for (layer, &shape) in shapes.iter().enumerate() {
                    let (p, w) =
                        (&state.momentum[layer][span(layer)], &mut state.current[layer][span(layer)]);
                    match x.memory.rate {
                        RateOf::Written => {
                            let kept: Vec<f64> = gate(x.decay, layer, 0.0).iter().map(|x| 1.0 - x).collect();
                            multiply_columns(w, &kept);
                            match x.memory.newton_schulz {
                                false => add_scaled(w, 1.0, p),
                                true => add_scaled(w, 1.0, &newton_schulz(p, shape)),
                            }
                        }
                        RateOf::Reading => {
                            w.copy_from_slice(&state.start[layer][span(layer)]);
                            let rates = gate(x.rate, layer, 1.0);
                            let scaled = p.iter().zip(rates.iter().cycle());
                            w.iter_mut().zip(scaled).for_each(|(w, (p, rate))| *w += rate * p);
                        }
                    }
                }
                if !x.memory.read_before_write {
                    let weights = slices(&state.current, &span);
                    o[values].copy_from_slice(&network.value(&weights, &x.q[keys]));
                }
            }
        }
        state.positions[n] += tokens.len();
    }
    // After a chunk's last token the state is the next chunk's.
    for n in 0..state.positions.len() {
        if !state.positions[n].is_multiple_of(x.memory.chunk) {
            continue;
        }
        for (layer, [from, to]) in shapes.iter().enumerate() {
            let range = n * heads * from * to..(n + 1) * heads * from * to;
            let now = state.current[layer][range.clone()].to_vec();
            state.start[layer][range.clone()].copy_from_slice(&now);
            if x.memory.rate == RateOf::Reading {
                state.momentum[layer][range].fill(0.0);
            }
        }
    }
    Outputs { o, state }
}

fn slices<'a>(layers: &'a [Vec<f64>], span: &impl Fn(usize) -> std::ops::Range<usize>) -> Vec<&'a [f64]> {
    layers.iter().enumerate().map(|(layer, weights)| &weights[span(layer)]).collect()
}

/// Multiplies each column of `w [in,out]` by its factor.
fn multiply_columns(w: &mut [f64], factors: &[f64]) {
    let rows = w.chunks_exact_mut(factors.len());
    rows.for_each(|row| row.iter_mut().zip(factors).for_each(|(w, factor)| *w *= factor));
}

/// Five Newton-Schulz steps on `p [in,out]`; `X X^T X` is the same for a matrix and its transpose.
fn newton_schulz(p: &[f64], [from, to]: [usize; 2]) -> Vec<f64> {
    let norm = (dot(p, p) + TINY).sqrt();
    let mut x: Vec<f64> = p.iter().map(|p| p / norm).collect();
    // X X^T Y
    let twice = |x: &[f64], y: &[f64]| {
        let mut out = vec![0.0; from * to];
        for (i, out) in out.chunks_exact_mut(to).enumerate() {
            for j in 0..from {
                let along = dot(&x[i * to..(i + 1) * to], &x[j * to..(j + 1) * to]);
                add_scaled(out, along, &y[j * to..(j + 1) * to]);
            }
        }
        out
    };
    for _ in 0..STEPS {
        let cubic = twice(&x, &x);
        let quintic = twice(&x, &cubic);
        multiply(&mut x, QUINTIC[0]);
        add_scaled(&mut x, QUINTIC[1], &cubic);
        add_scaled(&mut x, QUINTIC[2], &quintic);
    }
    x
}
