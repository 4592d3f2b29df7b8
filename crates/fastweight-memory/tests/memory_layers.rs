//! Every mixer: one definition however the sequence is cut, packed, padded or batched.

mod common;

use burn::tensor::{Device, Tensor};
use common::*;
use fastweight_memory::padding::{Padding, repad, unpad};
use fastweight_memory::{Mixer, MixerState, State};
use fastweight_ops::Offsets;

const TOLERANCE: f32 = 2e-5;

fn time(x: &Tensor<3>, from: usize, to: usize) -> Tensor<3> {
    x.clone().narrow(1, from, to - from)
}

/// `forward` of a prefix, then one step per token.
fn stepped(mixer: &Mixer, x: &Tensor<3>, prefix: usize) -> (Tensor<3>, MixerState) {
    let total = x.dims()[1];
    let (mut state, mut parts) = if prefix == 0 {
        (mixer.zero_state(x.dims()[0], &x.device()), vec![])
    } else {
        let (y, state) = mixer.read(time(x, 0, prefix), None, None).unwrap();
        (state, vec![y])
    };
    for t in prefix..total {
        let (y, next) = mixer.read_token(time(x, t, t + 1).squeeze_dim(1), state).unwrap();
        state = next;
        parts.push(y.unsqueeze_dim(1));
    }
    (Tensor::cat(parts, 1), state)
}

#[test]
fn steps_after_a_prompt_equal_one_forward() {
    let device = Device::flex();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        for prefix in [0, 1, CHUNK + 1, 2 * CHUNK + 1] {
            let x = input([2, prefix + 64, WIDTH], 1, &device);
            let (whole, end) = mixer.read(x.clone(), None, None).unwrap();
            let (steps, state) = stepped(&mixer, &x, prefix);
            let what = format!("{name}, {prefix} tokens then steps");
            assert_close(&what, &values(&steps), &values(&whole), TOLERANCE);
            assert_states_close(&what, &state, &end, f64::from(TOLERANCE));
        }
    }
}

#[test]
fn a_split_forward_equals_the_whole() {
    let device = Device::flex();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        let x = input([2, 70, WIDTH], 2, &device);
        let (whole, end) = mixer.read(x.clone(), None, None).unwrap();
        for cut in [1, 2, CHUNK, CHUNK + 1, 69] {
            let (first, state) = mixer.read(time(&x, 0, cut), None, None).unwrap();
            let (second, state) = mixer.read(time(&x, cut, 70), Some(state), None).unwrap();
            let what = format!("{name}, cut at {cut}");
            let both = Tensor::cat(vec![first, second], 1);
            assert_close(&what, &values(&both), &values(&whole), TOLERANCE);
            assert_states_close(&what, &state, &end, f64::from(TOLERANCE));
        }
    }
}

#[test]
fn packed_documents_equal_separate_ones() {
    let device = Device::flex();
    let lengths = [5, 1, 0, CHUNK + 1, 2];
    let offsets = Offsets::from_lengths(&lengths);
    let total = offsets.time();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        let x = input([1, total, WIDTH], 3, &device);
        // Documents that start empty, then documents that each continue another session.
        let (packed, state) = mixer.read(x.clone(), None, Some(&offsets)).unwrap();
        let (again, state_again) = mixer.read(x.clone(), Some(state.clone()), Some(&offsets)).unwrap();
        for (document, range) in offsets.ranges().enumerate() {
            let what = format!("{name}, document {document}");
            if range.is_empty() {
                let zero = mixer.zero_state(1, &device);
                assert_states_close(&what, &state.select(&[document]).unwrap(), &zero, 0.0);
                continue;
            }
            let own = time(&x, range.start, range.end);
            let (y, end) = mixer.read(own.clone(), None, None).unwrap();
            assert_close(&what, &values(&time(&packed, range.start, range.end)), &values(&y), TOLERANCE);
            assert_states_close(&what, &state.select(&[document]).unwrap(), &end, 2e-5);
            let (y, end) = mixer.read(own, Some(end), None).unwrap();
            assert_close(&what, &values(&time(&again, range.start, range.end)), &values(&y), TOLERANCE);
            assert_states_close(&what, &state_again.select(&[document]).unwrap(), &end, 2e-5);
        }
        // Rows of different lengths go on together, token by token and in a block.
        let more = input([lengths.len(), 3, WIDTH], 4, &device);
        let (together, end) = mixer.read(more.clone(), Some(state.clone()), None).unwrap();
        let (token, next) = mixer.read_token(time(&more, 0, 1).squeeze_dim(1), state.clone()).unwrap();
        let (last, next) = mixer.read(time(&more, 1, 3), Some(next), None).unwrap();
        let parts = Tensor::cat(vec![token.unsqueeze_dim(1), last], 1);
        assert_close(name, &values(&parts), &values(&together), TOLERANCE);
        assert_states_close(name, &next, &end, 2e-5);
        for row in 0..lengths.len() {
            let own = more.clone().narrow(0, row, 1);
            let (y, alone) = mixer.read(own, Some(state.select(&[row]).unwrap()), None).unwrap();
            assert_close(name, &values(&together.clone().narrow(0, row, 1)), &values(&y), TOLERANCE);
            assert_states_close(name, &end.select(&[row]).unwrap(), &alone, 2e-5);
        }
    }
}

#[test]
fn a_row_does_not_see_other_rows() {
    let device = Device::flex();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        let x = input([3, CHUNK + 2, WIDTH], 5, &device);
        let other = input([1, CHUNK + 2, WIDTH], 6, &device) * 100.0;
        let changed = x.clone().slice_assign([1..2, 0..CHUNK + 2, 0..WIDTH], other);
        let (y, state) = mixer.read(x, None, None).unwrap();
        let (z, changed_state) = mixer.read(changed, None, None).unwrap();
        for row in [0, 2] {
            let pick = |t: &Tensor<3>| values(&t.clone().narrow(0, row, 1));
            assert_eq!(pick(&y), pick(&z), "{name}, row {row}");
            let states = [&state, &changed_state].map(|s| state_values(&s.select(&[row]).unwrap()));
            assert_eq!(states[0], states[1], "{name}, row {row}");
        }
    }
}

#[test]
fn padding_touches_nothing() {
    let device = Device::flex();
    let (batch, columns) = (4, 12);
    // Left, interior, right padding, and a row of padding alone.
    let rows = ["........xxxx", "xx..xxx.x..x", "xxxxxxxxxx..", "............"];
    let mask: Vec<bool> = rows.iter().flat_map(|row| row.bytes().map(|b| b == b'x')).collect();
    let padding = Padding::from_mask(&mask, batch, columns).unwrap();
    for (name, config) in mixers() {
        let mixer = build(&config, &device);
        let x = input([batch, columns, WIDTH], 7, &device);
        let start = mixer.read(input([batch, 3, WIDTH], 8, &device), None, None).unwrap().1;
        let packed = unpad(x.clone(), &padding).unwrap();
        let (y, state) = mixer.read(packed, Some(start.clone()), Some(padding.offsets())).unwrap();
        let y = repad(y, &padding).unwrap();
        for row in 0..batch {
            let real: Vec<usize> = (0..columns).filter(|t| mask[row * columns + t]).collect();
            let alone_start = start.select(&[row]).unwrap();
            let what = format!("{name}, row {row}");
            let column = |t: &Tensor<3>, i: usize| t.clone().narrow(0, row, 1).narrow(1, i, 1);
            if real.is_empty() {
                assert_states_close(&what, &state.select(&[row]).unwrap(), &alone_start, 0.0);
            } else {
                let own = Tensor::cat(real.iter().map(|i| column(&x, *i)).collect(), 1);
                let (expected, end) = mixer.read(own, Some(alone_start), None).unwrap();
                let found = Tensor::cat(real.iter().map(|i| column(&y, *i)).collect(), 1);
                assert_close(&what, &values(&found), &values(&expected), TOLERANCE);
                assert_states_close(&what, &state.select(&[row]).unwrap(), &end, 2e-5);
            }
            for i in (0..columns).filter(|i| !real.contains(i)) {
                assert!(values(&column(&y, i)).iter().all(|v| *v == 0.0), "{what}: padding is zero");
            }
        }
    }
}

#[test]
fn inputs_that_do_not_fit_are_refused_with_a_reason() {
    let device = Device::flex();
    let config = "kind = 'delta_net'";
    let mixer = build(&toml::from_str(config).unwrap(), &device);
    let attention = build(&toml::from_str("kind = 'softmax_attention'").unwrap(), &device);
    let x = |shape| Tensor::<3>::zeros(shape, &device);
    let message = |result: Result<_, fastweight_memory::MemoryError>| {
        let result: Result<(Tensor<3>, MixerState), _> = result;
        result.unwrap_err().to_string()
    };
    assert!(message(mixer.read(x([1, 4, WIDTH + 1]), None, None)).contains("[batch, time, 12]"));
    assert!(message(mixer.read(x([1, 0, WIDTH]), None, None)).contains("one token"));
    let state = mixer.zero_state(2, &device);
    assert!(message(mixer.read(x([3, 4, WIDTH]), Some(state), None)).contains("holds 2 sequences"));
    let state = attention.zero_state(1, &device);
    assert!(message(mixer.read(x([1, 4, WIDTH]), Some(state), None)).contains("key-value state"));
    let offsets = Offsets::from_lengths(&[2, 2]);
    assert!(message(mixer.read(x([2, 4, WIDTH]), None, Some(&offsets))).contains("2 rows"));
    assert!(message(mixer.read(x([1, 5, WIDTH]), None, Some(&offsets))).contains("end at 5"));
    let wrong = mixer.read_token(Tensor::zeros([2, WIDTH], &device), mixer.zero_state(3, &device));
    assert!(wrong.unwrap_err().to_string().contains("zero_state(2)"));
    assert!(Padding::from_lengths(&[3, 5], 4).unwrap_err().to_string().contains("row 1 has length 5"));
    assert!(Padding::from_mask(&[false; 4], 2, 2).unwrap_err().to_string().contains("no token"));
    assert!(Padding::from_mask(&[true; 3], 2, 2).unwrap_err().to_string().contains("3 entries"));
    let padding = Padding::from_lengths(&[1, 2], 2).unwrap();
    assert!(unpad(x([2, 3, WIDTH]), &padding).is_err() && repad(x([1, 4, WIDTH]), &padding).is_err());
}
