//! The definition of the diagonal-plus-low-rank recurrence: one token after the other, in float64.

use crate::kernel::Dims;
use crate::reference::{add_scaled, decay_rows, decay_rows_back, multiply, read, read_back, write};

/// Inputs, row-major in the layout of [`dplr`](super::dplr).
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Sizes and documents.
    pub dims: &'a Dims,
    /// Factor on the output, in float64 (the one of `dims` is rounded).
    pub scale: f64,
    /// Queries `[B,T,H,K]`.
    pub q: &'a [f64],
    /// Log decays `[B,T,H,K]`.
    pub w: &'a [f64],
    /// Keys `[B,T,H,K]`.
    pub k: &'a [f64],
    /// Values `[B,T,H,V]`.
    pub v: &'a [f64],
    /// Directions that are read, `[B,T,H,K]`.
    pub a: &'a [f64],
    /// Directions that are written, `[B,T,H,K]`.
    pub b: &'a [f64],
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
    /// Of the log decays.
    pub w: Vec<f64>,
    /// Of the keys.
    pub k: Vec<f64>,
    /// Of the values.
    pub v: Vec<f64>,
    /// Of the directions that are read.
    pub a: Vec<f64>,
    /// Of the directions that are written.
    pub b: Vec<f64>,
    /// Of the initial states.
    pub initial: Vec<f64>,
}

impl Inputs<'_> {
    /// Updates `s`; returns what `a` read before, `S^T a`.
    fn write(&self, s: &mut [f64], row: usize, t: usize, head: usize) -> Vec<f64> {
        let keys = self.dims.token(row, t, head, self.dims.key);
        let u = read(s, &self.a[keys.clone()], self.dims.value);
        decay_rows(s, &self.w[keys.clone()]);
        write(s, &self.b[keys.clone()], &u);
        write(s, &self.k[keys], &self.v[self.dims.token(row, t, head, self.dims.value)]);
        u
    }
}

/// `S = diag(exp(w)) S + b (S^T a)^T + k v^T`, `o = scale S^T q`.
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
        w: zeros(x.w),
        k: zeros(x.k),
        v: zeros(x.v),
        a: zeros(x.a),
        b: zeros(x.b),
        initial: grad_state.to_vec(),
    };
    let initial = x.dims.memories(x.initial);
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let mut history = vec![initial[x.dims.memory(n, head)].to_vec()];
            let mut reads = Vec::new();
            for (i, t) in tokens.clone().enumerate() {
                let mut s = history[i].clone();
                reads.push(x.write(&mut s, row, t, head));
                history.push(s);
            }
            let ds = &mut grads.initial[x.dims.memory(n, head)];
            for (i, t) in tokens.clone().enumerate().rev() {
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                let [q, w, k, a, b] = [x.q, x.w, x.k, x.a, x.b].map(|array| &array[keys.clone()]);
                let (before, after) = (&history[i], &history[i + 1]);

                // o = scale S^T q
                let mut d_read = grad_o[values.clone()].to_vec();
                multiply(&mut d_read, x.scale);
                add_scaled(&mut grads.q[keys.clone()], 1.0, &read_back(after, &d_read));
                write(ds, q, &d_read);
                // S = diag(exp(w)) before + b u^T + k v^T
                add_scaled(&mut grads.k[keys.clone()], 1.0, &read_back(ds, &x.v[values.clone()]));
                add_scaled(&mut grads.v[values], 1.0, &read(ds, k, value));
                add_scaled(&mut grads.b[keys.clone()], 1.0, &read_back(ds, &reads[i]));
                add_scaled(&mut grads.w[keys.clone()], 1.0, &decay_rows_back(w, ds, before));
                // u = before^T a
                let du = read(ds, b, value);
                add_scaled(&mut grads.a[keys], 1.0, &read_back(before, &du));
                decay_rows(ds, w);
                write(ds, a, &du);
            }
        }
    }
    grads
}
