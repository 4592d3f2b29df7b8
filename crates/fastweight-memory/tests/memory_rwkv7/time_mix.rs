//! The time mix, and what a model's later layers take from its first.

use burn::tensor::{Device, Tensor};
use fastweight_memory::{LayerContext, Mixer, MixerConfig, Shared};

use crate::common::*;
use crate::plain::*;

const HEADS: usize = 2;

impl Plain {
    fn low_rank(&self, name: &str, x: &[f64], inner: fn(f64) -> f64) -> Vec<f64> {
        let hidden: Vec<f64> = map(self.get(&format!("{name}.lora_a")), x).into_iter().map(inner).collect();
        let y = map(self.get(&format!("{name}.lora_b")), &hidden);
        match self.0.get(&format!("{name}.start")) {
            Some(start) => y.iter().zip(start).map(|(y, s)| y + s).collect(),
            None => y,
        }
    }

    /// Outputs `[T, width]` and values `[T, heads V]` of the layer; `first` are the values of the first layer.
    fn run(&self, x: &Rows, first: Option<&Rows>, ids: &[usize]) -> (Rows, Rows) {
        let (keys, values) = (self.get("removal").len() / HEADS, self.get("norm").len() / HEADS);
        let mut states = vec![vec![vec![0.0; keys]; values]; HEADS];
        let (mut outputs, mut all_values) = (Rows::new(), Rows::new());
        for (t, now) in x.iter().enumerate() {
            let before = if t > 0 { x[t - 1].clone() } else { vec![0.0; now.len()] };
            let lerp = |name: &str| -> Vec<f64> {
                let mix = self.get(&format!("shift.{name}"));
                (0..now.len()).map(|c| (1.0 - mix[c]) * now[c] + mix[c] * before[c]).collect()
            };
            let r = map(self.get("r.weight"), &lerp("r"));
            let mut k = map(self.get("k.weight"), &lerp("k"));
            let mut v = map(self.get("v.weight"), &lerp("v"));
            let made = v.clone();
            if let (Some(first), true) = (first, self.0.contains_key("first_value.start")) {
                let share = self.low_rank("first_value", &lerp("v"), |x| x);
                for c in 0..v.len() {
                    v[c] += (first[t][c] - v[c]) * sigmoid(share[c]);
                }
            }
            if self.0.contains_key("k_table.token_table") {
                k = product(&k, &self.table("k_table", ids[t], &[]));
                v = product(&v, &self.table("v_table", ids[t], &[]));
            }
            let w: Vec<f64> = self
                .low_rank("decay", &lerp("w"), f64::tanh)
                .iter()
                .map(|w| (-(-0.5f64).exp() * sigmoid(*w)).exp())
                .collect();
            let rate: Vec<f64> = self.low_rank("rate", &lerp("a"), |x| x).into_iter().map(sigmoid).collect();
            let gate = self.low_rank("gate", &lerp("g"), sigmoid);
            let mut reading = Vec::new();
            for (h, s) in states.iter_mut().enumerate() {
                let key = |c: usize| h * keys + c;
                let kk: Vec<f64> = (0..keys).map(|c| k[key(c)] * self.get("removal")[key(c)]).collect();
                let norm = (kk.iter().map(|x| x * x).sum::<f64>() + 1e-12).sqrt();
                let kk: Vec<f64> = kk.iter().map(|x| x / norm).collect();
                let written: Vec<f64> = (0..keys)
                    .map(|c| k[key(c)] * (1.0 + (rate[key(c)] - 1.0) * self.get("replacement")[key(c)]))
                    .collect();
                let bonus: f64 = (0..keys).map(|c| r[key(c)] * written[c] * self.get("bonus")[key(c)]).sum();
                let mut o = Vec::new();
                for (j, row) in s.iter_mut().enumerate() {
                    let removed: f64 = (0..keys).map(|c| row[c] * -kk[c]).sum();
                    for c in 0..keys {
                        row[c] = row[c] * w[key(c)]
                            + removed * kk[c] * rate[key(c)]
                            + v[h * values + j] * written[c];
                    }
                    o.push((0..keys).map(|c| row[c] * r[key(c)]).sum::<f64>());
                }
                let mean = o.iter().sum::<f64>() / values as f64;
                let variance = o.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values as f64;
                for (j, o) in o.iter().enumerate() {
                    let at = h * values + j;
                    let normed = (o - mean) / (variance + 64e-5).sqrt();
                    let y = normed * self.get("norm")[at] + self.get("norm_shift")[at] + bonus * v[at];
                    reading.push(y * gate[at]);
                }
            }
            outputs.push(map(self.get("o.weight"), &reading));
            all_values.push(made);
        }
        (outputs, all_values)
    }
}

/// Outputs and values of the time mix whose parameters have this prefix.
pub fn time_mix(p: &Plain, under: &str, x: &Rows, first: Option<&Rows>, ids: &[usize]) -> (Rows, Rows) {
    let own =
        |(name, values): (&String, &Vec<f64>)| Some((name.strip_prefix(under)?.to_owned(), values.clone()));
    Plain(p.0.iter().filter_map(own).collect()).run(x, first, ids)
}

const OPTIONS: &str = "kind = 'rwkv7'\ndecay_rank = 3\nrate_rank = 2\nvalue_rank = 4\ngate_rank = 5";

/// A layer with every parameter off its initial value, where many are zero or alike.
fn layer(options: &str, index: usize, device: &Device) -> (Mixer, Plain) {
    let config: MixerConfig = toml::from_str(options).unwrap();
    let ctx = LayerContext { layer: index, ..context(&config) };
    Plain::of(config.init(&ctx, device).unwrap(), 50 + 10 * index as u64)
}

#[test]
fn the_time_mix_computes_its_formula() {
    let device = Device::flex();
    let tables = format!("{OPTIONS}\ntoken_keys_values = true");
    for (index, options) in [(0, OPTIONS), (1, OPTIONS), (1, &tables)] {
        let (mixer, plain) = layer(options, index, &device);
        let x = input([1, 37, WIDTH], 1, &device);
        let (expected, _) = plain.run(&rows(&x), None, &token_ids(&x).0);
        let (y, _) = mixer.read(x, None, None).unwrap();
        assert_close(&format!("layer {index}, {options}"), &values(&y), &flat(&expected), 2e-5);
    }
}

#[test]
fn later_layers_mix_in_the_values_of_the_first() {
    let device = Device::flex();
    let (first, second) = (layer(OPTIONS, 0, &device), layer(OPTIONS, 1, &device));
    let x = input([1, 20, WIDTH], 2, &device);
    let (expected, first_values) = first.1.run(&rows(&x), None, &[]);
    let (expected, _) = second.1.run(&expected, Some(&first_values), &[]);
    let alone = second.1.run(&first.1.run(&rows(&x), None, &[]).0, None, &[]).0;

    let mut shared = Shared::default();
    let (y, first_state) = first.0.forward_shared(x.clone(), None, None, &mut shared).unwrap();
    let (y, second_state) = second.0.forward_shared(y, None, None, &mut shared).unwrap();
    assert_close("two layers", &values(&y), &flat(&expected), 2e-5);
    let apart = values(&y).iter().zip(flat(&alone)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart > 1e-3, "the first layer's values must reach the second: {apart}");

    let token: Tensor<2> = input([1, WIDTH], 3, &device);
    let longer = Tensor::cat(vec![x, token.clone().unsqueeze_dim(1)], 1);
    let mut shared = Shared::default();
    let (whole, _) = first.0.forward_shared(longer, None, None, &mut shared).unwrap();
    let (whole, _) = second.0.forward_shared(whole, None, None, &mut shared).unwrap();
    let mut shared = Shared::default();
    let (y, _) = first.0.step_shared(token, first_state, &mut shared).unwrap();
    let (y, _) = second.0.step_shared(y, second_state, &mut shared).unwrap();
    assert_close("a step", &values(&y), &values(&whole.narrow(1, 20, 1)), 2e-5);
}
