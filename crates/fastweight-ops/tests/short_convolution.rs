//! The short convolution: fused and composed against the float64 loop, with every gradient.

mod comparing;

use burn::tensor::{Device, Tensor};
use comparing::{assert_close, numbers, strided, tensor, values, widen};
use fastweight_ops::kernel::{InstructionSet, with_instruction_set};
use fastweight_ops::short_conv::reference::{self, Inputs};
use fastweight_ops::short_conv::{ConvSizes, short_convolution};
use fastweight_ops::{Offsets, Path};

struct Case {
    sizes: ConvSizes,
    bias: bool,
    initial: bool,
}

impl Case {
    fn new([batch, time, channels, width]: [usize; 4]) -> Self {
        let sizes = ConvSizes { batch, time, channels, width, silu: true, offsets: None };
        Self { sizes, bias: true, initial: true }
    }

    fn packed(lengths: &[usize], channels: usize, width: usize) -> Self {
        let mut case = Self::new([1, lengths.iter().sum(), channels, width]);
        case.sizes.offsets = Some(Offsets::from_lengths(lengths));
        case
    }

    fn states(&self) -> usize {
        self.sizes.offsets.as_ref().map_or(self.sizes.batch, Offsets::documents)
    }

    /// `x`, weight, bias, initial state, then the upstream gradients of the output and the state.
    fn numbers(&self) -> [Vec<f32>; 6] {
        let ConvSizes { batch, time, channels, width, .. } = self.sizes;
        let (tokens, state) = (batch * time * channels, self.states() * (width - 1) * channels);
        let counts = [tokens, width * channels, channels, state, tokens, state];
        let mut seed = 0;
        counts.map(|count| {
            seed += 1;
            numbers(seed, count).into_iter().map(|x| 2.0 * x).collect()
        })
    }

    /// Output, state, then the gradients of `x`, weight, bias and initial state where they exist.
    fn run(&self, path: Path, lay_out: fn(Tensor<3>) -> Tensor<3>) -> Vec<Vec<f32>> {
        let ConvSizes { batch, time, channels, width, silu, .. } = self.sizes;
        let device = Device::flex().autodiff();
        let [x, weight, bias, initial, up, up_state] = self.numbers();
        let state_shape = [self.states(), width - 1, channels];
        let x = tensor::<3>(&x, [batch, time, channels], &device).require_grad();
        let weight = tensor::<2>(&weight, [channels, width], &device).require_grad();
        let bias = self.bias.then(|| tensor::<1>(&bias, [channels], &device).require_grad());
        let initial =
            (self.initial && width > 1).then(|| tensor::<3>(&initial, state_shape, &device).require_grad());
        let offsets = self.sizes.offsets.as_ref();
        let used = (lay_out(x.clone()), initial.clone().map(lay_out));
        let (y, state) =
            short_convolution(used.0, weight.clone(), bias.clone(), used.1, silu, offsets, path).unwrap();
        let mut loss = (lay_out(y.clone()) * tensor(&up, y.dims(), &device)).sum();
        if width > 1 {
            loss = loss + (state.clone() * tensor(&up_state, state_shape, &device)).sum();
        }
        let grads = loss.backward();
        let mut all = vec![
            values(y),
            values(state),
            values(x.grad(&grads).unwrap()),
            values(weight.grad(&grads).unwrap()),
        ];
        all.extend(bias.map(|bias| values(bias.grad(&grads).unwrap())));
        all.extend(initial.map(|initial| values(initial.grad(&grads).unwrap())));
        all
    }

    fn expected(&self) -> Vec<Vec<f64>> {
        let [x, weight, bias, initial, up, up_state] = self.numbers().map(|x| widen(&x));
        let inputs = Inputs {
            sizes: &self.sizes,
            x: &x,
            weight: &weight,
            bias: self.bias.then_some(&bias),
            initial: self.initial.then_some(&initial),
        };
        let outputs = reference::forward(&inputs);
        let grads = reference::backward(&inputs, &up, &up_state);
        let mut all = vec![outputs.y, outputs.state, grads.x, grads.weight];
        all.extend(self.bias.then_some(grads.bias));
        all.extend((self.initial && self.sizes.width > 1).then_some(grads.initial));
        all
    }

    fn check(&self) {
        let expected = self.expected();
        for path in [Path::Fused, Path::Composed] {
            let found = self.run(path, |x| x);
            assert_eq!(found.len(), expected.len());
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let tolerance = if i < 2 { 1e-5 } else { 1e-4 };
                assert_close(&format!("{:?} {path:?} tensor {i}", self.sizes), found, expected, tolerance);
            }
        }
    }
}

#[test]
fn any_time_channels_and_width() {
    for time in [1, 2, 3, 4, 31, 33, 100] {
        for (channels, width) in [(1, 4), (20, 4), (60, 3), (64, 4), (128, 2), (33, 7), (16, 1), (48, 4)] {
            Case::new([2, time, channels, width]).check();
        }
    }
}

#[test]
fn without_bias_state_or_activation() {
    for (bias, initial, silu) in
        [(false, true, true), (true, false, true), (true, true, false), (false, false, false)]
    {
        let mut case = Case::new([3, 9, 20, 4]);
        (case.bias, case.initial, case.sizes.silu) = (bias, initial, silu);
        case.check();
    }
}

#[test]
fn packed_documents_restart() {
    for lengths in [&[1, 2, 30][..], &[0, 5, 0, 1], &[40], &[3, 3, 3]] {
        Case::packed(lengths, 20, 4).check();
        Case::packed(lengths, 16, 2).check();
    }
}

#[test]
fn long_rows_are_cut_into_pieces() {
    Case::new([2, 300, 200, 4]).check();
    Case::packed(&[257, 2, 341], 200, 4).check();
}

#[test]
fn every_instruction_set_agrees_and_runs_repeat() {
    let case = Case::new([2, 150, 250, 4]);
    let expected = case.expected();
    for set in InstructionSet::available() {
        let found = with_instruction_set(set, || case.run(Path::Fused, |x| x));
        assert_eq!(found, with_instruction_set(set, || case.run(Path::Fused, |x| x)), "{set:?}");
        for (found, expected) in found.iter().zip(&expected) {
            assert_close(&format!("{set:?}"), found, expected, 1e-5);
        }
    }
}

#[test]
fn strided_inputs_and_gradients() {
    let case = Case::new([2, 30, 20, 4]);
    assert_eq!(case.run(Path::Fused, strided), case.run(Path::Fused, |x| x));
}

#[test]
fn a_carried_state_continues_the_sequence() {
    let device = Device::flex();
    let [time, channels, width] = [40, 20, 4];
    let x = tensor::<3>(&numbers(1, 2 * time * channels), [2, time, channels], &device);
    let weight = tensor::<2>(&numbers(2, channels * width), [channels, width], &device);
    let call = |x, state| short_convolution(x, weight.clone(), None, state, true, None, Path::Auto).unwrap();
    let (whole, last) = call(x.clone(), None);
    let (mut outputs, mut state, mut start) = (Vec::new(), None, 0);
    for tokens in [1, 1, 2, 1, 20, 1, 1, 13] {
        let (y, next) = call(x.clone().narrow(1, start, tokens), state);
        outputs.push(y);
        state = Some(next);
        start += tokens;
    }
    assert_eq!(values(Tensor::cat(outputs, 1)), values(whole));
    assert_eq!(values(state.unwrap()), values(last));
}

#[test]
fn wrong_arguments_are_named() {
    let device = Device::flex();
    let zeros = |shape: [usize; 3]| Tensor::<3>::zeros(shape, &device);
    let weight = |shape: [usize; 2]| Tensor::<2>::zeros(shape, &device);
    let fails = |x, weight, initial, offsets: Option<&Offsets>, word: &str| {
        let message =
            short_convolution(x, weight, None, initial, true, offsets, Path::Auto).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    };
    fails(zeros([2, 5, 8]), weight([7, 4]), None, None, "weight has shape");
    fails(zeros([2, 5, 8]), weight([8, 4]), Some(zeros([2, 4, 8])), None, "initial has shape");
    fails(zeros([2, 5, 8]), weight([8, 4]), None, Some(&Offsets::from_lengths(&[5])), "rows");
    fails(zeros([1, 5, 8]), weight([8, 4]), None, Some(&Offsets::from_lengths(&[4])), "end at 5");
}
