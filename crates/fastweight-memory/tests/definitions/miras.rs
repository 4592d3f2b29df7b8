//! Moneta, Yaad and Memora: memories with a rate and a decay for every output of every weight.

use serde_json::Value;

use super::{low_rank, per_head, projections};
use crate::{H, K, Plain, Rows, V, dot, head, sigmoid, silu, softplus, unit};

/// What the weights are computed from at a memory that keeps `a`, `[rows][cols]`.
fn weights(name: &str, options: &Value, a: &Rows) -> Rows {
    let map = |of: &dyn Fn(f64) -> f64| -> Rows {
        a.iter().map(|row| row.iter().map(|a| of(*a)).collect()).collect()
    };
    let norm = |power: f64| a.iter().flatten().map(|a| a.abs().powf(power)).sum::<f64>().powf(1.0 / power);
    match name {
        "moneta" => {
            let q = options["q"].as_f64().unwrap();
            if options["mirror"] == true {
                let r = q / (q - 1.0);
                let length = norm(r).powf(r - 2.0);
                map(&|a| a.signum() * a.abs().powf(r - 1.0) / length)
            } else {
                let length = norm(q).powf(q - 2.0);
                map(&|a| a / length)
            }
        }
        "memora" => map(&f64::exp),
        _ => a.clone(),
    }
}

/// Every column less the logarithm of its sum.
fn normalise(a: &mut Rows) {
    for j in 0..a[0].len() {
        let sum: f64 = a.iter().map(|row| row[j].exp()).sum();
        a.iter_mut().for_each(|row| row[j] -= sum.ln());
    }
}

/// `W^T x`.
fn times(w: &Rows, x: &[f64]) -> Vec<f64> {
    (0..w[0].len()).map(|j| w.iter().zip(x).map(|(row, x)| row[j] * x).sum()).collect()
}

fn memory(w: &[Rows], x: &[f64]) -> Vec<f64> {
    match w {
        [matrix] => times(matrix, x),
        _ => {
            let hidden: Vec<f64> = times(&w[0], x).into_iter().map(silu).collect();
            times(&w[1], &hidden).iter().zip(x).map(|(y, x)| x + y).collect()
        }
    }
}

/// The gradient of the loss by what the memory returns.
fn slope(name: &str, options: &Value, e: &[f64], threshold: f64) -> Vec<f64> {
    let length = dot(e, e).sqrt();
    let part = |e: f64| match name {
        "moneta" => {
            let p = options["p"].as_f64().unwrap();
            let (sign, size) = match options["smooth"] == true {
                true => ((10.0 * e).tanh(), (e * e + 1e-6).sqrt()),
                false => (e.signum(), e.abs()),
            };
            p * sign * size.powf(p - 1.0)
        }
        "yaad" if length > threshold => e * threshold / length,
        _ => e,
    };
    e.iter().map(|e| part(*e)).collect()
}

/// Gradients of the weights at one token, `left right^T` each.
fn gradients(w: &[Rows], k: &[f64], g: Vec<f64>) -> Vec<(Vec<f64>, Vec<f64>)> {
    match w {
        [_] => vec![(k.to_vec(), g)],
        _ => {
            let inputs = times(&w[0], k);
            let back: Vec<f64> = inputs
                .iter()
                .zip(&w[1])
                .map(|(x, row)| {
                    let s = sigmoid(*x);
                    dot(row, &g) * (s + x * s * (1.0 - s))
                })
                .collect();
            let hidden = inputs.into_iter().map(silu).collect();
            vec![(k.to_vec(), back), (hidden, g)]
        }
    }
}

/// Readings of the three layers; an MLP has K = V.
pub fn miras(name: &str, p: &Plain, x: &Rows, options: &Value) -> Rows {
    let [q, k, v] = projections(p, ["q", "k", "v"], x, true);
    let chunk = options["chunk"].as_u64().unwrap() as usize;
    let mlp = options["memory"] == "mlp";
    let hidden = options["expansion"].as_u64().unwrap() as usize * K;
    let shapes = if mlp { vec![[K, hidden], [hidden, K]] } else { vec![[K, V]] };
    let most: f64 = if mlp { 0.1 } else { 1.0 };
    let most = most.min(2.0 / chunk as f64) * if name == "moneta" { 0.1 } else { 1.0 };
    let most = if name == "memora" { most * (K as f64 / 4.0).max(1.0) } else { most };
    let most = options["rate_max"].as_f64().unwrap_or(most);
    let maps = ["gates_in", "gates_out"];
    per_head(x.len(), |h| {
        let start = |(index, [rows, cols]): (usize, &[usize; 2])| -> Rows {
            let mut a = match p.0.get(["start_in", "start_out"][index]) {
                Some(all) => head(all, H, h).chunks(*cols).map(<[f64]>::to_vec).collect(),
                None => vec![vec![0.0; *cols]; *rows],
            };
            if name == "memora" {
                normalise(&mut a);
            }
            if options["mirror"] == true {
                let q = options["q"].as_f64().unwrap();
                let by = ((rows * cols) as f64).powf((2.0 - q) / q);
                a.iter_mut().flatten().for_each(|a| *a *= by);
            }
            a
        };
        let mut kept: Vec<Rows> = shapes.iter().enumerate().map(start).collect();
        let read = |kept: &[Rows]| -> Vec<Rows> { kept.iter().map(|a| weights(name, options, a)).collect() };
        let mut at_start = read(&kept);
        let token = |t: usize| {
            if t.is_multiple_of(chunk) {
                at_start = read(&kept);
            }
            let (k, v) = (unit(head(&k[t], H, h)), head(&v[t], H, h));
            let e: Vec<f64> = memory(&at_start, &k).iter().zip(v).map(|(y, v)| y - v).collect();
            let threshold = match name {
                "yaad" => softplus(low_rank(p, "threshold", &x[t])[h] + (1f64.exp() - 1.0).ln()),
                _ => 0.0,
            };
            let gradients = gradients(&at_start, &k, slope(name, options, &e, threshold));
            for ((a, (left, right)), map) in kept.iter_mut().zip(gradients).zip(maps) {
                let gates = |gate: &str| {
                    let all = low_rank(p, &format!("{map}.{gate}"), &x[t]);
                    head(&all, H, h).to_vec()
                };
                let (rate, decay) = (gates("rate"), gates("decay"));
                let bias = head(&p.0[&format!("{map}.decay_bias")], H, h);
                for (row, left) in a.iter_mut().zip(&left) {
                    for (j, a) in row.iter_mut().enumerate() {
                        let alpha = sigmoid(decay[j] + bias[j]).powf(1.0 / 16.0);
                        *a = alpha * *a - most * sigmoid(rate[j]) * left * right[j];
                    }
                }
                if name == "memora" {
                    normalise(a);
                }
            }
            memory(&read(&kept), &unit(head(&q[t], H, h)))
        };
        (0..x.len()).map(token).collect()
    })
}
