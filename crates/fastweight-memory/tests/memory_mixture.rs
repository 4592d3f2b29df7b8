//! The mixture of memories: what is not chosen stays as it is, the load of the memories, and the switches.

mod common;

use burn::tensor::{Device, Tensor, TensorData};
use common::*;
use fastweight_memory::layers::{Layer, LayerConfig, MixtureOfMemories, MixtureOfMemoriesConfig};
use fastweight_memory::parameters::import;
use fastweight_memory::{LayerContext, MixerConfig, Shared};

const HEADS: usize = 2;

fn layer(config: &MixtureOfMemoriesConfig, device: &Device) -> MixtureOfMemories {
    config.init(&LayerContext { seed: 3, ..LayerContext::new(WIDTH, HEADS) }, device).unwrap()
}

/// The layer with scores that do not look at the token: `scores[i]` times the token's first channel.
fn with_scores(layer: MixtureOfMemories, scores: &[f32]) -> MixtureOfMemories {
    let values = |shape: &[usize]| {
        let mut values = vec![0.0; shape[0] * shape[1]];
        values[..scores.len()].copy_from_slice(scores);
        TensorData::new(values, shape.to_vec())
    };
    let weights = fastweight_memory::parameters::export(&layer);
    import(layer, |info| match info.name.as_str() {
        "router.weight" => Some(values(&info.shape)),
        name => weights.iter().find(|(other, _)| other == name).map(|(_, data)| data.clone()),
    })
    .unwrap()
}

/// Tokens whose first channel is one.
fn tokens(time: usize, device: &Device) -> Tensor<3> {
    input([1, time, WIDTH], 1, device).slice_assign([0..1, 0..time, 0..1], Tensor::ones([1, time, 1], device))
}

#[test]
fn a_memory_that_is_not_chosen_neither_forgets_nor_writes() {
    let device = Device::flex();
    let layer = with_scores(layer(&MixtureOfMemoriesConfig::default(), &device), &[0.1, 2.0, -1.0, 1.0]);
    let (_, state) = layer.forward(tokens(9, &device), None, None).unwrap();
    // Memory by memory, the shared one first: the second and fourth of the parallel ones are chosen.
    for (name, tensor) in state.change.tensors() {
        let [_, _, key, value] = tensor.dims();
        let changed: Vec<bool> = values(&tensor)
            .chunks(HEADS * key * value)
            .map(|memory| memory.iter().any(|v| *v != 0.0))
            .collect();
        // The first chunk is not over: its start is the trained one.
        let moved = name.starts_with("current");
        assert_eq!(changed, [moved, false, moved, false, moved], "{name}");
    }
}

#[test]
fn the_load_says_who_is_busy() {
    let device = Device::flex();
    let config = MixtureOfMemoriesConfig::default();
    // Equal scores go to the first memories, and every probability is a quarter.
    let even = with_scores(layer(&config, &device), &[0.0; 4]);
    let load = even.load(tokens(5, &device)).unwrap();
    assert_eq!(values(&load.share), [1.0, 1.0, 0.0, 0.0]);
    assert_close("probability", &values(&load.probability), &[0.25; 4], 1e-6);
    assert_close("balance", &values(&load.balance), &[1.0], 1e-6);
    // Two memories that take everything: n / top_k.
    let narrow = with_scores(layer(&config, &device), &[-30.0, 0.0, 0.0, -30.0]);
    let load = narrow.load(tokens(5, &device)).unwrap();
    assert_eq!(values(&load.share), [0.0, 1.0, 1.0, 0.0]);
    assert_close("balance", &values(&load.balance), &[2.0], 1e-6);
    // Any scores: shares add up to the number chosen.
    let load = layer(&config, &device).load(input([2, 50, WIDTH], 2, &device)).unwrap();
    assert_close("shares", &[values(&load.share).iter().sum()], &[2.0], 1e-5);
    assert!(layer(&config, &device).load(input([1, 2, 5], 2, &device)).is_err());
}

#[test]
fn the_balance_reaches_what_the_layers_share_and_trains_the_router() {
    let device = Device::flex().autodiff();
    let layer = layer(&MixtureOfMemoriesConfig::default(), &device);
    let x = input([1, 6, WIDTH], 3, &device);
    let mut shared = Shared::default();
    layer.forward_shared(x.clone(), None, None, &mut shared).unwrap();
    let [load] = &shared.loads[..] else { panic!("one layer, one loss") };
    assert_eq!(values(&load.balance), values(&layer.load(x).unwrap().balance));
    let gradients = gradients(&layer, &load.balance.backward());
    for (name, gradient) in gradients {
        let trained = gradient.is_some_and(|gradient| gradient.iter().any(|g| *g != 0.0));
        assert_eq!(trained, name == "router.weight", "{name}");
    }
}

#[test]
fn without_weights_the_chosen_readings_are_added_up() {
    let device = Device::flex();
    let x = input([1, 20, WIDTH], 4, &device);
    let output = |top_k: usize, unweighted: bool| {
        let config = MixtureOfMemoriesConfig { top_k, unweighted, ..MixtureOfMemoriesConfig::default() };
        values(&layer(&config, &device).forward(x.clone(), None, None).unwrap().0)
    };
    // The weight of a single choice is one.
    assert_close("one choice", &output(1, true), &output(1, false), 1e-6);
    assert_ne!(output(2, true), output(2, false));
}

#[test]
fn options_that_do_not_fit_say_what_to_change() {
    let ctx = || LayerContext::new(24, 2);
    let check = |options: &str, ctx: LayerContext| {
        let mixer: MixerConfig = toml::from_str(&format!("kind = 'mixture_of_memories'\n{options}")).unwrap();
        assert!(mixer.init(&ctx, &Device::flex()).is_err(), "{options}");
        mixer.validate(&ctx).unwrap_err().to_string()
    };
    let cases = [
        (check("memories = 0", ctx()), "memories is 0"),
        (check("memories = 9000000000000000000", ctx()), "from 1 to 256"),
        (check("top_k = 5", ctx()), "top_k is 5, expected from 1 to memories = 4"),
        (check("top_k = 0", ctx()), "top_k is 0"),
        (check("chunk = 0", ctx()), "chunk is 0"),
        (check("eta_max = 0.0", ctx()), "eta_max is 0"),
        (
            check("add_key = true", LayerContext { value_dim: 5, ..ctx() }),
            "value_dim is 5, expected head_dim = 12",
        ),
    ];
    for (message, words) in cases {
        assert!(message.contains(words), "{message}");
    }
}
