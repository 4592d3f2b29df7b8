//! The definition of the matrix memory of Titans: one token after the other, in float64.

use crate::kernel::Dims;
use crate::reference::{add_scaled, dot, multiply, read, read_back, write};

/// Inputs, row-major in the layout of [`titans_memory`](super::titans_memory).
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
    /// Rates `[B,T,H]`.
    pub theta: &'a [f64],
    /// Momentum factors `[B,T,H]`.
    pub eta: &'a [f64],
    /// Forgetting `[B,T,H]`.
    pub alpha: &'a [f64],
    /// Initial memories `[N,H,K,V]`, zero when absent.
    pub memory: Option<&'a [f64]>,
    /// Initial momenta `[N,H,K,V]`, zero when absent.
    pub momentum: Option<&'a [f64]>,
}

/// The output `[B,T,H,V]`, and the final memories and momenta `[N,H,K,V]`.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// Output.
    pub o: Vec<f64>,
    /// Final memories.
    pub memory: Vec<f64>,
    /// Final momenta.
    pub momentum: Vec<f64>,
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
    /// Of the rates.
    pub theta: Vec<f64>,
    /// Of the momentum factors.
    pub eta: Vec<f64>,
    /// Of the forgetting.
    pub alpha: Vec<f64>,
    /// Of the initial memories.
    pub memory: Vec<f64>,
    /// Of the initial momenta.
    pub momentum: Vec<f64>,
}

impl Inputs<'_> {
    /// Updates memory and momentum; returns the error `v - M^T k` before.
    fn write(&self, m: &mut [f64], s: &mut [f64], row: usize, t: usize, head: usize) -> Vec<f64> {
        let k = &self.k[self.dims.token(row, t, head, self.dims.key)];
        let v = &self.v[self.dims.token(row, t, head, self.dims.value)];
        let scalar = self.dims.token(row, t, head, 1).start;
        let mut error = v.to_vec();
        add_scaled(&mut error, -1.0, &read(m, k, v.len()));
        let mut u = error.clone();
        multiply(&mut u, self.theta[scalar]);
        multiply(s, self.eta[scalar]);
        write(s, k, &u);
        multiply(m, 1.0 - self.alpha[scalar]);
        add_scaled(m, 1.0, s);
        error
    }
}

/// `S = eta S - theta k (M^T k - v)^T`, `M = (1 - alpha) M + S`, `o = scale M^T q`.
pub fn forward(x: &Inputs) -> Outputs {
    let Dims { heads, key, value, .. } = *x.dims;
    let mut o = vec![0.0; x.v.len()];
    let [mut memories, mut momenta] = [x.memory, x.momentum].map(|initial| x.dims.memories(initial));
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let memory = &mut memories[x.dims.memory(n, head)];
            let momentum = &mut momenta[x.dims.memory(n, head)];
            for t in tokens.clone() {
                x.write(memory, momentum, row, t, head);
                let read = read(memory, &x.q[x.dims.token(row, t, head, key)], value);
                add_scaled(&mut o[x.dims.token(row, t, head, value)], x.scale, &read);
            }
        }
    }
    Outputs { o, memory: memories, momentum: momenta }
}

/// Gradients of `sum(o * grad_o) + sum(memory * grad_memory) + sum(momentum * grad_momentum)`.
pub fn backward(x: &Inputs, grad_o: &[f64], grad_memory: &[f64], grad_momentum: &[f64]) -> Gradients {
    let Dims { heads, key, value, .. } = *x.dims;
    let zeros = |like: &[f64]| vec![0.0; like.len()];
    let mut grads = Gradients {
        q: zeros(x.q),
        k: zeros(x.k),
        v: zeros(x.v),
        theta: zeros(x.theta),
        eta: zeros(x.eta),
        alpha: zeros(x.alpha),
        memory: grad_memory.to_vec(),
        momentum: grad_momentum.to_vec(),
    };
    let initial = [x.memory, x.momentum].map(|initial| x.dims.memories(initial));
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let range = x.dims.memory(n, head);
            let mut history = vec![initial.each_ref().map(|states| states[range.clone()].to_vec())];
            let mut errors = Vec::new();
            for (i, t) in tokens.clone().enumerate() {
                let [mut memory, mut momentum] = history[i].clone();
                errors.push(x.write(&mut memory, &mut momentum, row, t, head));
                history.push([memory, momentum]);
            }
            let (d_memory, d_momentum) = (&mut grads.memory[range.clone()], &mut grads.momentum[range]);
            for (i, t) in tokens.clone().enumerate().rev() {
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                let scalar = x.dims.token(row, t, head, 1).start;
                let ([memory, momentum], [memory_after, _]) = (&history[i], &history[i + 1]);
                let error = &errors[i];

                // o = scale M^T q
                let mut d_read = grad_o[values.clone()].to_vec();
                multiply(&mut d_read, x.scale);
                add_scaled(&mut grads.q[keys.clone()], 1.0, &read_back(memory_after, &d_read));
                write(d_memory, &x.q[keys.clone()], &d_read);
                // M = (1 - alpha) M + S
                let (theta, eta, alpha) = (x.theta[scalar], x.eta[scalar], x.alpha[scalar]);
                grads.alpha[scalar] = -dot(d_memory, memory);
                add_scaled(d_momentum, 1.0, d_memory);
                multiply(d_memory, 1.0 - alpha);
                // S = eta S + theta k error^T
                let gathered = read_back(d_momentum, error);
                grads.eta[scalar] = dot(d_momentum, momentum);
                grads.theta[scalar] = dot(&x.k[keys.clone()], &gathered);
                add_scaled(&mut grads.k[keys.clone()], theta, &gathered);
                let mut d_error = read(d_momentum, &x.k[keys.clone()], value);
                multiply(&mut d_error, theta);
                multiply(d_momentum, eta);
                // error = v - M^T k
                add_scaled(&mut grads.v[values], 1.0, &d_error);
                add_scaled(&mut grads.k[keys.clone()], -1.0, &read_back(memory, &d_error));
                multiply(&mut d_error, -1.0);
                write(d_memory, &x.k[keys], &d_error);
            }
        }
    }
    grads
}
