//! Lookup experts: against a plain float64 definition, as networks and as tables; gradients, counts, options, errors.

mod common;

use burn::tensor::{Device, Int, Tensor, TensorData};
use common::*;
use fastweight_memory::channel::{ChannelMixer, ChannelMixerConfig, Experts, Mole};
use fastweight_memory::parameters::{ParameterGroup, export, import, list};
use fastweight_memory::{LayerContext, MemoryError, Shared};

const VOCAB: usize = 1030; // More than the rows of a table that are computed at once.
const EPS: f64 = 1e-5;

/// The second of three layers, whose shared map has 10 channels inside.
fn context() -> LayerContext {
    let sizes = LayerContext {
        layer: 1,
        layers: 3,
        mlp_hidden: Some(10),
        vocab: VOCAB,
        seed: 3,
        norm_eps: EPS,
        ..LayerContext::new(WIDTH, 2)
    };
    LayerContext { ..sizes }
}

/// The options that change the way through the code.
fn configs() -> Vec<(&'static str, ChannelMixerConfig)> {
    [
        "kind = 'mole'",
        "kind = 'mole'\nexperts = 1\nexpert_hidden = 3",
        "kind = 'mole'\nexperts = 3\nexpert_hidden = 17\nshared = false",
        "kind = 'mole'\ntables = true",
        "kind = 'mole'\nexperts = 5\nshared = false\ntables = true",
    ]
    .map(|recipe| (recipe, toml::from_str(recipe).unwrap()))
    .into()
}

fn networks() -> impl Iterator<Item = (&'static str, ChannelMixerConfig)> {
    configs().into_iter().filter(|(name, _)| !name.contains("tables"))
}

fn build(config: &ChannelMixerConfig, device: &Device) -> ChannelMixer {
    config.init(&context(), device).unwrap()
}

fn ids(shape: [usize; 2], seed: usize) -> Vec<i64> {
    (0..shape[0] * shape[1]).map(|i| ((i * 7919 + seed * 104_729 + i * i) % VOCAB) as i64).collect()
}

fn embedding(device: &Device) -> Tensor<2> {
    input([VOCAB, WIDTH], 77, device)
}

/// What a model with [`embedding`] shares at the tokens of `seed`.
fn shared([batch, time]: [usize; 2], seed: usize, device: &Device) -> Shared {
    let tokens =
        Tensor::<2, Int>::from_data(TensorData::new(ids([batch, time], seed), [batch, time]), device);
    let rows = embedding(device).select(0, tokens.clone().flatten::<1>(0, 1));
    Shared { embedded: Some(rows.reshape([batch, time, WIDTH])), tokens: Some(tokens), ..Shared::default() }
}

fn forward(mixer: &ChannelMixer, x: Tensor<3>, shared: &Shared) -> Tensor<3> {
    let (y, state) = mixer.forward(x, None, None, shared).unwrap();
    assert!(state.is_none());
    y
}

fn mole(mixer: &ChannelMixer) -> &Mole {
    match mixer {
        ChannelMixer::Mole(mole) => mole,
        other => panic!("{other:?}"),
    }
}

/// A parameter by name, in double precision.
struct Weights(Vec<(String, TensorData)>);

impl Weights {
    fn get(&self, name: &str) -> Vec<f64> {
        let found = self.0.iter().find(|(known, _)| known == name);
        found.unwrap_or_else(|| panic!("no {name}")).1.iter::<f64>().collect()
    }

    fn swiglu(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let matrix = |part: &str| self.get(&format!("{name}.{part}.weight"));
        let (gate, up) = (product(x, &matrix("gate")), product(x, &matrix("up")));
        let inside: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        product(&inside, &matrix("down"))
    }

    /// One expert's output for the vector of one token.
    fn expert(&self, expert: usize, vector: &[f64]) -> Vec<f64> {
        let square = vector.iter().map(|e| e * e).sum::<f64>() / vector.len() as f64;
        let weight = self.get("experts.norm.weight");
        let normed: Vec<f64> =
            vector.iter().zip(weight).map(|(e, w)| e / (square + EPS).sqrt() * w).collect();
        self.swiglu(&format!("experts.networks.{expert}"), &normed)
    }
}

/// `x W`, W `[inputs, outputs]`.
fn product(x: &[f64], matrix: &[f64]) -> Vec<f64> {
    let outputs = matrix.len() / x.len();
    (0..outputs).map(|j| x.iter().enumerate().map(|(i, x)| x * matrix[i * outputs + j]).sum()).collect()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let all: f64 = x.iter().map(|x| x.exp()).sum();
    x.iter().map(|x| x.exp() / all).collect()
}

#[test]
fn the_layer_is_its_plain_definition() {
    let device = Device::flex();
    for (name, config) in configs() {
        let mixer = build(&config, &device);
        let weights = Weights(export(&mixer));
        let (x, shared) = (input([2, 5, WIDTH], 4, &device), shared([2, 5], 1, &device));
        let found = values(&forward(&mixer, x.clone(), &shared));
        let (x, ids) = (values(&x), ids([2, 5], 1));
        let embedding = values(&embedding(&device));
        let mut expected = Vec::new();
        for (x, id) in x.chunks_exact(WIDTH).zip(ids) {
            let wide = |part: &[f32]| part.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
            let (x, vector) = (wide(x), wide(&embedding[id as usize * WIDTH..][..WIDTH]));
            let gates = softmax(&product(&x, &weights.get("router.weight")));
            let mut y = if name.contains("shared") { vec![0.0; WIDTH] } else { weights.swiglu("shared", &x) };
            for (expert, gate) in gates.iter().enumerate() {
                let output = if name.contains("tables") {
                    let row = (id as usize * gates.len() + expert) * WIDTH;
                    weights.get("experts.table")[row..row + WIDTH].to_vec()
                } else {
                    weights.expert(expert, &vector)
                };
                y.iter_mut().zip(output).for_each(|(y, o)| *y += gate * o);
            }
            expected.extend(y.into_iter().map(|y| y as f32));
        }
        assert_close(name, &found, &expected, 2e-6);
        assert!(expected.iter().any(|y| y.abs() > 1e-3), "{name}: the outputs are all near zero");
    }
}

#[test]
fn tables_hold_what_the_networks_give_and_are_the_same_map() {
    let device = Device::flex();
    for (name, config) in networks() {
        let mixer = build(&config, &device);
        let tables = mixer.to_tables(embedding(&device)).unwrap();
        let Experts::Tables(table) = &mole(&tables).experts else { panic!("{name}: no tables") };
        let (weights, vectors) = (Weights(export(&mixer)), values(&embedding(&device)));
        let [vocab, experts, width] = table.table.val().dims();
        assert_eq!((vocab, width), (VOCAB, WIDTH));
        let found = values(&table.table.val());
        for id in [0, 1, 511, 1023, 1024, VOCAB - 1] {
            let vector: Vec<f64> = vectors[id * WIDTH..][..WIDTH].iter().map(|v| f64::from(*v)).collect();
            for expert in 0..experts {
                let expected: Vec<f32> =
                    weights.expert(expert, &vector).into_iter().map(|y| y as f32).collect();
                let row = &found[(id * experts + expert) * WIDTH..][..WIDTH];
                assert_close(&format!("{name}, token {id}, expert {expert}"), row, &expected, 2e-6);
            }
        }
        let (x, shared) = (input([3, 40, WIDTH], 5, &device), shared([3, 40], 2, &device));
        let [a, b] = [&mixer, &tables].map(|map| values(&forward(map, x.clone(), &shared)));
        assert_close(name, &b, &a, 2e-6);
        // Tables of tables are the same ones, and other maps have none.
        let again = tables.to_tables(embedding(&device)).unwrap();
        assert!(export(&again) == export(&tables), "{name}");
    }
    let plain = build(&ChannelMixerConfig::default(), &device);
    assert!(export(&plain.to_tables(embedding(&device)).unwrap()) == export(&plain));
    assert_eq!(plain.expert_bytes(), None);
}

#[test]
fn every_token_is_mapped_alone() {
    let device = Device::flex();
    for (name, config) in configs() {
        let mixer = build(&config, &device);
        let (x, all) = (input([2, 7, WIDTH], 6, &device), shared([2, 7], 3, &device));
        let whole = values(&forward(&mixer, x.clone(), &all));
        let tokens = all.tokens.unwrap();
        let embedded = all.embedded.unwrap();
        for row in 0..2 {
            for t in 0..7 {
                let own = Shared {
                    tokens: Some(tokens.clone().narrow(0, row, 1).narrow(1, t, 1)),
                    embedded: Some(embedded.clone().narrow(0, row, 1).narrow(1, t, 1)),
                    ..Shared::default()
                };
                let alone = forward(&mixer, x.clone().narrow(0, row, 1).narrow(1, t, 1), &own);
                let part = &whole[(row * 7 + t) * WIDTH..][..WIDTH];
                assert_close(&format!("{name}, row {row}, token {t}"), part, &values(&alone), 1e-6);
            }
        }
    }
}

#[test]
fn gradients_are_those_of_the_loss() {
    let device = Device::flex().autodiff();
    for (name, config) in configs() {
        let mixer = build(&config, &device);
        let x = input([2, 3, WIDTH], 7, &device).require_grad();
        let mut all = shared([2, 3], 4, &device);
        let embedded = all.embedded.take().unwrap().detach().require_grad();
        let weight = || input([2, 3, WIDTH], 8, &device);
        let loss = |mixer: &ChannelMixer, x: Tensor<3>, embedded: Tensor<3>| {
            let shared = Shared { embedded: Some(embedded), ..all.clone() };
            (forward(mixer, x, &shared) * weight()).sum()
        };
        let scalar = |loss: Tensor<1>| f64::from(loss.into_scalar::<f32>());
        let grads = loss(&mixer, x.clone(), embedded.clone()).backward();
        let step = 1e-2f32;
        let check = |what: &str, at: &dyn Fn(f32) -> f64, expected: f64| {
            let slope = |step: f32| (at(step) - at(-step)) / (2.0 * f64::from(step));
            let found = (4.0 * slope(step) - slope(2.0 * step)) / 3.0;
            let tolerance = 1e-2 * expected.abs() + 1e-3;
            assert!((found - expected).abs() <= tolerance, "{name}, {what}: {found} against {expected}");
        };
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        let parameters = gradients(&mixer, &grads);
        assert_eq!(parameters.len(), list(&mixer).len());
        for (chosen, (parameter, gradient)) in parameters.iter().enumerate() {
            let gradient = gradient.as_ref().unwrap_or_else(|| panic!("{name}, {parameter}: no gradient"));
            // One expert has the whole weight, whatever its router says.
            let blind = name.contains("experts = 1") && parameter == "router.weight";
            assert_eq!(gradient.iter().all(|g| *g == 0.0), blind, "{name}, {parameter}");
            let norm = dot(gradient, gradient).sqrt().max(1e-6) as f32;
            let directions: Vec<Vec<f32>> = parameters
                .iter()
                .enumerate()
                .map(|(i, (_, other))| {
                    let other = other.as_ref().unwrap();
                    let random = numbers(other.len(), 20 + i as u64);
                    let on = if i == chosen { 1.0 } else { 0.0 };
                    other.iter().zip(random).map(|(g, r)| on * (g / norm + 0.3 * r)).collect()
                })
                .collect();
            let at = |by: f32| scalar(loss(&moved(&mixer, &directions, by), x.clone(), embedded.clone()));
            check(parameter, &at, dot(gradient, &directions[chosen]));
        }
        let direction = input([2, 3, WIDTH], 9, &device);
        let along =
            |of: &Tensor<3>| of.grad(&grads).map_or(0.0, |grad| dot(&values(&grad), &values(&direction)));
        let at = |by: f32| scalar(loss(&mixer, x.clone() + direction.clone() * by, embedded.clone()));
        check("x", &at, along(&x));
        let at = |by: f32| scalar(loss(&mixer, x.clone(), embedded.clone() + direction.clone() * by));
        check("the vectors of the tokens", &at, along(&embedded));
        assert_eq!(along(&embedded) == 0.0, name.contains("tables"), "{name}");
    }
}

#[test]
fn a_zero_input_and_equal_logits_have_finite_gradients() {
    let device = Device::flex().autodiff();
    for (name, config) in configs() {
        let mixer = build(&config, &device);
        let x = Tensor::zeros([1, 4, WIDTH], &device).require_grad();
        let mut zero = shared([1, 4], 5, &device);
        zero.embedded = Some(Tensor::zeros([1, 4, WIDTH], &device));
        let grads = forward(&mixer, x.clone(), &zero).sum().backward();
        for (parameter, gradient) in gradients(&mixer, &grads) {
            let gradient = gradient.unwrap_or_default();
            assert!(gradient.iter().all(|g| g.is_finite()), "{name}, {parameter}");
        }
        assert!(values(&x.grad(&grads).unwrap()).iter().all(|g| g.is_finite()), "{name}");
    }
}

#[test]
fn parameters_are_counted_named_grouped_seeded_and_loaded() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        for (name, config) in configs() {
            let mixer = build(&config, &device);
            let weights = export(&mixer);
            let count: usize = weights.iter().map(|(_, data)| data.num_elements()).sum();
            assert_eq!(count, config.parameter_count(&context()), "{name}");
            for (parameter, data) in &weights {
                assert!(data.iter::<f32>().all(f32::is_finite), "{name}, {parameter}");
                assert!(data.iter::<f32>().any(|v| v != 0.0), "{name}, {parameter} is all zero");
            }
            let stored: usize = weights
                .iter()
                .filter(|(parameter, _)| parameter.starts_with("experts."))
                .map(|(_, data)| data.as_bytes().len())
                .sum();
            let bytes = mixer.expert_bytes().unwrap();
            assert_eq!(bytes.stored, stored, "{name}");
            let gates = weights.iter().find(|(parameter, _)| parameter == "router.weight").unwrap();
            let experts = gates.1.num_elements() / WIDTH;
            let read = if name.contains("tables") { experts * WIDTH * 4 } else { stored };
            assert_eq!(bytes.per_token, read, "{name}");

            device.seed(99);
            assert!(weights == export(&build(&config, &device)), "{name}: the same seed gives other weights");
            let other = config.init(&LayerContext { seed: 4, ..context() }, &device).unwrap();
            assert!(weights != export(&other), "{name}: another seed gives the same weights");
            let loaded = import(other, |info| {
                weights.iter().find(|(name, _)| *name == info.name).map(|(_, data)| data.clone())
            });
            assert!(weights == export(&loaded.unwrap()), "{name}: loading changes weights");
        }
    }
    let names = |recipe: &str| {
        let config: ChannelMixerConfig = toml::from_str(recipe).unwrap();
        let listed = list(&build(&config, &Device::flex()));
        let decays = |group| if group == ParameterGroup::Decay { "" } else { " (no decay)" };
        listed.into_iter().map(|info| format!("{}{}", info.name, decays(info.group))).collect::<Vec<_>>()
    };
    let expected = [
        "router.weight",
        "shared.gate.weight",
        "shared.up.weight",
        "shared.down.weight",
        "experts.norm.weight (no decay)",
        "experts.networks.0.gate.weight",
        "experts.networks.0.up.weight",
        "experts.networks.0.down.weight",
    ];
    assert_eq!(names("kind = 'mole'\nexperts = 1"), expected);
    let expected = ["router.weight", "experts.table (no decay)"];
    assert_eq!(names("kind = 'mole'\nshared = false\ntables = true"), expected);
}

#[test]
fn options_are_read_and_checked() {
    let config: ChannelMixerConfig = toml::from_str("kind = 'mole'\nexperts = 16").unwrap();
    assert_eq!(config.name(), "mole");
    assert_eq!(config, toml::from_str(&toml::to_string(&config).unwrap()).unwrap());
    assert_eq!(ChannelMixerConfig::by_name("mole").unwrap().hidden(&context()), 10);
    let unknown = toml::from_str::<ChannelMixerConfig>("kind = 'mole'\nexpert = 16").unwrap_err().to_string();
    assert!(unknown.contains("experts"), "{unknown}");
    for (recipe, words) in [
        ("experts = 0", "mole: experts is 0, expected at least 1"),
        ("experts = 4097", "mole: experts is 4097, expected at most 4096"),
        ("expert_hidden = 0", "mole: expert_hidden is 0, expected at least 1"),
        ("expert_hidden = 99999999", "mole: expert_hidden is 99999999, expected at most"),
    ] {
        let config: ChannelMixerConfig = toml::from_str(&format!("kind = 'mole'\n{recipe}")).unwrap();
        let error = config.init(&context(), &Device::flex()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let tables: ChannelMixerConfig = toml::from_str("kind = 'mole'\ntables = true").unwrap();
    let alone = LayerContext { vocab: 0, ..context() };
    let error = tables.build(&alone, &Device::flex()).unwrap_err().to_string();
    assert!(error.contains("mole: vocab is 0"), "{error}");
    // Sizes beyond any memory are counted without overflow.
    let most = LayerContext { width: usize::MAX, vocab: usize::MAX, ..context() };
    assert_eq!(tables.parameter_count(&most), usize::MAX);
    assert_eq!(config.parameter_count(&most), usize::MAX);
}

#[test]
fn what_does_not_fit_is_refused_with_a_reason() {
    let device = Device::flex();
    let refused = |mixer: &ChannelMixer, x: [usize; 3], shared: &Shared| {
        mixer.forward(Tensor::zeros(x, &device), None, None, shared).unwrap_err()
    };
    let whole = shared([2, 3], 1, &device);
    let at = [2, 3, WIDTH];
    for (name, config) in configs() {
        let mixer = build(&config, &device);
        let (what, field) = match name.contains("tables") {
            true => ("token ids", "tokens"),
            false => ("the tokens' vectors", "embedded"),
        };
        let missing = MemoryError::Missing { layer: "mole", what, field };
        assert_eq!(refused(&mixer, at, &Shared::default()), missing, "{name}");
        for (x, shared) in [([2, 3, WIDTH + 1], &whole), (at, &shared([2, 4], 1, &device))] {
            let error = refused(&mixer, x, shared);
            assert!(matches!(error, MemoryError::Input { layer: "mole", .. }), "{name}: {error}");
        }
        let narrow = Tensor::zeros([VOCAB, WIDTH - 1], &device);
        assert_eq!(mixer.to_tables(narrow).is_err(), !name.contains("tables"), "{name}");
        for id in [-1, VOCAB as i64] {
            let mut foreign = whole.clone();
            foreign.tokens = Some(Tensor::from_data(TensorData::new(vec![id; 6], [2, 3]), &device));
            let result = mixer.forward(Tensor::zeros(at, &device), None, None, &foreign);
            assert_eq!(result.is_err(), name.contains("tables"), "{name}");
            if let Err(error) = result {
                assert!(error.to_string().contains(&format!("a token id is {id}")), "{error}");
            }
        }
    }
}
