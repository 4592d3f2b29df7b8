//! The definition of the matrix memory of Titans: one token after the other, in float64.

use crate::kernel::Dims;
use crate::reference::{add_scaled, multiply, read, read_back, write};

/// Inputs, row-major in the layout of [`titans_memory`](super::titans_memory); each gate has one number a head, or one a
/// column of the memory as in [`titans_memory_channelwise`](super::titans_memory_channelwise).
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
    /// Rates `[B,T,H]` or `[B,T,H,V]`.
    pub theta: &'a [f64],
    /// Momentum factors `[B,T,H]` or `[B,T,H,V]`.
    pub eta: &'a [f64],
    /// Forgetting `[B,T,H]` or `[B,T,H,V]`.
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

/// Adds to the gradient of a token's gate what each of its columns asks for.
fn add_to_gate(grad: &mut [f64], dims: &Dims, at: [usize; 3], columns: &[f64]) {
    let range = gate_range(grad.len(), dims, at);
    let own = &mut grad[range];
    let size = own.len();
    columns.iter().enumerate().for_each(|(j, x)| own[j % size] += x);
}

/// A token's numbers in a gate of `length` numbers: one for all columns, or one each.
fn gate_range(length: usize, dims: &Dims, [row, t, head]: [usize; 3]) -> std::ops::Range<usize> {
    dims.token(row, t, head, length / (dims.batch * dims.time * dims.heads))
}

/// A token's gate for each of its columns.
fn gate_columns(gate: &[f64], dims: &Dims, at: [usize; 3]) -> Vec<f64> {
    gate[gate_range(gate.len(), dims, at)].iter().copied().cycle().take(dims.value).collect()
}

/// Multiplies each column of a memory by its factor.
fn multiply_columns(s: &mut [f64], factors: &[f64]) {
    s.chunks_exact_mut(factors.len()).flat_map(|row| row.iter_mut().zip(factors)).for_each(|(s, f)| *s *= f);
}

/// `sum_i a_ij b_ij` of every column.
fn column_dots(a: &[f64], b: &[f64], value: usize) -> Vec<f64> {
    let mut sums = vec![0.0; value];
    a.iter().zip(b).enumerate().for_each(|(at, (a, b))| sums[at % value] += a * b);
    sums
}

/// `a_j b_j`.
fn products(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}

impl Inputs<'_> {
    /// The rates, momentum factors and retentions of a token's columns.
    fn gates(&self, at: [usize; 3]) -> [Vec<f64>; 3] {
        let [theta, eta, alpha] =
            [self.theta, self.eta, self.alpha].map(|gate| gate_columns(gate, self.dims, at));
        [theta, eta, alpha.into_iter().map(|alpha| 1.0 - alpha).collect()]
    }

    /// Updates memory and momentum; returns the error `v - M^T k` before.
    fn write(&self, m: &mut [f64], s: &mut [f64], row: usize, t: usize, head: usize) -> Vec<f64> {
        let k = &self.k[self.dims.token(row, t, head, self.dims.key)];
        let v = &self.v[self.dims.token(row, t, head, self.dims.value)];
        let [theta, eta, retain] = self.gates([row, t, head]);
        let mut error = v.to_vec();
        add_scaled(&mut error, -1.0, &read(m, k, v.len()));
        multiply_columns(s, &eta);
        write(s, k, &products(&theta, &error));
        multiply_columns(m, &retain);
        add_scaled(m, 1.0, s);
        error
    }
}

/// `S = eta S - theta k (M^T k - v)^T`, `M = (1 - alpha) M + S`, `o = scale M^T q`, column by column where the gates
/// have a number for each.
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
                let at = [row, t, head];
                let ([memory, momentum], [memory_after, _]) = (&history[i], &history[i + 1]);
                let error = &errors[i];

                // o = scale M^T q
                let mut d_read = grad_o[values.clone()].to_vec();
                multiply(&mut d_read, x.scale);
                add_scaled(&mut grads.q[keys.clone()], 1.0, &read_back(memory_after, &d_read));
                write(d_memory, &x.q[keys.clone()], &d_read);
                // M = (1 - alpha) M + S
                let [theta, eta, retain] = x.gates(at);
                let mut d_alpha = column_dots(d_memory, memory, value);
                multiply(&mut d_alpha, -1.0);
                add_to_gate(&mut grads.alpha, x.dims, at, &d_alpha);
                add_scaled(d_momentum, 1.0, d_memory);
                multiply_columns(d_memory, &retain);
                // S = eta S + k (theta error)^T
                add_to_gate(&mut grads.eta, x.dims, at, &column_dots(d_momentum, momentum, value));
                let d_written = read(d_momentum, &x.k[keys.clone()], value);
                add_to_gate(&mut grads.theta, x.dims, at, &products(&d_written, error));
                let written = products(&theta, error);
                add_scaled(&mut grads.k[keys.clone()], 1.0, &read_back(d_momentum, &written));
                let mut d_error = products(&theta, &d_written);
                multiply_columns(d_momentum, &eta);
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
