//! Definitions in float64 of the named rules that are no cell of the algebra, one token each.
//!
//! Matrices are key first, `[K, V]`, as everywhere. Each has its objective or its loss, so that the update can be
//! checked against it.

use super::reference::{Layer, Weights, add};

/// `W^T x`.
fn transposed_times(w: &Layer, x: &[f64]) -> Vec<f64> {
    (0..w.cols).map(|j| (0..w.rows).map(|i| w.at(i, j) * x[i]).sum()).collect()
}

fn outer(x: &[f64], y: &[f64]) -> Layer {
    Layer::new(x.len(), y.len(), x.iter().flat_map(|x| y.iter().map(move |y| x * y)).collect())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn scaled(x: &[f64], by: f64) -> Vec<f64> {
    x.iter().map(|x| by * x).collect()
}

fn plus(a: &Layer, factor: f64, b: &Layer) -> Layer {
    add(std::slice::from_ref(a), factor, std::slice::from_ref(b)).remove(0)
}

fn inner(a: &Layer, b: &Layer) -> f64 {
    dot(&a.values, &b.values)
}

fn half_square(a: &Layer) -> f64 {
    0.5 * inner(a, a)
}

/// Oja's rule with the value as its output (Oja 1982): value-first `W + eta (v k^T - v v^T W)`.
pub fn oja(s: &Layer, k: &[f64], v: &[f64], eta: f64) -> Layer {
    // Key-first: S + eta (k v^T - (S v) v^T).
    let sv: Vec<f64> = s.values.chunks(s.cols).map(|row| dot(row, v)).collect();
    let change: Vec<f64> = k.iter().zip(&sv).map(|(k, sv)| k - sv).collect();
    plus(s, eta, &outer(&change, v))
}

/// The loss whose gradient step is [`oja`]: `-<S^T k, v> + 1/2 |S v|^2`.
pub fn oja_loss(s: &Layer, k: &[f64], v: &[f64]) -> f64 {
    let sv: Vec<f64> = s.values.chunks(s.cols).map(|row| dot(row, v)).collect();
    -dot(&sv, k) + 0.5 * dot(&sv, &sv)
}

/// Comba (2506.02475): `S <- (alpha I - b beta k k^T) S + beta k v^T`, the read undecayed.
pub fn comba(s: &Layer, k: &[f64], v: &[f64], [beta, alpha, b]: [f64; 3]) -> Layer {
    let read = transposed_times(s, k);
    let write: Vec<f64> = read.iter().zip(v).map(|(read, v)| beta * (v - b * read)).collect();
    let decayed = Layer { values: scaled(&s.values, alpha), ..s.clone() };
    plus(&decayed, 1.0, &outer(k, &write))
}

/// The objective of [`comba`]: `beta <S^T k, b S_{t-1}^T k - v> + 1/2 |S - alpha S_{t-1}|^2`.
pub fn comba_objective(
    candidate: &Layer,
    s: &Layer,
    k: &[f64],
    v: &[f64],
    [beta, alpha, b]: [f64; 3],
) -> f64 {
    let error: Vec<f64> = transposed_times(s, k).iter().zip(v).map(|(read, v)| b * read - v).collect();
    let decayed = Layer { values: scaled(&s.values, alpha), ..s.clone() };
    beta * dot(&transposed_times(candidate, k), &error) + half_square(&plus(candidate, -1.0, &decayed))
}

/// What a token of RWKV-7 brings: decays `w`, removal key `kk`, rates `a`, written key `n * k` and value.
#[derive(Debug, Clone, PartialEq)]
pub struct Rwkv7Token {
    /// Decay of every key channel.
    pub w: Vec<f64>,
    /// Unit key that is removed.
    pub kk: Vec<f64>,
    /// In-context rate of every key channel.
    pub a: Vec<f64>,
    /// Key that is written.
    pub k: Vec<f64>,
    /// Value.
    pub v: Vec<f64>,
}

/// RWKV-7 (2503.14456): value-first `S <- S diag(w) - S kk (a * kk)^T + v k^T`.
pub fn rwkv7(s: &Layer, token: &Rwkv7Token) -> Layer {
    let Rwkv7Token { w, kk, a, k, v } = token;
    let read = transposed_times(s, kk);
    let entry = |i: usize, j: usize| w[i] * s.at(i, j) - a[i] * kk[i] * read[j] + k[i] * v[j];
    let values = (0..s.rows).flat_map(|i| (0..s.cols).map(move |j| (i, j))).map(|(i, j)| entry(i, j));
    Layer::new(s.rows, s.cols, values.collect())
}

/// The objective of [`rwkv7`], value-first
/// `<S, S_{t-1} kk (a * kk)^T - v k^T> + 1/2 |S - S_{t-1} diag(w)|_F^2`.
pub fn rwkv7_objective(candidate: &Layer, s: &Layer, token: &Rwkv7Token) -> f64 {
    let Rwkv7Token { w, kk, a, k, v } = token;
    let removed: Vec<f64> = a.iter().zip(kk).map(|(a, kk)| a * kk).collect();
    let linear = plus(&outer(&removed, &transposed_times(s, kk)), -1.0, &outer(k, v));
    let cols = s.cols;
    let decayed = s.values.iter().enumerate().map(|(i, s)| w[i / cols] * s).collect();
    inner(candidate, &linear) + half_square(&plus(candidate, -1.0, &Layer { values: decayed, ..s.clone() }))
}

/// Added to the variance in the normalisation of test-time training.
const LN_EPS: f64 = 1e-6;

fn gelu(x: f64) -> (f64, f64) {
    // The tanh form, and its derivative.
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let t = (c * (x + 0.044715 * x * x * x)).tanh();
    (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x))
}

/// `LN(x)` without weight, and the deviation that it divides by.
fn layer_norm(x: &[f64]) -> (Vec<f64>, f64) {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let deviation = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + LN_EPS).sqrt();
    (x.iter().map(|x| (x - mean) / deviation).collect(), deviation)
}

/// The residual function of test-time training: `W^T x + c`, or with four weights `W2^T gelu(W1^T x + c1) + c2`.
/// Biases are weights of one row: `[W, c]` or `[W1, c1, W2, c2]`.
fn ttt_inner(weights: &[Layer], x: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let affine = |w: &Layer, c: &Layer, x: &[f64]| -> Vec<f64> {
        transposed_times(w, x).iter().zip(&c.values).map(|(y, c)| y + c).collect()
    };
    match weights {
        [w1, c1, w2, c2] => {
            let inputs = affine(w1, c1, x);
            let hidden: Vec<f64> = inputs.iter().map(|a| gelu(*a).0).collect();
            (affine(w2, c2, &hidden), inputs)
        }
        [w, c, ..] => (affine(w, c, x), Vec::new()),
        _ => (x.to_vec(), Vec::new()),
    }
}

/// `f(x) = x + LN(f_res(x))`.
pub fn ttt_read(weights: &[Layer], x: &[f64]) -> Vec<f64> {
    let normalised = layer_norm(&ttt_inner(weights, x).0).0;
    x.iter().zip(normalised).map(|(x, y)| x + y).collect()
}

/// The inner loss of test-time training (2407.04620): `1/2 |LN(f_res(k)) - (v - k)|^2`.
pub fn ttt_loss(weights: &[Layer], k: &[f64], v: &[f64]) -> f64 {
    0.5 * ttt_read(weights, k).iter().zip(v).map(|(y, v)| (y - v).powi(2)).sum::<f64>()
}

/// The gradient of [`ttt_loss`] by every weight.
pub fn ttt_gradient(weights: &[Layer], k: &[f64], v: &[f64]) -> Weights {
    let (residual, inputs) = ttt_inner(weights, k);
    let (normalised, deviation) = layer_norm(&residual);
    let n = residual.len() as f64;
    let y: Vec<f64> = (0..k.len()).map(|i| k[i] + normalised[i] - v[i]).collect();
    let (mean, along) = (y.iter().sum::<f64>() / n, dot(&y, &normalised) / n);
    let u: Vec<f64> = y.iter().zip(&normalised).map(|(y, x)| (y - mean - x * along) / deviation).collect();
    let row = |x: &[f64]| Layer::new(1, x.len(), x.to_vec());
    match weights {
        [_, _, w2, _] => {
            let hidden: Vec<f64> = inputs.iter().map(|a| gelu(*a).0).collect();
            let back: Vec<f64> = (0..inputs.len())
                .map(|i| gelu(inputs[i]).1 * dot(&w2.values[i * w2.cols..(i + 1) * w2.cols], &u))
                .collect();
            vec![outer(k, &back), row(&back), outer(&hidden, &u), row(&u)]
        }
        _ => vec![outer(k, &u), row(&u)],
    }
}

/// One gradient step of test-time training with a mini-batch of one token.
pub fn ttt(weights: &[Layer], k: &[f64], v: &[f64], eta: f64) -> Weights {
    add(weights, -eta, &ttt_gradient(weights, k, v))
}

/// Cells of an LSTM, a row: `f c + i g`.
pub fn lstm(c: &Layer, g: &[f64], [input, forget]: [f64; 2]) -> Layer {
    let kept = Layer { values: scaled(&c.values, forget), ..c.clone() };
    plus(&kept, input, &Layer::new(1, g.len(), g.to_vec()))
}

/// The objective of [`lstm`]: `-i <g, c> + 1/2 |c - f c_{t-1}|^2`.
pub fn lstm_objective(candidate: &Layer, c: &Layer, g: &[f64], [input, forget]: [f64; 2]) -> f64 {
    let kept = Layer { values: scaled(&c.values, forget), ..c.clone() };
    -input * dot(g, &candidate.values) + half_square(&plus(candidate, -1.0, &kept))
}

/// What a self-referential matrix makes of a token.
#[derive(Debug, Clone, PartialEq)]
pub struct SrwmToken {
    /// What it reads at the token.
    pub output: Vec<f64>,
    /// The key, `phi(k)`.
    pub key: Vec<f64>,
    /// The target, what it reads at `phi(q)`, column by column.
    pub target: Vec<f64>,
    /// The rate of each column.
    pub rates: Vec<f64>,
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let top = x.iter().fold(f64::NEG_INFINITY, |top, x| top.max(*x));
    let exps: Vec<f64> = x.iter().map(|x| (x - top).exp()).collect();
    let sum: f64 = exps.iter().sum();
    scaled(&exps, 1.0 / sum)
}

/// What the matrix `w [K, V + 2 K + 4]` makes of the input `x`: output, query, key and four rates, one a block of columns.
pub fn srwm_token(w: &Layer, x: &[f64]) -> SrwmToken {
    let key = w.rows;
    let value = w.cols - 2 * key - 4;
    let z = transposed_times(w, &softmax(x));
    let (query, own) = (softmax(&z[value..value + key]), softmax(&z[value + key..value + 2 * key]));
    let sizes = [value, key, key, 4].into_iter().enumerate();
    let rate = |block: usize| 1.0 / (1.0 + (-z[value + 2 * key + block]).exp());
    SrwmToken {
        output: z[..value].to_vec(),
        target: transposed_times(w, &query),
        key: own,
        rates: sizes.flat_map(|(block, size)| vec![rate(block); size]).collect(),
    }
}

/// SRWM (2202.05780): the delta step of the matrix on the key, target and rates it made.
pub fn srwm(w: &Layer, token: &SrwmToken) -> Layer {
    let read = transposed_times(w, &token.key);
    let write: Vec<f64> = (0..w.cols).map(|c| token.rates[c] * (token.target[c] - read[c])).collect();
    plus(w, 1.0, &outer(&token.key, &write))
}

/// The loss whose gradient step, of rate one, is [`srwm`]: `sum_c rate_c 1/2 (W^T key - target)_c^2`, what the matrix made of the
/// token held fixed.
pub fn srwm_loss(w: &Layer, token: &SrwmToken) -> f64 {
    let errors = transposed_times(w, &token.key).into_iter().zip(&token.target);
    errors.zip(&token.rates).map(|((y, v), rate)| 0.5 * rate * (y - v).powi(2)).sum()
}

/// What a normalised matrix reads, `LN(W^T x)`.
pub fn normalised_read(w: &Layer, x: &[f64]) -> Vec<f64> {
    layer_norm(&transposed_times(w, x)).0
}

/// `1/2 |LN(W^T k) - v|^2`.
pub fn normalised_loss(w: &Layer, k: &[f64], v: &[f64]) -> f64 {
    0.5 * normalised_read(w, k).iter().zip(v).map(|(y, v)| (y - v).powi(2)).sum::<f64>()
}

/// The gradient of [`normalised_loss`].
pub fn normalised_gradient(w: &Layer, k: &[f64], v: &[f64]) -> Layer {
    let (normal, deviation) = layer_norm(&transposed_times(w, k));
    let error: Vec<f64> = normal.iter().zip(v).map(|(y, v)| y - v).collect();
    let n = error.len() as f64;
    let (mean, along) = (error.iter().sum::<f64>() / n, dot(&error, &normal) / n);
    let u: Vec<f64> = error.iter().zip(&normal).map(|(e, x)| (e - mean - x * along) / deviation).collect();
    outer(k, &u)
}

/// A chosen memory of a mixture: `(1 - alpha) M - eta grad 1/2 |LN(M^T k) - v|^2`.
pub fn normalised(w: &Layer, k: &[f64], v: &[f64], [eta, alpha]: [f64; 2]) -> Layer {
    let kept = Layer { values: scaled(&w.values, 1.0 - alpha), ..w.clone() };
    plus(&kept, -eta, &normalised_gradient(w, k, v))
}

/// The objective of [`normalised`]: `eta <grad, M> + 1/2 |M - (1 - alpha) M_{t-1}|^2`.
pub fn normalised_objective(
    candidate: &Layer,
    w: &Layer,
    k: &[f64],
    v: &[f64],
    [eta, alpha]: [f64; 2],
) -> f64 {
    let kept = Layer { values: scaled(&w.values, 1.0 - alpha), ..w.clone() };
    eta * inner(&normalised_gradient(w, k, v), candidate) + half_square(&plus(candidate, -1.0, &kept))
}

/// The Nadaraya-Watson estimate `sum_i s_i v_i / sum_i s_i`: softmax attention for `s_i = exp(scale q.k_i)`.
pub fn nadaraya_watson(similarities: &[f64], values: &[Vec<f64>]) -> Vec<f64> {
    let total: f64 = similarities.iter().sum();
    let dim = values.first().map_or(0, Vec::len);
    (0..dim).map(|j| similarities.iter().zip(values).map(|(s, v)| s * v[j]).sum::<f64>() / total).collect()
}

/// Its objective, `sum_i s_i |v_i - z|^2`.
pub fn nadaraya_watson_objective(z: &[f64], similarities: &[f64], values: &[Vec<f64>]) -> f64 {
    let distance = |v: &Vec<f64>| v.iter().zip(z).map(|(v, z)| (v - z).powi(2)).sum::<f64>();
    similarities.iter().zip(values).map(|(s, v)| s * distance(v)).sum()
}
