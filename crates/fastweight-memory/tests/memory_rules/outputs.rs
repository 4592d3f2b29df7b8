//! Rules with gates of their own for every output, against their definition and against rules with one gate a head.

use burn::tensor::{DType, Device, Tensor};
use fastweight_memory::rule::reference::{self, OutputToken, State, Token, Weights};
use fastweight_memory::rule::{
    Bias, GradientAt, Learner, Memory, OutputTokens, Retention, Rule, RuleState, run_outputs,
};
use fastweight_ops::Offsets;

use crate::support::{Numbers, assert_close, name, sizes, start, state, stored, tensor, tokens, values};

const HEADS: usize = 2;

/// Every rule that takes such gates, with chunks.
fn rules() -> Vec<Rule> {
    let mut rules = Vec::new();
    for memory in [Memory::Matrix, Memory::Mlp] {
        for bias in [Bias::DotProduct, Bias::Squared, Bias::Huber, Bias::Lp] {
            for retention in [Retention::ScalarDecay, Retention::Lq, Retention::Kl] {
                let rule = Rule {
                    huber_delta: 0.6,
                    expansion: 2,
                    ..Rule::new(memory, bias, retention, Learner::Gradient)
                };
                for chunk in [1, 3, 8] {
                    rules.push(Rule { chunk, ..rule });
                }
                if retention == Retention::Lq {
                    rules.push(Rule { chunk: 4, mirror: true, ..rule });
                }
            }
        }
    }
    rules
}

/// Tokens with their own gates, and a threshold that some errors pass.
fn output_tokens(rule: &Rule, count: usize, seed: u64) -> Vec<OutputToken> {
    let [key, value] = sizes(rule);
    let mut numbers = Numbers::new(900 + seed);
    let mut columns = |of: &dyn Fn(f64) -> f64| -> Vec<Vec<f64>> {
        let shapes = rule.layer_shapes(key, value);
        shapes.iter().map(|[_, cols]| numbers.many(*cols).into_iter().map(of).collect()).collect()
    };
    tokens(rule, [key, value], count, seed)
        .into_iter()
        .enumerate()
        .map(|(t, token)| OutputToken {
            rates: columns(&|x| token.rate * (1.0 + 0.5 * x)),
            // A column that is reset once.
            decays: columns(&|x| if t == 4 && x > 0.8 { 0.0 } else { 0.8 + 0.2 * x }),
            threshold: (rule.bias == Bias::Huber).then_some(0.7 + token.k[0]).map(|d: f64| d.max(0.2)),
            q: token.q,
            k: token.k,
            v: token.v,
        })
        .collect()
}

type Sequences = Vec<Vec<Vec<OutputToken>>>;

/// Two rows of two heads.
fn problem(rule: &Rule, time: usize) -> (Sequences, Vec<Vec<Weights>>) {
    let seeds = |row: u64| (0..HEADS as u64).map(move |head| 10 * row + head + 1);
    let sequences = (0..2).map(|row| seeds(row).map(|seed| output_tokens(rule, time, seed)).collect());
    let starts = (0..2).map(|row| seeds(row).map(|seed| start(rule, sizes(rule), 50 + seed)).collect());
    (sequences.collect(), starts.collect())
}

fn as_tensors(rule: &Rule, sequences: &Sequences, dtype: DType, device: &Device) -> OutputTokens {
    let (batch, heads, time) = (sequences.len(), sequences[0].len(), sequences[0][0].len());
    let gather = |of: &dyn Fn(&OutputToken) -> Vec<f64>| {
        let mut all = Vec::new();
        for row in sequences {
            for t in 0..time {
                row.iter().for_each(|head| all.extend(of(&head[t])));
            }
        }
        let dim = all.len() / (batch * time * heads);
        tensor(all, [batch, time, heads, dim], dtype, device)
    };
    let weights = 0..rule.layer_shapes(1, 1).len();
    OutputTokens {
        q: gather(&|t| t.q.clone()),
        k: gather(&|t| t.k.clone()),
        v: gather(&|t| t.v.clone()),
        rates: weights.clone().map(|i| gather(&|t| t.rates[i].clone())).collect(),
        gates: weights.map(|i| gather(&|t| t.decays[i].iter().map(|d| d.ln()).collect())).collect(),
        threshold: (rule.bias == Bias::Huber)
            .then(|| gather(&|t| vec![t.threshold.unwrap()]).squeeze_dim::<3>(3)),
    }
}

fn cut(tokens: &OutputTokens, dim: usize, from: usize, count: usize) -> OutputTokens {
    let part = |x: &Tensor<4>| x.clone().narrow(dim, from, count);
    OutputTokens {
        q: part(&tokens.q),
        k: part(&tokens.k),
        v: part(&tokens.v),
        rates: tokens.rates.iter().map(part).collect(),
        gates: tokens.gates.iter().map(part).collect(),
        threshold: tokens.threshold.clone().map(|x| x.narrow(dim, from, count)),
    }
}

/// Readings `[B, T, H, V]` and the memories of every row and head after them.
fn expected(rule: &Rule, sequences: &Sequences, starts: &[Vec<Weights>]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let (mut readings, mut memories) = (Vec::new(), Vec::new());
    for (row, starts) in sequences.iter().zip(starts) {
        let mut heads = Vec::new();
        for (sequence, start) in row.iter().zip(starts) {
            let mut state = State::new(rule, start.clone());
            let step = |token| reference::step_outputs(rule, &mut state, token);
            heads.push(sequence.iter().map(step).collect::<Vec<_>>());
            memories.push(stored(rule, &state));
        }
        for t in 0..row[0].len() {
            heads.iter().for_each(|head| readings.extend(&head[t]));
        }
    }
    (readings, memories)
}

#[track_caller]
fn assert_memories(what: &str, state: &RuleState, expected: &[Vec<f64>], tolerance: f64) {
    let layers: Vec<Vec<f64>> = state.memory.iter().map(values).collect();
    for (index, expected) in expected.iter().enumerate() {
        let part = |layer: &Vec<f64>| {
            let size = layer.len() / expected_rows(state);
            layer[index * size..(index + 1) * size].to_vec()
        };
        let found: Vec<f64> = layers.iter().flat_map(part).collect();
        assert_close(what, &found, expected, tolerance);
    }
}

fn expected_rows(state: &RuleState) -> usize {
    let [batch, heads, ..] = state.memory[0].dims();
    batch * heads
}

#[test]
fn any_cut_equals_the_definition() {
    let device = Device::flex();
    for rule in rules() {
        let (sequences, starts) = problem(&rule, 9);
        let (readings, ends) = expected(&rule, &sequences, &starts);
        for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 2e-5)] {
            let tokens = as_tensors(&rule, &sequences, dtype, &device);
            for cuts in [vec![9], vec![1; 9], vec![4, 5], vec![5, 1, 3]] {
                let mut held = state(&rule, &starts, sizes(&rule)[1], dtype, &device);
                let (mut from, mut parts) = (0, Vec::new());
                for count in &cuts {
                    let (o, next) = run_outputs(&rule, cut(&tokens, 1, from, *count), held, None).unwrap();
                    held = next;
                    parts.push(o);
                    from += count;
                }
                let what = format!("{}, {dtype:?}, cut in {cuts:?}", name(&rule));
                assert_close(&what, &values(&Tensor::cat(parts, 1)), &readings, tolerance);
                assert_memories(&what, &held, &ends, tolerance);
                assert_eq!(held.positions, [9; 2]);
            }
        }
    }
}

#[test]
fn rows_apart_and_packed_documents_equal_each_alone() {
    let device = Device::flex();
    for rule in rules() {
        let (sequences, starts) = problem(&rule, 9);
        let tokens = as_tensors(&rule, &sequences, DType::F64, &device);
        let initial = state(&rule, &starts, sizes(&rule)[1], DType::F64, &device);
        let alone = |row: usize, from: usize, count: usize, state: RuleState| {
            run_outputs(&rule, cut(&cut(&tokens, 0, row, 1), 1, from, count), state, None).unwrap()
        };
        let own = |row: usize| initial.select(&[row]).unwrap();
        // Row 0 stands at token 4 and row 1 at token 2 when they go on together.
        let held = [alone(0, 0, 4, own(0)).1, alone(1, 0, 2, own(1)).1];
        let (whole, ends) = [(0, 4), (1, 2)]
            .map(|(row, from)| alone(row, from, 5, held[row].clone()))
            .into_iter()
            .unzip::<_, _, Vec<_>, Vec<_>>();
        let joined = RuleState::cat(held.to_vec()).unwrap();
        let shifted = [cut(&cut(&tokens, 0, 0, 1), 1, 4, 5), cut(&cut(&tokens, 0, 1, 1), 1, 2, 5)];
        let stacked =
            |of: &dyn Fn(&OutputTokens) -> Tensor<4>| Tensor::cat(shifted.iter().map(of).collect(), 0);
        let weights = 0..tokens.rates.len();
        let together = OutputTokens {
            q: stacked(&|t| t.q.clone()),
            k: stacked(&|t| t.k.clone()),
            v: stacked(&|t| t.v.clone()),
            rates: weights.clone().map(|i| stacked(&|t| t.rates[i].clone())).collect(),
            gates: weights.map(|i| stacked(&|t| t.gates[i].clone())).collect(),
            threshold: tokens
                .threshold
                .is_some()
                .then(|| Tensor::cat(shifted.iter().map(|t| t.threshold.clone().unwrap()).collect(), 0)),
        };
        let (o, end) = run_outputs(&rule, together, joined, None).unwrap();
        let what = name(&rule);
        assert_close(&what, &values(&o), &values(&Tensor::cat(whole, 0)), 1e-10);
        let ends = RuleState::cat(ends).unwrap();
        for (a, b) in end.memory.iter().zip(&ends.memory) {
            assert_close(&what, &values(a), &values(b), 1e-10);
        }
        assert_eq!(end.positions, [9, 7]);
        // Row 0 again, as documents of 3, 0 and 6 tokens.
        let row = cut(&tokens, 0, 0, 1);
        let three = initial.select(&[0, 1, 1]).unwrap();
        let offsets = Offsets::from_lengths(&[3, 0, 6]);
        let (packed, end) = run_outputs(&rule, row, three.clone(), Some(&offsets)).unwrap();
        let parts = [(0, 0, 3), (2, 3, 6)]
            .map(|(document, from, count)| alone(0, from, count, three.select(&[document]).unwrap()).0);
        assert_close(&what, &values(&packed), &values(&Tensor::cat(parts.to_vec(), 1)), 1e-10);
        assert_eq!(end.positions, [3, 0, 6]);
    }
}

/// Gates that are the same for all outputs are those of one gate a head.
#[test]
fn equal_gates_are_one_gate_a_head() {
    for rule in rules() {
        let [key, value] = sizes(&rule);
        let mut one = State::new(&rule, start(&rule, [key, value], 3));
        let mut many = one.clone();
        for token in tokens(&rule, [key, value], 9, 4) {
            let columns =
                |x: f64| rule.layer_shapes(key, value).iter().map(|[_, cols]| vec![x; *cols]).collect();
            let Token { q, k, v, rate, decay, .. } = token.clone();
            let gated =
                OutputToken { q, k, v, rates: columns(rate), decays: columns(decay[0]), threshold: None };
            let (a, b) =
                (reference::step(&rule, &mut one, &token), reference::step_outputs(&rule, &mut many, &gated));
            assert_close(&name(&rule), &b, &a, 1e-12);
            assert_close(&name(&rule), &stored(&rule, &many), &stored(&rule, &one), 1e-12);
        }
    }
}

#[test]
fn gradients_are_those_of_the_definition() {
    let device = Device::flex().autodiff();
    for rule in rules() {
        let (sequences, starts) = problem(&rule, 5);
        let mut tokens = as_tensors(&rule, &sequences, DType::F64, &device);
        tokens.k = tokens.k.require_grad();
        tokens.rates = tokens.rates.into_iter().map(Tensor::require_grad).collect();
        tokens.gates = tokens.gates.into_iter().map(Tensor::require_grad).collect();
        tokens.threshold = tokens.threshold.map(Tensor::require_grad);
        let kept = tokens.clone();
        let initial = state(&rule, &starts, sizes(&rule)[1], DType::F64, &device);
        let (o, _) = run_outputs(&rule, tokens, initial, None).unwrap();
        let grads = o.square().sum().backward();
        let loss = |s: &Sequences| -> f64 { expected(&rule, s, &starts).0.iter().map(|o| o * o).sum() };
        let last = kept.rates.len() - 1;
        let grad = |x: &Tensor<4>| values(&x.grad(&grads).unwrap());
        let cols = rule.layer_shapes(sizes(&rule)[0], sizes(&rule)[1])[last][1];
        for (row, head, t) in [(0, 0, 0), (1, 1, 2)] {
            let at = |grad: Vec<f64>, dim: usize, i: usize| grad[((row * 5 + t) * HEADS + head) * dim + i];
            let moved = |change: &dyn Fn(&mut OutputToken, f64)| {
                let side = |by: f64| {
                    let mut sequences = sequences.clone();
                    change(&mut sequences[row][head][t], by);
                    loss(&sequences)
                };
                (side(1e-6) - side(-1e-6)) / 2e-6
            };
            let mut checks = vec![
                (moved(&|t, by| t.k[1] += by), at(grad(&kept.k), sizes(&rule)[0], 1)),
                (moved(&|t, by| t.rates[last][1] += by), at(grad(&kept.rates[last]), cols, 1)),
                (moved(&|t, by| t.decays[last][2] *= by.exp()), at(grad(&kept.gates[last]), cols, 2)),
            ];
            if let Some(threshold) = &kept.threshold {
                let grad = threshold.grad(&grads).unwrap().unsqueeze_dim::<4>(3);
                let found = at(values(&grad), 1, 0);
                checks.push((moved(&|t, by| t.threshold = t.threshold.map(|d| d + by)), found));
            }
            for (expected, found) in checks {
                let close = (found - expected).abs() <= 1e-4 * expected.abs().max(1.0);
                assert!(close, "{}: {found} against {expected}", name(&rule));
            }
        }
    }
}

#[test]
fn rules_and_tensors_that_do_not_fit_are_named() {
    let device = Device::flex();
    let rule = Rule { retention: Retention::ScalarDecay, bias: Bias::Huber, chunk: 3, ..Rule::default() };
    let (sequences, starts) = problem(&rule, 4);
    let good = || as_tensors(&rule, &sequences, DType::F32, &device);
    let held = state(&rule, &starts, sizes(&rule)[1], DType::F32, &device);
    let other = |rule: Rule| run_outputs(&rule, good(), held.clone(), None).unwrap_err().to_string();
    let momentum = Rule { learner: Learner::Momentum, ..rule };
    let decayed = Rule { chunk: 1, gradient_at: GradientAt::Decayed, ..rule };
    for (rule, words) in [
        (Rule { memory: Memory::Vector, ..rule }, "memory is vector"),
        (Rule { retention: Retention::ElasticNet, ..rule }, "retention is elastic_net"),
        (momentum, "learner is momentum"),
        (decayed, "gradient_at is decayed"),
        (Rule { window: 2, ..rule }, "window is 2"),
    ] {
        assert!(other(rule).contains(words), "{words}: {}", other(rule));
    }
    let message = |change: &dyn Fn(&mut OutputTokens)| {
        let mut tokens = good();
        change(&mut tokens);
        run_outputs(&rule, tokens, held.clone(), None).unwrap_err().to_string()
    };
    assert!(message(&|t| t.rates.clear()).contains("one a weight"));
    assert!(message(&|t| t.gates[0] = t.gates[0].clone().narrow(3, 0, 1)).contains("gates has shape"));
    assert!(message(&|t| t.gates[0] = t.gates[0].clone() + 1.0).contains("gate is"));
    assert!(message(&|t| t.threshold = t.threshold.clone().map(|x| x.narrow(1, 0, 1))).contains("threshold"));
    let offsets = Offsets::from_lengths(&[2, 2]);
    let error = run_outputs(&rule, good(), held.clone(), Some(&offsets)).unwrap_err().to_string();
    assert!(error.contains("2 rows"), "{error}");
}
