//! Every mixer against its formula, written as plain float64 loops over one sequence.

mod common;
mod definitions;

use std::collections::HashMap;

use burn::tensor::Device;
use common::*;
use fastweight_memory::MixerConfig;
use fastweight_memory::parameters::export;

/// Sizes of `common::context`.
const H: usize = 2;
const K: usize = 6;
const V: usize = 5;

type Rows = Vec<Vec<f64>>;

/// The parameters of a layer and its formula's pieces.
struct Plain(HashMap<String, Vec<f64>>);

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn softplus(x: f64) -> f64 {
    x.exp().ln_1p()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Plain {
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = &self.0[&format!("{name}.weight")];
        let outputs = weight.len() / x.len();
        (0..outputs).map(|o| (0..x.len()).map(|i| x[i] * weight[i * outputs + o]).sum()).collect()
    }

    /// Linear map, then convolution over time if there is one, then SiLU if asked.
    fn projection(&self, name: &str, x: &Rows, with_silu: bool) -> Rows {
        let y: Rows = x.iter().map(|x| self.linear(name, x)).collect();
        let y = match self.0.get(&format!("{name}.conv")) {
            None => y,
            Some(taps) => {
                let width = taps.len() / y[0].len();
                let at = |t: usize, c: usize| -> f64 {
                    (0..width.min(t + 1))
                        .map(|back| taps[c * width + width - 1 - back] * y[t - back][c])
                        .sum()
                };
                (0..y.len()).map(|t| (0..y[0].len()).map(|c| at(t, c)).collect()).collect()
            }
        };
        if with_silu { y.into_iter().map(|y| y.into_iter().map(silu).collect()).collect() } else { y }
    }

    /// RMS normalisation of each run of as many channels as the weight has.
    fn norm(&self, x: &[f64]) -> Vec<f64> {
        let weight = &self.0["norm.weight"];
        let mut y = Vec::new();
        for head in x.chunks(weight.len()) {
            let rms = (dot(head, head) / head.len() as f64 + 1e-5).sqrt();
            y.extend(head.iter().zip(weight).map(|(x, w)| x / rms * w));
        }
        y
    }
}

fn unit(x: &[f64]) -> Vec<f64> {
    let norm = (dot(x, x) + 1e-6).sqrt();
    x.iter().map(|x| x / norm).collect()
}

fn rotate(x: &[f64], position: usize) -> Vec<f64> {
    let half = x.len() / 2;
    let mut y = x.to_vec();
    for i in 0..half {
        let angle = position as f64 * 10_000f64.powf(-(i as f64) / half as f64);
        y[i] = x[i] * angle.cos() - x[i + half] * angle.sin();
        y[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin();
    }
    y
}

fn head(x: &[f64], heads: usize, h: usize) -> &[f64] {
    let dim = x.len() / heads;
    &x[h * dim..(h + 1) * dim]
}

/// The layer's output for `x [T, width]`.
fn plain(config: &MixerConfig, p: &Plain, x: &Rows) -> Rows {
    let name = config.name();
    let options = serde_json::to_value(config).unwrap();
    let flag = |option: &str| options[option].as_bool().unwrap_or(false);
    let number = |option: &str| options[option].as_u64().map(|n| n as usize);
    let with_silu = matches!(name, "lightning_attention" | "mamba2" | "delta_net" | "gated_delta_net");
    let [q, k, v] = ["q", "k", "v"].map(|name| p.projection(name, x, with_silu));
    let kv_heads = number("kv_heads").unwrap_or(H);
    let scale = if name == "mamba2" { 1.0 } else { 1.0 / (K as f64).sqrt() };
    let mut readings: Rows = vec![Vec::new(); x.len()];
    for h in 0..H {
        let mut s = vec![vec![0.0; V]; K];
        let mut z = [0.0; K];
        for t in 0..x.len() {
            let group = h / (H / kv_heads);
            let (mut qt, v_t) = (head(&q[t], H, h).to_vec(), head(&v[t], kv_heads, group));
            let mut kt = head(&k[t], kv_heads, group).to_vec();
            if flag("rope") {
                (qt, kt) = (rotate(&qt, t), rotate(&kt, t));
            }
            if name.ends_with("delta_net") {
                (qt, kt) = (unit(&qt), unit(&kt));
            }
            if name.starts_with("elu1") {
                let phi = |x: &f64| if *x > 0.0 { x + 1.0 } else { x.exp() };
                (qt, kt) = (qt.iter().map(phi).collect(), kt.iter().map(phi).collect());
            }
            let gate_of =
                |map: &str| softplus(p.linear(map, &x[t])[h] + p.0["dt_bias"][h]) * -p.0["a_log"][h].exp();
            let gate = match name {
                "retnet" => (1.0 - 2f64.powi(-5 - h as i32)).ln(),
                // Layer 1 of 3.
                "lightning_attention" => {
                    -(2f64.powf(-8.0 * (h + 1) as f64 / H as f64)) * (1.0 - 1.0 / (2.0 + 1e-5) + 1e-5)
                }
                "mamba2" => gate_of("dt"),
                "gated_delta_net" => gate_of("decay"),
                _ => 0.0,
            };
            let write = match name {
                "mamba2" => softplus(p.linear("dt", &x[t])[h] + p.0["dt_bias"][h]),
                "delta_net" | "gated_delta_net" => {
                    sigmoid(p.linear("beta", &x[t])[h])
                        * if flag("allow_negative_eigenvalues") { 2.0 } else { 1.0 }
                }
                _ => 1.0,
            };
            if name == "softmax_attention" {
                let first = number("window").map_or(0, |w| (t + 1).saturating_sub(w));
                let key = |i: usize| {
                    let key = head(&k[i], kv_heads, group);
                    if flag("rope") { rotate(key, i) } else { key.to_vec() }
                };
                let weights: Vec<f64> = (first..=t).map(|i| (scale * dot(&qt, &key(i))).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let reading = (0..V).map(|j| {
                    let parts = weights.iter().zip(first..=t);
                    parts.map(|(w, i)| w * head(&v[i], kv_heads, group)[j]).sum::<f64>() / sum
                });
                readings[t].extend(reading);
                continue;
            }
            s.iter_mut().flatten().for_each(|s| *s *= gate.exp());
            let read = |s: &Rows, key: &[f64], j: usize| -> f64 { (0..K).map(|i| s[i][j] * key[i]).sum() };
            let error: Vec<f64> = (0..V)
                .map(|j| v_t[j] - if name.ends_with("delta_net") { read(&s, &kt, j) } else { 0.0 })
                .collect();
            for i in 0..K {
                (0..V).for_each(|j| s[i][j] += write * kt[i] * error[j]);
                z[i] += kt[i];
            }
            let norm = if name.starts_with("elu1") { 1.0 / (dot(&z, &qt) + 1e-6) } else { scale };
            let skip = if name == "mamba2" { p.0["d_skip"][h] } else { 0.0 };
            readings[t].extend((0..V).map(|j| norm * read(&s, &qt, j) + skip * v_t[j]));
        }
    }
    let gated = |y: Vec<f64>, x: &[f64], f: fn(f64) -> f64| -> Vec<f64> {
        y.iter().zip(p.linear("gate", x)).map(|(y, g)| y * f(g)).collect()
    };
    let output = |(y, x): (Vec<f64>, &Vec<f64>)| {
        let y = match name {
            "linear_attention" if flag("output_norm") => p.norm(&y),
            "delta_net" => p.norm(&y),
            "retnet" | "gated_delta_net" => gated(p.norm(&y), x, silu),
            "lightning_attention" => gated(p.norm(&y), x, sigmoid),
            "mamba2" => p.norm(&gated(y, x, silu)),
            _ => y,
        };
        p.linear("o", &y)
    };
    readings.into_iter().zip(x).map(output).collect()
}

/// Layers of the algebra and RWKV-7 have their definitions in tests of their own.
#[test]
fn every_mixer_computes_its_formula() {
    let device = Device::flex();
    // Too steep at zero for the finite differences of the other tests.
    let steep = [
        "kind = 'moneta'\nsmooth = true\np = 2.5\nchunk = 3",
        "kind = 'moneta'\nmirror = true\nmemory = 'matrix'\nchunk = 5",
    ];
    let all = mixers().into_iter().chain(steep.map(|recipe| (recipe, toml::from_str(recipe).unwrap())));
    let elsewhere = ["rule", "rwkv7", "rwkv7_dea"];
    for (name, config) in all.filter(|(_, config)| !elsewhere.contains(&config.name())) {
        let mixer = build(&config, &device);
        let parameters =
            export(&mixer).into_iter().map(|(name, data)| (name, data.iter::<f64>().collect())).collect();
        let x = input([1, 37, WIDTH], 1, &device);
        let rows: Rows =
            values(&x).chunks(WIDTH).map(|row| row.iter().map(|v| f64::from(*v)).collect()).collect();
        let parameters = Plain(parameters);
        let expected = definitions::plain(&config, &parameters, &rows)
            .unwrap_or_else(|| plain(&config, &parameters, &rows));
        let expected: Vec<f32> = expected.into_iter().flatten().map(|v| v as f32).collect();
        let (y, _) = mixer.forward(x, None, None).unwrap();
        assert_close(name, &values(&y), &expected, 2e-5);
    }
}
