//! The architectures of Titans: what is seen when, and what a session holds.

mod common;

use burn::tensor::{Device, Tensor};
use common::*;
use fastweight_memory::parameters::{export, import};
use fastweight_memory::{LayerContext, Mixer, MixerConfig, State};

fn mixer(recipe: &str) -> (Mixer, MixerConfig) {
    let config: MixerConfig = toml::from_str(recipe).unwrap();
    (build(&config, &Device::flex()), config)
}

fn output(mixer: &Mixer, x: &Tensor<3>) -> Vec<f32> {
    values(&mixer.forward(x.clone(), None, None).unwrap().0)
}

/// Tokens from which on two outputs of one row differ.
fn first_difference(a: &[f32], b: &[f32]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b).map(|at| at / WIDTH)
}

/// The same with the parameters that `change` names multiplied.
fn scaled(mixer: &Mixer, factor: f32, change: &str) -> Mixer {
    let weights = export(mixer);
    let changed = import(mixer.clone(), |info| {
        let (_, data) = weights.iter().find(|(name, _)| *name == info.name)?;
        let factor = if info.name.starts_with(change) { factor } else { 1.0 };
        let values: Vec<f32> = data.iter::<f32>().map(|value| value * factor).collect();
        Some(burn::tensor::TensorData::new(values, info.shape.clone()))
    });
    changed.unwrap()
}

/// The same parameters, the columns of each gate of a head repeated for its value channels.
fn with_equal_channels(per_head: &Mixer, channels: Mixer) -> Mixer {
    let weights = export(per_head);
    let spread = import(channels, |info| {
        let (_, data) = weights.iter().find(|(name, _)| *name == info.name)?;
        let values: Vec<f32> = data.iter::<f32>().collect();
        let times = info.shape.iter().product::<usize>() / values.len();
        let values = values.iter().flat_map(|x| std::iter::repeat_n(*x, times)).collect();
        Some(burn::tensor::TensorData::new(values, info.shape.clone()))
    });
    spread.unwrap()
}

#[test]
fn equal_channel_gates_are_gates_of_the_head() {
    let device = Device::flex();
    let x = input([2, 40, WIDTH], 7, &device);
    let options = ["'titans'", "'titans_mac'\nmemory = 'matrix'\nsegment = 8\npersistent = 2"];
    for recipe in options.map(|options| format!("kind = {options}")) {
        let ((per_head, _), (other, _)) = (mixer(&recipe), mixer(&format!("{recipe}\nchannel_gates = true")));
        let channels = with_equal_channels(&per_head, other.clone());
        assert_close(&recipe, &output(&channels, &x), &output(&per_head, &x), 1e-6);
        assert_eq!(first_difference(&output(&other, &x), &output(&channels, &x)), Some(0), "{recipe}");
        let (Mixer::Titans(per_head), Mixer::Titans(channels)) = (per_head, channels) else { continue };
        let [expected, found] = [per_head, channels].map(|layer| layer.surprise(x.clone()).unwrap());
        let pairs = [
            (found.gradient, expected.gradient),
            (found.theta, expected.theta),
            (found.eta, expected.eta),
            (found.alpha, expected.alpha),
        ];
        for (found, expected) in pairs {
            assert_eq!(found.dims(), [2, 40, 2]);
            assert_close("surprise", &values(&found), &values(&expected), 1e-6);
        }
    }
}

#[test]
fn surprise_shows_the_mean_of_channel_gates() {
    let device = Device::flex();
    let x = input([2, 9, WIDTH], 8, &device);
    let (Mixer::Titans(layer), _) = mixer("kind = 'titans'\nchannel_gates = true\ntheta_max = 0.5") else {
        panic!("another layer");
    };
    let shown = layer.surprise(x.clone()).unwrap();
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    let mean = |map: &burn::nn::Linear, to: &dyn Fn(f32) -> f32| -> Vec<f32> {
        let all = values(&map.forward(x.clone()));
        all.chunks(5).map(|head| head.iter().map(|x| to(*x)).sum::<f32>() / 5.0).collect()
    };
    assert_close("theta", &values(&shown.theta), &mean(&layer.theta, &|x| 0.5 * sigmoid(x)), 1e-6);
    assert_close("eta", &values(&shown.eta), &mean(&layer.eta, &sigmoid), 1e-6);
    assert_close("alpha", &values(&shown.alpha), &mean(&layer.alpha, &|x| sigmoid(x - 4.0)), 1e-6);
}

const ALL: [&str; 6] = [
    "kind = 'titans_mac'\nsegment = 8\npersistent = 2",
    "kind = 'titans_mac'\nmemory = 'matrix'\nsegment = 8\npersistent = 2",
    "kind = 'titans_mag'\nwindow = 6\npersistent = 2",
    "kind = 'titans_mag'\nmemory = 'matrix'\nwindow = 6\npersistent = 2",
    "kind = 'titans_mal'\nwindow = 6\npersistent = 2",
    "kind = 'titans_mal'\nmemory = 'matrix'\nwindow = 6\npersistent = 2",
];

#[test]
fn no_token_sees_a_later_one_of_its_segment_or_any_other() {
    let device = Device::flex();
    for recipe in ALL {
        let (mixer, _) = mixer(recipe);
        let x = input([1, 30, WIDTH], 1, &device);
        let first = output(&mixer, &x);
        for from in [1, 5, 8, 11, 16, 29] {
            let other = input([1, 30 - from, WIDTH], 2, &device);
            let changed = Tensor::cat(vec![x.clone().narrow(1, 0, from), other], 1);
            assert_eq!(first_difference(&first, &output(&mixer, &changed)), Some(from), "{recipe}");
        }
    }
}

#[test]
fn the_memory_is_read_as_it_was_before_the_segment() {
    let device = Device::flex();
    let x = input([1, 30, WIDTH], 3, &device);
    // An empty matrix recalls nothing, so that the first segment does not know how it is asked.
    let (matrix, _) = mixer(ALL[1]);
    let asked = scaled(&matrix, -1.0, "recall.weight");
    assert_eq!(first_difference(&output(&matrix, &x), &output(&asked, &x)), Some(8));
    // A network has a trained start to recall.
    let (network, _) = mixer(ALL[0]);
    let asked = scaled(&network, -1.0, "recall.weight");
    assert_eq!(first_difference(&output(&network, &x), &output(&asked, &x)), Some(0));
    // What recall gives enters attention and nothing else.
    let deaf = [&matrix, &network].map(|mixer| scaled(mixer, 0.0, "h."));
    for deaf in deaf {
        let asked = scaled(&deaf, -1.0, "recall.weight");
        assert_eq!(output(&deaf, &x), output(&asked, &x));
    }
}

#[test]
fn persistent_tokens_are_seen_from_the_first_token_to_the_last() {
    let device = Device::flex();
    let x = input([1, 30, WIDTH], 4, &device);
    for recipe in ALL {
        let (mixer, _) = mixer(recipe);
        let name = if recipe.contains("mal") { "persistent" } else { "attention.persistent" };
        let (before, after) = (output(&mixer, &x), output(&scaled(&mixer, 2.0, name), &x));
        for t in 0..30 {
            let token = t * WIDTH..(t + 1) * WIDTH;
            assert_ne!(before[token.clone()], after[token], "{recipe}, token {t}");
        }
    }
}

#[test]
fn a_session_holds_no_more_after_many_tokens() {
    let device = Device::flex();
    for recipe in ALL {
        let (mixer, config) = mixer(recipe);
        let ctx = context(&config);
        let most = (0..100).map(|tokens| config.state_size(&ctx, tokens).total()).max().unwrap();
        assert_eq!(most, (4000..4100).map(|tokens| config.state_size(&ctx, tokens).total()).max().unwrap());
        let (_, state) = mixer.forward(input([1, 1031, WIDTH], 5, &device), None, None).unwrap();
        assert_eq!(state.bytes(), config.state_size(&ctx, 1031).total(), "{recipe}");
        assert!(state.bytes() <= most, "{recipe}");
    }
    // Beside a memory attention keeps no room to spare, token by token either.
    for recipe in &ALL[..4] {
        let (mixer, config) = mixer(recipe);
        let mut state = mixer.zero_state(1, &device);
        for tokens in 1..20 {
            state = mixer.step(input([1, WIDTH], tokens as u64, &device), state).unwrap().1;
            let size = config.state_size(&context(&config), tokens);
            assert_eq!(state.bytes(), size.total(), "{recipe}, {tokens} tokens");
        }
    }
}

#[test]
fn a_state_of_another_memory_is_refused() {
    let device = Device::flex();
    let x = input([1, 2, WIDTH], 6, &device);
    for pair in ALL.chunks(2) {
        let ((network, _), (matrix, _)) = (mixer(pair[0]), mixer(pair[1]));
        let state = matrix.zero_state(1, &device);
        let error = network.forward(x.clone(), Some(state), None).unwrap_err().to_string();
        assert!(error.contains("momentum matrix state") && error.contains("deep memory state"), "{error}");
    }
    // A state of the same kind that another geometry left.
    let more = LayerContext { seed: 3, ..LayerContext::new(WIDTH, 3) };
    for recipe in ALL.into_iter().chain(["kind = 'ttt_mlp'", "kind = 'titans_mlp'", "kind = 'dla'"]) {
        let (mixer, config) = mixer(recipe);
        let other = config.init(&more, &device).unwrap();
        let (_, state) = other.forward(x.clone(), None, None).unwrap();
        assert!(mixer.forward(x.clone(), Some(state), None).is_err(), "{recipe}");
    }
}
