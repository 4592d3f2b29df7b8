//! Named rules with a step of their own: the definition here and the operator agree.

use burn::tensor::{DType, Device, Tensor};
use fastweight_memory::rule::reference::Layer;
use fastweight_memory::rule::special::{Rwkv7Token, comba, rwkv7, ttt};
use fastweight_ops::comba::comba as comba_operator;
use fastweight_ops::delta_product::delta_product;
use fastweight_ops::dplr::dplr;
use fastweight_ops::ttt::{TttOptions, TttState, ttt_linear};
use fastweight_ops::{Path, SequenceOptions};

use crate::support::{Numbers, assert_close, tensor, values};

const T: usize = 7;
const K: usize = 5;
const V: usize = 4;

fn four(rows: &[Vec<f64>], device: &Device) -> Tensor<4> {
    tensor(rows.concat(), [1, rows.len(), 1, rows[0].len()], DType::F64, device)
}

fn three(numbers: &[f64], device: &Device) -> Tensor<3> {
    tensor(numbers.to_vec(), [1, numbers.len(), 1], DType::F64, device)
}

fn rows(count: usize, dim: usize, seed: u64) -> Vec<Vec<f64>> {
    let mut numbers = Numbers::new(seed);
    (0..count).map(|_| numbers.many(dim)).collect()
}

fn options() -> SequenceOptions {
    SequenceOptions { scale: Some(1.0), path: Path::Composed, ..SequenceOptions::default() }
}

#[test]
fn comba_is_its_operator() {
    let device = Device::flex();
    let (k, v) = (rows(T, K, 1), rows(T, V, 2));
    let (beta, gate): (Vec<f64>, Vec<f64>) =
        rows(T, 2, 3).iter().map(|x| (0.5 + 0.4 * x[0], -0.3 - 0.2 * x[1])).unzip();
    let start = Layer::new(K, V, Numbers::new(4).many(K * V));
    let scalar = |x: f64| tensor(vec![x], [1], DType::F64, &device);
    let (_, end) = comba_operator(
        four(&rows(T, K, 5), &device),
        four(&k, &device),
        four(&v, &device),
        three(&beta, &device),
        three(&gate, &device),
        scalar(0.7),
        scalar(0.2),
        Some(tensor(start.values.clone(), [1, 1, K, V], DType::F64, &device)),
        &options(),
    )
    .unwrap();
    let step = |s: Layer, t: usize| comba(&s, &k[t], &v[t], [beta[t], gate[t].exp(), 0.7]);
    assert_close("comba", &values(&end), &(0..T).fold(start, step).values, 1e-10);
}

#[test]
fn rwkv7_is_diagonal_plus_low_rank() {
    let device = Device::flex();
    let (w, kk, a) = (rows(T, K, 1), rows(T, K, 2), rows(T, K, 3));
    let (k, v) = (rows(T, K, 4), rows(T, V, 5));
    let log_w: Vec<Vec<f64>> = w.iter().map(|w| w.iter().map(|w| -0.3 - 0.2 * w).collect()).collect();
    let read: Vec<Vec<f64>> = kk.iter().map(|kk| kk.iter().map(|kk| -kk).collect()).collect();
    let removed: Vec<Vec<f64>> =
        kk.iter().zip(&a).map(|(kk, a)| kk.iter().zip(a).map(|(kk, a)| kk * a).collect()).collect();
    let start = Layer::new(K, V, Numbers::new(6).many(K * V));
    let [q, log, key, value, a_t, b_t] =
        [&rows(T, K, 7), &log_w, &k, &v, &read, &removed].map(|x| four(x, &device));
    let initial = tensor(start.values.clone(), [1, 1, K, V], DType::F64, &device);
    let (_, end) = dplr(q, log, key, value, a_t, b_t, Some(initial), &options()).unwrap();
    let step = |s: Layer, t: usize| {
        let w = log_w[t].iter().map(|w| w.exp()).collect();
        rwkv7(&s, &Rwkv7Token { w, kk: kk[t].clone(), a: a[t].clone(), k: k[t].clone(), v: v[t].clone() })
    };
    assert_close("rwkv7", &values(&end), &(0..T).fold(start, step).values, 1e-10);
}

#[test]
fn delta_product_is_several_delta_steps_a_token() {
    let device = Device::flex();
    let (k, v) = (rows(2 * T, K, 1), rows(2 * T, V, 2));
    let beta: Vec<f64> = rows(2 * T, 1, 3).iter().map(|x| 0.5 + 0.4 * x[0]).collect();
    let start = Layer::new(K, V, Numbers::new(4).many(K * V));
    let (_, end) = delta_product(
        four(&rows(T, K, 5), &device),
        tensor(k.concat(), [1, T, 2, 1, K], DType::F64, &device),
        tensor(v.concat(), [1, T, 2, 1, V], DType::F64, &device),
        tensor(beta.clone(), [1, T, 2, 1], DType::F64, &device),
        None,
        Some(tensor(start.values.clone(), [1, 1, K, V], DType::F64, &device)),
        &options(),
    )
    .unwrap();
    let step = |s: Layer, t: usize| comba(&s, &k[t], &v[t], [beta[t], 1.0, 1.0]);
    assert_close("delta_product", &values(&end), &(0..2 * T).fold(start, step).values, 1e-10);
}

#[test]
fn test_time_training_is_its_operator_with_a_mini_batch_of_one() {
    let device = Device::flex();
    let (k, v) = (rows(T, V, 1), rows(T, V, 2));
    let eta: Vec<f64> = rows(T, 1, 3).iter().map(|x| 0.1 + 0.05 * x[0]).collect();
    let start =
        vec![Layer::new(V, V, Numbers::new(4).many(V * V)), Layer::new(1, V, Numbers::new(5).many(V))];
    let initial = TttState::new(
        tensor(start[0].values.clone(), [1, 1, V, V], DType::F64, &device),
        tensor(start[1].values.clone(), [1, 1, V], DType::F64, &device),
    );
    let affine = |x: f64| tensor(vec![x; V], [1, V], DType::F64, &device);
    let (_, end) = ttt_linear(
        four(&rows(T, V, 6), &device),
        four(&k, &device),
        four(&v, &device),
        three(&eta, &device),
        affine(1.0),
        affine(0.0),
        Some(initial),
        &TttOptions { mini_batch: 1, scale: Some(1.0), path: Path::Composed, ..TttOptions::default() },
    )
    .unwrap();
    let end = end.flush();
    let expected = (0..T).fold(start, |weights, t| ttt(&weights, &k[t], &v[t], eta[t]));
    assert_close("ttt_linear", &values(&end.weights), &expected[0].values, 1e-10);
    assert_close("ttt_linear", &values(&end.bias), &expected[1].values, 1e-10);
}
