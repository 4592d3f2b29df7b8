//! States: bytes held, rows taken, cleared and forked; layers made alone.

mod common;

use burn::backend::Flex;
use burn::tensor::{Device, Tensor};
use common::*;
use fastweight_memory::parameters::{export, import, list};
use fastweight_memory::{ConvState, KvState, MixerConfig, MixerState, State};
use fastweight_ops::softmax::reserved;
use fastweight_ops::ttt::TttState;

fn after(config: &MixerConfig, batch: usize, tokens: usize) -> MixerState {
    let device = Device::flex();
    let mixer = build(config, &device);
    let state = mixer.zero_state(batch, &device);
    if tokens == 0 {
        return state;
    }
    mixer.read(input([batch, tokens, WIDTH], 1, &device), Some(state), None).unwrap().1
}

fn storage<const D: usize>(tensor: &Tensor<D>) -> usize {
    tensor.clone().try_into_primitive::<Flex>().unwrap().bytes().len()
}

fn conv_storage(conv: &Option<ConvState>) -> usize {
    conv.as_ref().map_or(0, |conv| [&conv.q, &conv.k, &conv.v].map(storage).iter().sum())
}

fn kv_storage(state: &KvState) -> usize {
    let entries = state.entries.as_ref().map_or(0, |(k, v)| storage(k) + storage(v));
    entries + conv_storage(&state.conv)
}

/// Bytes of the storage behind a state's tensors: a view would keep all of a longer tensor alive.
fn stored(state: &MixerState) -> usize {
    match state {
        MixerState::Matrix(state) => storage(&state.memory) + conv_storage(&state.conv),
        MixerState::Rotary(state) => storage(&state.matrix.memory) + conv_storage(&state.matrix.conv),
        MixerState::Normalised(state) => {
            storage(&state.matrix.memory) + conv_storage(&state.matrix.conv) + storage(&state.normaliser)
        }
        MixerState::Kv(state) => kv_storage(state),
        MixerState::Shifted(state) => storage(&state.memory) + storage(&state.last),
        MixerState::Dea(state) => {
            let time_mix = storage(&state.time_mix.memory) + storage(&state.time_mix.last);
            let entries = state.cache.entries.as_ref().map_or(0, |(k, v)| storage(k) + storage(v));
            time_mix + entries + storage(&state.last_query)
        }
        MixerState::Lstm(state) => storage(&state.hidden) + storage(&state.cell),
        MixerState::Momentum(state) => {
            let matrix = storage(&state.matrix.memory) + conv_storage(&state.matrix.conv);
            matrix + storage(&state.momentum)
        }
        MixerState::Ttt(state) => {
            let TttState { weights, bias, gathered, gathered_bias, rate, .. } = &state.change;
            let inner = storage(weights) + storage(bias) + storage(rate);
            inner + storage(gathered) + storage(gathered_bias) + conv_storage(&state.conv)
        }
        MixerState::Deep(state) => {
            let inner: usize = state.change.tensors().iter().map(|(_, tensor)| storage(tensor)).sum();
            inner + conv_storage(&state.conv)
        }
        MixerState::MemoryAttention(state) => stored(&state.memory) + kv_storage(&state.attention),
        MixerState::Segment(state) => {
            let start: usize = state.start.iter().map(storage).sum();
            let recall = state.recall.as_ref().map_or(0, storage);
            stored(&state.memory) + start + recall + kv_storage(&state.attention)
        }
        MixerState::Rule(state) => {
            let change = &state.change;
            let weights = change.memory.iter().chain(&change.start).chain(&change.momentum);
            let past = change.past.iter().flat_map(|past| [&past.k, &past.v, &past.rate]);
            weights.chain(&change.history).chain(past).map(storage).sum::<usize>() + conv_storage(&state.conv)
        }
    }
}

#[test]
fn bytes_held_are_those_of_the_ledger() {
    for (name, config) in mixers() {
        for tokens in [0, 1, 4, 5, 40] {
            let size = config.state_size(&context(&config), tokens);
            let state = after(&config, 3, tokens);
            assert_eq!(state.bytes(), 3 * size.total(), "{name} after {tokens} tokens");
            assert_eq!(stored(&state), 3 * size.total(), "{name} after {tokens} tokens: storage");
            // Token by token the state holds the same.
            let device = Device::flex();
            let mixer = build(&config, &device);
            let mut stepped = mixer.zero_state(1, &device);
            for t in 0..tokens {
                stepped = mixer.read_token(input([1, WIDTH], t as u64, &device), stepped).unwrap().1;
            }
            assert_eq!(stepped.bytes(), stored(&stepped), "{name} after {tokens} steps: storage");
            let entry = config.state_size(&context(&config), 1).growing;
            let most = size.fixed + entry * reserved(tokens);
            assert!(stepped.bytes() <= most, "{name} after {tokens} steps: {} bytes", stepped.bytes());
            let cut = stepped.select(&[0]).unwrap();
            assert_eq!(cut.bytes(), size.total(), "{name} after {tokens} steps, without room to spare");
            assert_eq!(
                stored(&cut),
                size.total(),
                "{name} after {tokens} steps, without room to spare: storage"
            );
        }
    }
}

#[test]
fn selected_rows_go_on_as_they_would_have() {
    let device = Device::flex();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        let state = after(&config, 3, 9);
        let x = input([3, WIDTH], 2, &device);
        let (y, _) = mixer.read_token(x.clone(), state.clone()).unwrap();
        let rows = [2, 0, 2];
        let selected = state.select(&rows).unwrap();
        let x = Tensor::cat(rows.iter().map(|row| x.clone().narrow(0, *row, 1)).collect(), 0);
        let (z, _) = mixer.read_token(x, selected).unwrap();
        for (i, row) in rows.iter().enumerate() {
            let pick = |t: &Tensor<2>, row: usize| values(&t.clone().narrow(0, row, 1));
            assert_eq!(pick(&z, i), pick(&y, *row), "{name}");
        }
        assert!(state.select(&[0, 3]).unwrap_err().to_string().contains("row 3"), "{name}");
        assert!(state.select(&[]).is_err(), "{name}");
    }
}

#[test]
fn cleared_rows_start_again_and_others_go_on() {
    let device = Device::flex();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        let state = after(&config, 3, 9);
        let x = input([3, 2, WIDTH], 3, &device);
        let (untouched, _) = mixer.read(x.clone(), Some(state.clone()), None).unwrap();
        let (fresh, _) = mixer.read(x.clone(), None, None).unwrap();
        let cleared = state.clone().clear(&[1]).unwrap();
        assert_eq!(cleared.batch(), 3);
        let row = cleared.select(&[1]).unwrap();
        assert_eq!(state_values(&row), state_values(&mixer.zero_state(1, &device)), "{name}");
        let (y, _) = mixer.read(x.clone(), Some(cleared), None).unwrap();
        for (row, expected) in [(0, &untouched), (1, &fresh), (2, &untouched)] {
            let pick = |t: &Tensor<3>| values(&t.clone().narrow(0, row, 1));
            assert_close(&format!("{name}, row {row}"), &pick(&y), &pick(expected), 1e-5);
        }
        // A row that broke can be cleared too, and an empty state weighs what the ledger says.
        let broken = mixer.read(x.clone() * f32::NAN, None, None);
        if let Ok((_, broken)) = broken {
            let all = broken.clear(&[0, 1, 2]).unwrap();
            assert_eq!(all.bytes(), 3 * config.state_size(&context(&config), 0).total(), "{name}");
            let (y, _) = mixer.read(x, Some(all), None).unwrap();
            assert_close(name, &values(&y), &values(&fresh), 1e-5);
        }
        assert!(state.clear(&[3]).unwrap_err().to_string().contains("row 3"), "{name}");
    }
}

#[test]
fn a_fork_shares_nothing_that_a_write_could_reach() {
    let device = Device::flex();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        let state = after(&config, 2, 6);
        let fork = state.clone();
        let before = state_values(&fork);
        let mut written = state;
        for t in 0..5 {
            written = mixer.read_token(input([2, WIDTH], 40 + t, &device), written).unwrap().1;
        }
        let written = written.clear(&[0, 1]).unwrap();
        drop(written);
        assert_eq!(before, state_values(&fork), "{name}");
    }
}

#[test]
fn a_layer_made_alone_is_finite_seeded_and_counted() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        for (name, config) in mixers() {
            let mixer = build(&config, &device);
            let weights = export(&mixer);
            for (parameter, data) in &weights {
                assert!(data.iter::<f32>().all(f32::is_finite), "{name}, {parameter}");
                let zero = parameter.ends_with("norm_shift") || parameter.ends_with("bias");
                assert!(zero || data.iter::<f32>().any(|v| v != 0.0), "{name}, {parameter} is all zero");
            }
            let count: usize = weights.iter().map(|(_, data)| data.num_elements()).sum();
            assert_eq!(count, config.parameter_count(&context(&config)), "{name}");
            let (y, _) = mixer.read(input([1, 40, WIDTH], 1, &device), None, None).unwrap();
            assert!(values(&y).iter().all(|v| v.is_finite()), "{name}");

            device.seed(99);
            let again = export(&build(&config, &device));
            assert!(weights == again, "{name}: the same seed gives other weights");
            let other = config
                .init(&fastweight_memory::LayerContext { seed: 4, ..context(&config) }, &device)
                .unwrap();
            assert!(weights != export(&other), "{name}: another seed gives the same weights");
            let loaded = import(other, |info| {
                weights.iter().find(|(name, _)| *name == info.name).map(|(_, data)| data.clone())
            });
            assert!(weights == export(&loaded.unwrap()), "{name}: loading changes weights");
        }
    }
}

#[test]
fn gated_delta_net_starts_with_the_decay_its_options_say() {
    let device = Device::flex();
    let step_sizes = |options: &str| -> Vec<f32> {
        let config: MixerConfig = toml::from_str(&format!("kind = 'gated_delta_net'\n{options}")).unwrap();
        let weights = export(&build(&config, &device));
        let (_, bias) = weights.into_iter().find(|(name, _)| name == "dt_bias").unwrap();
        bias.iter::<f32>().map(|bias| bias.exp().ln_1p()).collect()
    };
    // Two heads: the smallest, and the middle of the range in the logarithm.
    for (options, expected) in
        [("", [1e-3, 1e-2]), ("dt_min = 1e-5\ndt_max = 1e-3", [1e-5, 1e-4]), ("dt_min = 0.1", [0.1, 0.1])]
    {
        let found = step_sizes(options);
        let near = found.iter().zip(expected).all(|(found, expected)| (found / expected - 1.0).abs() < 1e-2);
        assert!(found.len() == 2 && near, "{options}: {found:?}, not {expected:?}");
    }
    for (options, setting) in
        [("dt_min = 0.0", "dt_min"), ("dt_max = 1e4", "dt_max"), ("dt_min = 1.0", "dt_max")]
    {
        let config: MixerConfig = toml::from_str(&format!("kind = 'gated_delta_net'\n{options}")).unwrap();
        let error = config.init(&context(&config), &device).unwrap_err().to_string();
        assert!(error.contains(setting), "{options}: {error}");
    }
}

#[test]
fn loading_a_wrong_or_missing_parameter_is_an_error() {
    let device = Device::flex();
    let mixer = build(&MixerConfig::by_name("delta_net").unwrap(), &device);
    let missing = import(mixer.clone(), |_| None).unwrap_err().to_string();
    assert!(missing.contains("q.weight") && missing.contains("missing"), "{missing}");
    let wrong = import(mixer.clone(), |_| Some(burn::tensor::TensorData::zeros::<f32, _>([3, 3])));
    assert!(wrong.unwrap_err().to_string().contains("expected [12, 12]"));
    let names: Vec<String> = list(&mixer).into_iter().map(|info| info.name).collect();
    let expected = [
        "q.weight",
        "q.conv",
        "k.weight",
        "k.conv",
        "v.weight",
        "v.conv",
        "beta.weight",
        "norm.weight",
        "o.weight",
    ];
    assert_eq!(names, expected);
}
