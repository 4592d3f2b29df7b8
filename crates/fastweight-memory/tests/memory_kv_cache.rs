//! The cache of softmax attention over many tokens: written in place, and never seen by anyone else.

mod common;

use burn::backend::Flex;
use burn::tensor::{Device, Tensor};
use common::*;
use fastweight_memory::{KvState, Mixer, MixerConfig, MixerState, State};
use fastweight_ops::Offsets;

const TOKENS: usize = 150;

/// Attention with and without a window shorter than the sequence, and a window shorter than the room made for it.
fn attentions() -> [(usize, MixerConfig); 3] {
    let recipe = |text: &str| toml::from_str(text).unwrap();
    [
        (usize::MAX, recipe("kind = 'softmax_attention'\nconv_width = 4")),
        (49, recipe("kind = 'softmax_attention'\nwindow = 50\nkv_heads = 1")),
        (2, recipe("kind = 'softmax_attention'\nwindow = 3")),
    ]
}

fn step(mixer: &Mixer, x: &Tensor<3>, at: usize, state: MixerState) -> (Vec<f32>, MixerState) {
    let (y, state) = mixer.step(x.clone().narrow(1, at, 1).squeeze_dim(1), state).unwrap();
    (values(&y), state)
}

fn kv(state: &MixerState) -> KvState {
    state.clone().try_into().unwrap()
}

/// Where the keys lie in memory.
fn address(state: &MixerState) -> usize {
    let keys = kv(state).entries.unwrap().0.try_into_primitive::<Flex>().unwrap();
    keys.as_slice::<f32>().unwrap().as_ptr().addr()
}

#[test]
fn steps_equal_one_forward_through_growth_and_window() {
    let device = Device::flex();
    for (keep, config) in attentions() {
        let mixer = build(&config, &device);
        let x = input([2, TOKENS, WIDTH], 1, &device);
        let (y, end) = mixer.forward(x.clone(), None, None).unwrap();
        for read in [0, 1, 40, 60] {
            let start = x.clone().narrow(1, 0, read.max(1));
            let mut state = mixer.zero_state(2, &device);
            if read > 0 {
                state = mixer.forward(start, Some(state), None).unwrap().1;
            }
            for at in read..TOKENS {
                let (found, next) = step(&mixer, &x, at, state);
                let expected = values(&y.clone().narrow(1, at, 1));
                assert_close(&format!("window {keep}, token {at} after {read}"), &found, &expected, 1e-5);
                state = next;
            }
            assert_states_close(&format!("window {keep} after {read}"), &state, &end, 1e-5);
            let exact = config.state_size(&context(&config), TOKENS).total() * 2;
            assert_eq!(state.select(&[0, 1]).unwrap().bytes(), exact, "a selection has no room to spare");
            let held = TOKENS.min(keep);
            let entries = kv(&state).entries.unwrap().0.dims()[1];
            assert!(entries <= held + held / 8 + 32, "window {keep}: {entries} entries for {held}");
        }
    }
}

#[test]
fn tokens_are_written_where_the_cache_lies_and_growth_is_rare() {
    let device = Device::flex();
    for (keep, config) in attentions() {
        let mixer = build(&config, &device);
        let x = input([2, 400, WIDTH], 1, &device);
        let mut state = step(&mixer, &x, 0, mixer.zero_state(2, &device)).1;
        let mut moves = 0;
        for at in 1..400 {
            let before = address(&state);
            state = step(&mixer, &x, at, state).1;
            moves += usize::from(address(&state) != before);
        }
        let most = if keep == usize::MAX { 9 } else { 3 };
        assert!(moves <= most, "window {keep}: the cache moved {moves} times in 400 tokens");
    }
}

#[test]
fn a_fork_and_its_origin_go_different_ways() {
    let device = Device::flex();
    for (keep, config) in attentions() {
        let mixer = build(&config, &device);
        let [x, other] = [1, 2].map(|seed| input([2, TOKENS, WIDTH], seed, &device));
        let mut state = mixer.zero_state(2, &device);
        for at in 0..60 {
            state = step(&mixer, &x, at, state).1;
        }
        let (mut fork, mut alone) = (state.clone(), state.select(&[0, 1]).unwrap());
        for at in 60..TOKENS {
            let (found, next) = step(&mixer, &x, at, state);
            (_, fork) = step(&mixer, &other, at, fork);
            let (expected, next_alone) = step(&mixer, &x, at, alone);
            assert_close(&format!("window {keep}, token {at}"), &found, &expected, 1e-6);
            (state, alone) = (next, next_alone);
        }
        let joined = Tensor::cat(vec![x.narrow(1, 0, 60), other.narrow(1, 60, TOKENS - 60)], 1);
        let (_, expected) = mixer.forward(joined, None, None).unwrap();
        assert_states_close(&format!("window {keep}, fork"), &fork, &expected, 1e-5);
    }
}

#[test]
fn rows_of_different_lengths_go_on_after_being_cleared_and_selected() {
    let device = Device::flex();
    for (keep, config) in attentions() {
        let mixer = build(&config, &device);
        let x = input([3, TOKENS, WIDTH], 1, &device);
        let mut state = mixer.zero_state(3, &device);
        for at in 0..70 {
            state = step(&mixer, &x, at, state).1;
        }
        state = state.clear(&[1]).unwrap();
        for at in 70..110 {
            state = step(&mixer, &x, at, state).1;
        }
        state = state.select(&[2, 1]).unwrap();
        let x = x.select(0, Tensor::from_data([2, 1], &device));
        for at in 110..TOKENS {
            state = step(&mixer, &x, at, state).1;
        }
        for (row, start) in [(0, 0), (1, 70)] {
            let read = x.clone().narrow(0, row, 1).narrow(1, start, TOKENS - start);
            let (_, expected) = mixer.forward(read, None, None).unwrap();
            let found = state.select(&[row]).unwrap();
            assert_states_close(&format!("window {keep}, row {row}"), &found, &expected, 1e-5);
        }
    }
}

#[test]
fn documents_are_appended_each_to_its_own_row() {
    let device = Device::flex();
    for (keep, config) in attentions() {
        let mixer = build(&config, &device);
        let x = input([3, TOKENS, WIDTH], 1, &device);
        let mut state = mixer.zero_state(3, &device);
        let mut read = [0; 3];
        for lengths in [[5, 0, 30], [1, 0, 2], [40, 3, 0], [1, 1, 1], [0, 90, 1]] {
            let parts = (0..3).filter(|row| lengths[*row] > 0);
            let part = |row: usize| x.clone().narrow(0, row, 1).narrow(1, read[row], lengths[row]);
            let packed = Tensor::cat(parts.map(part).collect(), 1);
            let mut bounds = vec![0];
            lengths.iter().for_each(|length| bounds.push(bounds[bounds.len() - 1] + length));
            let offsets = Offsets::new(&bounds, packed.dims()[1]).unwrap();
            state = mixer.forward(packed, Some(state), Some(&offsets)).unwrap().1;
            (0..3).for_each(|row| read[row] += lengths[row]);
        }
        for (row, &count) in read.iter().enumerate() {
            let alone = x.clone().narrow(0, row, 1).narrow(1, 0, count);
            let (_, expected) = mixer.forward(alone, None, None).unwrap();
            let found = state.select(&[row]).unwrap();
            assert_states_close(&format!("window {keep}, document {row}"), &found, &expected, 1e-5);
        }
    }
}
