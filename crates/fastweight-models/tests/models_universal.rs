//! Models of several rounds: what a round is, when tokens halt, and what it costs.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fastweight_memory::Shared;
use fastweight_memory::parameters::{export, import};
use fastweight_models::{HaltingConfig, LanguageModel, MixerConfig, ModelConfig, State};

const VOCAB: usize = 20;
const WIDTH: usize = 16;

fn config(rounds: usize, threshold: Option<f64>) -> ModelConfig {
    let mixers = ["softmax_attention", "delta_net"].map(|name| MixerConfig::by_name(name).unwrap()).into();
    let halting = threshold.map(|threshold| HaltingConfig { threshold, ponder_cost: 0.5 });
    let one = ModelConfig::new(VOCAB, WIDTH, 2, 2, MixerConfig::by_name("delta_net").unwrap());
    ModelConfig { mixers, rounds, halting, ..one }
}

/// The model with signals and a halting map that are large enough to matter.
fn model(config: &ModelConfig, device: &Device) -> LanguageModel {
    let model = config.init(3, device).unwrap();
    let weights = export(&model);
    import(model, |info| {
        let data = weights.iter().find(|(name, _)| *name == info.name)?.1.clone();
        let scale = match info.name.as_str() {
            "embedding.weight" => 50.0,
            "rounds.embedding.weight" => 20.0,
            "rounds.halt.weight" => 3.0,
            "rounds.halt.bias" => -0.5,
            _ => return Some(data),
        };
        let values: Vec<f32> = data.iter::<f32>().map(|v| scale * v).collect();
        Some(TensorData::new(values, info.shape.clone()))
    })
    .unwrap()
}

fn tokens(batch: usize, time: usize) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..batch * time).map(|i| ((i * 7919 + i * i) % VOCAB) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [batch, time]), &Device::flex())
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.to_data().try_to_vec().unwrap()
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 2e-5 * b.abs().max(1.0), "{what}: value {i} is {a}, expected {b}");
    }
}

/// One round without a state, from its signal on.
fn round(model: &LanguageModel, x: Tensor<3>, round: usize) -> Tensor<3> {
    let signals = model.rounds.as_ref().unwrap().embedding.weight.val();
    let x = x + signals.narrow(0, round, 1).unsqueeze_dim::<3>(0);
    let mut shared = Shared::default();
    model.blocks.iter().fold(x, |x, block| block.forward(x, None, None, &mut shared).unwrap().0)
}

fn embedded(model: &LanguageModel, ids: Tensor<2, Int>) -> Tensor<3> {
    burn::tensor::module::embedding(model.embedding.weight.val(), ids)
}

#[test]
fn a_round_is_the_signal_and_then_every_block() {
    let model = model(&config(3, None), &Device::flex());
    let ids = tokens(2, 9);
    let x = (0..3).fold(embedded(&model, ids.clone()), |x, r| round(&model, x, r));
    let reading = model.read(ids, None, None).unwrap();
    assert!(reading.pondering.is_none() && reading.loads.is_empty());
    assert_close("hidden", &values(&reading.hidden), &values(&model.norm.forward(x).unwrap()));
}

#[test]
fn one_round_is_the_plain_model() {
    let device = Device::flex();
    let (plain, several) = (config(1, None), config(2, None));
    let model = plain.init(3, &device).unwrap();
    assert!(model.rounds.is_none());
    assert_eq!(model.num_params() + 2 * WIDTH, several.init(3, &device).unwrap().num_params());
    assert_eq!(serde_json::to_value(&plain).unwrap().get("rounds"), None);
    let x = embedded(&model, tokens(1, 6));
    let mut shared = Shared::default();
    let x = model.blocks.iter().fold(x, |x, block| block.forward(x, None, None, &mut shared).unwrap().0);
    let hidden = model.hidden(tokens(1, 6), None, None).unwrap().0;
    assert_eq!(values(&hidden), values(&model.norm.forward(x).unwrap()));
}

#[test]
fn tokens_halt_by_their_probabilities_and_the_output_is_the_mean_of_the_rounds() {
    const ROUNDS: usize = 4;
    const THRESHOLD: f32 = 0.8;
    let model = model(&config(ROUNDS, Some(f64::from(THRESHOLD))), &Device::flex());
    let halt = model.rounds.as_ref().unwrap().halt.as_ref().unwrap();
    let (weight, bias) = (values(&halt.weight.val()), values(&halt.bias.as_ref().unwrap().val())[0]);
    let ids = tokens(1, 40);
    let count = 40;
    let mut x = values(&embedded(&model, ids.clone()));
    let mut output = vec![0.0; x.len()];
    let (mut spent, mut taken, mut remainders) = (vec![0.0; count], vec![0.0; count], vec![0.0; count]);
    let mut running = vec![true; count];
    for r in 0..ROUNDS {
        let before = Tensor::from_data(TensorData::new(x.clone(), [1, count, WIDTH]), &Device::flex());
        let after = values(&round(&model, before, r));
        for t in (0..count).filter(|t| running[*t]).collect::<Vec<_>>() {
            let own = t * WIDTH..(t + 1) * WIDTH;
            x[own.clone()].copy_from_slice(&after[own.clone()]);
            let score: f32 = x[own.clone()].iter().zip(&weight).map(|(x, w)| x * w).sum::<f32>() + bias;
            let probability = 1.0 / (1.0 + (-score).exp());
            taken[t] += 1.0;
            let left = 1.0 - spent[t];
            running[t] = r + 1 < ROUNDS && spent[t] + probability < THRESHOLD;
            let share = if running[t] { probability } else { left };
            if !running[t] {
                remainders[t] = left;
            }
            spent[t] += share;
            own.for_each(|i| output[i] += share * x[i]);
        }
    }
    let reading = model.read(ids, None, None).unwrap();
    let pondering = reading.pondering.as_ref().unwrap();
    assert_eq!(values(&pondering.rounds), taken);
    assert!((1..=ROUNDS).all(|r| taken.contains(&(r as f32))), "tokens of every length: {taken:?}");
    assert_close("remainder", &values(&pondering.remainder), &remainders);
    let output: Tensor<3> = Tensor::from_data(TensorData::new(output, [1, count, WIDTH]), &Device::flex());
    assert_close("hidden", &values(&reading.hidden), &values(&model.norm.forward(output).unwrap()));
    let cost = taken.iter().chain(&remainders).sum::<f32>() / count as f32;
    assert_close("ponder cost", &values(&pondering.cost()), &[cost]);
    assert_close("loss", &values(&model.auxiliary_loss(&reading, 1.0).unwrap()), &[0.5 * cost]);
    assert_close("rounds", &[pondering.mean_rounds() as f32], &[taken.iter().sum::<f32>() / count as f32]);
}

#[test]
fn a_threshold_near_zero_stops_after_the_first_round() {
    let model = model(&config(3, Some(1e-9)), &Device::flex());
    let ids = tokens(2, 7);
    let reading = model.read(ids.clone(), None, None).unwrap();
    assert_eq!(reading.pondering.unwrap().mean_rounds(), 1.0);
    let first = round(&model, embedded(&model, ids), 0);
    assert_close("hidden", &values(&reading.hidden), &values(&model.norm.forward(first).unwrap()));
}

#[test]
fn every_round_has_a_state_of_its_own() {
    let device = Device::flex();
    let config = config(3, Some(0.9));
    let model = model(&config, &device);
    let (_, state) = model.forward(tokens(2, 5), None, None).unwrap();
    assert_eq!(state.layers.len(), 6);
    assert_eq!(state.bytes(), 2 * config.state_bytes(5).total());
    let places: Vec<_> =
        config.state_bytes(5).layers.iter().map(|bytes| (bytes.round, bytes.layer)).collect();
    assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
    // A state of the same blocks with another number of rounds.
    let fewer = ModelConfig { rounds: 2, ..config }.init(3, &device).unwrap();
    let error =
        model.forward(tokens(2, 1), Some(fewer.zero_state(2, &device)), None).unwrap_err().to_string();
    assert!(error.contains("holds 4 layers, the model has 6"), "{error}");
    // The rounds' states differ, and each row can be cleared.
    let named = state.named_tensors();
    let data = |name: &str| &named.iter().find(|(other, _)| other == name).unwrap().1;
    assert_ne!(data("blocks.1.memory"), data("blocks.3.memory"));
    let cleared = state.clear(&[0, 1]).unwrap();
    let [a, b] =
        [Some(cleared), None].map(|state| values(&model.forward(tokens(2, 3), state, None).unwrap().0));
    assert_close("cleared", &a, &b);
}

#[test]
fn the_ponder_cost_trains_the_halting() {
    let device = Device::flex().autodiff();
    let model = model(&config(3, Some(0.9)), &device);
    let ids = Tensor::from_data(tokens(1, 20).to_data(), &device);
    let reading = model.read(ids, None, None).unwrap();
    let gradients = model.auxiliary_loss(&reading, 0.0).unwrap().backward();
    let halt = model.rounds.as_ref().unwrap().halt.as_ref().unwrap();
    let bias = values(&halt.bias.as_ref().unwrap().val().grad(&gradients).unwrap())[0];
    // Halting sooner is cheaper.
    assert!(bias < 0.0, "{bias}");
}

#[test]
fn halting_is_refused_where_it_means_nothing() {
    for (threshold, words) in
        [(0.0, "threshold = 0,"), (1.5, "threshold = 1.5"), (f64::NAN, "threshold = NaN")]
    {
        let error = config(2, Some(threshold)).validate().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let halting = Some(HaltingConfig { ponder_cost: -1.0, ..HaltingConfig::default() });
    let error = ModelConfig { halting, ..config(2, None) }.validate().unwrap_err().to_string();
    assert!(error.contains("ponder_cost = -1"), "{error}");
}
