//! Tensors that are views, states that are absent, sequences without a token.

use burn::tensor::{DType, Device, Tensor, TensorData};
use fastweight_ops::comba::comba;
use fastweight_ops::delta::{delta_rule, delta_rule_step};
use fastweight_ops::delta_product::delta_product;
use fastweight_ops::dplr::{dplr, dplr_step};
use fastweight_ops::gla::{gated_linear_attention, gated_linear_attention_step};
use fastweight_ops::kda::{kimi_delta_attention, kimi_delta_attention_step};
use fastweight_ops::linear::{LinearGate, linear_attention, linear_attention_noncausal};
use fastweight_ops::momentum_delta::{MomentumTokens, momentum_delta_rule};
use fastweight_ops::normalised_linear::normalised_linear_attention;
use fastweight_ops::softmax::{SoftmaxOptions, softmax_attention};
use fastweight_ops::titans::{
    titans_memory, titans_memory_channelwise, titans_memory_channelwise_step, titans_memory_step,
};
use fastweight_ops::ttt::{TttOptions, ttt_linear};
use fastweight_ops::{Offsets, Path, SequenceOptions};

use crate::support::random::Random;

const PATHS: [Path; 2] = [Path::Fused, Path::Composed];

fn random<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    let values: Vec<f32> = Random::new(seed).normals(&shape).values.iter().map(|&x| x as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

type Call = fn(Tensor<4>, Tensor<4>, Tensor<4>, Path) -> Tensor<4>;

fn sequence(path: Path) -> SequenceOptions {
    SequenceOptions { path, ..SequenceOptions::default() }
}

const CALLS: [(&str, Call); 13] = [
    ("softmax", |q, k, v, path| {
        let options = SoftmaxOptions { path, ..SoftmaxOptions::default() };
        softmax_attention(q, k, v, None, &options).expect("valid arguments")
    }),
    ("linear", |q, k, v, path| {
        linear_attention(q, k, v, LinearGate::None, None, &sequence(path)).expect("valid arguments").0
    }),
    ("normalised linear", |q, k, v, path| {
        normalised_linear_attention(q, k, v, None, None, &sequence(path)).expect("valid arguments").0
    }),
    ("delta", |q, k, v, path| {
        let beta = k.clone().sum_dim(3).squeeze_dim::<3>(3) * 0.1;
        delta_rule(q, k * 0.3, v, beta, None, None, &sequence(path)).expect("valid arguments").0
    }),
    ("gla", |q, k, v, path| {
        let gate = k.clone().abs().neg();
        gated_linear_attention(q, k, v, gate, None, &sequence(path)).expect("valid arguments").0
    }),
    ("kda", |q, k, v, path| {
        let (beta, gate) = (k.clone().sum_dim(3).squeeze_dim::<3>(3) * 0.1, k.clone().abs().neg());
        kimi_delta_attention(q, k * 0.3, v, beta, gate, None, &sequence(path)).expect("valid arguments").0
    }),
    ("dplr", |q, k, v, path| {
        let (w, a, b) = (k.clone().abs().neg(), q.clone() * 0.2, k.clone() * 0.2);
        dplr(q, w, k, v, a, b, None, &sequence(path)).expect("valid arguments").0
    }),
    ("momentum delta", |q, k, v, path| {
        let number = k.clone().sum_dim(3).squeeze_dim::<3>(3) * 0.1;
        let gate = number.clone().abs().neg() - 0.5;
        let (p, k) = (q.clone() * 0.3, k * 0.3);
        let (log_alpha, log_mu, beta, eta) = (gate.clone(), gate, number.clone(), number);
        let tokens = MomentumTokens { q, k, p, v, log_alpha, log_mu, beta, eta };
        momentum_delta_rule(tokens, None, &sequence(path)).expect("valid arguments").0
    }),
    ("titans", |q, k, v, path| {
        let number = k.clone().sum_dim(3).squeeze_dim::<3>(3).tanh().abs() * 0.5;
        let (theta, eta, alpha) = (number.clone(), number.clone(), number);
        titans_memory(q, k * 0.3, v, theta, eta, alpha, None, &sequence(path)).expect("valid arguments").0
    }),
    ("titans with channel gates", |q, k, v, path| {
        let gate = v.clone().tanh().abs() * 0.5;
        let (theta, eta, alpha, options) = (gate.clone(), gate.clone(), gate, sequence(path));
        titans_memory_channelwise(q, k * 0.3, v, theta, eta, alpha, None, &options)
            .expect("valid arguments")
            .0
    }),
    ("delta product", |q, k, v, path| {
        let beta = k.clone().sum_dim(3).squeeze_dim::<3>(3) * 0.1;
        let k = Tensor::stack(vec![k * 0.3, q.clone() * 0.2], 2);
        let (v, beta) =
            (Tensor::stack(vec![v.clone(), v * 0.5], 2), Tensor::stack(vec![beta.clone(), beta], 2));
        delta_product(q, k, v, beta, None, None, &sequence(path)).expect("valid arguments").0
    }),
    ("comba", |q, k, v, path| {
        let number = k.clone().sum_dim(3).squeeze_dim::<3>(3) * 0.1;
        let (beta, gate) = (number.clone(), number.abs().neg());
        let [b, d] = [0.8, 0.3].map(|x| Tensor::full([q.dims()[2]], x, &q.device()));
        comba(q, k * 0.3, v, beta, gate, b, d, None, &sequence(path)).expect("valid arguments").0
    }),
    ("ttt linear", |q, k, v, path| {
        let [_, _, heads, size] = q.dims();
        let eta = k.clone().sum_dim(3).squeeze_dim::<3>(3).tanh() * 0.05;
        // With equal scales the columns of an output would add up to a constant.
        let ln_w = k.clone().slice([0..1, 0..1]).reshape([heads, size]).tanh() + 1.0;
        let ln_b = Tensor::full([heads, size], 0.2, &q.device());
        let options = TttOptions { path, ..TttOptions::default() };
        ttt_linear(q, k, v, eta, ln_w, ln_b, None, &options).expect("valid arguments").0
    }),
];

/// Inputs and the output's gradient as transposed views of other tensors.
#[test]
fn transposed_inputs_and_output_gradients_change_nothing() {
    let device = Device::flex().autodiff();
    for (name, call) in CALLS {
        for path in PATHS {
            let run = |transposed: bool| {
                let leaves = [1, 2, 3].map(|seed| {
                    let plain = random(seed, [2, 40, 3, 8], &device);
                    let leaf = if transposed { plain.swap_dims(1, 2) } else { plain };
                    let leaf = values_as_leaf(leaf);
                    let view = if transposed { leaf.clone().swap_dims(1, 2) } else { leaf.clone() };
                    (leaf, view)
                });
                let [q, k, v] = [0, 1, 2].map(|i| leaves[i].1.clone());
                let o = call(q, k, v, path);
                let up = random(4, [2, 40, 3, 8], &device);
                let loss =
                    if transposed { o.clone().swap_dims(1, 3) * up.swap_dims(1, 3) } else { o.clone() * up };
                let grads = loss.sum().backward();
                let mut all = values(o);
                for (leaf, _) in leaves {
                    let grad = leaf.grad(&grads).expect("a gradient");
                    all.extend(values(if transposed { grad.swap_dims(1, 2) } else { grad }));
                }
                all
            };
            let (found, expected) = (run(true), run(false));
            assert!(found.iter().all(|x| x.is_finite()), "{name} {path:?}");
            crate::close(&found, &expected, 1e-6);
        }
    }
}

/// The same numbers as a contiguous leaf.
fn values_as_leaf(tensor: Tensor<4>) -> Tensor<4> {
    let device = tensor.device();
    Tensor::from_data(tensor.into_data(), &device).require_grad()
}

#[test]
fn an_absent_initial_state_is_zero() {
    let device = Device::flex();
    let [q, k, v] = [1, 2, 3].map(|seed| random::<4>(seed, [2, 30, 2, 6], &device));
    let beta = random::<3>(4, [2, 30, 2], &device);
    let zeros = || Tensor::<4>::zeros([2, 2, 6, 6], &device);
    for path in PATHS {
        let options = sequence(path);
        let delta = |initial| {
            let (o, s) =
                delta_rule(q.clone(), k.clone() * 0.3, v.clone(), beta.clone(), None, initial, &options)
                    .expect("valid arguments");
            (values(o), values(s))
        };
        assert_eq!(delta(None), delta(Some(zeros())));
        let linear = |initial| {
            let (o, s) =
                linear_attention(q.clone(), k.clone(), v.clone(), LinearGate::None, initial, &options)
                    .expect("valid arguments");
            (values(o), values(s))
        };
        assert_eq!(linear(None), linear(Some(zeros())));
    }
}

/// No token: an empty output, and the states as they came; documents without a token likewise.
#[test]
fn a_sequence_without_a_token_returns_its_state() {
    let device = Device::flex();
    let empty = || Tensor::<4>::zeros([1, 0, 2, 4], &device);
    let none = || Tensor::<3>::zeros([1, 0, 2], &device);
    let state = random::<4>(1, [1, 2, 4, 4], &device);
    let norm = random::<3>(2, [1, 2, 4], &device);
    for path in PATHS {
        let options = sequence(path);
        let initial = Some(state.clone());
        let (o, s) =
            delta_rule(empty(), empty(), empty(), none(), Some(none()), initial.clone(), &options).unwrap();
        assert_eq!((o.dims(), values(s)), ([1, 0, 2, 4], values(state.clone())));
        let gate = LinearGate::PerToken(none());
        let (o, s) = linear_attention(empty(), empty(), empty(), gate, initial, &options).unwrap();
        assert_eq!((o.dims(), values(s)), ([1, 0, 2, 4], values(state.clone())));
        let initial = Some((state.clone(), norm.clone()));
        let (o, s, z) =
            normalised_linear_attention(empty(), empty(), empty(), None, initial, &options).unwrap();
        assert_eq!(
            (o.dims(), values(s), values(z)),
            ([1, 0, 2, 4], values(state.clone()), values(norm.clone()))
        );
        let initial = Some(state.clone());
        let results = [
            gated_linear_attention(empty(), empty(), empty(), empty(), initial.clone(), &options),
            kimi_delta_attention(empty(), empty(), empty(), none(), empty(), initial.clone(), &options),
            dplr(empty(), empty(), empty(), empty(), empty(), empty(), initial, &options),
        ];
        for result in results {
            let (o, s) = result.unwrap();
            assert_eq!((o.dims(), values(s)), ([1, 0, 2, 4], values(state.clone())));
        }
        let initial = Some((state.clone(), state.clone() * 2.0));
        let (o, m, s) =
            titans_memory(empty(), empty(), empty(), none(), none(), none(), initial, &options).unwrap();
        let expected = (values(state.clone()), values(state.clone() * 2.0));
        assert_eq!((o.dims(), (values(m), values(s))), ([1, 0, 2, 4], expected.clone()));
        let initial = Some((state.clone(), state.clone() * 2.0));
        let gate = empty;
        let (o, m, s) =
            titans_memory_channelwise(empty(), empty(), empty(), gate(), gate(), gate(), initial, &options)
                .unwrap();
        assert_eq!((o.dims(), (values(m), values(s))), ([1, 0, 2, 4], expected));
    }
    let o = linear_attention_noncausal(empty(), empty(), empty(), &sequence(Path::Auto)).unwrap();
    assert_eq!(o.dims(), [1, 0, 2, 4]);
    let offsets = Some(Offsets::new(&[0, 0, 0], 0).unwrap());
    let options = SequenceOptions { offsets, ..SequenceOptions::default() };
    let states = random::<4>(1, [2, 2, 4, 4], &device);
    let (_, s) = delta_rule(empty(), empty(), empty(), none(), None, Some(states.clone()), &options).unwrap();
    assert_eq!(values(s), values(states));
}

/// A step must leave a state alone that the caller still holds.
#[test]
fn a_step_does_not_change_a_shared_state() {
    let device = Device::flex();
    let state = random::<4>(1, [1, 2, 4, 4], &device);
    let momentum = random::<4>(9, [1, 2, 4, 4], &device);
    let token = |seed| random::<3>(seed, [1, 2, 4], &device);
    let [q, k, v] = [2, 3, 4].map(token);
    let gate = token(6).abs().neg();
    let beta = random::<2>(5, [1, 2], &device);
    let held = || state.clone();
    let steps: [(&str, Tensor<4>); 6] = [
        (
            "delta",
            delta_rule_step(q.clone(), k.clone(), v.clone(), beta.clone(), None, held(), None).unwrap().1,
        ),
        (
            "gla",
            gated_linear_attention_step(q.clone(), k.clone(), v.clone(), gate.clone(), held(), None)
                .unwrap()
                .1,
        ),
        (
            "kda",
            kimi_delta_attention_step(
                q.clone(),
                k.clone(),
                v.clone(),
                beta.clone(),
                gate.clone(),
                held(),
                None,
            )
            .unwrap()
            .1,
        ),
        (
            "dplr",
            dplr_step(q.clone(), gate, k.clone(), v.clone(), q.clone(), k.clone(), held(), None).unwrap().1,
        ),
        ("titans with channel gates", {
            let (half, states) = (v.zeros_like() + 0.5, (held(), momentum.clone()));
            let [theta, eta, alpha] = [0; 3].map(|_| half.clone());
            titans_memory_channelwise_step(q.clone(), k.clone(), v.clone(), theta, eta, alpha, states, None)
                .unwrap()
                .1
        }),
        ("titans", {
            let half = beta.zeros_like() + 0.5;
            let states = (held(), momentum.clone());
            let (_, m, s) =
                titans_memory_step(q, k, v, half.clone(), half.clone(), half, states, None).unwrap();
            assert_ne!(values(s), values(random::<4>(9, [1, 2, 4, 4], &device)));
            m
        }),
    ];
    let [kept, kept_momentum] = [1, 9].map(|seed| values(random::<4>(seed, [1, 2, 4, 4], &device)));
    for (name, next) in steps {
        assert_ne!(values(next), kept, "{name}");
    }
    assert_eq!((values(state), values(momentum)), (kept, kept_momentum));
}

/// Tensors without gradients beside one that has them are constants, not an error.
#[test]
fn one_tracked_input_among_constants_gets_its_gradient() {
    let (plain, tracking) = (Device::flex(), Device::flex().autodiff());
    for (name, call) in CALLS {
        for path in PATHS {
            let [q, k] = [1, 2].map(|seed| random::<4>(seed, [1, 20, 2, 4], &plain));
            let v = random::<4>(3, [1, 20, 2, 4], &tracking).require_grad();
            let grads = call(q, k, v.clone(), path).sum().backward();
            let grad = values(v.grad(&grads).expect("a gradient"));
            assert!(grad.iter().any(|x| *x != 0.0), "{name} {path:?}");
        }
    }
}

#[test]
fn float64_tensors_take_the_composed_path() {
    let device = Device::flex();
    let x = || random::<4>(1, [1, 10, 2, 4], &device).cast(DType::F64);
    let (o, _) = linear_attention(x(), x(), x(), LinearGate::None, None, &sequence(Path::Auto)).unwrap();
    assert_eq!(o.dtype(), DType::F64);
    let error = linear_attention(x(), x(), x(), LinearGate::None, None, &sequence(Path::Fused)).unwrap_err();
    assert!(error.to_string().contains("no fused kernel"), "{error}");
}
