//! The definition of Kimi delta attention: one token after the other, in float64.

use crate::kernel::Dims;
use crate::reference::{add_scaled, decay_rows, decay_rows_back, dot, multiply, read, read_back, write};

/// Inputs, row-major in the layout of [`kimi_delta_attention`](super::kimi_delta_attention).
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Sizes and documents.
    pub dims: &'a Dims,
    /// Factor on the output, in float64 (the one of `dims` is rounded).
    pub scale: f64,
    /// Queries `[B,T,H,K]`.
    pub q: &'a [f64],
    /// Keys `[B,T,H,K]`.
    pub k: &'a [f64],
    /// Values `[B,T,H,V]`.
    pub v: &'a [f64],
    /// Write strengths `[B,T,H]`.
    pub beta: &'a [f64],
    /// Log decays `[B,T,H,K]`.
    pub gate: &'a [f64],
    /// Initial states `[N,H,K,V]`, zero when absent.
    pub initial: Option<&'a [f64]>,
}

/// The output `[B,T,H,V]` and the final states `[N,H,K,V]`.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// Output.
    pub o: Vec<f64>,
    /// Final states.
    pub state: Vec<f64>,
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
    /// Of the write strengths.
    pub beta: Vec<f64>,
    /// Of the log decays.
    pub gate: Vec<f64>,
    /// Of the initial states.
    pub initial: Vec<f64>,
}

impl Inputs<'_> {
    /// Decays and corrects `s`; returns the error `v - S~^T k` that was corrected.
    fn write(&self, s: &mut [f64], row: usize, t: usize, head: usize) -> Vec<f64> {
        let keys = self.dims.token(row, t, head, self.dims.key);
        let (k, gate) = (&self.k[keys.clone()], &self.gate[keys]);
        let v = &self.v[self.dims.token(row, t, head, self.dims.value)];
        decay_rows(s, gate);
        let mut error = v.to_vec();
        add_scaled(&mut error, -1.0, &read(s, k, v.len()));
        let mut u = error.clone();
        multiply(&mut u, self.beta[self.dims.token(row, t, head, 1).start]);
        write(s, k, &u);
        error
    }
}

/// `S~ = diag(exp(g)) S`, `S = S~ + beta k (v - S~^T k)^T`, `o = scale S^T q`.
pub fn forward(x: &Inputs) -> Outputs {
    let Dims { heads, key, value, .. } = *x.dims;
    let mut o = vec![0.0; x.v.len()];
    let mut states = x.dims.memories(x.initial);
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let s = &mut states[x.dims.memory(n, head)];
            for t in tokens.clone() {
                x.write(s, row, t, head);
                let read = read(s, &x.q[x.dims.token(row, t, head, key)], value);
                add_scaled(&mut o[x.dims.token(row, t, head, value)], x.scale, &read);
            }
        }
    }
    Outputs { o, state: states }
}

/// Gradients of `sum(o * grad_o) + sum(state * grad_state)`.
pub fn backward(x: &Inputs, grad_o: &[f64], grad_state: &[f64]) -> Gradients {
    let Dims { heads, key, value, .. } = *x.dims;
    let zeros = |like: &[f64]| vec![0.0; like.len()];
    let mut grads = Gradients {
        q: zeros(x.q),
        k: zeros(x.k),
        v: zeros(x.v),
        beta: zeros(x.beta),
        gate: zeros(x.gate),
        initial: grad_state.to_vec(),
    };
    let initial = x.dims.memories(x.initial);
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let mut history = vec![initial[x.dims.memory(n, head)].to_vec()];
            let mut errors = Vec::new();
            for (i, t) in tokens.clone().enumerate() {
                let mut s = history[i].clone();
                errors.push(x.write(&mut s, row, t, head));
                history.push(s);
            }
            let ds = &mut grads.initial[x.dims.memory(n, head)];
            for (i, t) in tokens.clone().enumerate().rev() {
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                let scalar = x.dims.token(row, t, head, 1).start;
                let (q, k, gate) = (&x.q[keys.clone()], &x.k[keys.clone()], &x.gate[keys.clone()]);
                let (beta, before, after, error) = (x.beta[scalar], &history[i], &history[i + 1], &errors[i]);
                let mut decayed = before.clone();
                decay_rows(&mut decayed, gate);

                // o = scale S^T q
                let mut d_read = grad_o[values.clone()].to_vec();
                multiply(&mut d_read, x.scale);
                add_scaled(&mut grads.q[keys.clone()], 1.0, &read_back(after, &d_read));
                write(ds, q, &d_read);
                // S = S~ + beta k error^T
                let du = read(ds, k, value);
                add_scaled(&mut grads.k[keys.clone()], beta, &read_back(ds, error));
                grads.beta[scalar] = dot(&du, error);
                // error = v - S~^T k
                add_scaled(&mut grads.v[values], beta, &du);
                add_scaled(&mut grads.k[keys.clone()], -beta, &read_back(&decayed, &du));
                let mut d_error = du;
                multiply(&mut d_error, -beta);
                write(ds, k, &d_error);
                // S~ = diag(exp(g)) before
                add_scaled(&mut grads.gate[keys], 1.0, &decay_rows_back(gate, ds, before));
                decay_rows(ds, gate);
            }
        }
    }
    grads
}
