//! The definition of TTT-Linear: one token after the other, in float64.
//!
//! The bias of the inner model is the last row of its weights, for a key entry that is always one: weights and
//! gathered updates are `[N,H,K+1,V]` here, keys are `[k, 1]` and queries `[scale q, 1]`.

use std::ops::Range;

use crate::kernel::Dims;
use crate::reference::{add_scaled, dot, read, read_back, write};

use super::EPSILON;

/// Inputs, row-major in the layout of [`ttt_linear`](super::ttt_linear).
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Sizes and documents; `key` equals `value`.
    pub dims: &'a Dims,
    /// Tokens of a mini-batch.
    pub mini_batch: usize,
    /// Factor on the query, in float64 (the one of `dims` is rounded).
    pub scale: f64,
    /// Queries `[B,T,H,K]`.
    pub q: &'a [f64],
    /// Keys `[B,T,H,K]`.
    pub k: &'a [f64],
    /// Values `[B,T,H,V]`.
    pub v: &'a [f64],
    /// Learning rates `[B,T,H]`.
    pub eta: &'a [f64],
    /// Scale of the normalisation `[H,V]`.
    pub ln_w: &'a [f64],
    /// Shift of the normalisation `[H,V]`.
    pub ln_b: &'a [f64],
    /// Initial states, zero when absent.
    pub initial: Option<State<'a>>,
}

/// What a mini-batch in progress holds.
#[derive(Debug, Clone, Copy)]
pub struct State<'a> {
    /// Weights at its start `[N,H,K+1,V]`.
    pub weights: &'a [f64],
    /// `sum [k, 1] u^T` over its tokens so far `[N,H,K+1,V]`; not read at position 0.
    pub gathered: &'a [f64],
    /// How many tokens of it were seen, for each of the `N` sequences.
    pub position: &'a [usize],
}

/// The output `[B,T,H,V]` and the final states.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// Output.
    pub o: Vec<f64>,
    /// Weights at the start of the mini-batch in progress.
    pub weights: Vec<f64>,
    /// What that mini-batch gathered.
    pub gathered: Vec<f64>,
    /// Tokens of it.
    pub position: Vec<usize>,
}

/// Gradients, each in the layout of its input.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Of the queries.
    pub q: Vec<f64>,
    /// Of the keys.
    pub k: Vec<f64>,
    /// Of the values.
    pub v: Vec<f64>,
    /// Of the learning rates.
    pub eta: Vec<f64>,
    /// Of the normalisation's scale.
    pub ln_w: Vec<f64>,
    /// Of the normalisation's shift.
    pub ln_b: Vec<f64>,
    /// Of the initial weights.
    pub weights: Vec<f64>,
    /// Of what was gathered before the first token (zero at position 0).
    pub gathered: Vec<f64>,
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

/// `a_i b_i`.
fn product(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}

/// `a_i - mean(a) - x_i mean(a x)`: what a gradient keeps on its way back through a normalisation to `x`.
fn projected(a: &[f64], x: &[f64]) -> Vec<f64> {
    let (shift, slope) = (mean(a), dot(a, x) / x.len() as f64);
    a.iter().zip(x).map(|(a, x)| a - shift - x * slope).collect()
}

/// `(x - mean) / d` and `d = sqrt(var + eps)`.
fn normalised(x: &[f64]) -> (Vec<f64>, f64) {
    let shift = mean(x);
    let centred: Vec<f64> = x.iter().map(|x| x - shift).collect();
    let d = (dot(&centred, &centred) / x.len() as f64 + EPSILON).sqrt();
    (centred.into_iter().map(|x| x / d).collect(), d)
}

/// The inner gradient of a token and what its own gradient needs.
struct Inner {
    /// Normalised reading, and its standard deviation.
    xh: Vec<f64>,
    d: f64,
    /// `ln_w xh + ln_b - (v - k)`, the error.
    error: Vec<f64>,
    /// `ln_w error`.
    y: Vec<f64>,
    /// Gradient of `1/2 |error|^2` with respect to the reading.
    u: Vec<f64>,
}

impl Inputs<'_> {
    fn of_norm(&self, head: usize) -> (&[f64], &[f64]) {
        let range = head * self.dims.value..(head + 1) * self.dims.value;
        (&self.ln_w[range.clone()], &self.ln_b[range])
    }

    fn of_state(&self, sequence: usize, head: usize) -> Range<usize> {
        let size = (self.dims.key + 1) * self.dims.value;
        let start = (sequence * self.dims.heads + head) * size;
        start..start + size
    }

    /// `[k, 1]` and `[scale q, 1]`.
    fn extended(&self, row: usize, t: usize, head: usize) -> (Vec<f64>, Vec<f64>) {
        let keys = self.dims.token(row, t, head, self.dims.key);
        let mut k = self.k[keys.clone()].to_vec();
        let mut q: Vec<f64> = self.q[keys].iter().map(|q| q * self.scale).collect();
        k.push(1.0);
        q.push(1.0);
        (q, k)
    }

    fn inner(&self, weights: &[f64], row: usize, t: usize, head: usize) -> Inner {
        let (_, k) = self.extended(row, t, head);
        let (ln_w, ln_b) = self.of_norm(head);
        let v = &self.v[self.dims.token(row, t, head, self.dims.value)];
        let (xh, d) = normalised(&read(weights, &k, v.len()));
        let error: Vec<f64> = (0..v.len()).map(|j| ln_w[j] * xh[j] + ln_b[j] - (v[j] - k[j])).collect();
        let y = product(ln_w, &error);
        let u = projected(&y, &xh).into_iter().map(|u| u / d).collect();
        Inner { xh, d, error, y, u }
    }

    fn initial(&self) -> (Vec<f64>, Vec<f64>, Vec<usize>) {
        let (states, heads) = (self.dims.states(), self.dims.heads);
        let length = states * heads * (self.dims.key + 1) * self.dims.value;
        let Some(state) = &self.initial else {
            return (vec![0.0; length], vec![0.0; length], vec![0; states]);
        };
        let mut gathered = state.gathered.to_vec();
        for n in (0..states).filter(|&n| state.position[n] == 0) {
            gathered[self.of_state(n, 0).start..self.of_state(n, heads - 1).end].fill(0.0);
        }
        (state.weights.to_vec(), gathered, state.position.to_vec())
    }
}

/// `u = d/dx 1/2 |LN(x) - (v - k)|^2` at `x = W^T [k,1]`; `G <- G + [k,1] u^T`; `z = (W - eta G)^T [scale q,1]`,
/// `o = z + LN(z)`; after the last token of a mini-batch `W <- W - eta G`, `G <- 0`.
pub fn forward(x: &Inputs) -> Outputs {
    let Dims { heads, value, .. } = *x.dims;
    let mut o = vec![0.0; x.v.len()];
    let (mut weights, mut gathered, mut position) = x.initial();
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let (w, g) = (&mut weights[x.of_state(n, head)], &mut gathered[x.of_state(n, head)]);
            let (ln_w, ln_b) = x.of_norm(head);
            let mut seen = position[n];
            for t in tokens.clone() {
                let eta = x.eta[x.dims.token(row, t, head, 1).start];
                let (q, k) = x.extended(row, t, head);
                write(g, &k, &x.inner(w, row, t, head).u);
                let mut z = read(w, &q, value);
                add_scaled(&mut z, -eta, &read(g, &q, value));
                let (zh, _) = normalised(&z);
                let o = &mut o[x.dims.token(row, t, head, value)];
                for j in 0..value {
                    o[j] = z[j] + ln_w[j] * zh[j] + ln_b[j];
                }
                seen += 1;
                if seen == x.mini_batch {
                    add_scaled(w, -eta, g);
                    g.fill(0.0);
                    seen = 0;
                }
            }
        }
        position[n] = (position[n] + tokens.len()) % x.mini_batch;
    }
    Outputs { o, weights, gathered, position }
}

/// Gradients of `sum(o * grad_o) + sum(weights * grad_weights) + sum(gathered * grad_gathered)`.
pub fn backward(x: &Inputs, grad_o: &[f64], grad_weights: &[f64], grad_gathered: &[f64]) -> Gradients {
    let Dims { heads, key, value, .. } = *x.dims;
    let zeros = |like: &[f64]| vec![0.0; like.len()];
    let mut grads = Gradients {
        q: zeros(x.q),
        k: zeros(x.k),
        v: zeros(x.v),
        eta: zeros(x.eta),
        ln_w: zeros(x.ln_w),
        ln_b: zeros(x.ln_b),
        weights: grad_weights.to_vec(),
        gathered: grad_gathered.to_vec(),
    };
    let (initial, gathered, position) = x.initial();
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let state = x.of_state(n, head);
            let (ln_w, _) = x.of_norm(head);
            let (mut w, mut g) = (initial[state.clone()].to_vec(), gathered[state.clone()].to_vec());
            let mut history = Vec::new();
            for (i, t) in tokens.clone().enumerate() {
                let (_, k) = x.extended(row, t, head);
                write(&mut g, &k, &x.inner(&w, row, t, head).u);
                let ends = (position[n] + i + 1).is_multiple_of(x.mini_batch);
                history.push((w.clone(), g.clone(), ends));
                if ends {
                    add_scaled(&mut w, -x.eta[x.dims.token(row, t, head, 1).start], &g);
                    g.fill(0.0);
                }
            }
            let (dw, dg) = (&mut grads.weights[state.clone()], &mut grads.gathered[state]);
            let norm = head * value..(head + 1) * value;
            let (d_ln_w, d_ln_b) = (&mut grads.ln_w[norm.clone()], &mut grads.ln_b[norm]);
            for (t, (w, g, ends)) in tokens.clone().zip(history).rev() {
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                let scalar = x.dims.token(row, t, head, 1).start;
                let (eta, (q, k)) = (x.eta[scalar], x.extended(row, t, head));
                let inner = x.inner(&w, row, t, head);
                if ends {
                    grads.eta[scalar] -= dot(dw, &g);
                    dg.fill(0.0);
                    add_scaled(dg, -eta, dw);
                }

                // o = z + ln_w LN(z) + ln_b
                let from_g = read(&g, &q, value);
                let mut z = read(&w, &q, value);
                add_scaled(&mut z, -eta, &from_g);
                let (zh, d) = normalised(&z);
                let d_o = &grad_o[values.clone()];
                let mut dz = d_o.to_vec();
                add_scaled(&mut dz, 1.0 / d, &projected(&product(ln_w, d_o), &zh));
                add_scaled(d_ln_w, 1.0, &product(d_o, &zh));
                add_scaled(d_ln_b, 1.0, d_o);

                // z = (W - eta G)^T q
                grads.eta[scalar] -= dot(&dz, &from_g);
                let mut dq = read_back(&w, &dz);
                add_scaled(&mut dq, -eta, &read_back(&g, &dz));
                add_scaled(&mut grads.q[keys.clone()], x.scale, &dq[..key]);
                write(dw, &q, &dz);
                write(dg, &q, &dz.iter().map(|z| -eta * z).collect::<Vec<_>>());

                // G = before + k u^T, u = projected(y, xh) / d
                let mut dk = read_back(dg, &inner.u);
                let du = read(dg, &k, value);
                let h: Vec<f64> = du.iter().map(|u| u / inner.d).collect();
                let size = value as f64;
                let (along_y, along_h) = (dot(&inner.y, &inner.xh) / size, dot(&h, &inner.xh) / size);
                let dy = projected(&h, &inner.xh);
                let mut dxh: Vec<f64> = (0..value).map(|j| -h[j] * along_y - inner.y[j] * along_h).collect();
                let dd = -dot(&du, &inner.u) / inner.d;

                // y = ln_w error, error = ln_w xh + ln_b - (v - k)
                let d_error = product(&dy, ln_w);
                add_scaled(d_ln_w, 1.0, &product(&dy, &inner.error));
                add_scaled(d_ln_w, 1.0, &product(&d_error, &inner.xh));
                add_scaled(d_ln_b, 1.0, &d_error);
                add_scaled(&mut grads.v[values], -1.0, &d_error);
                add_scaled(&mut dk[..key], 1.0, &d_error);
                add_scaled(&mut dxh, 1.0, &product(&d_error, ln_w));

                // xh and d from the reading, the reading from W and k
                let mut dx: Vec<f64> = projected(&dxh, &inner.xh).iter().map(|x| x / inner.d).collect();
                add_scaled(&mut dx, dd / size, &inner.xh);
                add_scaled(&mut dk, 1.0, &read_back(&w, &dx));
                write(dw, &k, &dx);
                add_scaled(&mut grads.k[keys], 1.0, &dk[..key]);
            }
            if position[n] == 0 {
                dg.fill(0.0);
            }
        }
    }
    grads
}
