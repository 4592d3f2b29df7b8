//! The generic tensor path against the definition, for every sound rule.

use burn::tensor::{DType, Device, Tensor};
use fastweight_memory::rule::reference::{self, State, Token, Weights};
use fastweight_memory::rule::{
    Bias, Fused, Gate, GradientAt, Learner, Retention, Rule, RuleState, RunOptions, Tokens, run,
};
use fastweight_ops::{Offsets, Path};

use crate::support::{assert_close, name, sizes, sound_rules, start, state, stored, tensors, tokens, values};

const ROWS: usize = 2;
const HEADS: usize = 2;

pub fn composed() -> RunOptions {
    RunOptions { path: Path::Composed, ..RunOptions::default() }
}

/// Rules with every variant of chunk, window and place of the gradient that they allow.
fn variants() -> Vec<Rule> {
    let mut all = Vec::new();
    for rule in sound_rules() {
        all.push(rule);
        if rule.learner != Learner::Proximal {
            all.push(Rule { chunk: 3, ..rule });
            all.push(Rule { window: 3, ..rule });
            all.push(Rule { window: 2, chunk: 4, ..rule });
            all.push(Rule { gradient_at: GradientAt::Decayed, window: 2, ..rule });
            if rule.bias == Bias::Lp {
                all.push(Rule { smooth: true, p: 1.5, ..rule });
            }
        }
    }
    all
}

/// Sequences and starts of two rows with two heads.
pub fn problem(rule: &Rule, time: usize) -> (Vec<Vec<Vec<Token>>>, Vec<Vec<Weights>>) {
    let sizes = sizes(rule);
    let seed = |row: usize, head: usize| (10 * row + head + 1) as u64;
    let each = |row: usize| (0..HEADS).map(move |head| seed(row, head));
    let sequences =
        (0..ROWS).map(|row| each(row).map(|seed| tokens(rule, sizes, time, seed)).collect()).collect();
    let starts = (0..ROWS).map(|row| each(row).map(|seed| start(rule, sizes, 50 + seed)).collect()).collect();
    (sequences, starts)
}

/// Readings `[B, T, H, V]` and final memories of the definition.
pub fn expected(
    rule: &Rule,
    sequences: &[Vec<Vec<Token>>],
    starts: &[Vec<Weights>],
) -> (Vec<f64>, Vec<Vec<f64>>) {
    let (mut readings, mut memories) = (Vec::new(), Vec::new());
    for (row, starts) in sequences.iter().zip(starts) {
        let mut heads = Vec::new();
        for (sequence, start) in row.iter().zip(starts) {
            let mut state = State::new(rule, start.clone());
            heads.push(reference::run(rule, &mut state, sequence));
            memories.push(stored(rule, &state));
        }
        for t in 0..row[0].len() {
            heads.iter().for_each(|head| readings.extend(&head[t]));
        }
    }
    (readings, memories)
}

fn memories(state: &RuleState) -> Vec<Vec<f64>> {
    let [batch, heads, ..] = state.memory[0].dims();
    let layers: Vec<Vec<f64>> = state.memory.iter().map(values).collect();
    let part = |layer: &Vec<f64>, index: usize| {
        let size = layer.len() / (batch * heads);
        layer[index * size..(index + 1) * size].to_vec()
    };
    (0..batch * heads).map(|index| layers.iter().flat_map(|layer| part(layer, index)).collect()).collect()
}

#[track_caller]
pub fn assert_memories(what: &str, found: &RuleState, expected: &[Vec<f64>], tolerance: f64) {
    for (found, expected) in memories(found).iter().zip(expected) {
        assert_close(what, found, expected, tolerance);
    }
}

#[test]
fn every_sound_rule_equals_its_definition() {
    let device = Device::flex();
    for rule in variants() {
        rule.validate().unwrap();
        for time in [1, 8] {
            let (sequences, starts) = problem(&rule, time);
            let (readings, ends) = expected(&rule, &sequences, &starts);
            // Five Newton-Schulz iterations multiply the rounding of a momentum of low rank by 3.4445^5 = 485, and every
            // later gradient again: in float32 one token can be compared, in float64 all.
            let orthogonal = rule.learner == Learner::NewtonSchulz;
            let single = if orthogonal { 5e-4 } else { 2e-5 };
            for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, single)] {
                if orthogonal && dtype == DType::F32 && time > 1 {
                    continue;
                }
                let initial = state(&rule, &starts, sizes(&rule)[1], dtype, &device);
                let (o, end) =
                    run(&rule, tensors(&rule, &sequences, dtype, &device), Some(initial), &composed())
                        .unwrap();
                let what = format!("{}, {time} tokens, {dtype:?}", name(&rule));
                assert_close(&what, &values(&o), &readings, tolerance);
                assert_memories(&what, &end, &ends, tolerance);
                assert_eq!(end.positions, [time; ROWS], "{what}");
            }
        }
    }
}

/// `four` and `three` applied to every tensor of the tokens.
fn each(
    tokens: &Tokens,
    four: impl Fn(&Tensor<4>) -> Tensor<4>,
    three: impl Fn(&Tensor<3>) -> Tensor<3>,
) -> Tokens {
    Tokens {
        q: four(&tokens.q),
        k: four(&tokens.k),
        v: four(&tokens.v),
        rate: three(&tokens.rate),
        gate: match &tokens.gate {
            Gate::None => Gate::None,
            Gate::Scalar(gate) => Gate::Scalar(three(gate)),
            Gate::Channel(gate) => Gate::Channel(four(gate)),
        },
        momentum: tokens.momentum.as_ref().map(three),
    }
}

/// Tokens `from..from + count` of every row.
pub fn cut(tokens: &Tokens, from: usize, count: usize) -> Tokens {
    each(tokens, |x| x.clone().narrow(1, from, count), |x| x.clone().narrow(1, from, count))
}

/// One row.
fn row(tokens: &Tokens, row: usize) -> Tokens {
    each(tokens, |x| x.clone().narrow(0, row, 1), |x| x.clone().narrow(0, row, 1))
}

/// The rows of `a`, then those of `b`.
fn stacked(a: &Tokens, b: &Tokens) -> Tokens {
    Tokens {
        q: Tensor::cat(vec![a.q.clone(), b.q.clone()], 0),
        k: Tensor::cat(vec![a.k.clone(), b.k.clone()], 0),
        v: Tensor::cat(vec![a.v.clone(), b.v.clone()], 0),
        rate: Tensor::cat(vec![a.rate.clone(), b.rate.clone()], 0),
        gate: match (&a.gate, &b.gate) {
            (Gate::Scalar(a), Gate::Scalar(b)) => Gate::Scalar(Tensor::cat(vec![a.clone(), b.clone()], 0)),
            (Gate::Channel(a), Gate::Channel(b)) => Gate::Channel(Tensor::cat(vec![a.clone(), b.clone()], 0)),
            _ => Gate::None,
        },
        momentum: a.momentum.clone().zip(b.momentum.clone()).map(|(a, b)| Tensor::cat(vec![a, b], 0)),
    }
}

#[test]
fn any_cut_of_the_input_gives_the_same_result() {
    let device = Device::flex();
    for rule in variants() {
        let (sequences, starts) = problem(&rule, 9);
        let (readings, ends) = expected(&rule, &sequences, &starts);
        let tokens = tensors(&rule, &sequences, DType::F64, &device);
        for cuts in [vec![1; 9], vec![2, 7], vec![4, 5], vec![5, 1, 3]] {
            let mut held = state(&rule, &starts, sizes(&rule)[1], DType::F64, &device);
            let (mut from, mut parts) = (0, Vec::new());
            for count in &cuts {
                let (o, next) = run(&rule, cut(&tokens, from, *count), Some(held), &composed()).unwrap();
                held = next;
                parts.push(o);
                from += count;
            }
            let what = format!("{}, cut in {cuts:?}", name(&rule));
            assert_close(&what, &values(&Tensor::cat(parts, 1)), &readings, 1e-10);
            assert_memories(&what, &held, &ends, 1e-10);
        }
    }
}

/// Rows at different places of their chunks, and rows that another row must not touch.
#[test]
fn rows_are_independent_wherever_each_stands_in_its_chunk() {
    let device = Device::flex();
    for rule in variants() {
        let (sequences, starts) = problem(&rule, 9);
        let (readings, ends) = expected(&rule, &sequences, &starts);
        let tokens = tensors(&rule, &sequences, DType::F64, &device);
        let initial = state(&rule, &starts, sizes(&rule)[1], DType::F64, &device);
        // Row 0 reads four tokens alone and row 1 two; then each reads its next five, together.
        let alone = |index: usize, count: usize| {
            let part = row(&cut(&tokens, 0, count), index);
            run(&rule, part, Some(initial.select(&[index]).unwrap()), &composed()).unwrap().1
        };
        let joined = RuleState::cat(vec![alone(0, 4), alone(1, 2)]).unwrap();
        assert_eq!(joined.positions, [4, 2]);
        let mixed = stacked(&row(&cut(&tokens, 4, 5), 0), &row(&cut(&tokens, 2, 5), 1));
        let (o, end) = run(&rule, mixed, Some(joined), &composed()).unwrap();
        let value = sizes(&rule)[1];
        let whole = |row: usize, from: usize| -> Vec<f64> {
            let size = HEADS * value;
            readings[(row * 9 + from) * size..(row * 9 + from + 5) * size].to_vec()
        };
        let what = format!("{}, rows apart", name(&rule));
        assert_close(&what, &values(&o), &[whole(0, 4), whole(1, 2)].concat(), 1e-10);
        assert_close(&what, &memories(&end)[0], &ends[0], 1e-10);
        assert_eq!(end.positions, [9, 7]);
    }
}

#[test]
fn packed_documents_equal_separate_ones() {
    let device = Device::flex();
    for rule in variants() {
        let sizes = sizes(&rule);
        let lengths = [3, 0, 5];
        let documents: Vec<Vec<Token>> =
            lengths.iter().enumerate().map(|(i, n)| tokens(&rule, sizes, *n, 30 + i as u64)).collect();
        let starts: Vec<Vec<Weights>> = (0..3).map(|i| vec![start(&rule, sizes, 70 + i)]).collect();
        let row = vec![vec![documents.concat()]];
        let mut readings = Vec::new();
        let mut ends = Vec::new();
        for (document, start) in documents.iter().zip(&starts) {
            let mut state = State::new(&rule, start[0].clone());
            readings.extend(reference::run(&rule, &mut state, document).concat());
            ends.push(stored(&rule, &state));
        }
        let offsets = Some(Offsets::new(&[0, 3, 3, 8], 8).unwrap());
        let options = RunOptions { offsets, ..composed() };
        let initial = state(&rule, &starts, sizes[1], DType::F64, &device);
        let (o, end) =
            run(&rule, tensors(&rule, &row, DType::F64, &device), Some(initial), &options).unwrap();
        let what = format!("{}, packed", name(&rule));
        assert_close(&what, &values(&o), &readings, 1e-10);
        assert_memories(&what, &end, &ends, 1e-10);
        assert_eq!(end.positions, lengths);
    }
}

/// Gradients of the outer loss by every input against central differences of the definition.
#[test]
fn gradients_are_those_of_the_definition() {
    let device = Device::flex().autodiff();
    for rule in variants() {
        let (sequences, starts) = problem(&rule, 4);
        let mut tokens = tensors(&rule, &sequences, DType::F64, &device);
        tokens.k = tokens.k.require_grad();
        tokens.v = tokens.v.require_grad();
        tokens.rate = tokens.rate.require_grad();
        let (k, v, rate) = (tokens.k.clone(), tokens.v.clone(), tokens.rate.clone());
        let initial = state(&rule, &starts, sizes(&rule)[1], DType::F64, &device);
        let (o, _) = run(&rule, tokens, Some(initial), &composed()).unwrap();
        let grads = o.square().sum().backward();
        let loss = |sequences: &[Vec<Vec<Token>>]| -> f64 {
            expected(&rule, sequences, &starts).0.iter().map(|o| o * o).sum()
        };
        let [k, v, rate] = [k.grad(&grads), v.grad(&grads), rate.grad(&grads).map(|g| g.unsqueeze_dim(3))]
            .map(|grad| values(&grad.unwrap()));
        for (row, head, t) in [(0, 0, 0), (1, 1, 2)] {
            let at = |grad: &[f64], dim: usize, i: usize| grad[((row * 4 + t) * HEADS + head) * dim + i];
            let [key, value] = sizes(&rule);
            let moved = |change: &dyn Fn(&mut Token, f64)| {
                let side = |by: f64| {
                    let mut sequences = sequences.clone();
                    change(&mut sequences[row][head][t], by);
                    loss(&sequences)
                };
                // Central differences of fourth order: Newton-Schulz turns quickly where the momentum is small.
                (8.0 * (side(1e-6) - side(-1e-6)) - (side(2e-6) - side(-2e-6))) / 12e-6
            };
            let checks = [
                (moved(&|t, by| t.k[1] += by), at(&k, key, 1)),
                (moved(&|t, by| t.v[2] += by), at(&v, value, 2)),
                (moved(&|t, by| t.rate += by), at(&rate, 1, 0)),
            ];
            for (expected, found) in checks {
                let close = (found - expected).abs() <= 1e-4 * expected.abs().max(1.0);
                assert!(close, "{}: {found} against {expected}", name(&rule));
            }
        }
    }
}

#[test]
fn zero_inputs_have_finite_gradients() {
    let device = Device::flex().autodiff();
    for rule in variants() {
        let (mut sequences, starts) = problem(&rule, 3);
        for token in sequences.iter_mut().flatten().flatten() {
            for x in [&mut token.q, &mut token.k, &mut token.v] {
                x.fill(0.0);
            }
        }
        for dtype in [DType::F32, DType::F64] {
            let mut tokens = tensors(&rule, &sequences, dtype, &device);
            tokens.k = tokens.k.require_grad();
            tokens.q = tokens.q.require_grad();
            let (k, q) = (tokens.k.clone(), tokens.q.clone());
            let initial = state(&rule, &starts, sizes(&rule)[1], dtype, &device);
            let (o, end) = run(&rule, tokens, Some(initial), &composed()).unwrap();
            let loss = o.sum() + end.memory[0].clone().sum();
            let grads = loss.backward();
            for grad in [k.grad(&grads), q.grad(&grads)].into_iter().flatten() {
                assert!(values(&grad).iter().all(|g| g.is_finite()), "{}", name(&rule));
            }
        }
    }
}

#[test]
fn a_hard_reset_forgets_everything_before_it() {
    let device = Device::flex();
    for rule in variants().into_iter().filter(|rule| {
        matches!(rule.retention, Retention::ScalarDecay | Retention::ChannelDecay | Retention::Kl)
            && rule.learner == Learner::Gradient
            && rule.is_linear_loss()
            && rule.window == 1
    }) {
        let (mut sequences, starts) = problem(&rule, 4);
        sequences.iter_mut().flatten().for_each(|sequence| sequence[2].decay.fill(0.0));
        let (readings, _) = expected(&rule, &sequences, &starts);
        let initial = state(&rule, &starts, sizes(&rule)[1], DType::F64, &device);
        let tokens = tensors(&rule, &sequences, DType::F64, &device);
        let (o, _) = run(&rule, tokens, Some(initial), &composed()).unwrap();
        assert_close(&name(&rule), &values(&o), &readings, 1e-10);
    }
}

/// A rule that is a fused operator gives the same through it and through the generic path.
#[test]
fn fused_operators_equal_the_generic_path() {
    let device = Device::flex();
    let mut seen: Vec<Fused> = Vec::new();
    for rule in variants().into_iter().chain(sound_rules().into_iter().filter_map(|rule| {
        let decayed = Rule { gradient_at: GradientAt::Decayed, ..rule };
        decayed.fused().map(|_| decayed)
    })) {
        let Some(fused) = rule.fused() else {
            let (sequences, starts) = problem(&rule, 2);
            let initial = state(&rule, &starts, sizes(&rule)[1], DType::F32, &device);
            let tokens = tensors(&rule, &sequences, DType::F32, &device);
            let options = RunOptions { path: Path::Fused, ..RunOptions::default() };
            assert!(run(&rule, tokens, Some(initial), &options).is_err());
            continue;
        };
        if !seen.contains(&fused) {
            seen.push(fused);
        }
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-10)] {
            let (sequences, starts) = problem(&rule, 9);
            let result = |path: Path| {
                let initial = state(&rule, &starts, sizes(&rule)[1], dtype, &device);
                let tokens = tensors(&rule, &sequences, dtype, &device);
                let options = RunOptions { path, scale: 0.5, ..RunOptions::default() };
                run(&rule, tokens, Some(initial), &options).unwrap()
            };
            let ((a, end), (b, other)) = (result(Path::Auto), result(Path::Composed));
            let what = format!("{} through {fused:?} in {dtype:?}", name(&rule));
            assert_close(&what, &values(&a), &values(&b), tolerance);
            assert_memories(&what, &end, &memories(&other), tolerance);
            assert_eq!(end.positions, other.positions);
            assert_eq!(end.momentum.len(), other.momentum.len());
        }
    }
    assert_eq!(seen.len(), 6, "{seen:?}");
}
