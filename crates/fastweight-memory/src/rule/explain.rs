//! A named rule at work on a small example, computed from its definition.

use serde::Serialize;

use super::named::{Definition, NamedRule, Special};
use super::reference::{self, Layer, State, Token, Weights, objective};
use super::special::{
    Rwkv7Token, comba, comba_objective, lstm, lstm_objective, nadaraya_watson, nadaraya_watson_objective,
    normalised, normalised_objective, normalised_read, oja, oja_loss, rwkv7, rwkv7_objective, srwm,
    srwm_loss, srwm_token, ttt, ttt_loss, ttt_read,
};
use super::{Memory, Retention, Rule};

/// Keys of the example's tokens: the third is the first again, with another value.
pub const KEYS: [[f64; 2]; 3] = [[0.6, 0.8], [1.0, 0.0], [0.6, 0.8]];
/// Their values.
pub const VALUES: [[f64; 2]; 3] = [[1.0, 2.0], [2.0, -1.0], [-1.0, 1.0]];
/// Rate of every write.
const RATE: f64 = 0.5;
/// Rate where the half would overshoot: a step of a loss that bends with the memory.
const SMALL_RATE: f64 = 0.1;
/// Decay of rules that decay; of the second key channel where each has its own.
const DECAYS: [f64; 2] = [0.9, 0.8];
/// Momentum of rules that have one.
const MOMENTUM: f64 = 0.5;

/// One token of the example.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// The token's key, which is also its query.
    pub key: Vec<f64>,
    /// Its value.
    pub value: Vec<f64>,
    /// The memory after it, row by row; empty for memories too large to print and where there is none.
    pub memory: Vec<Vec<f64>>,
    /// What the key reads from the memory before the token; empty where nothing can be read.
    pub read_before: Vec<f64>,
    /// What it reads after it.
    pub read_after: Vec<f64>,
    /// The objective of the step at the memory before the token.
    pub objective_before: Option<f64>,
    /// The objective at the memory after it.
    pub objective_after: Option<f64>,
}

/// The example of a rule: three tokens with K = V = 2.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Example {
    /// The numbers that the tokens share.
    pub numbers: String,
    /// The tokens.
    pub steps: Vec<Step>,
}

fn rows(layers: &[Layer]) -> Vec<Vec<f64>> {
    match layers {
        [layer] => layer.values.chunks(layer.cols).map(<[f64]>::to_vec).collect(),
        _ => Vec::new(),
    }
}

/// Computes the example of a rule.
pub fn example(named: &NamedRule) -> Example {
    match named.definition {
        Definition::Cell(rule) => cell(&rule),
        Definition::Special(special) => {
            let (numbers, steps) = match special {
                Special::Softmax => ("similarity exp(q.k/√2)".to_owned(), kernel(softmax_similarity)),
                Special::Normalised => {
                    ("similarity φ(q).φ(k), φ = ELU + 1".to_owned(), kernel(elu_similarity))
                }
                Special::Comba => (format!("β = {RATE}, α = {}, b = 0.8", DECAYS[0]), matrix(comba_step)),
                Special::DeltaProduct => (
                    format!("two steps a token: (k, v), then ([0, 1], [0, 0]), both β = {RATE}"),
                    matrix(product_step),
                ),
                Special::Rwkv7 => {
                    (format!("w = {DECAYS:?}, κ = k, a = [{RATE}, {RATE}]"), matrix(rwkv7_step))
                }
                Special::Oja => (format!("η = {SMALL_RATE}"), matrix(oja_step)),
                Special::TttLinear => {
                    (format!("η = {SMALL_RATE}, mini-batch of one token, a small fixed start"), trained(2))
                }
                Special::Lstm => {
                    (format!("g = tanh(v), i = {RATE}, f = {}, o = 1 in every cell", DECAYS[0]), cells())
                }
                Special::Srwm => (
                    "x = k; key, value and rates are those that the matrix makes, its output's columns shown; a small fixed start"
                        .to_owned(),
                    self_referential(),
                ),
                Special::MixtureOfMemories => (
                    format!("one chosen memory, η = {SMALL_RATE}, α = {}, chunk of one token, a small fixed start", 1.0 - DECAYS[0]),
                    chosen(),
                ),
                Special::TttMlp => {
                    (format!("η = {SMALL_RATE}, mini-batch of one token, a small fixed start"), trained(4))
                }
            };
            Example { numbers, steps }
        }
    }
}

/// A start that is not zero: small numbers without a pattern.
fn start(rows: usize, cols: usize, size: f64) -> Layer {
    let number = |i: usize| size * (((i * 7 + 3) % 11) as f64 / 11.0 - 0.4);
    Layer::new(rows, cols, (0..rows * cols).map(number).collect())
}

fn normalise(mut layer: Layer) -> Layer {
    layer.values.iter_mut().for_each(|w| *w = w.exp());
    for j in 0..layer.cols {
        let sum: f64 = (0..layer.rows).map(|i| layer.values[i * layer.cols + j]).sum();
        (0..layer.rows).for_each(|i| layer.values[i * layer.cols + j] /= sum);
    }
    layer
}

fn cell(rule: &Rule) -> Example {
    let starts_at_zero = !rule.needs_start() && rule.memory != Memory::Mlp;
    let mut state = if starts_at_zero {
        State::zero(rule, 2, 2)
    } else {
        let layers = rule.layer_shapes(2, 2).into_iter().map(|[rows, cols]| start(rows, cols, 1.0));
        let layers: Weights = match rule.retention {
            Retention::Kl => layers.map(normalise).collect(),
            _ => layers.collect(),
        };
        State::new(rule, layers)
    };
    let decay = match rule.retention {
        Retention::None | Retention::Bregman => vec![1.0],
        Retention::ChannelDecay => DECAYS.to_vec(),
        _ => vec![DECAYS[0]],
    };
    let mut numbers = format!("η = {RATE}");
    if decay != [1.0] {
        numbers += &format!(", α = {decay:?}");
    }
    if rule.has_momentum() {
        numbers += &format!(", μ = {MOMENTUM}");
    }
    if !starts_at_zero {
        numbers += ", a small fixed start";
    }
    let steps = KEYS.iter().zip(VALUES).map(|(k, v)| {
        let before = state.clone();
        let token = Token {
            q: k.to_vec(),
            k: k.to_vec(),
            v: v.to_vec(),
            rate: RATE,
            decay: decay.clone(),
            momentum: if rule.has_momentum() { MOMENTUM } else { 0.0 },
        };
        let read_after = reference::step(rule, &mut state, &token);
        Step {
            key: k.to_vec(),
            value: v.to_vec(),
            memory: rows(&state.memory),
            read_before: reference::read(rule, &before.memory, k),
            read_after,
            objective_before: objective(rule, &before, &token, &before.memory),
            objective_after: objective(rule, &before, &token, &state.memory),
        }
    });
    Example { numbers, steps: steps.collect() }
}

/// A matrix memory's next memory, and its objective at a candidate.
type Update = fn(&Layer, &[f64], &[f64]) -> (Layer, Option<f64>, Option<f64>);

fn matrix(update: Update) -> Vec<Step> {
    let read = |s: &Layer, x: &[f64]| -> Vec<f64> {
        (0..2).map(|j| (0..2).map(|i| s.values[i * 2 + j] * x[i]).sum()).collect()
    };
    let mut memory = Layer::zeros(2, 2);
    let step = |(k, v): (&[f64; 2], &[f64; 2])| {
        let read_before = read(&memory, k);
        let (after, objective_before, objective_after) = update(&memory, k, v);
        memory = after;
        Step {
            key: k.to_vec(),
            value: v.to_vec(),
            memory: rows(std::slice::from_ref(&memory)),
            read_before,
            read_after: read(&memory, k),
            objective_before,
            objective_after,
        }
    };
    KEYS.iter().zip(&VALUES).map(step).collect()
}

fn comba_step(s: &Layer, k: &[f64], v: &[f64]) -> (Layer, Option<f64>, Option<f64>) {
    let numbers = [RATE, DECAYS[0], 0.8];
    let after = comba(s, k, v, numbers);
    let at = |candidate: &Layer| Some(comba_objective(candidate, s, k, v, numbers));
    let (before, least) = (at(s), at(&after));
    (after, before, least)
}

fn product_step(s: &Layer, k: &[f64], v: &[f64]) -> (Layer, Option<f64>, Option<f64>) {
    let first = comba(s, k, v, [RATE, 1.0, 1.0]);
    let pair = ([0.0, 1.0], [0.0, 0.0]);
    let numbers = [RATE, 1.0, 1.0];
    let after = comba(&first, &pair.0, &pair.1, numbers);
    let at = |candidate: &Layer| Some(comba_objective(candidate, &first, &pair.0, &pair.1, numbers));
    let (before, least) = (at(s), at(&after));
    (after, before, least)
}

fn rwkv7_step(s: &Layer, k: &[f64], v: &[f64]) -> (Layer, Option<f64>, Option<f64>) {
    let token = Rwkv7Token {
        w: DECAYS.to_vec(),
        kk: k.to_vec(),
        a: vec![RATE; 2],
        k: k.iter().map(|k| RATE * k).collect(),
        v: v.to_vec(),
    };
    let after = rwkv7(s, &token);
    let (before, least) = (rwkv7_objective(s, s, &token), rwkv7_objective(&after, s, &token));
    (after, Some(before), Some(least))
}

/// Its loss, of which the update is one gradient step.
fn oja_step(s: &Layer, k: &[f64], v: &[f64]) -> (Layer, Option<f64>, Option<f64>) {
    let after = oja(s, k, v, SMALL_RATE);
    let (before, least) = (oja_loss(s, k, v), oja_loss(&after, k, v));
    (after, Some(before), Some(least))
}

/// Test-time training with two (matrix) or four (MLP) weights; the objective shown is the inner loss.
fn trained(weights: usize) -> Vec<Step> {
    let mut memory: Weights = match weights {
        2 => vec![start(2, 2, 1.0), Layer::zeros(1, 2)],
        _ => vec![start(2, 8, 1.0), Layer::zeros(1, 8), start(8, 2, 1.0), Layer::zeros(1, 2)],
    };
    let step = |(k, v): (&[f64; 2], &[f64; 2])| {
        let after = ttt(&memory, k, v, SMALL_RATE);
        let before = std::mem::replace(&mut memory, after);
        Step {
            key: k.to_vec(),
            value: v.to_vec(),
            memory: Vec::new(),
            read_before: ttt_read(&before, k),
            read_after: ttt_read(&memory, k),
            objective_before: Some(ttt_loss(&before, k, v)),
            objective_after: Some(ttt_loss(&memory, k, v)),
        }
    };
    KEYS.iter().zip(&VALUES).map(step).collect()
}

/// Two cells; what they read is their hyperbolic tangent.
fn cells() -> Vec<Step> {
    let mut memory = Layer::zeros(1, 2);
    let numbers = [RATE, DECAYS[0]];
    let read = |c: &Layer| -> Vec<f64> { c.values.iter().map(|c| c.tanh()).collect() };
    let step = |(k, v): (&[f64; 2], &[f64; 2])| {
        let g = v.map(f64::tanh);
        let after = lstm(&memory, &g, numbers);
        let before = std::mem::replace(&mut memory, after);
        let objective = |candidate: &Layer| Some(lstm_objective(candidate, &before, &g, numbers));
        Step {
            key: k.to_vec(),
            value: v.to_vec(),
            memory: rows(std::slice::from_ref(&memory)),
            read_before: read(&before),
            read_after: read(&memory),
            objective_before: objective(&before),
            objective_after: objective(&memory),
        }
    };
    KEYS.iter().zip(&VALUES).map(step).collect()
}

/// A matrix with K = V = 2 that makes its own keys and values.
fn self_referential() -> Vec<Step> {
    let mut memory = start(2, 10, 1.0);
    let step = |x: &[f64; 2]| {
        let token = srwm_token(&memory, x);
        let after = srwm(&memory, &token);
        let before = std::mem::replace(&mut memory, after);
        let read = |w: &Layer| -> Vec<f64> {
            (0..2).map(|c| (0..2).map(|i| w.values[i * w.cols + c] * token.key[i]).sum()).collect()
        };
        Step {
            value: token.target[..2].to_vec(),
            memory: Vec::new(),
            read_before: read(&before),
            read_after: read(&memory),
            objective_before: Some(srwm_loss(&before, &token)),
            objective_after: Some(srwm_loss(&memory, &token)),
            key: token.key.clone(),
        }
    };
    KEYS.iter().map(step).collect()
}

/// A memory of a mixture that is chosen at every token.
fn chosen() -> Vec<Step> {
    let mut memory = start(2, 2, 1.0);
    let numbers = [SMALL_RATE, 1.0 - DECAYS[0]];
    let step = |(k, v): (&[f64; 2], &[f64; 2])| {
        let after = normalised(&memory, k, v, numbers);
        let before = std::mem::replace(&mut memory, after);
        let objective = |candidate: &Layer| Some(normalised_objective(candidate, &before, k, v, numbers));
        Step {
            key: k.to_vec(),
            value: v.to_vec(),
            memory: rows(std::slice::from_ref(&memory)),
            read_before: normalised_read(&before, k),
            read_after: normalised_read(&memory, k),
            objective_before: objective(&before),
            objective_after: objective(&memory),
        }
    };
    KEYS.iter().zip(&VALUES).map(step).collect()
}

fn softmax_similarity(q: &[f64], k: &[f64]) -> f64 {
    (q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / 2f64.sqrt()).exp()
}

fn elu_similarity(q: &[f64], k: &[f64]) -> f64 {
    let phi = |x: f64| if x > 0.0 { x + 1.0 } else { x.exp() };
    q.iter().zip(k).map(|(q, k)| phi(*q) * phi(*k)).sum()
}

/// The Nadaraya-Watson estimate over all pairs so far. The objective before the token is that of the estimate
/// without it, over the pairs with it.
fn kernel(similarity: fn(&[f64], &[f64]) -> f64) -> Vec<Step> {
    let step = |t: usize| {
        let values: Vec<Vec<f64>> = VALUES[..=t].iter().map(|v| v.to_vec()).collect();
        let weights: Vec<f64> = KEYS[..=t].iter().map(|k| similarity(&KEYS[t], k)).collect();
        let before = (t > 0).then(|| nadaraya_watson(&weights[..t], &values[..t]));
        let z = nadaraya_watson(&weights, &values);
        Step {
            key: KEYS[t].to_vec(),
            value: VALUES[t].to_vec(),
            memory: Vec::new(),
            objective_before: before.as_ref().map(|z| nadaraya_watson_objective(z, &weights, &values)),
            read_before: before.unwrap_or_default(),
            objective_after: Some(nadaraya_watson_objective(&z, &weights, &values)),
            read_after: z,
        }
    };
    (0..KEYS.len()).map(step).collect()
}
