//! The definition of DeltaProduct: one step of one token after the other, in float64.

use std::ops::Range;

use crate::kernel::Dims;
use crate::reference::{add_scaled, dot, multiply, read, read_back, write};

/// Inputs, row-major in the layout of [`delta_product`](super::delta_product).
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Sizes and documents; `time` counts tokens.
    pub dims: &'a Dims,
    /// Steps of a token, `N`.
    pub steps: usize,
    /// Factor on the output, in float64 (the one of `dims` is rounded).
    pub scale: f64,
    /// Queries `[B,T,H,K]`.
    pub q: &'a [f64],
    /// Keys `[B,T,N,H,K]`.
    pub k: &'a [f64],
    /// Values `[B,T,N,H,V]`.
    pub v: &'a [f64],
    /// Write strengths `[B,T,N,H]`.
    pub beta: &'a [f64],
    /// Log decays `[B,T,H]`, no decay when absent.
    pub gate: Option<&'a [f64]>,
    /// Initial states `[D,H,K,V]`, zero when absent.
    pub initial: Option<&'a [f64]>,
}

/// The output `[B,T,H,V]` and the final states `[D,H,K,V]`.
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
    /// Of the log decays (zeros when there are none).
    pub gate: Vec<f64>,
    /// Of the initial states.
    pub initial: Vec<f64>,
}

/// A token of a head: its row, its position in the row, its head.
type Token = (usize, usize, usize);

impl Inputs<'_> {
    fn of_token(&self, (row, t, head): Token, size: usize) -> Range<usize> {
        self.dims.token(row, t, head, size)
    }

    /// Range of the `j`-th step's numbers in a tensor `[B,T,N,H,size]`.
    fn of_step(&self, (row, t, head): Token, j: usize, size: usize) -> Range<usize> {
        let start = (((row * self.dims.time + t) * self.steps + j) * self.dims.heads + head) * size;
        start..start + size
    }

    fn decay(&self, token: Token) -> f64 {
        self.gate.map_or(1.0, |gate| gate[self.of_token(token, 1).start].exp())
    }

    /// What the `j`-th step has to correct: `v - s^T k`.
    fn error(&self, s: &[f64], token: Token, j: usize) -> Vec<f64> {
        let v = &self.v[self.of_step(token, j, self.dims.value)];
        let mut error = v.to_vec();
        let k = &self.k[self.of_step(token, j, self.dims.key)];
        add_scaled(&mut error, -1.0, &read(s, k, v.len()));
        error
    }

    /// The states after the decay and after each step, `N + 1` of them.
    fn states(&self, s: &[f64], token: Token) -> Vec<Vec<f64>> {
        let mut s = s.to_vec();
        multiply(&mut s, self.decay(token));
        let mut states = vec![s.clone()];
        for j in 0..self.steps {
            let mut u = self.error(&s, token, j);
            multiply(&mut u, self.beta[self.of_step(token, j, 1).start]);
            write(&mut s, &self.k[self.of_step(token, j, self.dims.key)], &u);
            states.push(s.clone());
        }
        states
    }
}

/// `S <- exp(g) S`, then `N` times `S <- S + beta k (v - S^T k)^T`, then `o = scale S^T q`.
pub fn forward(x: &Inputs) -> Outputs {
    let Dims { batch, time, heads, key, value, .. } = *x.dims;
    let mut o = vec![0.0; batch * time * heads * value];
    let mut memories = x.dims.memories(x.initial);
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let s = &mut memories[x.dims.memory(n, head)];
            for token in tokens.clone().map(|t| (row, t, head)) {
                s.copy_from_slice(&x.states(s, token)[x.steps]);
                let reading = read(s, &x.q[x.of_token(token, key)], value);
                add_scaled(&mut o[x.of_token(token, value)], x.scale, &reading);
            }
        }
    }
    Outputs { o, state: memories }
}

/// Gradients of `sum(o * grad_o) + sum(state * grad_state)`.
pub fn backward(x: &Inputs, grad_o: &[f64], grad_state: &[f64]) -> Gradients {
    let Dims { batch, time, heads, key, value, .. } = *x.dims;
    let zeros = |like: &[f64]| vec![0.0; like.len()];
    let mut grads = Gradients {
        q: zeros(x.q),
        k: zeros(x.k),
        v: zeros(x.v),
        beta: zeros(x.beta),
        gate: vec![0.0; batch * time * heads],
        initial: grad_state.to_vec(),
    };
    let initial = x.dims.memories(x.initial);
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let mut starts = vec![initial[x.dims.memory(n, head)].to_vec()];
            for (i, t) in tokens.clone().enumerate() {
                starts.push(x.states(&starts[i], (row, t, head)).swap_remove(x.steps));
            }
            let ds = &mut grads.initial[x.dims.memory(n, head)];
            for (i, t) in tokens.clone().enumerate().rev() {
                let token = (row, t, head);
                let states = x.states(&starts[i], token);
                let keys = x.of_token(token, key);

                let mut d_read = grad_o[x.of_token(token, value)].to_vec();
                multiply(&mut d_read, x.scale);
                add_scaled(&mut grads.q[keys.clone()], 1.0, &read_back(&states[x.steps], &d_read));
                write(ds, &x.q[keys], &d_read);
                for j in (0..x.steps).rev() {
                    let (keys, values) = (x.of_step(token, j, key), x.of_step(token, j, value));
                    let strength = x.of_step(token, j, 1).start;
                    let (k, beta, before) = (&x.k[keys.clone()], x.beta[strength], &states[j]);
                    let error = x.error(before, token, j);
                    let mut du = read(ds, k, value);
                    add_scaled(&mut grads.k[keys.clone()], beta, &read_back(ds, &error));
                    grads.beta[strength] = dot(&du, &error);
                    multiply(&mut du, beta);
                    add_scaled(&mut grads.v[values], 1.0, &du);
                    add_scaled(&mut grads.k[keys], -1.0, &read_back(before, &du));
                    multiply(&mut du, -1.0);
                    write(ds, k, &du);
                }
                let scalar = x.of_token(token, 1).start;
                grads.gate[scalar] = if x.gate.is_some() { dot(ds, &states[0]) } else { 0.0 };
                multiply(ds, x.decay(token));
            }
        }
    }
    grads
}
