//! Every mixer: gradients reach every parameter, are finite, and are those of the loss.

mod common;

use std::collections::HashMap;

use burn::tensor::{Device, Tensor};
use common::*;
use fastweight_memory::parameters::list;
use fastweight_memory::{Mixer, MixerState, State};

/// A loss that reads every output and every state value: a weighted sum of outputs and of a continuation.
fn loss(mixer: &Mixer, x: Tensor<3>, state: Option<MixerState>) -> Tensor<1> {
    let device = x.device();
    let [batch, tokens, _] = x.dims();
    let weight = input([batch, tokens, WIDTH], 11, &device);
    let (y, state) = mixer.read(x.clone(), state, None).unwrap();
    let (token, _) = mixer.read_token(x.narrow(1, 0, 1).squeeze_dim(1), state).unwrap();
    (y * weight).sum() + (token * input([batch, WIDTH], 12, &device)).sum()
}

fn scalar(loss: Tensor<1>) -> f64 {
    f64::from(loss.into_scalar::<f32>())
}

#[test]
fn gradients_reach_every_parameter() {
    let device = Device::flex().autodiff();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        for tokens in [2, CHUNK, CHUNK + 1] {
            let x = input([2, tokens, WIDTH], 9, &device).require_grad();
            let grads = loss(&mixer, x.clone(), None).backward();
            let all = gradients(&mixer, &grads);
            assert_eq!(all.len(), list(&mixer).len());
            for (parameter, gradient) in all {
                let what = format!("{name}, {tokens} tokens, {parameter}");
                let gradient = gradient.unwrap_or_else(|| panic!("{what}: no gradient"));
                assert!(gradient.iter().all(|g| g.is_finite()), "{what}: not finite");
                // A window of one token has one weight; a layer alone has no values but its own.
                let blind = name.contains("window = 1") && parameter.starts_with(['q', 'k'])
                    || parameter.contains("first_value");
                assert!(blind || gradient.iter().any(|g| *g != 0.0), "{what}: all zero");
            }
            let gradient = values(&x.grad(&grads).unwrap());
            assert!(gradient.iter().all(|g| g.is_finite()) && gradient.iter().any(|g| *g != 0.0), "{name}");
        }
    }
}

#[test]
fn a_step_along_a_direction_changes_the_loss_as_the_gradient_says() {
    let device = Device::flex().autodiff();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        let x = input([1, 7, WIDTH], 10, &device);
        let start = || mixer.read(input([1, 3, WIDTH], 13, &device), None, None).unwrap().1.detach();
        let grads = loss(&mixer, x.clone(), Some(start())).backward();
        let sizes: HashMap<String, usize> =
            list(&mixer).into_iter().map(|info| (info.name, info.shape.iter().product())).collect();
        // Tokens in front of a text do nothing in the middle of it.
        let outside = |(parameter, gradient): (String, Option<Vec<f32>>)| {
            let size = sizes[&parameter];
            let gradient = gradient.or_else(|| (parameter == "persistent").then(|| vec![0.0; size]));
            (parameter, gradient)
        };
        let all: Vec<_> = gradients(&mixer, &grads).into_iter().map(outside).collect();
        // Each parameter alone, then all together.
        for chosen in (0..all.len()).map(Some).chain([None]) {
            let direction: Vec<Vec<f32>> = all
                .iter()
                .enumerate()
                .map(|(i, (_, gradient))| {
                    let gradient = gradient.as_ref().unwrap();
                    let on = chosen.is_none_or(|chosen| chosen == i);
                    let random = numbers(gradient.len(), 20 + i as u64);
                    let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt().max(1e-6);
                    let along = gradient.iter().zip(random).map(|(g, r)| g / norm + 0.3 * r);
                    along.map(|d| if on { d } else { 0.0 }).collect()
                })
                .collect();
            let expected: f64 = all
                .iter()
                .zip(&direction)
                .flat_map(|((_, gradient), direction)| gradient.as_ref().unwrap().iter().zip(direction))
                .map(|(g, d)| f64::from(g * d))
                .sum();
            let step = 2e-3;
            let at = |factor| scalar(loss(&moved(&mixer, &direction, factor), x.clone(), Some(start())));
            let slope = |step: f32| (at(step) - at(-step)) / (2.0 * f64::from(step));
            // Without the error of the third derivative: unit queries bend where the query is small.
            let found = (4.0 * slope(step) - slope(2.0 * step)) / 3.0;
            let what = chosen.map_or("all", |chosen| &all[chosen].0);
            let tolerance = 1e-2 * expected.abs() + 1e-3;
            assert!((found - expected).abs() <= tolerance, "{name}, {what}: {found} against {expected}");
        }
    }
}

#[test]
fn a_zero_input_has_finite_gradients() {
    let device = Device::flex().autodiff();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        let x = Tensor::zeros([2, CHUNK, WIDTH], &device).require_grad();
        let grads = loss(&mixer, x.clone(), None).backward();
        for (parameter, gradient) in gradients(&mixer, &grads) {
            assert!(gradient.unwrap().iter().all(|g| g.is_finite()), "{name}, {parameter}");
        }
        assert!(values(&x.grad(&grads).unwrap()).iter().all(|g| g.is_finite()), "{name}");
    }
}
