//! Formulas of layers whose memory is a network `x + LN(f(x))` that learns token by token.

use serde_json::Value;

use super::{FADING_EPS, TTT_EPS, per_head, projections, read, standardise};
use crate::{H, K, Plain, Rows, dot, head, sigmoid, unit};

/// A head's network; a bias is the last row of its layer.
pub struct Network {
    layers: Vec<Rows>,
    scale: Vec<f64>,
    shift: Vec<f64>,
    bias: bool,
}

fn gelu(x: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + u.tanh())
}

fn gelu_slope(x: f64) -> f64 {
    (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5
}

impl Network {
    pub fn new(p: &Plain, h: usize) -> Self {
        let per_value = |name: &str| head(&p.0[&format!("memory.{name}")], H, h).to_vec();
        let bias = p.0.contains_key("memory.layers.0.start_bias");
        let mut layers = Vec::new();
        let mut inputs = K;
        while p.0.contains_key(&format!("memory.layers.{}.start", layers.len())) {
            let at = layers.len();
            let flat = per_value(&format!("layers.{at}.start"));
            let outputs = flat.len() / inputs;
            let mut layer: Rows = flat.chunks(outputs).map(<[f64]>::to_vec).collect();
            if bias {
                layer.push(per_value(&format!("layers.{at}.start_bias")));
            }
            layers.push(layer);
            inputs = outputs;
        }
        Self { layers, scale: per_value("ln_weight"), shift: per_value("ln_bias"), bias }
    }

    /// Inputs of every layer, what the first ones gave before the activation, and what the last one gave.
    fn forward(&self, x: &[f64]) -> (Rows, Rows, Vec<f64>) {
        let with_bias = |mut h: Vec<f64>| {
            h.extend(self.bias.then_some(1.0));
            h
        };
        let (mut inputs, mut before) = (vec![with_bias(x.to_vec())], Vec::new());
        let mut z = read(&self.layers[0], &inputs[0]);
        for layer in &self.layers[1..] {
            let h = with_bias(z.iter().map(|z| gelu(*z)).collect());
            before.push(std::mem::replace(&mut z, read(layer, &h)));
            inputs.push(h);
        }
        (inputs, before, z)
    }

    /// Only TTT-MLP has biases.
    fn eps(&self) -> f64 {
        if self.bias { TTT_EPS } else { FADING_EPS }
    }

    pub fn reading(&self, x: &[f64]) -> Vec<f64> {
        let normal = standardise(&self.forward(x).2, self.eps()).0;
        (0..x.len()).map(|j| x[j] + self.scale[j] * normal[j] + self.shift[j]).collect()
    }

    /// Gradients of the inner loss of a token, for every weight: half the squared error, or minus the dot product.
    fn gradients(&self, k: &[f64], v: &[f64], dot_product: bool) -> Vec<Rows> {
        let (inputs, before, z) = self.forward(k);
        let (normal, deviation) = standardise(&z, self.eps());
        let error = |j: usize| match dot_product {
            true => -v[j],
            false => k[j] + self.scale[j] * normal[j] + self.shift[j] - v[j],
        };
        let slope: Vec<f64> = (0..k.len()).map(|j| error(j) * self.scale[j]).collect();
        let mean = slope.iter().sum::<f64>() / k.len() as f64;
        let along = dot(&slope, &normal) / k.len() as f64;
        let mut d: Vec<f64> =
            slope.iter().zip(&normal).map(|(s, n)| (s - mean - n * along) / deviation).collect();
        let mut gradients = Vec::new();
        for at in (0..self.layers.len()).rev() {
            gradients.push(inputs[at].iter().map(|h| d.iter().map(|d| h * d).collect()).collect());
            if at > 0 {
                let back = |(i, z): (usize, &f64)| dot(&self.layers[at][i], &d) * gelu_slope(*z);
                d = before[at - 1].iter().enumerate().map(back).collect();
            }
        }
        gradients.reverse();
        gradients
    }
}

/// `a <- f a + g b` for every weight, with an f and a g for each column.
fn blend(a: &mut [Rows], f: &Rows, b: &[Rows], g: &Rows) {
    for (((a, f), b), g) in a.iter_mut().zip(f).zip(b).zip(g) {
        for (a, b) in a.iter_mut().zip(b) {
            (0..a.len()).for_each(|j| a[j] = f[j] * a[j] + g[j] * b[j]);
        }
    }
}

/// A head's numbers of a gate for the columns of each layer: its one number, or the layers' own one after the other.
fn columns(numbers: &[f64], layers: &[Rows]) -> Rows {
    let mut left = numbers.iter();
    let layer = |layer: &Rows| match numbers.len() {
        1 => vec![numbers[0]; layer[0].len()],
        _ => left.by_ref().take(layer[0].len()).copied().collect(),
    };
    let all = layers.iter().map(layer).collect();
    assert!(numbers.len() == 1 || left.next().is_none(), "a number for each output");
    all
}

/// TTT-MLP, Titans with an MLP memory, and DLA.
pub fn deep_memory(p: &Plain, x: &Rows, options: &Value) -> Rows {
    per_head(x.len(), |h| deep_head(p, x, options, h).0)
}

/// A head's readings, and its network after the last token.
pub fn deep_head(p: &Plain, x: &Rows, options: &Value, h: usize) -> (Rows, Network) {
    let kind = options["kind"].as_str().unwrap();
    let reading = kind == "ttt_mlp";
    let [q, k, v] = projections(p, ["q", "k", "v"], x, !reading);
    let chunk = options[if reading { "mini_batch" } else { "chunk" }].as_u64().unwrap() as usize;
    let largest = options[if reading { "eta_base" } else { "theta_max" }].as_f64().unwrap();
    let shift = options["forget_shift"].as_f64().unwrap_or(0.0);
    let mut network = Network::new(p, h);
    // Momentum, or the gradients of the mini-batch.
    let mut none = network.layers.clone();
    none.iter_mut().flatten().flatten().for_each(|weight| *weight = 0.0);
    let mut moving = none.clone();
    let mut start = Network::new(p, h);
    let token = |t: usize| {
        let gate = |name: &str, shift: f64, map: &dyn Fn(f64) -> f64| {
            let numbers = p.linear(name, &x[t]);
            let numbers: Vec<f64> = head(&numbers, H, h).iter().map(|x| map(sigmoid(x - shift))).collect();
            columns(&numbers, &none)
        };
        let same = |x: f64| columns(&[x], &none);
        if t.is_multiple_of(chunk) {
            start.layers.clone_from(&network.layers);
            if reading {
                moving.clone_from(&none);
            }
        }
        let gradients = start.gradients(&unit(head(&k[t], H, h)), head(&v[t], H, h), kind == "dla");
        if reading {
            blend(&mut moving, &same(1.0), &gradients, &same(1.0));
            network.layers.clone_from(&start.layers);
            blend(&mut network.layers, &same(1.0), &moving, &gate("eta", 0.0, &|eta| -largest * eta));
        } else {
            let momentum = if kind == "dla" { same(0.0) } else { gate("eta", 0.0, &|eta| eta) };
            blend(&mut moving, &momentum, &gradients, &gate("theta", 0.0, &|theta| -largest * theta));
            let kept = gate("alpha", shift, &|alpha| 1.0 - alpha);
            blend(&mut network.layers, &kept, &moving, &same(1.0));
        }
        network.reading(&unit(head(&q[t], H, h)))
    };
    let readings = (0..x.len()).map(token).collect();
    (readings, network)
}
