//! The layer of any rule: its formula, steps, cuts, sizes and gradients, for every sound rule.

use std::collections::HashMap;

use burn::tensor::{Device, Tensor, TensorData};
use fastweight_memory::layers::RuleConfig;
use fastweight_memory::parameters::{export, list};
use fastweight_memory::rule::reference::{self, Layer as Weight, State as Plain, Token, mirror_lq};
use fastweight_memory::rule::soundness::{cells, unsound};
use fastweight_memory::rule::{Bias, GradientAt, Learner, Memory, Retention, Rule};
use fastweight_memory::{LayerContext, Mixer, MixerConfig, MixerState, State};
use fastweight_ops::Offsets;
use serde::{Deserialize, Serialize};

use crate::support::{Numbers, name, sound_rules};

const WIDTH: usize = 10;
const H: usize = 2;

/// The layers of every sound rule, some with a window, a chunk or no convolution.
fn layers() -> Vec<(RuleConfig, LayerContext)> {
    let mut layers = Vec::new();
    for (i, rule) in sound_rules().into_iter().enumerate() {
        let value_dim = if rule.memory == Memory::Matrix { 3 } else { 4 };
        let ctx = LayerContext { head_dim: 4, value_dim, seed: 5, ..LayerContext::new(WIDTH, H) };
        let exact = rule.learner == Learner::Proximal;
        let decayed = Rule { gradient_at: GradientAt::Decayed, ..rule };
        let rule = match i % 4 {
            1 if !exact => Rule { window: 2, chunk: 3, ..rule },
            2 if decayed.validate_used().is_ok() => decayed,
            _ => rule,
        };
        let config = RuleConfig { rule, conv_width: [4, 0, 2][i % 3], ..RuleConfig::default() };
        layers.push((config, ctx));
    }
    layers
}

fn build((config, ctx): &(RuleConfig, LayerContext), device: &Device) -> Mixer {
    MixerConfig::Rule(config.clone()).init(ctx, device).unwrap()
}

fn input(shape: [usize; 3], seed: u64, device: &Device) -> Tensor<3> {
    let numbers = Numbers::new(seed).many(shape.iter().product());
    let numbers: Vec<f32> = numbers.into_iter().map(|x| 1.5 * x as f32).collect();
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

#[track_caller]
fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1.0f64, |m, v| m.max(v.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * scale, "{what}: value {i} is {a}, expected {b}");
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Parameters by name.
struct Parameters(HashMap<String, Vec<f64>>);

impl Parameters {
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = &self.0[&format!("{name}.weight")];
        let outputs = weight.len() / x.len();
        (0..outputs).map(|o| (0..x.len()).map(|i| x[i] * weight[i * outputs + o]).sum()).collect()
    }

    /// Map, convolution if there is one, SiLU.
    fn projection(&self, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let y: Vec<Vec<f64>> = x.iter().map(|x| self.linear(name, x)).collect();
        let mixed = |t: usize, c: usize| match self.0.get(&format!("{name}.conv")) {
            None => y[t][c],
            Some(taps) => {
                let width = taps.len() / y[0].len();
                (0..width.min(t + 1)).map(|back| taps[c * width + width - 1 - back] * y[t - back][c]).sum()
            }
        };
        (0..y.len()).map(|t| (0..y[0].len()).map(|c| mixed(t, c)).map(|x| x * sigmoid(x)).collect()).collect()
    }
}

/// The layer's output for one sequence, from the definition of its rule.
fn plain(config: &RuleConfig, ctx: &LayerContext, p: &Parameters, x: &[Vec<f64>]) -> Vec<f64> {
    let rule = config.rule;
    let (key, value) = (ctx.head_dim, ctx.value_dim);
    let [q, k, v] = ["q", "k", "v"].map(|name| p.projection(name, x));
    let unit = |x: &[f64]| -> Vec<f64> {
        let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        x.iter().map(|x| x / norm).collect()
    };
    let mut most = if rule.memory == Memory::Mlp { 0.1 } else { 1.0 };
    if rule.bias == Bias::Lp {
        most *= 0.1;
    }
    most /= rule.window as f64;
    let mut readings = vec![Vec::new(); x.len()];
    for h in 0..H {
        let mut state = Plain::zero(&rule, key, value);
        if rule.needs_start() {
            let layer = |(index, [rows, cols]): (usize, [usize; 2])| {
                let all = &p.0[["start_in", "start_out"][index]];
                let mut layer = Weight::new(rows, cols, all[h * rows * cols..(h + 1) * rows * cols].to_vec());
                if rule.retention == Retention::Kl {
                    for j in 0..cols {
                        let sum: f64 = (0..rows).map(|i| layer.values[i * cols + j].exp()).sum();
                        (0..rows).for_each(|i| {
                            layer.values[i * cols + j] = layer.values[i * cols + j].exp() / sum;
                        });
                    }
                }
                if rule.retention == Retention::Lq && rule.mirror {
                    // As large a memory as its dual would be without the map: n^((q-2)/q) entries' worth.
                    let by = ((rows * cols) as f64).powf((rule.q - 2.0) / rule.q);
                    layer.values.iter_mut().for_each(|a| *a /= by);
                    assert!(mirror_lq(&layer, rule.q).values.iter().all(|w| w.abs() < 10.0));
                }
                layer
            };
            state =
                Plain::new(&rule, rule.layer_shapes(key, value).into_iter().enumerate().map(layer).collect());
        }
        for t in 0..x.len() {
            let gate = |i: usize| {
                let rate = -p.0["a_log"][i].exp();
                (rate * (p.linear("decay", &x[t])[i] + p.0["dt_bias"][i]).exp().ln_1p()).exp()
            };
            let token = Token {
                q: unit(&q[t][h * key..(h + 1) * key]),
                k: unit(&k[t][h * key..(h + 1) * key]),
                v: v[t][h * value..(h + 1) * value].to_vec(),
                rate: most * sigmoid(p.linear("rate", &x[t])[h]),
                decay: match rule.retention {
                    Retention::None | Retention::Bregman => vec![1.0],
                    Retention::ChannelDecay => (h * key..(h + 1) * key).map(gate).collect(),
                    _ => vec![gate(h)],
                },
                momentum: if rule.has_momentum() { sigmoid(p.linear("momentum", &x[t])[h]) } else { 0.0 },
            };
            let reading = reference::step(&rule, &mut state, &token);
            let rms = (reading.iter().map(|y| y * y).sum::<f64>() / value as f64 + 1e-5).sqrt();
            let gates = p.linear("gate", &x[t]);
            readings[t].extend((0..value).map(|j| {
                let g = gates[h * value + j];
                reading[j] / rms * p.0["norm.weight"][j] * g * sigmoid(g)
            }));
        }
    }
    readings.into_iter().flat_map(|reading| p.linear("o", &reading)).collect()
}

#[test]
fn every_rule_layer_computes_its_definition() {
    let device = Device::flex();
    for layer in layers() {
        let mixer = build(&layer, &device);
        let parameters =
            export(&mixer).into_iter().map(|(name, data)| (name, data.iter::<f64>().collect())).collect();
        let x = input([1, 9, WIDTH], 1, &device);
        let rows: Vec<Vec<f64>> = values(&x).chunks(WIDTH).map(<[f64]>::to_vec).collect();
        let (y, _) = mixer.forward(x, None, None).unwrap();
        let expected = plain(&layer.0, &layer.1, &Parameters(parameters), &rows);
        let tolerance = if layer.0.rule.learner == Learner::NewtonSchulz { 1e-3 } else { 2e-4 };
        assert_close(&name(&layer.0.rule), &values(&y), &expected, tolerance);
    }
}

fn states(state: &MixerState) -> Vec<f64> {
    state.named_tensors().into_iter().flat_map(|(_, data)| data.iter::<f64>().collect::<Vec<_>>()).collect()
}

#[test]
fn steps_cuts_and_packed_documents_equal_one_forward() {
    let device = Device::flex();
    for layer in layers() {
        let (mixer, rule) = (build(&layer, &device), layer.0.rule);
        let tolerance = if rule.learner == Learner::NewtonSchulz { 2e-3 } else { 2e-4 };
        let what = name(&rule);
        let x = input([2, 8, WIDTH], 2, &device);
        let part = |from: usize, count: usize| x.clone().narrow(1, from, count);
        let (whole, end) = mixer.forward(x.clone(), None, None).unwrap();
        let (first, mut state) = mixer.forward(part(0, 5), Some(mixer.zero_state(2, &device)), None).unwrap();
        let mut parts = vec![first];
        for t in 5..8 {
            let (y, next) = mixer.step(part(t, 1).squeeze_dim(1), state).unwrap();
            state = next;
            parts.push(y.unsqueeze_dim(1));
        }
        assert_close(&what, &values(&Tensor::cat(parts, 1)), &values(&whole), tolerance);
        assert_close(&what, &states(&state), &states(&end), tolerance);
        // A cleared row is at its start again, the other row goes on.
        let cleared = end.clone().clear(&[1]).unwrap();
        let (y, _) = mixer.forward(part(0, 5), Some(cleared), None).unwrap();
        let (fresh, _) = mixer.forward(part(0, 5), None, None).unwrap();
        assert_close(&what, &values(&y.clone().narrow(0, 1, 1)), &values(&fresh.narrow(0, 1, 1)), tolerance);
        let (alone, _) =
            mixer.forward(part(0, 5).narrow(0, 0, 1), Some(end.select(&[0]).unwrap()), None).unwrap();
        assert_close(&what, &values(&y.narrow(0, 0, 1)), &values(&alone), tolerance);
        // Both rows as documents of one row.
        let row = Tensor::cat(vec![x.clone().narrow(0, 0, 1), x.clone().narrow(0, 1, 1)], 1);
        let offsets = Offsets::new(&[0, 8, 16], 16).unwrap();
        let (packed, packed_end) = mixer.forward(row, None, Some(&offsets)).unwrap();
        assert_close(&what, &values(&packed), &values(&whole), tolerance);
        assert_close(&what, &states(&packed_end), &states(&end), tolerance);
    }
}

#[test]
fn sizes_are_exact() {
    let device = Device::flex();
    for layer in layers() {
        let mixer = build(&layer, &device);
        let config = MixerConfig::Rule(layer.0.clone());
        let (_, state) = mixer.forward(input([3, 4, WIDTH], 2, &device), None, None).unwrap();
        let bytes = 3 * config.state_size(&layer.1, 4).total();
        assert_eq!(state.bytes(), bytes, "{}", name(&layer.0.rule));
        assert_eq!(mixer.zero_state(3, &device).bytes(), bytes);
        let count: usize = list(&mixer).iter().map(|info| info.shape.iter().product::<usize>()).sum();
        assert_eq!(count, config.parameter_count(&layer.1), "{}", name(&layer.0.rule));
    }
}

#[test]
fn gradients_are_finite_and_reach_the_input() {
    let device = Device::flex().autodiff();
    for layer in layers() {
        let mixer = build(&layer, &device);
        for x in [input([2, 4, WIDTH], 2, &device), Tensor::zeros([2, 4, WIDTH], &device)] {
            let zero = values(&x).iter().all(|x| *x == 0.0);
            let x = x.require_grad();
            let (y, _) = mixer.forward(x.clone(), None, None).unwrap();
            let grads = (y * input([2, 4, WIDTH], 3, &device)).sum().backward();
            let grad = values(&x.grad(&grads).unwrap());
            assert!(grad.iter().all(|g| g.is_finite()), "{}", name(&layer.0.rule));
            assert!(zero || grad.iter().any(|g| *g != 0.0), "{}", name(&layer.0.rule));
        }
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Recipe {
    mixer: MixerConfig,
}

#[test]
fn a_recipe_names_a_rule_by_its_choices() {
    let text = "mixer = { kind = 'rule', memory = 'matrix', bias = 'huber', retention = 'kl', learner = 'momentum', huber_delta = 2.0 }";
    let recipe: Recipe = toml::from_str(text).unwrap();
    let rule =
        Rule { huber_delta: 2.0, ..Rule::new(Memory::Matrix, Bias::Huber, Retention::Kl, Learner::Momentum) };
    assert_eq!(recipe.mixer, MixerConfig::Rule(RuleConfig { rule, ..RuleConfig::default() }));
    assert_eq!(recipe, toml::from_str(&toml::to_string(&recipe).unwrap()).unwrap());
    for rule in sound_rules() {
        let rule = Rule { smooth: rule.mirror && rule.bias == Bias::Lp, ..rule };
        let recipe: Recipe = toml::from_str(&format!("mixer = {}", rule.recipe())).unwrap();
        assert_eq!(recipe.mixer, MixerConfig::Rule(RuleConfig { rule, ..RuleConfig::default() }));
    }
}

#[test]
fn four_choices_in_a_recipe_are_enough_for_every_sound_rule() {
    for (memory, bias, retention, learner) in cells() {
        let [m, b, r, l] = [memory.name(), bias.name(), retention.name(), learner.name()];
        let text = format!(
            "mixer = {{ kind = 'rule', memory = '{m}', bias = '{b}', retention = '{r}', learner = '{l}' }}"
        );
        match unsound(memory, bias, retention, learner) {
            None => {
                let Recipe { mixer } = toml::from_str(&text).unwrap();
                mixer.validate(&LayerContext::new(8, 2)).unwrap();
            }
            Some(reason) => {
                let message = toml::from_str::<Recipe>(&text).unwrap_err().to_string();
                assert!(message.contains(reason), "{message}");
            }
        }
    }
}

#[test]
fn an_unsound_rule_in_a_recipe_is_refused_with_its_reason_and_line() {
    let cases = [
        ("memory = 'vector', retention = 'kl'", "constant 1"),
        ("memory = 'mlp', learner = 'proximal'", "not linear in its weights"),
        ("bias = 'lp', p = 1.5", "smooth = true"),
        ("bias = 'hubr'", "bias of rule"),
        ("biass = 'huber'", "did you mean \"bias\""),
        ("window = 0", "window is 0"),
        ("retention = 'lq', learner = 'proximal', bias = 'dot_product', mirror = false", "mirror is false"),
        ("bias = 'huber', p = 2.0", "p is 2, expected left out: it belongs to bias = \"lp\""),
        ("expansion = 2", "expansion is 2, expected left out: it belongs to memory = \"mlp\""),
        (
            "gradient_at = 'decayed'",
            "gradient_at is decayed, expected left out: it belongs to a retention that decays",
        ),
    ];
    for (choices, words) in cases {
        let error =
            toml::from_str::<Recipe>(&format!("\nmixer = {{ kind = 'rule', {choices} }}")).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(words) && message.contains("line 2"), "{message}");
    }
    let mixer: Recipe = toml::from_str("mixer = { kind = 'rule', memory = 'mlp' }").unwrap();
    let ctx = LayerContext { value_dim: 3, ..LayerContext::new(8, 2) };
    let message = mixer.mixer.validate(&ctx).unwrap_err().to_string();
    assert!(message.contains("value_dim is 3, expected head_dim = 4"), "{message}");
    let mixer: Recipe = toml::from_str("mixer = { kind = 'rule', rate_max = -1.0 }").unwrap();
    let message = mixer.mixer.validate(&LayerContext::new(8, 2)).unwrap_err().to_string();
    assert!(message.contains("rate_max is -1"), "{message}");
}
