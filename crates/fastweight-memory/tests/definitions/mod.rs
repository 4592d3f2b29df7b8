//! Formulas of layers whose memories have channel decays, momentum, several steps a token or an inner model.

mod architectures;
mod deep;
mod miras;
mod mixture;
mod sequential;

use fastweight_memory::MixerConfig;
use serde_json::Value;

use super::{H, K, Plain, Rows, V, dot, head, sigmoid, silu, softplus, unit};

/// The layer's output for `x [T, width]`; none for a layer whose formula stands elsewhere.
pub fn plain(config: &MixerConfig, p: &Plain, x: &Rows) -> Option<Rows> {
    layer(config.name(), p, x, &serde_json::to_value(config).unwrap())
}

fn layer(name: &str, p: &Plain, x: &Rows, options: &Value) -> Option<Rows> {
    let readings = match name {
        "titans_mac" => return Some(architectures::mac(p, x, options)),
        "titans_mag" => return Some(architectures::mag(p, x, options)),
        "titans_mal" => return Some(architectures::mal(p, x, options)),
        "gla" => gla(p, x, options),
        "hgrn2" => hgrn2(p, x, options),
        "kda" => kda(p, x, options),
        "comba" => comba(p, x),
        "delta_product" => delta_product(p, x, options),
        "titans" => titans(p, x, options),
        "ttt_linear" => ttt_linear(p, x, options),
        "ttt_mlp" | "titans_mlp" | "dla" => deep::deep_memory(p, x, options),
        "lstm" => return Some(sequential::lstm(p, x)),
        "srwm" => return Some(sequential::srwm(p, x)),
        "mixture_of_memories" => return Some(mixture::mixture_of_memories(p, x, options)),
        "moneta" | "yaad" | "memora" => miras::miras(name, p, x, options),
        _ => return None,
    };
    let output = |(t, reading): (usize, Vec<f64>)| {
        let normalised = p.norm(&reading);
        let gate = match name {
            "hgrn2" => vec![1.0; reading.len()],
            "kda" => low_rank(p, "gate", &x[t]).into_iter().map(sigmoid).collect(),
            _ => p.linear("gate", &x[t]).into_iter().map(silu).collect(),
        };
        let gated: Vec<f64> = normalised.iter().zip(&gate).map(|(y, g)| y * g).collect();
        p.linear("o", &gated)
    };
    Some(readings.into_iter().enumerate().map(output).collect())
}

/// A head's readings over all tokens, for every head, side by side.
fn per_head(tokens: usize, readings: impl Fn(usize) -> Rows) -> Rows {
    let heads: Vec<Rows> = (0..H).map(readings).collect();
    (0..tokens).map(|t| heads.iter().flat_map(|head| head[t].clone()).collect()).collect()
}

/// `S^T q`.
fn read(s: &Rows, q: &[f64]) -> Vec<f64> {
    (0..s[0].len()).map(|j| s.iter().zip(q).map(|(row, q)| row[j] * q).sum()).collect()
}

/// `S + k u^T`.
fn write(s: &mut Rows, k: &[f64], u: &[f64]) {
    s.iter_mut().zip(k).for_each(|(row, k)| row.iter_mut().zip(u).for_each(|(s, u)| *s += k * u));
}

/// `diag(f) S`.
fn forget(s: &mut Rows, f: &[f64]) {
    s.iter_mut().zip(f).for_each(|(row, f)| row.iter_mut().for_each(|s| *s *= f));
}

fn scaled(x: &[f64], factor: f64) -> Vec<f64> {
    x.iter().map(|x| x * factor).collect()
}

fn difference(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

fn low_rank(p: &Plain, name: &str, x: &[f64]) -> Vec<f64> {
    p.linear(&format!("{name}.expand"), &p.linear(&format!("{name}.reduce"), x))
}

fn projections(p: &Plain, names: [&str; 3], x: &Rows, with_silu: bool) -> [Rows; 3] {
    names.map(|name| p.projection(name, x, with_silu))
}

fn empty() -> Rows {
    vec![vec![0.0; V]; K]
}

fn gla(p: &Plain, x: &Rows, options: &Value) -> Rows {
    let [q, k, v] = projections(p, ["q", "k", "v"], x, options["conv_width"] != 0);
    per_head(x.len(), |h| {
        let mut s = empty();
        let token = |t: usize| {
            let decay = low_rank(p, "decay", &x[t]);
            let bias = &p.0["decay_bias"];
            let f: Vec<f64> =
                (h * K..(h + 1) * K).map(|i| sigmoid(decay[i] + bias[i]).powf(1.0 / 16.0)).collect();
            forget(&mut s, &f);
            write(&mut s, head(&k[t], H, h), head(&v[t], H, h));
            scaled(&read(&s, head(&q[t], H, h)), 1.0 / (K as f64).sqrt())
        };
        (0..x.len()).map(token).collect()
    })
}

fn hgrn2(p: &Plain, x: &Rows, options: &Value) -> Rows {
    let [q, f, v] = projections(p, ["q", "forget", "v"], x, false);
    // Layer 1 of 3.
    let bound = options["lower_bound"].as_f64().unwrap_or(1.0 / 3.0);
    per_head(x.len(), |h| {
        let mut s = empty();
        let token = |t: usize| {
            let f: Vec<f64> = head(&f[t], H, h).iter().map(|f| bound + (1.0 - bound) * sigmoid(*f)).collect();
            let k: Vec<f64> = f.iter().map(|f| 1.0 - f).collect();
            forget(&mut s, &f);
            write(&mut s, &k, head(&v[t], H, h));
            let q: Vec<f64> = head(&q[t], H, h).iter().map(|q| silu(*q)).collect();
            read(&s, &q)
        };
        (0..x.len()).map(token).collect()
    })
}

/// `beta`, up to 1 or 2.
fn strength(beta: f64, options: &Value) -> f64 {
    sigmoid(beta) * if options["allow_negative_eigenvalues"] == true { 2.0 } else { 1.0 }
}

fn kda(p: &Plain, x: &Rows, options: &Value) -> Rows {
    let [q, k, v] = projections(p, ["q", "k", "v"], x, true);
    per_head(x.len(), |h| {
        let mut s = empty();
        let token = |t: usize| {
            let (k, v) = (unit(head(&k[t], H, h)), head(&v[t], H, h));
            let decay = low_rank(p, "decay", &x[t]);
            let rate = p.0["a_log"][h].exp();
            let f = (h * K..(h + 1) * K).map(|i| (-rate * softplus(decay[i] + p.0["dt_bias"][i])).exp());
            forget(&mut s, &f.collect::<Vec<f64>>());
            let beta = strength(p.linear("beta", &x[t])[h], options);
            let u = scaled(&difference(v, &read(&s, &k)), beta);
            write(&mut s, &k, &u);
            scaled(&read(&s, &unit(head(&q[t], H, h))), 1.0 / (K as f64).sqrt())
        };
        (0..x.len()).map(token).collect()
    })
}

fn titans(p: &Plain, x: &Rows, options: &Value) -> Rows {
    per_head(x.len(), |h| titans_head(p, x, options, h).0)
}

/// A head's readings, and its memory after the last token.
fn titans_head(p: &Plain, x: &Rows, options: &Value, h: usize) -> (Rows, Rows) {
    let [q, k, v] = projections(p, ["q", "k", "v"], x, true);
    let [largest, shift] = ["theta_max", "forget_shift"].map(|option| options[option].as_f64().unwrap());
    let (mut s, mut momentum) = (empty(), empty());
    let token = |t: usize| {
        let (k, v) = (unit(head(&k[t], H, h)), head(&v[t], H, h));
        // One number a head, or one a column of the memory.
        let [theta, eta, alpha] = ["theta", "eta", "alpha"].map(|gate| {
            let gate = p.linear(gate, &x[t]);
            let own = head(&gate, H, h);
            (0..v.len()).map(|j| own[j % own.len()]).collect::<Vec<f64>>()
        });
        let error = difference(&read(&s, &k), v);
        for j in 0..v.len() {
            momentum.iter_mut().for_each(|row| row[j] *= sigmoid(eta[j]));
            s.iter_mut().for_each(|row| row[j] *= 1.0 - sigmoid(alpha[j] - shift));
        }
        let error: Vec<f64> = error.iter().zip(&theta).map(|(e, x)| -largest * sigmoid(*x) * e).collect();
        write(&mut momentum, &k, &error);
        s.iter_mut().flatten().zip(momentum.iter().flatten()).for_each(|(s, p)| *s += p);
        read(&s, &unit(head(&q[t], H, h)))
    };
    let readings = (0..x.len()).map(token).collect();
    (readings, s)
}

/// `exp(g)` of a scalar decay.
fn decay(p: &Plain, x: &[f64], h: usize) -> f64 {
    (-p.0["a_log"][h].exp() * softplus(p.linear("decay", x)[h] + p.0["dt_bias"][h])).exp()
}

fn comba(p: &Plain, x: &Rows) -> Rows {
    let [q, k, v] = projections(p, ["q", "k", "v"], x, true);
    per_head(x.len(), |h| {
        let mut s = empty();
        let token = |t: usize| {
            let k = unit(head(&k[t], H, h));
            let beta = sigmoid(p.linear("beta", &x[t])[h]);
            // The removal reads the memory before it decays.
            let removed = scaled(&read(&s, &k), sigmoid(p.0["b_logit"][h]));
            forget(&mut s, &[decay(p, &x[t], h); K]);
            write(&mut s, &k, &scaled(&difference(head(&v[t], H, h), &removed), beta));
            let q = difference(&unit(head(&q[t], H, h)), &scaled(&k, p.0["d"][h]));
            scaled(&read(&s, &q), 1.0 / (K as f64).sqrt())
        };
        (0..x.len()).map(token).collect()
    })
}

fn delta_product(p: &Plain, x: &Rows, options: &Value) -> Rows {
    let [q, k, v] = projections(p, ["q", "k", "v"], x, true);
    let steps = options["steps"].as_u64().unwrap() as usize;
    per_head(x.len(), |h| {
        let mut s = empty();
        let token = |t: usize| {
            if options["gated"] == true {
                forget(&mut s, &[decay(p, &x[t], h); K]);
            }
            for j in 0..steps {
                let (all, at) = (steps * H, j * H + h);
                let (k, v) = (unit(head(&k[t], all, at)), head(&v[t], all, at));
                let beta = strength(p.linear("beta", &x[t])[at], options);
                let u = scaled(&difference(v, &read(&s, &k)), beta);
                write(&mut s, &k, &u);
            }
            scaled(&read(&s, &unit(head(&q[t], H, h))), 1.0 / (K as f64).sqrt())
        };
        (0..x.len()).map(token).collect()
    })
}

/// Added to the variance in the inner LayerNorm of TTT and of mixtures of memories.
const TTT_EPS: f64 = 1e-6;
/// The same of networks that forget.
const FADING_EPS: f64 = 1e-4;

/// Mean zero and variance one, and the standard deviation.
fn standardise(x: &[f64], eps: f64) -> (Vec<f64>, f64) {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let deviation = (variance + eps).sqrt();
    (x.iter().map(|x| (x - mean) / deviation).collect(), deviation)
}

/// K = V here: the inner model adds to its input.
fn ttt_linear(p: &Plain, x: &Rows, options: &Value) -> Rows {
    let [q, k, v] = projections(p, ["q", "k", "v"], x, false);
    let mini_batch = options["mini_batch"].as_u64().unwrap() as usize;
    let base = options["eta_base"].as_f64().unwrap();
    per_head(x.len(), |h| {
        let per_value = |name: &str| head(&p.0[name], H, h).to_vec();
        let (scale, shift) = (per_value("ln_weight"), per_value("ln_bias"));
        let mut weights: Rows = head(&p.0["start"], H, h).chunks(K).map(<[f64]>::to_vec).collect();
        let mut bias = per_value("start_bias");
        // Keys and gradients of the mini-batch so far.
        let mut seen: Vec<(Vec<f64>, Vec<f64>)> = Vec::new();
        let token = |t: usize| {
            let (q, k, v) = (unit(head(&q[t], H, h)), unit(head(&k[t], H, h)), head(&v[t], H, h));
            let affine =
                |x: &[f64]| -> Vec<f64> { read(&weights, x).iter().zip(&bias).map(|(z, c)| z + c).collect() };
            // The gradient of 1/2 |scale * standardised + shift - (v - k)|^2 where the mini-batch started.
            let (normal, deviation) = standardise(&affine(&k), TTT_EPS);
            let slope: Vec<f64> =
                (0..K).map(|j| (scale[j] * normal[j] + shift[j] - (v[j] - k[j])) * scale[j]).collect();
            let mean = slope.iter().sum::<f64>() / K as f64;
            let along = dot(&slope, &normal) / K as f64;
            let u = (0..K).map(|j| (slope[j] - mean - normal[j] * along) / deviation).collect();
            seen.push((k, u));
            let eta = base * sigmoid(p.linear("eta", &x[t])[h]);
            let mut z = affine(&q);
            for (k, u) in &seen {
                let weight = eta * (dot(&q, k) + 1.0);
                z.iter_mut().zip(u).for_each(|(z, u)| *z -= weight * u);
            }
            if seen.len() == mini_batch {
                for (k, u) in seen.drain(..) {
                    write(&mut weights, &k, &scaled(&u, -eta));
                    bias.iter_mut().zip(&u).for_each(|(c, u)| *c -= eta * u);
                }
            }
            let normal = standardise(&z, TTT_EPS).0;
            (0..K).map(|j| z[j] + scale[j] * normal[j] + shift[j]).collect()
        };
        (0..x.len()).map(token).collect()
    })
}
