//! Mini-batches of TTT-Linear: any cut of a text, any size, states in progress, limits.

use burn::tensor::{Device, Gradients, Tensor, TensorData};
use fastweight_ops::Path;
use fastweight_ops::fused::FusedOp;
use fastweight_ops::kernel::{Dims, InstructionSet, with_instruction_set};
use fastweight_ops::ttt::cpu::FusedTtt;
use fastweight_ops::ttt::{TttOptions, TttState, ttt_linear, ttt_linear_step};
use proptest::prelude::*;

use crate::support::random::{Gates, Random, Sizes, problem};
use crate::support::{Array, Form, Operator, Problem};
use crate::{PUBLIC, assert_same, cases, close, compute, differences};

/// The tensors of one text on one device.
struct Text {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    eta: Tensor<3>,
    ln_w: Tensor<2>,
    ln_b: Tensor<2>,
    weights: Tensor<4>,
    bias: Tensor<3>,
    up: Tensor<4>,
}

impl Text {
    fn new(batch: usize, time: usize, size: usize, seed: u64, tracked: bool) -> Self {
        let problem =
            problem(Operator::TttLinear, &Sizes::of(batch, time, 2, size, size), Gates::Absent, seed);
        let device = if tracked { Device::flex().autodiff() } else { Device::flex() };
        fn leaf<const D: usize>(data: TensorData, device: &Device, tracked: bool) -> Tensor<D> {
            let tensor = Tensor::from_data(data, device);
            if tracked { tensor.require_grad() } else { tensor }
        }
        let input = |name: &str| data(&problem.inputs[name]);
        let without = |name: &str, axis: usize| {
            let mut array = problem.inputs[name].clone();
            array.shape.remove(axis);
            data(&array)
        };
        Self {
            q: leaf(input("q"), &device, tracked),
            k: leaf(input("k"), &device, tracked),
            v: leaf(input("v"), &device, tracked),
            eta: leaf(without("eta", 3), &device, tracked),
            ln_w: leaf(input("ln_w"), &device, tracked),
            ln_b: leaf(input("ln_b"), &device, tracked),
            weights: leaf(input("W"), &device, tracked),
            bias: leaf(without("bias", 2), &device, tracked),
            up: Tensor::from_data(data(&problem.up["o"]), &device),
        }
    }

    fn part(&self, state: TttState, start: usize, end: usize, options: &TttOptions) -> (Tensor<4>, TttState) {
        let cut = |x: &Tensor<4>| x.clone().slice([0..x.dims()[0], start..end]);
        let eta = self.eta.clone().slice([0..self.eta.dims()[0], start..end]);
        let (ln_w, ln_b) = (self.ln_w.clone(), self.ln_b.clone());
        ttt_linear(cut(&self.q), cut(&self.k), cut(&self.v), eta, ln_w, ln_b, Some(state), options)
            .expect("valid arguments")
    }

    fn step(&self, state: TttState, t: usize, options: &TttOptions) -> (Tensor<4>, TttState) {
        let at = |x: &Tensor<4>| x.clone().narrow(1, t, 1).squeeze_dim::<3>(1);
        let eta = self.eta.clone().narrow(1, t, 1).squeeze_dim(1);
        let (ln_w, ln_b) = (self.ln_w.clone(), self.ln_b.clone());
        let (o, state) =
            ttt_linear_step(at(&self.q), at(&self.k), at(&self.v), eta, ln_w, ln_b, state, options)
                .expect("valid arguments");
        (o.unsqueeze_dim(1), state)
    }

    fn start(&self) -> TttState {
        TttState::new(self.weights.clone(), self.bias.clone())
    }

    /// Output and flushed state of the text cut at `cuts`, and where tracked all gradients of a loss of them.
    fn cut(&self, cuts: &[usize], options: &TttOptions) -> Vec<Vec<f64>> {
        let mut state = self.start();
        let mut outputs = Vec::new();
        for cut in cuts.windows(2) {
            let (o, next) = self.part(state, cut[0], cut[1], options);
            outputs.push(o);
            state = next;
        }
        self.finish(Tensor::cat(outputs, 1), state)
    }

    fn finish(&self, o: Tensor<4>, state: TttState) -> Vec<Vec<f64>> {
        let state = state.flush();
        let mut all = vec![values(&o), values(&state.weights), values(&state.bias)];
        if self.q.is_tracked() {
            let loss =
                (o * self.up.clone()).sum() + state.weights.powi_scalar(2).sum() + state.bias.cos().sum();
            let grads = loss.backward();
            all.extend([&self.q, &self.k, &self.v, &self.weights].map(|leaf| grad(leaf, &grads)));
            all.extend([&self.ln_w, &self.ln_b].map(|leaf| grad(leaf, &grads)));
            all.extend([&self.eta, &self.bias].map(|leaf| grad(leaf, &grads)));
        }
        all
    }
}

fn data(array: &Array) -> TensorData {
    let values: Vec<f32> = array.values.iter().map(|&x| x as f32).collect();
    TensorData::new(values, array.shape.clone())
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

fn grad<const D: usize>(leaf: &Tensor<D>, grads: &Gradients) -> Vec<f64> {
    values(&leaf.grad(grads).expect("a gradient"))
}

fn assert_all_close(label: &str, found: &[Vec<f64>], expected: &[Vec<f64>], forward: f64, gradient: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = crate::relative_rms(found, expected);
        let limit = if i < 3 { forward } else { gradient };
        assert!(error <= limit, "{label}: part {i} is off by {error:.1e}, allowed {limit:.0e}");
    }
}

fn options(mini_batch: usize, path: Path) -> TttOptions {
    TttOptions { mini_batch, path, ..TttOptions::default() }
}

proptest! {
    #![proptest_config(cases(20))]

    /// Outputs, the final state and every gradient, the states' own included.
    #[test]
    fn any_cut_of_a_text_gives_the_same(
        time in 2..90_usize, mini_batch in 1..40_usize,
        mut cuts in prop::collection::vec(0..90_usize, 1..6), seed in any::<u64>(),
    ) {
        cuts.retain(|&cut| cut < time);
        cuts.extend([0, time]);
        cuts.sort_unstable();
        let text = Text::new(2, time, 6, seed, true);
        for path in [Path::Fused, Path::Composed] {
            let options = options(mini_batch, path);
            let (found, expected) = (text.cut(&cuts, &options), text.cut(&[0, time], &options));
            let label = format!("{path:?}, mini-batches of {mini_batch}, cut at {cuts:?}");
            assert_all_close(&label, &found, &expected, 1e-5, 1e-4);
        }
    }
}

#[test]
fn a_forward_of_37_then_5_then_steps_is_one_forward() {
    let (time, options) = (37 + 5 + 64, TttOptions::default());
    for size in [8, 20, 64] {
        let text = Text::new(2, time, size, 3, false);
        let (first, state) = text.part(text.start(), 0, 37, &options);
        let (second, mut state) = text.part(state, 37, 42, &options);
        let mut outputs = vec![first, second];
        for t in 42..time {
            let (o, next) = text.step(state, t, &options);
            outputs.push(o);
            state = next;
        }
        assert_eq!(state.position, [time % 16; 2]);
        let found = text.finish(Tensor::cat(outputs, 1), state);
        assert_all_close(&format!("{size} wide"), &found, &text.cut(&[0, time], &options), 1e-6, 0.0);
    }
}

/// With mini-batches of that size, the sequences at different positions.
fn with_mini_batch(mini_batch: usize, time: usize, size: usize) -> Problem {
    let mut problem = problem(Operator::TttLinear, &Sizes::of(3, time, 2, size, size), Gates::Absent, 1);
    let position = [mini_batch / 2, 0, mini_batch - 1].map(|position| position as f64);
    for name in ["G", "G_bias"] {
        let gathered = &mut problem.inputs.get_mut(name).expect("a start inside mini-batches").values;
        let row = gathered.len() / 3;
        for (part, _) in gathered.chunks_mut(row).zip(position).filter(|(_, position)| *position == 0.0) {
            part.fill(0.0);
        }
    }
    problem.inputs.insert("position".into(), Array::new(&[3], position.to_vec()));
    problem.inputs.insert("mini_batch".into(), Array::new(&[1], vec![mini_batch as f64]));
    problem
}

#[test]
fn mini_batches_of_any_size_agree() {
    for mini_batch in [1, 2, 7, 15, 16, 17, 20, 32, 50, 100] {
        for time in [1, 31, 70] {
            let problem = with_mini_batch(mini_batch, time, 10);
            let expected = compute(&problem, Form::Reference);
            for form in Form::ALL {
                let label = format!("mini-batches of {mini_batch}, T {time}, {}", form.name());
                assert_same(&label, &compute(&problem, form), &expected, form.is_f64());
            }
        }
    }
}

#[test]
fn every_instruction_set_agrees() {
    for set in InstructionSet::available() {
        with_instruction_set(set, || {
            for size in [1, 4, 17, 32, 60, 64] {
                let problem = with_mini_batch(16, 50, size);
                let expected = compute(&problem, Form::Reference);
                for form in [Form::Fused, Form::Steps] {
                    let label = format!("{set:?}, {size} wide, {}", form.name());
                    assert_same(&label, &compute(&problem, form), &expected, false);
                }
            }
        });
    }
}

/// What a mini-batch in progress holds is no part of the fixtures.
#[test]
fn gradients_of_a_mini_batch_in_progress_agree_with_differences() {
    for mini_batch in [1, 3, 16] {
        differences::check("ttt", &with_mini_batch(mini_batch, 7, 3), 1);
    }
}

/// Rates of zero learn nothing; large ones, large readings and empty tokens stay as the loop has them.
#[test]
fn limits_of_rates_and_readings_agree() {
    let scaled = |names: &[&str], factor: f64| {
        let mut problem = with_mini_batch(16, 40, 12);
        for name in names {
            problem.inputs.get_mut(*name).expect("an input").values.iter_mut().for_each(|x| *x *= factor);
        }
        problem
    };
    let all = ["q", "k", "v", "W", "bias", "G", "G_bias"];
    for (what, problem) in [
        ("no rate", scaled(&["eta"], 0.0)),
        ("rates of 8", scaled(&["eta"], 128.0)),
        ("readings in the thousands", scaled(&["W", "bias"], 4096.0)),
        ("a flat normalisation", scaled(&["ln_w"], 0.0)),
        ("nothing at all", scaled(&all, 0.0)),
    ] {
        let expected = compute(&problem, Form::Reference);
        for form in PUBLIC {
            let found = compute(&problem, form);
            let finite = |x: &f64| x.is_finite();
            assert!(
                found.outputs.values().chain(found.grads.values()).all(|x| x.values.iter().all(finite)),
                "{what}"
            );
            let label = format!("{what}, {}", form.name());
            for (name, expected) in &expected.outputs {
                let error = crate::relative_rms(&found.outputs[name].values, &expected.values);
                assert!(error <= 1e-5, "{label}: {name} is off by {error:e}");
            }
            let size = crate::support::rms(&expected.grads["v"].values).max(1.0);
            for (name, grad) in &found.grads {
                let expected = &expected.grads[name].values;
                let error = crate::support::error_against(
                    &grad.values,
                    expected,
                    crate::support::rms(expected).max(size),
                );
                assert!(error <= 1e-4, "{label}: gradient of {name} is off by {error:e}");
            }
        }
    }
    let still = compute(&scaled(&["eta"], 0.0), Form::Fused);
    close(&still.outputs["W"].values, &with_mini_batch(16, 40, 12).inputs["W"].values, 1e-7);
}

#[test]
fn a_flush_applies_the_last_rate_once() {
    let text = Text::new(2, 21, 4, 3, false);
    let (_, state) = text.part(text.start(), 0, 21, &TttOptions::default());
    assert_eq!(state.position, [5, 5]);
    let rate = values(&text.eta.clone().narrow(1, 20, 1));
    assert_eq!(values(&state.rate), rate);
    let expected: Vec<f64> = values(&state.weights)
        .iter()
        .zip(values(&state.gathered))
        .enumerate()
        .map(|(i, (w, g))| w - rate[i / 16] * g)
        .collect();
    let flushed = state.flush();
    assert_eq!(flushed.position, [0, 0]);
    close(&values(&flushed.weights), &expected, 1e-6);
    let again = flushed.clone().flush();
    assert_eq!(values(&again.weights), values(&flushed.weights));
    assert_eq!(values(&again.bias), values(&flushed.bias));
}

/// A step leaves a state alone that the caller still holds, at the end of a mini-batch too.
#[test]
fn a_step_does_not_change_a_shared_state() {
    let text = Text::new(1, 17, 4, 3, false);
    let options = TttOptions::default();
    let mut state = text.start();
    for t in 0..17 {
        let all = |state: &TttState| {
            let matrices = [&state.weights, &state.gathered].map(values);
            (matrices, [&state.bias, &state.gathered_bias].map(values), state.position.clone())
        };
        let kept = all(&state);
        let (_, next) = text.step(state.clone(), t, &options);
        assert_ne!(all(&next), kept, "token {t}");
        assert_eq!(all(&state), kept, "token {t}");
        state = next;
    }
}

/// What the backward pass needs grows with the text by a fixed number of bytes a token.
#[test]
fn saved_memory_is_linear_in_the_text() {
    let (heads, size) = (2, 8);
    let saved = |time: usize| {
        let dims = Dims { batch: 1, time, heads, key: size, value: size, scale: 1.0, offsets: None };
        let op = FusedTtt { dims, mini_batch: 16, position: vec![0] };
        let mut random = Random::new(1);
        let mut numbers = |len: usize| -> Vec<f32> { (0..len).map(|_| random.normal() as f32).collect() };
        let tokens = time * heads;
        let state = heads * (size + 1) * size;
        let lens =
            [tokens * size, tokens * size, tokens * size, tokens, heads * size, heads * size, state, state];
        let inputs = lens.map(&mut numbers);
        let forward = op.forward(&inputs.each_ref().map(Vec::as_slice), true);
        4 * forward.saved.iter().map(Vec::len).sum::<usize>()
    };
    for time in [16, 160, 1600] {
        assert_eq!(saved(time), time * heads * 4 * (size + 1) * size / 16);
    }
}

#[test]
fn a_text_without_a_token_returns_its_state() {
    let device = Device::flex();
    let empty = || Tensor::<4>::zeros([1, 0, 2, 4], &device);
    let text = Text::new(1, 10, 4, 3, false);
    let (_, state) = text.part(text.start(), 0, 10, &TttOptions::default());
    let norm = || Tensor::<2>::ones([2, 4], &device);
    for path in [Path::Fused, Path::Composed] {
        let eta = Tensor::<3>::zeros([1, 0, 2], &device);
        let initial = Some(state.clone());
        let (o, next) =
            ttt_linear(empty(), empty(), empty(), eta, norm(), norm(), initial, &options(16, path))
                .expect("none");
        assert_eq!((o.dims(), next.position), ([1, 0, 2, 4], vec![10]));
        assert_eq!(values(&next.gathered), values(&state.gathered));
    }
}
