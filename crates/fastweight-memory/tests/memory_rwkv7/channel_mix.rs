//! The channel mix, and DeepEmbed in both forms.

use burn::tensor::Device;
use fastweight_memory::{ChannelMixerConfig, LayerContext};

use crate::common::*;
use crate::plain::*;

/// `relu(lerp(x, x_before) K)^2`.
fn hidden(p: &Plain, under: &str, x: &Rows) -> Rows {
    let mixed = lerps(x, p.get(&format!("{under}shift")));
    let key = p.get(&format!("{under}key.weight"));
    mixed.iter().map(|x| map(key, x).into_iter().map(|h| h.max(0.0).powi(2)).collect()).collect()
}

fn plain(name: &str, p: &Plain, x: &Rows, ids: &[usize], embeddings: &Rows) -> Rows {
    let token = |t: usize| match name {
        "rwkv7_channel_mix" => map(p.get("value.weight"), &hidden(p, "", x)[t]),
        "deep_embed" => {
            let y = map(p.get("inside.value.weight"), &hidden(p, "inside.", x)[t]);
            product(&y, &p.table("scale", ids[t], &embeddings[t]))
        }
        _ => {
            let matrix = p.table("maps", ids[t], &embeddings[t]);
            let read = map(&matrix, &map(p.get("reduce.weight"), &x[t]));
            let factors = map(p.get("lora_b"), &read);
            let hidden = &hidden(p, "mix.", x)[t];
            let scaled: Vec<f64> =
                (0..hidden.len()).map(|i| hidden[i] * (factors[i] + p.get("start")[i])).collect();
            map(p.get("mix.value.weight"), &scaled)
        }
    };
    (0..x.len()).map(token).collect()
}

#[test]
fn channel_mixers_compute_their_formulas() {
    let device = Device::flex();
    for recipe in [
        "kind = 'rwkv7_channel_mix'",
        "kind = 'deep_embed'\ninside = 'rwkv7_channel_mix'",
        "kind = 'rwkv7_deep_embed'",
        "kind = 'rwkv7_deep_embed'\nrank = 3",
    ] {
        let config: ChannelMixerConfig = toml::from_str(recipe).unwrap();
        let ctx = LayerContext { vocab: VOCAB, seed: 2, ..LayerContext::new(WIDTH, 2) };
        let (mixer, p) = Plain::of(config.init(&ctx, &device).unwrap(), 40);
        let x = input([1, 23, WIDTH], 1, &device);
        let (ids, embeddings) = token_ids(&x);
        assert!(ids.iter().any(|id| *id != ids[0]), "{ids:?}");
        let expected = plain(config.name(), &p, &rows(&x), &ids, &embeddings);
        let shared = shared(&x);
        let (y, _) = mixer.forward(x, None, None, &shared).unwrap();
        assert_close(recipe, &values(&y), &flat(&expected), 2e-5);
    }
}

/// A table of ones leaves the map as it is; RWKV's own form starts within a hundredth of it.
#[test]
fn deep_embed_starts_as_the_map_that_it_scales() {
    let device = Device::flex();
    let ctx = LayerContext { vocab: VOCAB, seed: 2, ..LayerContext::new(WIDTH, 2) };
    let init = |recipe: &str| {
        let config: ChannelMixerConfig = toml::from_str(recipe).unwrap();
        config.init(&ctx, &device).unwrap()
    };
    let x = input([1, 23, WIDTH], 1, &device);
    for (recipe, mix, tolerance) in [
        ("kind = 'deep_embed'\ninside = 'rwkv7_channel_mix'", "inside", 0.0),
        ("kind = 'rwkv7_deep_embed'", "mix", 1e-2),
    ] {
        let map = init(recipe);
        let weights = fastweight_memory::parameters::export(&map);
        let alone = fastweight_memory::parameters::import(init("kind = 'rwkv7_channel_mix'"), |info| {
            let name = format!("{mix}.{}", info.name);
            weights.iter().find(|(other, _)| *other == name).map(|(_, data)| data.clone())
        });
        let shared = shared(&x);
        let [y, expected] =
            [map, alone.unwrap()].map(|map| map.forward(x.clone(), None, None, &shared).unwrap().0);
        assert_close(recipe, &values(&y), &values(&expected), tolerance);
    }
}
