//! The definition of normalised linear attention: one token after the other, in float64.

use std::ops::Range;

use super::EPSILON;
use crate::kernel::Dims;
use crate::reference::{add_scaled, dot, multiply, or_zeros, read, read_back, write};

/// Inputs, row-major in the layout of [`normalised_linear_attention`](super::normalised_linear_attention).
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Sizes and documents; there is no scale.
    pub dims: &'a Dims,
    /// Queries before the feature map `[B,T,H,K]`.
    pub q: &'a [f64],
    /// Keys before the feature map `[B,T,H,K]`.
    pub k: &'a [f64],
    /// Values `[B,T,H,V]`.
    pub v: &'a [f64],
    /// Log decays `[B,T,H]`, no decay when absent.
    pub gate: Option<&'a [f64]>,
    /// Initial memories `[N,H,K,V]` and normalisers `[N,H,K]`, zero when absent.
    pub initial: Option<(&'a [f64], &'a [f64])>,
}

/// The output `[B,T,H,V]` and the final memories and normalisers.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// Output.
    pub o: Vec<f64>,
    /// Final memories `[N,H,K,V]`.
    pub s: Vec<f64>,
    /// Final normalisers `[N,H,K]`.
    pub z: Vec<f64>,
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
    /// Of the initial memories.
    pub s: Vec<f64>,
    /// Of the initial normalisers.
    pub z: Vec<f64>,
}

fn feature_map(x: &[f64]) -> Vec<f64> {
    x.iter().map(|&x| if x > 0.0 { x + 1.0 } else { x.exp() }).collect()
}

/// `d += phi'(x) * d_phi`.
fn add_feature_gradient(d: &mut [f64], x: &[f64], d_phi: &[f64]) {
    for ((d, &x), d_phi) in d.iter_mut().zip(x).zip(d_phi) {
        *d += d_phi * if x > 0.0 { 1.0 } else { x.exp() };
    }
}

impl Inputs<'_> {
    /// Ranges of the memory in `[N,H,K,V]` and of the normaliser in `[N,H,K]`.
    fn state_at(&self, sequence: usize, head: usize) -> (Range<usize>, Range<usize>) {
        let start = (sequence * self.dims.heads + head) * self.dims.key;
        (self.dims.memory(sequence, head), start..start + self.dims.key)
    }

    fn states(&self) -> (Vec<f64>, Vec<f64>) {
        let (s, z) = self.initial.unzip();
        (self.dims.memories(s), or_zeros(z, self.dims.states() * self.dims.heads * self.dims.key))
    }

    fn decay_at(&self, row: usize, t: usize, head: usize) -> f64 {
        self.gate.map_or(1.0, |gate| gate[self.dims.token(row, t, head, 1).start].exp())
    }

    fn write(&self, s: &mut [f64], z: &mut [f64], row: usize, t: usize, head: usize) {
        let k = feature_map(&self.k[self.dims.token(row, t, head, self.dims.key)]);
        let decay = self.decay_at(row, t, head);
        multiply(s, decay);
        multiply(z, decay);
        write(s, &k, &self.v[self.dims.token(row, t, head, self.dims.value)]);
        add_scaled(z, 1.0, &k);
    }

    /// The output of a query's features, and its denominator.
    fn read(&self, s: &[f64], z: &[f64], features: &[f64]) -> (Vec<f64>, f64) {
        let mut o = read(s, features, self.dims.value);
        let denominator = dot(features, z) + EPSILON;
        o.iter_mut().for_each(|o| *o /= denominator);
        (o, denominator)
    }
}

/// `S = exp(g) S + phi(k) v^T`, `z = exp(g) z + phi(k)`, `o = S^T phi(q) / (phi(q) . z + eps)`.
pub fn forward(x: &Inputs) -> Outputs {
    let mut o = vec![0.0; x.v.len()];
    let (mut all_s, mut all_z) = x.states();
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..x.dims.heads {
            let (s_at, z_at) = x.state_at(n, head);
            let (s, z) = (&mut all_s[s_at], &mut all_z[z_at]);
            for t in tokens.clone() {
                x.write(s, z, row, t, head);
                let features = feature_map(&x.q[x.dims.token(row, t, head, x.dims.key)]);
                o[x.dims.token(row, t, head, x.dims.value)].copy_from_slice(&x.read(s, z, &features).0);
            }
        }
    }
    Outputs { o, s: all_s, z: all_z }
}

/// Gradients of `sum(o * grad_o) + sum(s * grad_s) + sum(z * grad_z)`.
pub fn backward(x: &Inputs, grad_o: &[f64], grad_s: &[f64], grad_z: &[f64]) -> Gradients {
    let Dims { heads, key, value, .. } = *x.dims;
    let zeros = |like: &[f64]| vec![0.0; like.len()];
    let mut grads = Gradients {
        q: zeros(x.q),
        k: zeros(x.k),
        v: zeros(x.v),
        gate: x.gate.map(zeros).unwrap_or_default(),
        s: grad_s.to_vec(),
        z: grad_z.to_vec(),
    };
    let (all_s, all_z) = x.states();
    for (n, (row, tokens)) in x.dims.sequences().into_iter().enumerate() {
        for head in 0..heads {
            let (s_at, z_at) = x.state_at(n, head);
            let mut history = vec![(all_s[s_at.clone()].to_vec(), all_z[z_at.clone()].to_vec())];
            for (i, t) in tokens.clone().enumerate() {
                let (mut s, mut z) = history[i].clone();
                x.write(&mut s, &mut z, row, t, head);
                history.push((s, z));
            }
            let (ds, dz) = (&mut grads.s[s_at], &mut grads.z[z_at]);
            for (i, t) in tokens.clone().enumerate().rev() {
                let (keys, values) = (x.dims.token(row, t, head, key), x.dims.token(row, t, head, value));
                let ((s_before, z_before), (s, z)) = (&history[i], &history[i + 1]);

                // o = numerator / denominator
                let q = feature_map(&x.q[keys.clone()]);
                let (o, denominator) = x.read(s, z, &q);
                let d_denominator = -dot(&grad_o[values.clone()], &o) / denominator;
                let d_numerator: Vec<f64> = grad_o[values.clone()].iter().map(|g| g / denominator).collect();
                let mut dq = read_back(s, &d_numerator);
                add_scaled(&mut dq, d_denominator, z);
                add_feature_gradient(&mut grads.q[keys.clone()], &x.q[keys.clone()], &dq);
                write(ds, &q, &d_numerator);
                add_scaled(dz, d_denominator, &q);
                // S += phi(k) v^T, z += phi(k)
                let mut dk = read_back(ds, &x.v[values.clone()]);
                add_scaled(&mut dk, 1.0, dz);
                add_feature_gradient(&mut grads.k[keys.clone()], &x.k[keys.clone()], &dk);
                add_scaled(&mut grads.v[values], 1.0, &read(ds, &feature_map(&x.k[keys]), value));
                // S and z decay
                if x.gate.is_some() {
                    let decay = x.decay_at(row, t, head);
                    let scalar = x.dims.token(row, t, head, 1).start;
                    grads.gate[scalar] = decay * (dot(ds, s_before) + dot(dz, z_before));
                    multiply(ds, decay);
                    multiply(dz, decay);
                }
            }
        }
    }
    grads
}

/// The same output without a state or a gate: every token weighs all earlier ones and itself,
/// `o_t = sum_{i<=t} phi(q_t).phi(k_i) v_i / (sum_{i<=t} phi(q_t).phi(k_i) + eps)`.
pub fn forward_explicit(x: &Inputs) -> Vec<f64> {
    let Dims { heads, key, value, .. } = *x.dims;
    let mut o = vec![0.0; x.v.len()];
    for (row, tokens) in x.dims.sequences() {
        for head in 0..heads {
            for t in tokens.clone() {
                let q = feature_map(&x.q[x.dims.token(row, t, head, key)]);
                let out = &mut o[x.dims.token(row, t, head, value)];
                let mut total = EPSILON;
                for i in tokens.start..=t {
                    let weight = dot(&q, &feature_map(&x.k[x.dims.token(row, i, head, key)]));
                    add_scaled(out, weight, &x.v[x.dims.token(row, i, head, value)]);
                    total += weight;
                }
                multiply(out, 1.0 / total);
            }
        }
    }
    o
}
