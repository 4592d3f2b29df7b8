//! Every rule of the stored numbers: the definition in float64, the tensor path in float32.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::{DType, Device, Tensor};
use fastweight_memory::rule::reference::{self, Layer, State, Token};
use fastweight_memory::rule::{Bias, Learner, Memory, Retention, Rule, RunOptions, Tokens, run};
use safetensors::SafeTensors;

use crate::support::{assert_close, state, tensors, values};

const T: usize = 20;
const K: usize = 6;
const V: usize = 5;

/// Every array of a file, in float64.
pub fn load(name: &str) -> HashMap<String, Vec<f64>> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/rules").join(format!("{name}.safetensors"));
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: &str| {
        let (chunks, _) = file.tensor(name).unwrap().data().as_chunks::<8>();
        chunks.iter().map(|b| f64::from_le_bytes(*b)).collect()
    };
    file.names().into_iter().map(|name| (name.to_owned(), read(name))).collect()
}

/// The stored value-first memory after `t` tokens, key first.
pub fn key_first(w: &[f64], t: usize) -> Vec<f64> {
    let w = &w[t * V * K..(t + 1) * V * K];
    (0..K).flat_map(|i| (0..V).map(move |j| w[j * K + i])).collect()
}

fn rules() -> Vec<(&'static str, Rule)> {
    let matrix = |bias, retention| Rule::new(Memory::Matrix, bias, retention, Learner::Gradient);
    let huber = |retention| Rule { huber_delta: 2.2, ..matrix(Bias::Huber, retention) };
    vec![
        ("hebbian", matrix(Bias::DotProduct, Retention::None)),
        ("hebbian_decay", matrix(Bias::DotProduct, Retention::ScalarDecay)),
        ("delta", matrix(Bias::Squared, Retention::None)),
        ("delta_decay", matrix(Bias::Squared, Retention::ScalarDecay)),
        ("huber", huber(Retention::None)),
        ("huber_decay", huber(Retention::ScalarDecay)),
        ("moneta_p3_q4", matrix(Bias::Lp, Retention::Lq)),
        ("memora", matrix(Bias::Squared, Retention::Kl)),
        ("dgd_proximal", Rule { learner: Learner::Proximal, ..matrix(Bias::Squared, Retention::None) }),
    ]
}

/// Tokens whose query reads one row of the memory each.
fn tokens(file: &HashMap<String, Vec<f64>>) -> Vec<Token> {
    let token = |t: usize| Token {
        q: (0..K).map(|i| f64::from(i == t % K)).collect(),
        k: file["k"][t * K..(t + 1) * K].to_vec(),
        v: file["v"][t * V..(t + 1) * V].to_vec(),
        rate: file["eta"][t],
        decay: vec![file.get("alpha").map_or(1.0, |alpha| alpha[t])],
        momentum: 0.0,
    };
    (0..T).map(token).collect()
}

fn start(rule: &Rule, file: &HashMap<String, Vec<f64>>) -> Layer {
    let stored = if rule.retention == Retention::Lq { "A" } else { "W" };
    Layer::new(K, V, key_first(&file[stored], 0))
}

#[test]
fn the_definitions_give_the_stored_memories() {
    for (name, rule) in rules() {
        let file = load(name);
        rule.validate().unwrap();
        let mut state = State::new(&rule, vec![start(&rule, &file)]);
        assert_close(name, &state.memory[0].values, &key_first(&file["W"], 0), 1e-10);
        for (t, token) in tokens(&file).iter().enumerate() {
            reference::step(&rule, &mut state, token);
            assert_close(name, &state.memory[0].values, &key_first(&file["W"], t + 1), 1e-10);
            if let Some(a) = file.get("A") {
                assert_close(name, &state.dual[0].values, &key_first(a, t + 1), 1e-10);
            }
        }
    }
}

#[test]
fn the_tensor_path_gives_the_stored_memories() {
    let device = Device::flex();
    for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
        for (name, rule) in rules() {
            let file = load(name);
            let sequences = [vec![tokens(&file)]];
            let Tokens { q, k, v, rate, gate, momentum } = tensors(&rule, &sequences, dtype, &device);
            // Rates and gates of exactly one are a retention of none.
            let tokens = Tokens { q, k, v, rate, gate, momentum };
            let initial = state(&rule, &[vec![vec![start(&rule, &file)]]], V, dtype, &device);
            for path in [fastweight_ops::Path::Auto, fastweight_ops::Path::Composed] {
                let options = RunOptions { path, ..RunOptions::default() };
                let (o, end) = run(&rule, tokens.clone(), Some(initial.clone()), &options).unwrap();
                // The query of token t reads row t % K of the memory after it.
                let expected: Vec<f64> = (0..T)
                    .flat_map(|t| key_first(&file["W"], t + 1)[(t % K) * V..(t % K + 1) * V].to_vec())
                    .collect();
                assert_close(&format!("{name} {dtype:?} {path:?}"), &values(&o), &expected, tolerance);
                let memory: Vec<f64> = match rule.retention {
                    Retention::Lq => key_first(&file["A"], T),
                    Retention::Kl => key_first(&file["W"], T).into_iter().map(f64::ln).collect(),
                    _ => key_first(&file["W"], T),
                };
                let found: Tensor<4> = end.memory[0].clone();
                assert_close(&format!("{name} {dtype:?} {path:?}"), &values(&found), &memory, tolerance);
            }
        }
    }
}
