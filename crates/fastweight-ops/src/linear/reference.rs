//! The definition of linear attention: one token after the other, in float64.

use crate::kernel::Dims;
use crate::reference::{add_scaled, dot, multiply, read, read_back, write};

/// Log decay of the state.
#[derive(Debug, Clone, Copy)]
pub enum Gate<'a> {
    /// Nothing is forgotten.
    None,
    /// One for each head, `[H]`.
    PerHead(&'a [f64]),
    /// One for each token and head, `[B,T,H]`.
    PerToken(&'a [f64]),
}

/// Inputs, row-major in the layout of [`linear_attention`](super::linear_attention).
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
    /// Log decays.
    pub gate: Gate<'a>,
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
    /// Of the log decays; empty when there are none.
    pub gate: Vec<f64>,
    /// Of the initial states.
    pub initial: Vec<f64>,
}

impl Inputs<'_> {
    /// The token's log decay and its position in the gate.
    fn gate_at(&self, row: usize, t: usize, head: usize) -> Option<(f64, usize)> {
        match self.gate {
            Gate::None => None,
            Gate::PerHead(gate) => Some((gate[head], head)),
            Gate::PerToken(gate) => {
                let position = self.dims.token(row, t, head, 1).start;
                Some((gate[position], position))
            }
        }
    }

    fn write(&self, s: &mut [f64], row: usize, t: usize, head: usize) {
        if let Some((gate, _)) = self.gate_at(row, t, head) {
            multiply(s, gate.exp());
        }
        let Dims { key, value, .. } = *self.dims;
        write(s, &self.k[self.dims.token(row, t, head, key)], &self.v[self.dims.token(row, t, head, value)]);
    }
}

/// `S = exp(g) S + k v^T`, `o = scale S^T q`.
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
    let gate = match x.gate {
        Gate::None => Vec::new(),
        Gate::PerHead(gate) | Gate::PerToken(gate) => zeros(gate),
    };
    let mut grads =
        Gradients { q: zeros(x.q), k: zeros(x.k), v: zeros(x.v), gate, initial: grad_state.to_vec() };
    let initial = x.dims.memories(x.initial);
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let mut history = vec![initial[x.dims.memory(n, head)].to_vec()];
            for (i, t) in tokens.clone().enumerate() {
                let mut s = history[i].clone();
                x.write(&mut s, row, t, head);
                history.push(s);
            }
            let ds = &mut grads.initial[x.dims.memory(n, head)];
            for (i, t) in tokens.clone().enumerate().rev() {
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                let mut d_read = grad_o[values.clone()].to_vec();
                multiply(&mut d_read, x.scale);
                add_scaled(&mut grads.q[keys.clone()], 1.0, &read_back(&history[i + 1], &d_read));
                write(ds, &x.q[keys.clone()], &d_read);
                add_scaled(&mut grads.k[keys.clone()], 1.0, &read_back(ds, &x.v[values.clone()]));
                add_scaled(&mut grads.v[values], 1.0, &read(ds, &x.k[keys], value));
                if let Some((gate, position)) = x.gate_at(row, t, head) {
                    grads.gate[position] += gate.exp() * dot(ds, &history[i]);
                    multiply(ds, gate.exp());
                }
            }
        }
    }
    grads
}

/// Every token reads the sum over its whole document: `o_t = scale (sum_s k_s v_s^T)^T q_t`; no gate, no state.
pub fn forward_noncausal(x: &Inputs) -> Vec<f64> {
    let Dims { heads, key, value, .. } = *x.dims;
    let mut o = vec![0.0; x.v.len()];
    for (row, tokens) in x.dims.sequences() {
        for head in 0..heads {
            let mut s = vec![0.0; key * value];
            for t in tokens.clone() {
                write(&mut s, &x.k[x.dims.token(row, t, head, key)], &x.v[x.dims.token(row, t, head, value)]);
            }
            for t in tokens.clone() {
                let read = read(&s, &x.q[x.dims.token(row, t, head, key)], value);
                add_scaled(&mut o[x.dims.token(row, t, head, value)], x.scale, &read);
            }
        }
    }
    o
}

/// Gradients of `sum(o * grad_o)` for `q`, `k` and `v` of [`forward_noncausal`].
pub fn backward_noncausal(x: &Inputs, grad_o: &[f64]) -> [Vec<f64>; 3] {
    let Dims { heads, key, value, .. } = *x.dims;
    let [mut dq, mut dk, mut dv] = [x.q, x.k, x.v].map(|like| vec![0.0; like.len()]);
    for (row, tokens) in x.dims.sequences() {
        for head in 0..heads {
            let mut s = vec![0.0; key * value];
            let mut ds = vec![0.0; key * value];
            for t in tokens.clone() {
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                write(&mut s, &x.k[keys.clone()], &x.v[values.clone()]);
                write(&mut ds, &x.q[keys], &grad_o[values]);
            }
            for t in tokens.clone() {
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                add_scaled(&mut dq[keys.clone()], x.scale, &read_back(&s, &grad_o[values.clone()]));
                add_scaled(&mut dk[keys.clone()], x.scale, &read_back(&ds, &x.v[values.clone()]));
                add_scaled(&mut dv[values], x.scale, &read(&ds, &x.k[keys], value));
            }
        }
    }
    [dq, dk, dv]
}
