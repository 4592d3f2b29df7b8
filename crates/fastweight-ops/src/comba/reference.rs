//! The definition of Comba: one token after the other, in float64.

use crate::kernel::Dims;
use crate::reference::{add_scaled, dot, multiply, read, read_back, write};

/// Inputs, row-major in the layout of [`comba`](super::comba).
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
    /// Log decays `[B,T,H]`.
    pub gate: &'a [f64],
    /// How much of what a key reads is corrected `[H]`.
    pub b: &'a [f64],
    /// How much of the key leaves the query `[H]`.
    pub d: &'a [f64],
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
    /// Of the shares corrected.
    pub b: Vec<f64>,
    /// Of the shares that leave the query.
    pub d: Vec<f64>,
    /// Of the initial states.
    pub initial: Vec<f64>,
}

impl Inputs<'_> {
    /// Writes a token to `s`; returns what its key read before, and the error `v - b S^T k`.
    fn write(&self, s: &mut [f64], row: usize, t: usize, head: usize) -> (Vec<f64>, Vec<f64>) {
        let k = &self.k[self.dims.token(row, t, head, self.dims.key)];
        let v = &self.v[self.dims.token(row, t, head, self.dims.value)];
        let scalar = self.dims.token(row, t, head, 1).start;
        let reading = read(s, k, v.len());
        let mut error = v.to_vec();
        add_scaled(&mut error, -self.b[head], &reading);
        let mut u = error.clone();
        multiply(&mut u, self.beta[scalar]);
        multiply(s, self.gate[scalar].exp());
        write(s, k, &u);
        (reading, error)
    }

    /// `q - d k`.
    fn query(&self, row: usize, t: usize, head: usize) -> Vec<f64> {
        let keys = self.dims.token(row, t, head, self.dims.key);
        let mut query = self.q[keys.clone()].to_vec();
        add_scaled(&mut query, -self.d[head], &self.k[keys]);
        query
    }
}

/// `S <- exp(g) S + beta k (v - b S^T k)^T`, `o = scale S^T (q - d k)`.
pub fn forward(x: &Inputs) -> Outputs {
    let Dims { heads, value, .. } = *x.dims;
    let mut o = vec![0.0; x.v.len()];
    let mut states = x.dims.memories(x.initial);
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let s = &mut states[x.dims.memory(n, head)];
            for t in tokens.clone() {
                x.write(s, row, t, head);
                let reading = read(s, &x.query(row, t, head), value);
                add_scaled(&mut o[x.dims.token(row, t, head, value)], x.scale, &reading);
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
        b: zeros(x.b),
        d: zeros(x.d),
        initial: grad_state.to_vec(),
    };
    let initial = x.dims.memories(x.initial);
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let mut history = vec![initial[x.dims.memory(n, head)].to_vec()];
            let mut readings = Vec::new();
            for (i, t) in tokens.clone().enumerate() {
                let mut s = history[i].clone();
                readings.push(x.write(&mut s, row, t, head));
                history.push(s);
            }
            let (b, d) = (x.b[head], x.d[head]);
            let ds = &mut grads.initial[x.dims.memory(n, head)];
            for (i, t) in tokens.clone().enumerate().rev() {
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                let scalar = x.dims.token(row, t, head, 1).start;
                let (k, beta, decay) = (&x.k[keys.clone()], x.beta[scalar], x.gate[scalar].exp());
                let (before, after, (reading, error)) = (&history[i], &history[i + 1], &readings[i]);

                // o = scale S^T (q - d k)
                let mut d_read = grad_o[values.clone()].to_vec();
                multiply(&mut d_read, x.scale);
                let d_query = read_back(after, &d_read);
                add_scaled(&mut grads.q[keys.clone()], 1.0, &d_query);
                add_scaled(&mut grads.k[keys.clone()], -d, &d_query);
                grads.d[head] -= dot(k, &d_query);
                write(ds, &x.query(row, t, head), &d_read);
                // S = decay * before + beta k error^T
                let mut du = read(ds, k, value);
                add_scaled(&mut grads.k[keys.clone()], beta, &read_back(ds, error));
                grads.beta[scalar] = dot(&du, error);
                grads.gate[scalar] = decay * dot(ds, before);
                multiply(ds, decay);
                // error = v - b before^T k
                multiply(&mut du, beta);
                add_scaled(&mut grads.v[values], 1.0, &du);
                grads.b[head] -= dot(&du, reading);
                multiply(&mut du, -b);
                add_scaled(&mut grads.k[keys], 1.0, &read_back(before, &du));
                write(ds, k, &du);
            }
        }
    }
    grads
}
