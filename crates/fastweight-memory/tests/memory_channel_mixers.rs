//! Every channel mixer: one definition however the sequence is cut, packed or batched; states, weights, gradients.

mod common;

use burn::tensor::{Device, Tensor};
use common::*;
use fastweight_memory::parameters::{export, import, list};
use fastweight_memory::{
    ChannelMixer, ChannelMixerConfig, ChannelState, LayerContext, MemoryError, Shared, State,
};
use fastweight_ops::Offsets;

const TOLERANCE: f32 = 2e-5;

fn place() -> LayerContext {
    LayerContext { layer: 1, layers: 3, seed: 3, vocab: VOCAB, ..LayerContext::new(WIDTH, 2) }
}

/// Every channel mixer as it comes, and with the options that change its way through the code.
fn maps() -> Vec<(String, ChannelMixerConfig, LayerContext)> {
    let recipes = ChannelMixerConfig::NAMES.map(|name| format!("kind = '{name}'"));
    let with = |recipe: String, ctx: LayerContext| {
        let config = toml::from_str(&recipe).unwrap();
        (recipe, config, ctx)
    };
    let mut maps: Vec<_> = recipes.iter().map(|recipe| with(recipe.clone(), place())).collect();
    let narrow = || LayerContext { mlp_hidden: Some(10), ..place() };
    maps.extend(recipes.iter().map(|recipe| with(recipe.clone(), narrow())));
    maps.extend(VARIANTS.iter().map(|recipe| with((*recipe).to_owned(), narrow())));
    maps
}

const VARIANTS: [&str; 3] = [
    "kind = 'deep_embed'\ninside = 'rwkv7_channel_mix'",
    "kind = 'rwkv7_deep_embed'\nrank = 3",
    "kind = 'mole'\ntables = true",
];

type Read = (Tensor<3>, Option<ChannelState>);

/// Reads `x` as a model would have it read.
fn read(
    map: &ChannelMixer,
    x: Tensor<3>,
    state: Option<ChannelState>,
    offsets: Option<&Offsets>,
) -> Result<Read, MemoryError> {
    let shared = shared(&x);
    map.forward(x, state, offsets, &shared)
}

fn time(x: &Tensor<3>, from: usize, to: usize) -> Tensor<3> {
    x.clone().narrow(1, from, to - from)
}

#[track_caller]
fn assert_states(what: &str, found: &Option<ChannelState>, expected: &Option<ChannelState>) {
    assert_eq!(found.is_some(), expected.is_some(), "{what}: a state");
    let (Some(found), Some(expected)) = (found, expected) else { return };
    for ((name, found), (other, expected)) in found.named_tensors().iter().zip(expected.named_tensors()) {
        assert_eq!((name, found.shape()), (&other, expected.shape()), "{what}");
        let [found, expected] = [found, &expected].map(|data| data.iter::<f32>().collect::<Vec<_>>());
        assert_close(&format!("{what}: {name}"), &found, &expected, TOLERANCE);
    }
}

#[test]
fn a_name_or_a_table_names_a_channel_mixer() {
    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Recipe {
        map: ChannelMixerConfig,
    }
    for name in ChannelMixerConfig::NAMES {
        let short: Recipe = toml::from_str(&format!("map = {name:?}")).unwrap();
        let long: Recipe = toml::from_str(&format!("map = {{ kind = {name:?} }}")).unwrap();
        assert_eq!((short.map.name(), &short), (name, &long));
        assert_eq!(short, toml::from_str(&toml::to_string(&short).unwrap()).unwrap());
        assert_eq!(short, serde_json::from_str(&serde_json::to_string(&short).unwrap()).unwrap());
    }
    for (recipe, words) in [
        ("map = 'swiglo'", "did you mean \"swiglu\""),
        ("map = { kind = 'rwkv7_deep_embed', rnk = 3 }", "did you mean \"rank\""),
        ("map = { kind = 'deep_embed', inside = 'mlp' }", "inside of deep_embed"),
    ] {
        let message = toml::from_str::<Recipe>(recipe).unwrap_err().to_string();
        assert!(message.contains(words), "{recipe}: {message}");
    }
    for (recipe, vocab, words) in [
        ("kind = 'rwkv7_deep_embed'\nrank = 0", VOCAB, "rank is 0"),
        ("kind = 'rwkv7_deep_embed'\nrank = 9000000000000000000", VOCAB, "1 to 1024"),
        ("kind = 'rwkv7_deep_embed'", 0, "rwkv7_deep_embed: vocab is 0"),
        ("kind = 'deep_embed'", 0, "deep_embed: vocab is 0"),
    ] {
        let config: ChannelMixerConfig = toml::from_str(recipe).unwrap();
        let ctx = LayerContext { vocab, ..place() };
        let message = config.validate(&ctx).unwrap_err().to_string();
        assert!(message.contains(words), "{recipe}: {message}");
        let _no_overflow = config.parameter_count(&ctx);
    }
}

#[test]
fn a_map_made_alone_is_finite_seeded_and_counted() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        for (name, config, ctx) in maps() {
            let map = config.init(&ctx, &device).unwrap();
            let weights = export(&map);
            for (parameter, data) in &weights {
                assert!(data.iter::<f32>().all(f32::is_finite), "{name}, {parameter}");
                assert!(data.iter::<f32>().any(|v| v != 0.0), "{name}, {parameter} is all zero");
            }
            let count: usize = weights.iter().map(|(_, data)| data.num_elements()).sum();
            assert_eq!(count, config.parameter_count(&ctx), "{name}");
            let (y, _) = read(&map, input([1, 40, WIDTH], 1, &device), None, None).unwrap();
            assert!(values(&y).iter().all(|v| v.is_finite()), "{name}");

            device.seed(99);
            assert!(weights == export(&config.init(&ctx, &device).unwrap()), "{name}: the same seed");
            let other = config.init(&LayerContext { seed: 4, ..ctx }, &device).unwrap();
            assert!(weights != export(&other), "{name}: another seed");
            let loaded = import(other, |info| {
                weights.iter().find(|(name, _)| *name == info.name).map(|(_, data)| data.clone())
            });
            let loaded = loaded.unwrap();
            assert!(weights == export(&loaded), "{name}: loading changes weights");
            let x = input([1, 9, WIDTH], 2, &device);
            let [a, b] = [&map, &loaded].map(|map| values(&read(map, x.clone(), None, None).unwrap().0));
            assert_eq!(a, b, "{name}: loaded");
        }
    }
}

#[test]
fn any_cut_of_a_sequence_gives_what_the_whole_gives() {
    let device = Device::flex();
    for (name, config, ctx) in maps() {
        let map = config.init(&ctx, &device).unwrap();
        let x = input([2, 21, WIDTH], 2, &device);
        let (whole, end) = read(&map, x.clone(), None, None).unwrap();
        let every: Vec<usize> = (0..=21).collect();
        for cuts in [vec![0, 1, 21], vec![0, 20, 21], vec![0, 3, 4, 17, 21], every] {
            let (mut parts, mut state) = (Vec::new(), map.zero_state(2, &device));
            for cut in cuts.windows(2) {
                let (y, next) = read(&map, time(&x, cut[0], cut[1]), state, None).unwrap();
                parts.push(y);
                state = next;
            }
            let what = format!("{name}, {} parts", parts.len());
            assert_close(&what, &values(&Tensor::cat(parts, 1)), &values(&whole), TOLERANCE);
            assert_states(&what, &state, &end);
        }
    }
}

#[test]
fn packed_documents_equal_separate_ones() {
    let device = Device::flex();
    let offsets = Offsets::from_lengths(&[5, 1, 0, 17, 2]);
    for (name, config, ctx) in maps() {
        let map = config.init(&ctx, &device).unwrap();
        let x = input([1, offsets.time(), WIDTH], 3, &device);
        // Documents that start empty, then documents that each continue another session.
        let (packed, state) = read(&map, x.clone(), None, Some(&offsets)).unwrap();
        let (again, again_state) = read(&map, x.clone(), state.clone(), Some(&offsets)).unwrap();
        for (document, range) in offsets.ranges().enumerate() {
            let what = format!("{name}, document {document}");
            let of =
                |state: &Option<ChannelState>| state.as_ref().map(|state| state.select(&[document]).unwrap());
            if range.is_empty() {
                assert_states(&what, &of(&state), &map.zero_state(1, &device));
                continue;
            }
            let own = time(&x, range.start, range.end);
            let (y, end) = read(&map, own.clone(), None, None).unwrap();
            assert_close(&what, &values(&time(&packed, range.start, range.end)), &values(&y), TOLERANCE);
            assert_states(&what, &of(&state), &end);
            let (y, end) = read(&map, own, end, None).unwrap();
            assert_close(&what, &values(&time(&again, range.start, range.end)), &values(&y), TOLERANCE);
            assert_states(&what, &of(&again_state), &end);
        }
    }
}

#[test]
fn a_row_does_not_see_other_rows() {
    let device = Device::flex();
    for (name, config, ctx) in maps() {
        let map = config.init(&ctx, &device).unwrap();
        let x = input([3, 9, WIDTH], 5, &device);
        let other = input([1, 9, WIDTH], 6, &device) * 100.0;
        let changed = x.clone().slice_assign([1..2, 0..9, 0..WIDTH], other);
        let [(y, state), (z, changed)] = [x, changed].map(|x| read(&map, x, None, None).unwrap());
        for row in [0, 2] {
            let [a, b] = [&y, &z].map(|t| values(&t.clone().narrow(0, row, 1)));
            assert_eq!(a, b, "{name}, row {row}");
            let [a, b] = [&state, &changed]
                .map(|state| state.as_ref().map(|state| state.select(&[row]).unwrap().named_tensors()));
            assert_eq!(a, b, "{name}, row {row}");
        }
    }
}

#[test]
fn bytes_held_are_those_of_the_ledger() {
    let device = Device::flex();
    for (name, config, ctx) in maps() {
        let map = config.init(&ctx, &device).unwrap();
        let size = config.state_size(&ctx);
        assert_eq!(size.growing, 0, "{name}");
        for tokens in [0, 1, 5] {
            let state = match tokens {
                0 => map.zero_state(3, &device),
                _ => read(&map, input([3, tokens, WIDTH], 1, &device), None, None).unwrap().1,
            };
            let held = state.as_ref().map_or(0, State::bytes);
            assert_eq!(held, 3 * size.total(), "{name} after {tokens} tokens");
        }
    }
}

#[test]
fn rows_of_a_state_are_selected_cleared_and_forked() {
    let device = Device::flex();
    for (name, config, ctx) in maps() {
        let map = config.init(&ctx, &device).unwrap();
        let (_, state) = read(&map, input([3, 9, WIDTH], 1, &device), None, None).unwrap();
        let Some(state) = state else { continue };
        let fork = state.clone();
        let x = input([3, 2, WIDTH], 2, &device);
        let go_on = |x: Tensor<3>, state: ChannelState| read(&map, x, Some(state), None).unwrap().0;
        let y = go_on(x.clone(), state.clone());
        let row = |t: &Tensor<3>, row: usize| values(&t.clone().narrow(0, row, 1));
        let rows = x.clone().select(0, Tensor::from_data([2, 0, 2], &device));
        let selected = go_on(rows, state.select(&[2, 0, 2]).unwrap());
        for (place, from) in [(0, 2), (1, 0), (2, 2)] {
            assert_close(&name, &row(&selected, place), &row(&y, from), TOLERANCE);
        }
        let fresh = read(&map, x.clone(), None, None).unwrap().0;
        let cleared = go_on(x.clone(), state.clone().clear(&[1]).unwrap());
        for (place, expected) in [(0, &y), (1, &fresh), (2, &y)] {
            assert_close(&name, &row(&cleared, place), &row(expected, place), TOLERANCE);
        }
        assert!(state.select(&[3]).is_err() && state.clone().clear(&[3]).is_err(), "{name}");
        assert_eq!(values(&go_on(x.clone(), fork)), values(&y), "{name}: a fork");
        let wrong = read(&map, x.narrow(0, 0, 2), Some(state), None).unwrap_err().to_string();
        assert!(wrong.contains("holds 3 sequences"), "{name}: {wrong}");
    }
}

#[test]
fn inputs_that_do_not_fit_are_refused_with_a_reason() {
    let device = Device::flex();
    for (name, config, ctx) in maps() {
        let map = config.init(&ctx, &device).unwrap();
        let x = input([1, 4, WIDTH], 1, &device);
        // Either nothing of what a model shares is needed, or its lack is a reason.
        if let Err(error) = map.forward(x.clone(), None, None, &Shared::default()) {
            assert!(error.to_string().contains("Shared::"), "{name}: {error}");
        }
        // Those of a map that carries nothing are its caller's.
        if map.zero_state(1, &device).is_some() {
            let offsets = Offsets::from_lengths(&[2, 3]);
            assert!(read(&map, x, None, Some(&offsets)).is_err(), "{name}");
            let two = input([2, 5, WIDTH], 1, &device);
            let error = read(&map, two, None, Some(&offsets)).unwrap_err().to_string();
            assert!(error.contains("2 rows"), "{name}: {error}");
        }
        let error = config.validate(&LayerContext { mlp_hidden: Some(0), ..ctx }).unwrap_err().to_string();
        assert!(error.contains("mlp_hidden is 0"), "{name}: {error}");
    }
}

fn loss(map: &ChannelMixer, x: Tensor<3>) -> Tensor<1> {
    let device = x.device();
    let weight = input(x.dims(), 11, &device);
    let (y, state) = read(map, x.clone(), None, None).unwrap();
    let (token, _) = read(map, x.narrow(1, 0, 1), state, None).unwrap();
    (y * weight).sum() + (token.clone() * input(token.dims(), 12, &device)).sum()
}

#[test]
fn gradients_reach_every_parameter_and_are_those_of_the_loss() {
    let device = Device::flex().autodiff();
    for (name, config, ctx) in maps() {
        let map = config.init(&ctx, &device).unwrap();
        // Off their starts, where some are alike.
        let count = list(&map).len();
        let away: Vec<Vec<f32>> = export(&map)
            .iter()
            .zip(70..)
            .map(|((_, data), seed)| numbers(data.num_elements(), seed))
            .collect();
        for map in [map.clone(), moved(&map, &away, 0.2)] {
            let x = input([2, 7, WIDTH], 9, &device).require_grad();
            let grads = loss(&map, x.clone()).backward();
            let all = gradients(&map, &grads);
            assert_eq!(all.len(), count, "{name}");
            let gradient = values(&x.grad(&grads).unwrap());
            assert!(gradient.iter().all(|g| g.is_finite()) && gradient.iter().any(|g| *g != 0.0), "{name}");
            for (i, (parameter, gradient)) in all.iter().enumerate() {
                let what = format!("{name}, {parameter}");
                let gradient = gradient.as_ref().unwrap_or_else(|| panic!("{what}: no gradient"));
                assert!(gradient.iter().all(|g| g.is_finite()), "{what}: not finite");
                assert!(gradient.iter().any(|g| *g != 0.0), "{what}: all zero");
                let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
                let mut direction: Vec<Vec<f32>> = away.iter().map(|d| vec![0.0; d.len()]).collect();
                direction[i] = gradient.iter().zip(&away[i]).map(|(g, r)| g / norm + 0.1 * r).collect();
                let expected: f64 = gradient.iter().zip(&direction[i]).map(|(g, d)| f64::from(g * d)).sum();
                let at = |factor| {
                    let loss = loss(&moved(&map, &direction, factor), x.clone().detach());
                    f64::from(loss.into_scalar::<f32>())
                };
                let slope = |step: f32| (at(step) - at(-step)) / (2.0 * f64::from(step));
                let found = (4.0 * slope(2e-3) - slope(4e-3)) / 3.0;
                let tolerance = 1e-2 * expected.abs() + 2e-3;
                assert!((found - expected).abs() <= tolerance, "{what}: {found} against {expected}");
            }
        }
    }
}
