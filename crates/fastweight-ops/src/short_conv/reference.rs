//! The definition of the short convolution: one token after the other, in float64.

use std::ops::Range;

use super::ConvSizes;
use crate::reference::{or_zeros, sequences};

/// Inputs, row-major in the layout of [`short_convolution`](super::short_convolution).
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Sizes and documents.
    pub sizes: &'a ConvSizes,
    /// Inputs `[B,T,C]`.
    pub x: &'a [f64],
    /// Taps `[C,W]`; the last one weighs the current token.
    pub weight: &'a [f64],
    /// Bias `[C]`.
    pub bias: Option<&'a [f64]>,
    /// The `W-1` inputs before the first token, `[N,W-1,C]`, oldest first; zero when absent.
    pub initial: Option<&'a [f64]>,
}

/// The output `[B,T,C]` and the last `W-1` inputs of each sequence `[N,W-1,C]`.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// Output.
    pub y: Vec<f64>,
    /// Final states.
    pub state: Vec<f64>,
}

/// Gradients, each in the layout of its input.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Of the inputs.
    pub x: Vec<f64>,
    /// Of the taps.
    pub weight: Vec<f64>,
    /// Of the bias (computed when there is none too).
    pub bias: Vec<f64>,
    /// Of the initial states.
    pub initial: Vec<f64>,
}

impl Inputs<'_> {
    fn sequences(&self) -> Vec<(usize, Range<usize>)> {
        sequences(self.sizes.batch, self.sizes.time, self.sizes.offsets.as_ref())
    }

    /// Inputs that are carried from one call to the next.
    fn carried(&self) -> usize {
        self.sizes.width - 1
    }

    fn states(&self) -> Vec<f64> {
        or_zeros(self.initial, self.sequences().len() * self.carried() * self.sizes.channels)
    }

    fn state_at(&self, sequence: usize, i: usize, channel: usize) -> usize {
        (sequence * self.carried() + i) * self.sizes.channels + channel
    }

    fn token_at(&self, row: usize, t: usize, channel: usize) -> usize {
        (row * self.sizes.time + t) * self.sizes.channels + channel
    }

    /// The inputs of one channel of one sequence, the carried ones first.
    fn history(
        &self,
        states: &[f64],
        n: usize,
        (row, tokens): (usize, Range<usize>),
        channel: usize,
    ) -> Vec<f64> {
        let carried = (0..self.carried()).map(|i| states[self.state_at(n, i, channel)]);
        carried.chain(tokens.map(|t| self.x[self.token_at(row, t, channel)])).collect()
    }

    /// The sum before SiLU, of a window of `W` inputs.
    fn convolve(&self, window: &[f64], channel: usize) -> f64 {
        let taps = &self.weight[channel * self.sizes.width..][..self.sizes.width];
        let sum: f64 = window.iter().zip(taps).map(|(x, w)| x * w).sum();
        sum + self.bias.map_or(0.0, |bias| bias[channel])
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `y_t = silu(bias + sum_i w_i x_{t-W+1+i})`; the state is the last `W-1` inputs.
pub fn forward(x: &Inputs) -> Outputs {
    let ConvSizes { channels, width, silu, .. } = *x.sizes;
    let initial = x.states();
    let mut y = vec![0.0; x.x.len()];
    let mut state = initial.clone();
    for (n, (row, tokens)) in x.sequences().into_iter().enumerate() {
        for channel in 0..channels {
            let history = x.history(&initial, n, (row, tokens.clone()), channel);
            for (t, window) in tokens.clone().zip(history.windows(width)) {
                let sum = x.convolve(window, channel);
                y[x.token_at(row, t, channel)] = if silu { sum * sigmoid(sum) } else { sum };
            }
            for (i, &last) in history[tokens.len()..].iter().enumerate() {
                state[x.state_at(n, i, channel)] = last;
            }
        }
    }
    Outputs { y, state }
}

/// Gradients of `sum(y * grad_y) + sum(state * grad_state)`.
pub fn backward(x: &Inputs, grad_y: &[f64], grad_state: &[f64]) -> Gradients {
    let ConvSizes { channels, width, silu, .. } = *x.sizes;
    let initial = x.states();
    let mut grads = Gradients {
        x: vec![0.0; x.x.len()],
        weight: vec![0.0; x.weight.len()],
        bias: vec![0.0; channels],
        initial: vec![0.0; initial.len()],
    };
    for (n, (row, tokens)) in x.sequences().into_iter().enumerate() {
        for channel in 0..channels {
            let history = x.history(&initial, n, (row, tokens.clone()), channel);
            let mut d_history = vec![0.0; history.len()];
            for (i, t) in tokens.clone().enumerate() {
                let window = &history[i..i + width];
                let sum = x.convolve(window, channel);
                let slope = if silu { sigmoid(sum) * (1.0 + sum * (1.0 - sigmoid(sum))) } else { 1.0 };
                let d_sum = grad_y[x.token_at(row, t, channel)] * slope;
                grads.bias[channel] += d_sum;
                for (j, value) in window.iter().enumerate() {
                    let tap = channel * width + j;
                    grads.weight[tap] += d_sum * value;
                    d_history[i + j] += d_sum * x.weight[tap];
                }
            }
            for i in 0..x.carried() {
                d_history[tokens.len() + i] += grad_state[x.state_at(n, i, channel)];
            }
            let (d_carried, d_tokens) = d_history.split_at(x.carried());
            for (i, d) in d_carried.iter().enumerate() {
                grads.initial[x.state_at(n, i, channel)] = *d;
            }
            for (t, d) in tokens.clone().zip(d_tokens) {
                grads.x[x.token_at(row, t, channel)] = *d;
            }
        }
    }
    grads
}
