//! Scores, speeds and generated tokens.

mod common;

use burn::tensor::{Int, Tensor, TensorData};
use common::{device, open, recall, text, text_file};
use fastweight_memory::{State, parameters};
use fastweight_models::LanguageModel;
use fastweight_train::evaluate::{decode_tokens_per_s, recall_by_pairs, score, state_bytes};
use fastweight_train::generate::{Generator, Sampling};
use fastweight_train::task::Metric;
use fastweight_train::{Task, TrainError};

/// A model of `mixer` whose head is zero, so that every token is equally likely.
fn uniform(model: LanguageModel) -> LanguageModel {
    let known: Vec<_> = parameters::export(&model);
    parameters::import(model, |info| {
        let (_, data) = known.iter().find(|(name, _)| *name == info.name)?;
        let zeros = || TensorData::zeros::<f32, _>(data.shape().to_vec());
        Some(if info.name.starts_with("head") { zeros() } else { data.clone() })
    })
    .unwrap()
}

fn text_task(mixer: &str) -> (tempfile::TempDir, Task, LanguageModel) {
    let folder = tempfile::tempdir().unwrap();
    let recipe = text("steps = 1\nbatch = 1", mixer);
    let task = Task::open(&recipe.task, Some(&text_file(folder.path()))).unwrap();
    let model = recipe.resolve_first(task.vocab()).unwrap().config.init(3, &device()).unwrap();
    (folder, task, model)
}

#[test]
fn a_model_that_knows_nothing_needs_eight_bits_a_byte_and_every_byte_counts_once() {
    for mixer in ["gated_delta_net", "softmax_attention"] {
        let (_folder, task, model) = text_task(mixer);
        let Task::Text(text) = &task else { panic!("a text task") };
        let result = score(&uniform(model), &task, 0).unwrap();
        assert!((result.score - 8.0).abs() < 1e-4, "{mixer}: {}", result.score);
        assert_eq!(result.scored, text.dataset.held_out_bytes(), "{mixer}");
        assert_eq!(result.metric, Metric::BitsPerByte);
        assert!(result.metric.reaches(1.0, 2.0) && !result.metric.reaches(3.0, 2.0));
    }
}

/// Mean loss of predicting `targets`, all read as one text.
fn loss_of_one_text(model: &LanguageModel, tokens: &[u32], targets: &[u32], skip: usize) -> f64 {
    let ids: Vec<i64> = tokens.iter().map(|&id| i64::from(id)).collect();
    let size = ids.len();
    let logits =
        model.forward(Tensor::<2, Int>::from_data(TensorData::new(ids, [1, size]), &device()), None, None);
    let logits: Vec<f32> = logits.unwrap().0.into_data().try_to_vec().unwrap();
    let vocab = logits.len() / size;
    let nats = |(row, target): (&[f32], &u32)| {
        let top = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - top).exp()).sum();
        sum.ln() - f64::from(row[*target as usize] - top)
    };
    let losses: Vec<f64> = logits.chunks(vocab).zip(targets).skip(skip).map(nats).collect();
    losses.iter().sum::<f64>() / losses.len() as f64
}

#[test]
fn fixed_states_are_carried_and_growing_ones_see_at_most_the_context() {
    for (mixer, carried) in [("gated_delta_net", true), ("softmax_attention", false)] {
        let (_folder, task, model) = text_task(mixer);
        let Task::Text(text) = &task else { panic!("a text task") };
        let held_out = text.dataset.held_out_tokens();
        let last = *text.dataset.train_tokens().last().unwrap();
        let lanes = (held_out.len() / 32).min(16);
        let time = held_out.len().div_ceil(lanes);
        let stream: Vec<u32> = [last].into_iter().chain(held_out.iter().copied()).collect();
        let (mut nats, mut count) = (0.0, 0);
        for start in (0..held_out.len()).step_by(time) {
            let end = (start + time).min(held_out.len());
            if carried {
                nats += loss_of_one_text(&model, &stream[start..end], &held_out[start..end], 0)
                    * (end - start) as f64;
                count += end - start;
            } else {
                for window in (start..end).step_by(16) {
                    let from = if window == start { start } else { window - 16 };
                    let to = (window + 16).min(end);
                    let skip = window - from;
                    nats += loss_of_one_text(&model, &stream[from..to], &held_out[from..to], skip)
                        * (to - window) as f64;
                    count += to - window;
                }
            }
        }
        let result = score(&model, &task, 0).unwrap();
        let expected = nats / count as f64;
        assert!(
            (result.loss.unwrap() - expected).abs() < 1e-4,
            "{mixer}: {:?} against {expected}",
            result.loss
        );
        let part = score(&model, &task, 1).unwrap();
        assert!(part.scored < result.scored && part.scored > 0);
    }
}

#[test]
fn recall_is_scored_for_every_number_of_pairs_that_fits() {
    let recipe = recall("steps = 1\nbatch = 1", &["delta_net"]);
    let (task, model) = open(&recipe);
    let model = model.config.init(1, &device()).unwrap();
    let result = score(&model, &task, 3).unwrap();
    assert_eq!((result.scored, result.metric), (3 * 64 * 2, Metric::Accuracy));
    assert!((0.0..0.5).contains(&result.score));
    let by_pairs = recall_by_pairs(&model, &task, 3).unwrap();
    assert_eq!(by_pairs.iter().map(|(pairs, _)| *pairs).collect::<Vec<_>>(), [1, 2, 4]);
    assert_eq!(by_pairs[1].1, result.score);
    assert_eq!(score(&model, &task, 3).unwrap(), result, "evaluation data is always the same");
}

#[test]
fn state_bytes_come_from_a_real_state_and_equal_the_ledger() {
    for mixer in ["softmax_attention", "elu1_linear_attention", "delta_net", "gated_delta_net"] {
        let (_, model) = open(&recall("steps = 1\nbatch = 1", &[mixer]));
        let built = model.config.init(1, &device()).unwrap();
        for tokens in [5, 16] {
            let real = state_bytes(&built, 32, tokens).unwrap();
            assert_eq!(real, model.config.state_bytes(tokens).total(), "{mixer} after {tokens}");
        }
        assert!(built.zero_state(1, &device()).bytes() <= state_bytes(&built, 32, 16).unwrap());
        assert!(decode_tokens_per_s(&built, 32, 4).unwrap() > 0.0);
    }
}

#[test]
fn the_same_seed_generates_the_same_tokens_twice_in_one_process() {
    for mixer in ["softmax_attention", "retnet", "gated_delta_net"] {
        let (_, model) = open(&recall("steps = 1\nbatch = 1", &[mixer]));
        let model = model.config.init(1, &device()).unwrap();
        let run = |sampling: Sampling| -> Vec<u32> {
            Generator::new(&model, &[1, 2, 3], sampling).unwrap().take(20).collect::<Result<_, _>>().unwrap()
        };
        let warm = |seed| Sampling { temperature: 1.5, top_p: 0.9, seed };
        assert_eq!(run(warm(1)), run(warm(1)), "{mixer}");
        assert_ne!(run(warm(1)), run(warm(2)), "{mixer}");
        let greedy = |seed| run(Sampling { temperature: 0.0, top_p: 1.0, seed });
        assert_eq!(greedy(1), greedy(2), "{mixer}: the most likely token needs no chance");
    }
}

#[test]
fn greedy_tokens_are_those_of_reading_everything_again() {
    for mixer in ["softmax_attention", "delta_net"] {
        let (_, model) = open(&recall("steps = 1\nbatch = 1", &[mixer]));
        let model = model.config.init(1, &device()).unwrap();
        let mut text = vec![4u32, 9, 2];
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        for token in Generator::new(&model, &text.clone(), sampling).unwrap().take(12) {
            let ids: Vec<i64> = text.iter().map(|&id| i64::from(id)).collect();
            let size = ids.len();
            let tokens = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, size]), &device());
            let logits =
                model.forward(tokens, None, None).unwrap().0.into_data().try_to_vec::<f32>().unwrap();
            let last = &logits[(size - 1) * 32..];
            let best = (0..32).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
            assert_eq!(token.as_ref().unwrap(), &(best as u32), "{mixer} after {size} tokens");
            text.push(token.unwrap());
        }
    }
}

#[test]
fn arguments_out_of_range_are_refused() {
    let (task, model) = open(&recall("steps = 1\nbatch = 1", &["delta_net"]));
    let model = model.config.init(1, &device()).unwrap();
    let refused = |prompt: &[u32], temperature, top_p| {
        let error = Generator::new(&model, prompt, Sampling { temperature, top_p, seed: 0 }).unwrap_err();
        assert!(matches!(error, TrainError::Argument { .. }) && error.is_input(), "{error}");
        error.to_string()
    };
    assert!(refused(&[], 1.0, 1.0).contains("empty"));
    assert!(refused(&[32], 1.0, 1.0).contains("token 32"));
    assert!(refused(&[1], -1.0, 1.0).contains("temperature"));
    assert!(refused(&[1], f64::NAN, 1.0).contains("temperature"));
    assert!(refused(&[1], 1.0, 0.0).contains("top-p"));
    let recipe = recall("steps = 1\nbatch = 1", &["delta_net"]);
    let message = Task::open(&recipe.task, Some("x".as_ref())).unwrap_err().to_string();
    assert!(message.contains("recall task makes its own"), "{message}");
    let message = Task::open(&text("steps = 1\nbatch = 1", "delta_net").task, None).unwrap_err().to_string();
    assert!(message.contains("the text is missing"), "{message}");
    assert!(score(&model, &task, 0).is_ok(), "at least one batch is scored");
}

#[test]
fn ids_without_a_token_are_never_chosen() {
    let (_folder, _task, model) = text_task("retnet");
    let known: Vec<bool> = (0..256).map(|id| id % 50 == 7).collect();
    for temperature in [0.0, 1.0] {
        let sampling = Sampling { temperature, ..Sampling::default() };
        let generator = Generator::new(&model, &[65, 66], sampling).unwrap().only(Some(known.clone()));
        let ids: Vec<u32> = generator.take(30).map(Result::unwrap).collect();
        assert!(ids.iter().all(|id| id % 50 == 7), "{ids:?}");
    }
}
