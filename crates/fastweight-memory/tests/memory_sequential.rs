//! Layers that read token by token: what they share with `burn`'s, how they start, and documents of uneven lengths.

mod common;

use burn::nn::{Linear, LstmConfig as BurnConfig};
use burn::tensor::{Device, Tensor, TensorData};
use common::*;
use fastweight_memory::layers::{Layer, LayerConfig, Lstm, LstmConfig, SrwmConfig};
use fastweight_memory::parameters::{export, import};
use fastweight_memory::{LayerContext, MatrixState, State};
use fastweight_ops::Offsets;

fn lstm(device: &Device) -> Lstm {
    let layer = LstmConfig { hidden: Some(7) }.init(&LayerContext::new(WIDTH, 2), device).unwrap();
    // Biases off zero.
    import(layer, |info| {
        let count = info.shape.iter().product();
        let seed = info.name.len() as u64 + info.name.as_bytes()[0] as u64;
        Some(TensorData::new(numbers(count, seed), info.shape.clone()))
    })
    .unwrap()
}

#[test]
fn an_lstm_computes_what_burns_does() {
    let device = Device::flex();
    let layer = lstm(&device);
    let mut burns = BurnConfig::new(WIDTH, 7, true).init(&device);
    let gate = |gate: &burn::nn::GateController| {
        let mut gate = gate.clone();
        let zeros = burn::module::Param::from_tensor(Tensor::zeros([7], &device));
        gate.hidden_transform = Linear { bias: Some(zeros), ..gate.hidden_transform };
        gate
    };
    burns.input_gate = gate(&layer.input_gate);
    burns.forget_gate = Some(gate(&layer.forget_gate));
    burns.output_gate = gate(&layer.output_gate);
    burns.cell_gate = gate(&layer.cell_gate);
    let x = input([3, 20, WIDTH], 1, &device);
    let (hidden, state) = burns.forward(x.clone(), None);
    let (y, end) = layer.forward(x, None, None).unwrap();
    assert_close("output", &values(&y), &values(&layer.o.forward(hidden)), 1e-6);
    assert_close("hidden", &values(&end.hidden), &values(&state.hidden), 1e-6);
    assert_close("cell", &values(&end.cell), &values(&state.cell), 1e-6);
}

#[test]
fn only_the_forget_gate_starts_with_a_bias() {
    let device = Device::flex();
    let layer = LstmConfig::default().init(&LayerContext::new(WIDTH, 2), &device).unwrap();
    for (name, data) in export(&layer).into_iter().filter(|(name, _)| name.ends_with("bias")) {
        let expected = if name.starts_with("forget_gate") { 1.0 } else { 0.0 };
        assert!(data.iter::<f32>().all(|bias| bias == expected), "{name}");
    }
}

#[test]
fn gradients_of_packed_documents_are_those_of_separate_ones() {
    let device = Device::flex().autodiff();
    let lengths = [2, 0, 7, 1, 7, 3];
    let offsets = Offsets::from_lengths(&lengths);
    for kind in ["lstm", "srwm"] {
        let mixer = build(&toml::from_str(&format!("kind = '{kind}'")).unwrap(), &device);
        let x = input([1, offsets.time(), WIDTH], 2, &device);
        let weight = input([1, offsets.time(), WIDTH], 3, &device);
        let (y, _) = mixer.forward(x.clone(), None, Some(&offsets)).unwrap();
        let packed = gradients(&mixer, &(y * weight.clone()).sum().backward());
        let parts = offsets.ranges().filter(|range| !range.is_empty()).map(|range| {
            let own = |t: &Tensor<3>| t.clone().narrow(1, range.start, range.len());
            (mixer.forward(own(&x), None, None).unwrap().0 * own(&weight)).sum()
        });
        let loss = parts.reduce(|a, b| a + b).unwrap();
        let separate = gradients(&mixer, &loss.backward());
        for ((name, found), (_, expected)) in packed.iter().zip(&separate) {
            let what = format!("{kind}, {name}");
            assert_close(&what, found.as_ref().unwrap(), expected.as_ref().unwrap(), 1e-5);
        }
    }
}

#[test]
fn a_state_of_other_sizes_is_refused() {
    let device = Device::flex();
    let ctx = LayerContext::new(WIDTH, 2);
    let x = || Tensor::zeros([1, 2, WIDTH], &device);
    let layer = LstmConfig::default().init(&ctx, &device).unwrap();
    let error = layer.forward(x(), Some(lstm(&device).zero_state(1, &device)), None).unwrap_err();
    assert!(error.to_string().contains("[1, 7], expected [1, 12]"), "{error}");
    let layer = SrwmConfig::default().init(&ctx, &device).unwrap();
    let state = MatrixState { memory: Tensor::zeros([1, 2, 6, 6], &device), conv: None };
    let error = layer.step(Tensor::zeros([1, WIDTH], &device), state.select(&[0]).unwrap()).unwrap_err();
    assert!(error.to_string().contains("expected [1, 2, 6, 22]"), "{error}");
}
