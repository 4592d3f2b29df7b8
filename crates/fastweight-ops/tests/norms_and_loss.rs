//! Normalisations, rotary positions, SwiGLU, the log gate and cross entropy against float64 loops.
//!
//! Each function is written once more in float64; its gradients come from central differences of that.

mod comparing;

use burn::tensor::{Device, Tensor};
use comparing::{assert_close, numbers, strided, tensor, values, widen};
use fastweight_ops::activation::{log_gate, swiglu, swiglu_on};
use fastweight_ops::kernel::{InstructionSet, with_instruction_set};
use fastweight_ops::loss::{IGNORE, Score, count_correct, cross_entropy, cross_entropy_on};
use fastweight_ops::norm::{gated_rms_norm_on, l2_normalise, l2_normalise_on, rms_norm, rms_norm_on};
use fastweight_ops::rope::{Positions, rotate, rotate_on};
use fastweight_ops::{Offsets, Path};

/// A function of flat inputs in float64.
type Definition<'a> = &'a dyn Fn(&[Vec<f64>]) -> Vec<f64>;
/// The same on tensors of one dimension.
type Operator<'a> = &'a dyn Fn(Vec<Tensor<1>>, Path) -> Tensor<1>;

/// Output and gradients of `sum(output * up)` from the definition.
fn expected(definition: Definition, inputs: &[Vec<f32>], up: &[f32]) -> Vec<Vec<f64>> {
    let inputs: Vec<Vec<f64>> = inputs.iter().map(|x| widen(x)).collect();
    let loss = |inputs: &[Vec<f64>]| -> f64 {
        definition(inputs).iter().zip(up).map(|(y, up)| y * f64::from(*up)).sum()
    };
    let mut all = vec![definition(&inputs)];
    for slot in 0..inputs.len() {
        let slope = |at: usize| {
            let step = 1e-5;
            let moved = |by: f64| {
                let mut inputs = inputs.clone();
                inputs[slot][at] += by;
                loss(&inputs)
            };
            (moved(step) - moved(-step)) / (2.0 * step)
        };
        all.push((0..inputs[slot].len()).map(slope).collect());
    }
    all
}

fn found(operator: Operator, inputs: &[Vec<f32>], up: &[f32], path: Path) -> Vec<Vec<f32>> {
    let device = Device::flex().autodiff();
    let leaves: Vec<Tensor<1>> =
        inputs.iter().map(|x| tensor(x, [x.len()], &device).require_grad()).collect();
    let y = operator(leaves.clone(), path);
    let grads = (y.clone() * tensor(up, [up.len()], &device)).sum().backward();
    let mut all = vec![values(y)];
    all.extend(leaves.iter().map(|leaf| values(leaf.grad(&grads).unwrap())));
    all
}

fn check(what: &str, definition: Definition, operator: Operator, inputs: &[Vec<f32>]) {
    let outputs = definition(&inputs.iter().map(|x| widen(x)).collect::<Vec<_>>()).len();
    let up = numbers(99, outputs);
    let expected = expected(definition, inputs, &up);
    let compare = |label: String, found: Vec<Vec<f32>>| {
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_close(&format!("{label} tensor {i}"), found, expected, if i == 0 { 1e-5 } else { 1e-4 });
        }
    };
    compare(format!("{what} composed"), found(operator, inputs, &up, Path::Composed));
    for set in InstructionSet::available() {
        let run = || with_instruction_set(set, || found(operator, inputs, &up, Path::Fused));
        assert_eq!(run(), run());
        compare(format!("{what} {set:?}"), run());
    }
}

fn spread(seed: u64, count: usize, factor: f32) -> Vec<f32> {
    numbers(seed, count).into_iter().map(|x| x * factor).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Not 1: there the gradient is what a rounding error leaves of two terms that cancel.
const SIZES: [usize; 6] = [3, 12, 16, 20, 60, 128];

#[test]
fn l2_normalisation() {
    for size in SIZES {
        let definition = |x: &[Vec<f64>]| {
            let row = |row: &[f64]| {
                let norm = (row.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                row.iter().map(|x| x / norm).collect::<Vec<_>>()
            };
            x[0].chunks(size).flat_map(row).collect()
        };
        let operator = |x: Vec<Tensor<1>>, path| {
            let [count] = x[0].dims();
            let x = x[0].clone().reshape([1, count / size / 3, 3, size]);
            l2_normalise_on(x, 1e-6, path).unwrap().reshape([count])
        };
        check("l2", &definition, &operator, &[spread(1, 6 * size, 3.0)]);
    }
}

#[test]
fn a_zero_vector_stays_zero_with_a_finite_gradient() {
    for path in [Path::Fused, Path::Composed] {
        let device = Device::flex().autodiff();
        let x = Tensor::<4>::zeros([1, 1, 2, 20], &device).require_grad();
        let y = l2_normalise_on(x.clone(), 1e-6, path).unwrap();
        assert!(values(y.clone()).iter().all(|y| *y == 0.0));
        let grad = values(x.grad(&y.sum().backward()).unwrap());
        assert!(grad.iter().all(|g| (g - 1000.0).abs() < 0.1), "{grad:?}");
    }
}

#[test]
fn rms_normalisation() {
    for size in SIZES {
        for gated in [false, true] {
            let definition = |x: &[Vec<f64>]| {
                let row = |(index, row): (usize, &[f64])| {
                    let norm = (row.iter().map(|x| x * x).sum::<f64>() / size as f64 + 1e-5).sqrt();
                    let gate = |i: usize| match x.get(2) {
                        Some(gate) => gate[index * size + i] * sigmoid(gate[index * size + i]),
                        None => 1.0,
                    };
                    (0..size).map(|i| row[i] / norm * x[1][i] * gate(i)).collect::<Vec<_>>()
                };
                x[0].chunks(size).enumerate().flat_map(row).collect()
            };
            let operator = |x: Vec<Tensor<1>>, path| {
                let [count] = x[0].dims();
                let shape = [2, count / size / 6, 3 * size];
                let gate = x.get(2).map(|gate| gate.clone().reshape(shape));
                gated_rms_norm_on(x[0].clone().reshape(shape), gate, x[1].clone(), 1e-5, path)
                    .unwrap()
                    .reshape([count])
            };
            let mut inputs = vec![spread(1, 12 * size, 2.0), spread(2, size, 1.0)];
            if gated {
                inputs.push(spread(3, 12 * size, 4.0));
            }
            check("gated rms", &definition, &operator, &inputs);
            let whole = |x: Vec<Tensor<1>>, path| {
                let [count] = x[0].dims();
                let x0 = x[0].clone().reshape([count / size, size]);
                rms_norm_on(x0, x[1].clone(), 1e-5, path).unwrap().reshape([count])
            };
            if !gated {
                check("rms", &definition, &whole, &inputs);
            }
        }
    }
}

#[test]
fn swiglu_products() {
    for count in [1, 15, 16, 100, 333] {
        let definition =
            |x: &[Vec<f64>]| x[0].iter().zip(&x[1]).map(|(g, u)| g * sigmoid(*g) * u).collect::<Vec<_>>();
        let operator = |x: Vec<Tensor<1>>, path| swiglu_on(x[0].clone(), x[1].clone(), path).unwrap();
        check("swiglu", &definition, &operator, &[spread(1, count, 6.0), spread(2, count, 2.0)]);
    }
}

#[test]
fn log_gates() {
    let definition = |x: &[Vec<f64>]| {
        let gate = |(at, a): (usize, &f64)| {
            let head = at % 3;
            -x[1][head].exp() * (a + x[2][head]).exp().ln_1p()
        };
        x[0].iter().enumerate().map(gate).collect::<Vec<_>>()
    };
    let inputs = [spread(1, 30, 8.0), spread(2, 3, 1.0), spread(3, 3, 1.0)];
    let up = numbers(9, 30);
    let operator = |x: Vec<Tensor<1>>, _| {
        log_gate(x[0].clone().reshape([2, 5, 3]), x[1].clone(), x[2].clone()).unwrap().reshape([30])
    };
    let expected = expected(&definition, &inputs, &up);
    for (found, expected) in found(&operator, &inputs, &up, Path::Auto).iter().zip(&expected) {
        assert_close("log gate", found, expected, 1e-5);
    }
    let device = Device::flex();
    let extreme = tensor::<3>(&[-200.0, 0.0, 200.0], [1, 1, 3], &device);
    let zeros = Tensor::<1>::zeros([3], &device);
    let gates = values(log_gate(extreme, zeros.clone(), zeros).unwrap());
    assert!(gates.iter().all(|g| g.is_finite() && *g <= 0.0), "{gates:?}");
}

#[test]
fn cross_entropies() {
    for vocab in [2, 16, 20, 50, 300] {
        let rows = 7;
        for ignored in [0, 3] {
            let target = |row: usize| if row % 4 < ignored { IGNORE } else { (row * 13 % vocab) as i64 };
            let targets: Vec<i64> = (0..rows).map(target).collect();
            let definition = |x: &[Vec<f64>]| {
                let scored = targets.iter().filter(|t| **t != IGNORE).count() as f64;
                let loss = |(row, target): (&[f64], &i64)| {
                    let sum: f64 = row.iter().map(|x| x.exp()).sum();
                    if *target == IGNORE { 0.0 } else { sum.ln() - row[*target as usize] }
                };
                vec![x[0].chunks(vocab).zip(&targets).map(loss).sum::<f64>() / scored]
            };
            let operator = |x: Vec<Tensor<1>>, path| {
                cross_entropy_on(x[0].clone().reshape([rows, vocab]), &targets, path).unwrap()
            };
            check("cross entropy", &definition, &operator, &[spread(1, rows * vocab, 5.0)]);
        }
    }
}

#[test]
fn nothing_scored_is_zero_and_large_logits_are_finite() {
    let device = Device::flex().autodiff();
    for path in [Path::Fused, Path::Composed] {
        let logits = tensor::<2>(&[1.0, 2.0, 3.0, 4.0], [2, 2], &device).require_grad();
        let loss = cross_entropy_on(logits.clone(), &[IGNORE, IGNORE], path).unwrap();
        assert_eq!(values(loss.clone()), [0.0]);
        assert_eq!(values(logits.grad(&loss.backward()).unwrap()), [0.0; 4]);
        let logits = tensor::<2>(&[1e4, -1e4, 3e4, 3e4], [2, 2], &device).require_grad();
        let loss = cross_entropy_on(logits.clone(), &[1, 0], path).unwrap();
        assert_close("loss", &values(loss.clone()), &[(2e4 + 2f64.ln()) / 2.0], 1e-6);
        assert_close(
            "gradient",
            &values(logits.grad(&loss.backward()).unwrap()),
            &[0.5, -0.5, -0.25, 0.25],
            1e-6,
        );
    }
}

#[test]
fn correct_predictions_are_counted() {
    let logits = tensor::<2>(&[0.0, 2.0, 1.0, 5.0, 4.0, 5.0, 1.0, 1.0, 9.0], [3, 3], &Device::flex());
    let score = |targets: &[i64]| count_correct(&logits, targets).unwrap();
    assert_eq!(score(&[1, 0, 2]), Score { correct: 3, scored: 3 });
    assert_eq!(score(&[1, IGNORE, 0]), Score { correct: 1, scored: 2 });
    assert_eq!(score(&[IGNORE; 3]), Score::default());
}

/// Rotate-half in float64.
fn rotated(x: &[f64], positions: &[usize], heads: usize, key: usize, base: f64) -> Vec<f64> {
    let half = key / 2;
    let row = |(index, x): (usize, &[f64])| -> Vec<f64> {
        let turn = |i: usize| {
            let angle = positions[index / heads] as f64 * base.powf(-((i % half) as f64) / half as f64);
            let (a, b) = (x[i % half], x[i % half + half]);
            if i < half { a * angle.cos() - b * angle.sin() } else { b * angle.cos() + a * angle.sin() }
        };
        (0..key).map(turn).collect()
    };
    x.chunks(key).enumerate().flat_map(row).collect()
}

#[test]
fn rotary_positions() {
    let offsets = Offsets::from_lengths(&[3, 0, 70, 27]);
    let documents = Positions::packed(offsets.clone(), vec![5, 9, 0, 1000]).unwrap();
    let packed: Vec<usize> =
        offsets.ranges().zip([5, 9, 0, 1000]).flat_map(|(range, start)| start..start + range.len()).collect();
    for (positions, list, batch, time) in [
        (Positions::uniform(2, 0), (0..70).chain(0..70).collect(), 2, 70),
        (Positions::uniform(3, 100_000), vec![100_000; 3], 3, 1),
        (Positions::rows(vec![0, 61]), (0..9).chain(61..70).collect(), 2, 9),
        (documents, packed, 1, 100),
    ] {
        for (heads, key) in [(1, 2), (3, 12), (2, 20)] {
            let count = batch * time * heads * key;
            let x = numbers(1, count);
            let up = numbers(2, count);
            let expected = rotated(&widen(&x), &list, heads, key, 10_000.0);
            for path in [Path::Fused, Path::Composed] {
                let device = Device::flex().autodiff();
                let x = tensor::<4>(&x, [batch, time, heads, key], &device).require_grad();
                let y = rotate_on(x.clone(), &positions, 10_000.0, path).unwrap();
                let up = tensor::<4>(&up, [batch, time, heads, key], &device);
                let grads = (y.clone() * up.clone()).sum().backward();
                assert_close("rotated", &values(y), &expected, 1e-6);
                // A rotation keeps inner products, so the gradient rotated forward is `up` again.
                let gradient = widen(&values(x.grad(&grads).unwrap()));
                let again = rotated(&gradient, &list, heads, key, 10_000.0);
                assert_close("gradient", &values(up), &again, 1e-6);
            }
        }
    }
}

#[test]
fn a_token_is_rotated_alike_however_the_sequence_is_cut() {
    let x = tensor::<4>(&numbers(1, 200 * 24), [1, 200, 1, 24], &Device::flex());
    let whole = rotate(x.clone(), &Positions::uniform(1, 30), 10_000.0).unwrap();
    let token = |t| rotate(x.clone().narrow(1, t, 1), &Positions::uniform(1, 30 + t), 10_000.0).unwrap();
    assert_eq!(values(Tensor::cat((0..200).map(token).collect(), 1)), values(whole));
}

#[test]
fn strided_inputs() {
    let device = Device::flex();
    let x = tensor::<4>(&numbers(1, 2 * 9 * 3 * 20), [2, 9, 3, 20], &device);
    let same = |a: Tensor<4>, b: Tensor<4>| assert_eq!(values(a), values(b));
    same(l2_normalise(strided(x.clone()), 1e-6), l2_normalise(x.clone(), 1e-6));
    let positions = Positions::uniform(2, 3);
    same(rotate(strided(x.clone()), &positions, 1e4).unwrap(), rotate(x.clone(), &positions, 1e4).unwrap());
    same(swiglu(strided(x.clone()), x.clone()).unwrap(), swiglu(x.clone(), strided(x.clone())).unwrap());
    let weight = tensor::<1>(&numbers(2, 20), [20], &device);
    same(rms_norm(strided(x.clone()), weight.clone(), 1e-5).unwrap(), rms_norm(x, weight, 1e-5).unwrap());
}

#[test]
fn wrong_arguments_are_named() {
    let device = Device::flex();
    let zeros = |count: usize| Tensor::<1>::zeros([count], &device);
    let x = Tensor::<4>::zeros([2, 5, 3, 8], &device);
    let says = |message: String, word: &str| assert!(message.contains(word), "{message}");
    let odd = Tensor::<4>::zeros([2, 5, 3, 7], &device);
    says(rotate(odd, &Positions::uniform(2, 0), 1e4).unwrap_err().to_string(), "even");
    says(rotate(x.clone(), &Positions::uniform(3, 0), 1e4).unwrap_err().to_string(), "3 rows");
    says(Positions::packed(Offsets::from_lengths(&[1]), vec![]).unwrap_err().to_string(), "documents");
    says(rms_norm(x.clone(), zeros(7), 1e-5).unwrap_err().to_string(), "weight");
    says(swiglu(zeros(3), zeros(4)).unwrap_err().to_string(), "up");
    let flat = Tensor::<3>::zeros([1, 2, 12], &device);
    says(
        gated_rms_norm_on(flat.clone(), None, zeros(5), 1e-5, Path::Auto).unwrap_err().to_string(),
        "divisor",
    );
    says(log_gate(flat, zeros(5), zeros(12)).unwrap_err().to_string(), "a_log");
    let logits = Tensor::<2>::zeros([2, 4], &device);
    says(cross_entropy(logits.clone(), &[0]).unwrap_err().to_string(), "2 rows");
    says(cross_entropy(logits, &[0, 4]).unwrap_err().to_string(), "vocabulary");
}
