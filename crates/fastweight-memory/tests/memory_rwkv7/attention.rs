//! DEA beside the time mix.

use burn::tensor::{Device, Tensor};
use fastweight_memory::layers::{Layer, LayerConfig, Rwkv7Dea, Rwkv7DeaConfig};
use fastweight_memory::{LayerContext, Shared, State};
use fastweight_ops::Offsets;

use crate::common::*;
use crate::plain::*;
use crate::time_mix::time_mix;

/// The output of DEA for the block's inputs `x`.
fn plain(p: &Plain, x: &Rows, ids: &[usize], embeddings: &Rows) -> Rows {
    let parts = |name: &str, table: &str, inner: fn(f64) -> f64| -> Rows {
        let part = |t: usize| {
            let cached = map(p.get(&format!("dea.{name}.reduce.weight")), &x[t]);
            let y = map(p.get(&format!("dea.{name}.expand.weight")), &cached);
            product(&y.into_iter().map(inner).collect::<Vec<_>>(), &p.table(table, ids[t], &embeddings[t]))
        };
        (0..x.len()).map(part).collect()
    };
    let normed = |name: &str, rows: Rows| -> Rows {
        let mixed = lerps(&rows, p.get(&format!("dea.shift.{name}")));
        mixed.iter().map(|row| p.norm(&format!("dea.{name}_norm"), row)).collect()
    };
    let q = normed("q", x.iter().map(|x| map(p.get("dea.q.weight"), x)).collect());
    let k = normed("k", parts("k", "dea.k_table", |k| k));
    let v = normed("v", parts("v", "dea.v_table", f64::tanh));
    let read = |t: usize| {
        let weight = |i: usize| {
            let score: f64 = product(&q[t], &k[i]).iter().sum();
            (64.0 * (score / (64.0 * (q[t].len() as f64).sqrt())).tanh()).exp()
        };
        let weights: Vec<f64> = (0..=t).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        (0..v[0].len()).map(|c| (0..=t).map(|i| weights[i] / sum * v[i][c]).sum()).collect()
    };
    (0..x.len()).map(read).collect()
}

fn layer(options: &str, device: &Device) -> (Rwkv7Dea, Plain) {
    let config: Rwkv7DeaConfig = toml::from_str(options).unwrap();
    let ctx = LayerContext { vocab: VOCAB, seed: 2, layer: 1, layers: 3, ..LayerContext::new(WIDTH, 2) };
    Plain::of(config.init(&ctx, device).unwrap(), 60)
}

#[test]
fn dea_and_the_time_mix_compute_their_formulas() {
    let device = Device::flex();
    // At 256 query channels the scores are those of RWKV-7b, tanh of a 1024th.
    assert_eq!(64.0 * (Rwkv7DeaConfig::default().query_dim as f64).sqrt(), 1024.0);
    for options in ["", "query_dim = 5\ncache_rank = 3\ndecay_rank = 4"] {
        let (layer, p) = layer(options, &device);
        let x = input([1, 37, WIDTH], 1, &device);
        let mut shared = shared(&x);
        let (ids, embeddings) = token_ids(&x);
        let read = plain(&p, &rows(&shared.residual.clone().unwrap()), &ids, &embeddings);
        let mixed = time_mix(&p, "time_mix.", &rows(&x), None, &ids).0;
        let expected: Rows =
            mixed.iter().zip(&read).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect();
        let (y, _) = layer.forward_shared(x, None, None, &mut shared).unwrap();
        assert_close(options, &values(&y), &flat(&expected), 3e-5);
    }
}

fn read(
    layer: &Rwkv7Dea,
    x: Tensor<3>,
    state: Option<<Rwkv7Dea as Layer>::State>,
    offsets: Option<&Offsets>,
) -> (Tensor<3>, <Rwkv7Dea as Layer>::State) {
    let mut shared = shared(&x);
    layer.forward_shared(x, state, offsets, &mut shared).unwrap()
}

/// Longer than a block of queries, in documents and in cuts.
#[test]
fn long_sequences_are_read_block_by_block() {
    let device = Device::flex();
    let (layer, p) = layer("", &device);
    let x = input([1, 300, WIDTH], 3, &device);
    let (whole, end) = read(&layer, x.clone(), None, None);
    let (ids, embeddings) = token_ids(&x);
    let residual = rows(&shared(&x).residual.unwrap());
    let dea = plain(&p, &residual, &ids, &embeddings);
    let mixed = time_mix(&p, "time_mix.", &rows(&x), None, &ids).0;
    let expected: Vec<f32> =
        dea.iter().flatten().zip(mixed.iter().flatten()).map(|(a, b)| (a + b) as f32).collect();
    assert_close("300 tokens", &values(&whole), &expected, 1e-4);
    let cut = |from: usize, to: usize| x.clone().narrow(1, from, to - from);
    let (first, state) = read(&layer, cut(0, 140), None, None);
    let (second, state) = read(&layer, cut(140, 300), Some(state), None);
    assert_close("a cut", &values(&Tensor::cat(vec![first, second], 1)), &values(&whole), 2e-5);
    assert_eq!(state.select(&[0]).unwrap().bytes(), end.bytes());
    let offsets = Offsets::from_lengths(&[140, 160]);
    let (packed, _) = read(&layer, x.clone(), None, Some(&offsets));
    let (alone, _) = read(&layer, cut(140, 300), None, None);
    assert_close("a document", &values(&packed.narrow(1, 140, 160)), &values(&alone), 2e-5);
}

#[test]
fn what_a_model_does_not_share_is_named() {
    let device = Device::flex();
    let (layer, _) = layer("", &device);
    let x: Tensor<3> = input([1, 4, WIDTH], 1, &device);
    let (_, state) = read(&layer, x.clone(), None, None);
    let error = |shared: Shared, state| {
        let mut shared = shared;
        let result = layer.forward_shared(x.clone(), state, None, &mut shared);
        result.unwrap_err().to_string()
    };
    assert!(error(Shared::default(), None).contains("Shared::residual"));
    assert!(error(Shared { tokens: None, ..shared(&x) }, None).contains("token ids"));
    assert!(error(Shared { embedded: None, ..shared(&x) }, None).contains("Shared::embedded"));
    assert!(error(Shared { vectors: None, ..shared(&x) }, Some(state)).contains("Shared::vectors"));
    let ids = tokens(&x);
    let wrong = error(Shared { tokens: Some(ids.clone() + 100), ..shared(&x) }, None);
    assert!(wrong.contains("below vocab"), "{wrong}");
    let short = error(Shared { tokens: Some(ids.narrow(1, 0, 3)), ..shared(&x) }, None);
    assert!(short.contains("[1, 4]"), "{short}");
    for (options, words) in [
        ("query_dim = 0", "query_dim is 0"),
        ("cache_rank = 70000", "cache_rank is 70000"),
        ("gate_rank = 0", "rwkv7_dea: gate_rank is 0"),
    ] {
        let config: Rwkv7DeaConfig = toml::from_str(options).unwrap();
        let ctx = LayerContext { vocab: VOCAB, ..LayerContext::new(WIDTH, 2) };
        let message = config.validate(&ctx).unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }
    let ctx = |vocab| LayerContext { vocab, ..LayerContext::new(WIDTH, 2) };
    for vocab in [0, (1 << 24) + 1] {
        let message = Rwkv7DeaConfig::default().validate(&ctx(vocab)).unwrap_err().to_string();
        assert!(message.contains("vocab is"), "{message}");
    }
}
