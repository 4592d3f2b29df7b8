//! The closed form of the inner gradient against finite differences of the inner loss, every loss and depth.

use burn::tensor::DType;
use fastweight_ops::Path;
use fastweight_ops::deep_memory::reference::Network;
use fastweight_ops::deep_memory::{Activation, DeepMemory, InnerLoss};

use crate::memories::losses;
use crate::problem::{ALL, Array, Parts, Problem, Sizes, assert_same};

/// Minus the gradient of every weight of one head, summed over the tokens with their rates.
fn differences(problem: &Problem, head: usize) -> Vec<Vec<f64>> {
    let (heads, size) = (problem.dims.heads, problem.dims.key);
    let shapes = problem.memory.weight_shapes(size, size);
    let head_of = |name: &str, count: usize| problem.get(name).map(|x| &x[head * count..(head + 1) * count]);
    let norm = head_of("norm.weight", size).zip(head_of("norm.bias", size));
    let network = Network { memory: &problem.memory, shapes: &shapes, norm };
    let mut weights: Vec<Vec<f64>> = (0..shapes.len())
        .map(|i| head_of(&format!("start.{i}"), shapes[i][0] * shapes[i][1]).unwrap().to_vec())
        .collect();
    let total = |weights: &[Vec<f64>]| -> f64 {
        let weights: Vec<&[f64]> = weights.iter().map(Vec::as_slice).collect();
        let token = |t: usize| {
            let at = t * heads + head;
            let vector = |name: &str| &problem.get(name).unwrap()[at * size..(at + 1) * size];
            let threshold = problem.get("threshold").map_or(1.0, |x| x[at]);
            problem.get("rate").unwrap()[at] * network.loss(&weights, vector("k"), vector("v"), threshold)
        };
        (0..problem.dims.time).map(token).sum()
    };
    let mut gradients = Vec::new();
    for layer in 0..weights.len() {
        let mut gradient = Vec::new();
        for i in 0..weights[layer].len() {
            let original = weights[layer][i];
            let mut at = |by: f64| {
                weights[layer][i] = original + by;
                let loss = total(&weights);
                weights[layer][i] = original;
                loss
            };
            let step = 1e-4;
            let slope = (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
            gradient.push(-slope);
        }
        gradients.push(gradient);
    }
    gradients
}

/// The tensor form's update of the weights after one chunk without momentum or decay is minus the gradient.
fn check(label: &str, memory: DeepMemory, parts: Parts) {
    let tokens = 5;
    let memory = DeepMemory { chunk: 8, ..memory };
    let problem = Problem::new(memory, &Sizes::of(1, tokens, 2, 6), parts, 0, 21);
    let outcome = problem.tensors(DType::F64, Path::Composed, false, &[]);
    let (mut found, mut expected) = (Vec::new(), Vec::new());
    for head in 0..problem.dims.heads {
        for (layer, gradient) in differences(&problem, head).into_iter().enumerate() {
            let array = |values: Vec<f64>| Array { shape: vec![values.len()], values };
            let part = |name: String| {
                let (_, array) = outcome.outputs.iter().find(|(n, _)| *n == name).unwrap();
                array.values[head * gradient.len()..(head + 1) * gradient.len()].to_vec()
            };
            let start = part(format!("start.{layer}"));
            let moved = part(format!("current.{layer}")).iter().zip(&start).map(|(w, s)| w - s).collect();
            found.push((format!("layer {layer}, head {head}"), array(moved)));
            expected.push((format!("layer {layer}, head {head}"), array(gradient)));
        }
    }
    assert_same(label, &found, &expected, 1e-7);
}

#[test]
fn it_equals_finite_differences() {
    let losses = losses().into_iter().filter(|loss| !matches!(loss, InnerLoss::Power { smooth: true, .. }));
    for loss in losses.chain([InnerLoss::Squared]) {
        for depth in 1..=4 {
            for norm in [false, true] {
                let parts = Parts { momentum: false, decay: false, norm, ..ALL };
                let memory =
                    DeepMemory { depth, loss, residual: norm, bias: depth % 2 == 0, ..DeepMemory::default() };
                check(&format!("{loss:?}, depth {depth}, norm {norm}"), memory.clone(), parts);
                let memory =
                    DeepMemory { activation: Activation::Silu, residual: !norm, expansion: 2, ..memory };
                check(&format!("{loss:?}, depth {depth}, norm {norm}, silu"), memory, parts);
            }
        }
    }
}
