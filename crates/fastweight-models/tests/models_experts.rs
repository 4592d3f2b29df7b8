//! Models with lookup experts: as networks and as tables, whole, packed and token by token.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fastweight_memory::channel::MoleConfig;
use fastweight_memory::parameters::export;
use fastweight_models::{
    ChannelMixerConfig, LanguageModel, MixerConfig, ModelConfig, ModelError, State, presets,
};
use fastweight_ops::Offsets;

const VOCAB: usize = 40;

fn mole(experts: usize, shared: bool) -> ChannelMixerConfig {
    ChannelMixerConfig::Mole(MoleConfig { experts, shared, ..MoleConfig::default() })
}

/// Attention and a recurrent mixer; lookup experts in every layer, and in every other one.
fn configs() -> Vec<ModelConfig> {
    let model = |layers, mixers: &[&str], channel_mixers| {
        let mixers: Vec<MixerConfig> =
            mixers.iter().map(|name| MixerConfig::by_name(name).unwrap()).collect();
        ModelConfig {
            channel_mixers,
            mixers: mixers.clone(),
            ..ModelConfig::new(VOCAB, 16, layers, 2, mixers[0].clone())
        }
    };
    let narrow = MoleConfig { experts: 3, expert_hidden: Some(5), ..MoleConfig::default() };
    vec![
        model(2, &["softmax_attention"], vec![mole(4, true)]),
        ModelConfig { embedding_norm: true, ..model(2, &["gated_delta_net"], vec![mole(2, false)]) },
        ModelConfig {
            tied: true,
            ..model(
                4,
                &["gated_delta_net", "softmax_attention"],
                vec![ChannelMixerConfig::default(), ChannelMixerConfig::Mole(narrow)],
            )
        },
    ]
}

fn tokens(batch: usize, time: usize, seed: usize) -> Tensor<2, Int> {
    let ids: Vec<i64> =
        (0..batch * time).map(|i| ((i * 7919 + seed * 104_729 + i * i) % VOCAB) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [batch, time]), &Device::flex())
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.to_data().try_to_vec().unwrap()
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 5e-6 * b.abs().max(1.0), "{what}: value {i} is {a}, expected {b}");
    }
}

/// A model whose experts matter: larger than a start draws them.
fn trained(config: &ModelConfig) -> LanguageModel {
    let model = config.init(5, &Device::flex()).unwrap();
    let weights = export(&model);
    fastweight_memory::parameters::import(model, |info| {
        let (_, data) = weights.iter().find(|(name, _)| *name == info.name)?;
        let factor = if info.name.contains("experts") || info.name.contains("router") { 3.0 } else { 1.0 };
        let values: Vec<f32> = data.iter::<f32>().map(|v| factor * v).collect();
        Some(TensorData::new(values, info.shape.clone()))
    })
    .unwrap()
}

/// Logits of all tokens at once.
fn whole(model: &LanguageModel, ids: Tensor<2, Int>) -> Vec<f32> {
    values(&model.forward(ids, None, None).unwrap().0)
}

#[test]
fn tables_give_the_logits_of_the_networks() {
    for config in configs() {
        let model = trained(&config);
        let tables = model.export_tables().unwrap();
        assert_eq!(tables.num_params(), tables.config().parameter_count());
        let what = format!("{config:?}");
        let ids = tokens(2, 37, 1);
        let expected = whole(&model, ids.clone());
        assert_close(&what, &whole(&tables, ids.clone()), &expected);
        // One token after the other, and a prompt first.
        for prompt in [0, 20] {
            let mut state = tables.zero_state(2, &Device::flex());
            let mut parts = Vec::new();
            if prompt > 0 {
                let (logits, next) =
                    tables.forward(ids.clone().narrow(1, 0, prompt), Some(state), None).unwrap();
                (state, parts) = (next, vec![logits]);
            }
            for t in prompt..37 {
                let (logits, next) = tables.step(ids.clone().narrow(1, t, 1).squeeze_dim(1), state).unwrap();
                state = next;
                parts.push(logits.unsqueeze_dim(1));
            }
            assert_close(&what, &values(&Tensor::cat(parts, 1)), &expected);
        }
        // Packed documents, and each of them alone.
        let offsets = Offsets::from_lengths(&[5, 31, 1]);
        let ids = tokens(1, 37, 2);
        let packed = |model: &LanguageModel| {
            let (logits, state) = model.forward(ids.clone(), None, Some(&offsets)).unwrap();
            assert_eq!(state.batch(), 3);
            values(&logits)
        };
        assert_close(&what, &packed(&tables), &packed(&model));
        for range in offsets.ranges() {
            let alone = whole(&tables, ids.clone().narrow(1, range.start, range.len()));
            assert_close(&what, &packed(&tables)[range.start * VOCAB..range.end * VOCAB], &alone);
        }
        // Not because the experts do nothing.
        let foreign = trained(&config).export_tables().unwrap();
        let off = fastweight_memory::parameters::import(foreign, |info| {
            let (_, data) = export(&tables).into_iter().find(|(name, _)| *name == info.name)?;
            let zero = if info.name.contains("table") { 0.0 } else { 1.0 };
            let values: Vec<f32> = data.iter::<f32>().map(|v| zero * v).collect();
            Some(TensorData::new(values, info.shape.clone()))
        });
        let without = whole(&off.unwrap(), tokens(2, 37, 1));
        let change = without.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(change > 1e-3, "{what}: {change}");
    }
}

#[test]
fn a_loaded_export_is_the_exported_model() {
    for config in configs() {
        let tables = trained(&config).export_tables().unwrap();
        let weights = export(&tables);
        let text = serde_json::to_string(tables.config()).unwrap();
        let described: ModelConfig = serde_json::from_str(&text).unwrap();
        assert_eq!(&described, tables.config());
        let loaded =
            fastweight_memory::parameters::import(described.build(&Device::flex()).unwrap(), |info| {
                weights.iter().find(|(name, _)| *name == info.name).map(|(_, data)| data.clone())
            });
        let ids = tokens(1, 12, 4);
        assert_eq!(whole(&loaded.unwrap(), ids.clone()), whole(&tables, ids));
    }
}

#[test]
fn bytes_of_both_forms_are_those_of_the_tensors() {
    let stored = |model: &LanguageModel, layer: usize| -> usize {
        let place = format!("blocks.{layer}.mlp.experts.");
        let weights = export(model).into_iter().filter(|(name, _)| name.starts_with(&place));
        weights.map(|(_, data)| data.as_bytes().len()).sum()
    };
    for config in configs() {
        let model = trained(&config);
        let tables = model.export_tables().unwrap();
        let found = config.experts().unwrap();
        let layers: Vec<usize> = found.iter().map(|layer| layer.layer).collect();
        let expected: Vec<usize> =
            (0..config.layers).filter(|layer| config.channel_mixer(*layer).name() == "mole").collect();
        assert_eq!(layers, expected);
        for (of, after) in found.iter().zip(tables.config().experts().unwrap()) {
            assert_eq!(of.networks.stored, stored(&model, of.layer));
            assert_eq!(of.networks.per_token, of.networks.stored);
            assert_eq!(of.tables.stored, stored(&tables, of.layer));
            assert_eq!(of.tables.stored, VOCAB * of.tables.per_token);
            assert_eq!(of.tables.per_token, of.experts * config.width * 4);
            assert_eq!((of.are_tables, after.are_tables), (false, true));
            assert_eq!((after.networks, after.tables), (of.networks, of.tables));
        }
    }
    assert!(ModelConfig::default().experts().unwrap().is_empty());
}

#[test]
fn a_model_without_lookup_experts_is_not_exported() {
    let plain = ModelConfig::new(VOCAB, 16, 1, 2, MixerConfig::by_name("delta_net").unwrap());
    let tables = trained(&configs()[0]).export_tables().unwrap();
    // One layer, so that the second channel mixer has none.
    let unused =
        ModelConfig { channel_mixers: vec![ChannelMixerConfig::default(), mole(2, true)], ..plain.clone() };
    for (model, found) in
        [(trained(&plain), "swiglu"), (tables, "mole with tables"), (trained(&unused), "swiglu")]
    {
        let Err(ModelError::Setting { setting, found: name, .. }) = model.export_tables() else {
            panic!("{found} was exported");
        };
        assert_eq!((setting, name.as_str()), ("channel_mixers", found));
    }
}

#[test]
fn the_presets_have_attention_and_lookup_experts() {
    let config = presets::by_name("mole-tiny").unwrap();
    assert_eq!((config.mixer(0).name(), config.channel_mixer(0).name()), ("softmax_attention", "mole"));
    assert_eq!(config.experts().unwrap().len(), config.layers);
    assert_eq!(config, toml::from_str(&toml::to_string(&config).unwrap()).unwrap());
}
