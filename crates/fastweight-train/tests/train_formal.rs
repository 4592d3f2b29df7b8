//! Formal languages in training: packed strings, scores by length.

mod common;

use burn::tensor::{Int, Tensor, TensorData};
use common::{device, losses, open, weights};
use fastweight_models::LanguageModel;
use fastweight_tasks::formal::evaluation_batch;
use fastweight_tasks::{Tally, TokenBatch};
use fastweight_train::evaluate::{LengthScore, by_length, score};
use fastweight_train::task::Metric;
use fastweight_train::{Recipe, Task, Trainer};

fn parity(train: &str, mixer: &str) -> Recipe {
    let text = format!(
        "name = \"test\"\n[task]\nkind = \"formal_language\"\nlanguage = \"parity\"\nshortest = 2\nlongest = 9\n\
         [train]\nlearning_rate = 1e-2\n{train}\n\
         [model]\nname = \"{mixer}\"\nmixers = [\"{mixer}\"]\nwidth = 16\nlayers = 2\nheads = 2\n"
    );
    Recipe::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// The most likely token after every symbol, each string read alone.
fn alone(model: &LanguageModel, strings: &TokenBatch) -> Vec<u32> {
    let mut answers = Vec::new();
    for (tokens, _) in strings.rows() {
        let ids: Vec<i64> = tokens.iter().map(|&id| i64::from(id)).collect();
        let size = ids.len();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, size]), &device());
        let logits: Vec<f32> = model.forward(tokens, None, None).unwrap().0.into_data().try_to_vec().unwrap();
        let best = |row: &[f32]| (0..4u32).max_by(|&a, &b| row[a as usize].total_cmp(&row[b as usize]));
        answers.extend(logits.chunks(4).map(|row| best(row).unwrap()));
    }
    answers
}

#[test]
fn packed_strings_are_scored_like_strings_read_alone() {
    for mixer in ["softmax_attention", "mamba2", "delta_net", "gated_delta_net"] {
        let (task, model) = open(&parity("steps = 1\nbatch = 1", mixer));
        let model = model.config.init(5, &device()).unwrap();
        let result = score(&model, &task, 1).unwrap();
        let bins = result.bins.unwrap();
        assert_eq!((result.metric, result.score), (Metric::Strings, bins[1].strings), "{mixer}");
        assert_eq!((bins[0].shortest, bins[0].longest, bins[0].tested), (2, 9, 64));
        assert_eq!((bins[1].shortest, bins[1].longest, bins[1].tested), (10, 18, 64));
        let Task::Formal(config) = &task else { panic!("a formal language") };
        for bin in bins {
            let lengths = bin.shortest..=bin.longest;
            let strings = evaluation_batch(config.language, &lengths, 0, 64).unwrap();
            let answers = alone(&model, &strings);
            let expected = fastweight_tasks::formal::score_strings(&strings, &answers).unwrap();
            let share = |tally: Tally| tally.correct as f64 / tally.total as f64;
            assert_eq!((bin.steps, bin.strings), (share(expected.steps), share(expected.strings)), "{mixer}");
            assert_eq!(bin.answers, strings.time);
        }
    }
}

#[test]
fn the_final_score_is_over_two_thousand_strings_of_each_bin() {
    let (task, model) = open(&parity("steps = 1\nbatch = 1", "linear_attention"));
    let model = model.config.init(5, &device()).unwrap();
    let whole = score(&model, &task, 0).unwrap();
    assert!(whole.bins.unwrap().iter().all(|bin| bin.tested == 2000));
    assert_eq!(whole, score(&model, &task, 1000).unwrap(), "there are no more");
    let lengths: Vec<usize> = by_length(&model, &task).unwrap().iter().map(|part| part.longest).collect();
    assert_eq!(lengths, [2, 4, 9, 18, 36], "a quarter, half, once, twice, four times the longest");
}

#[test]
fn strings_in_a_batch_do_not_see_each_other_in_training() {
    // The loss of a packed batch is the mean over its strings' symbols, whatever stands before them.
    for mixer in ["softmax_attention", "elu1_linear_attention", "gated_delta_net"] {
        let loss = |batch: usize, accumulate: usize| {
            let recipe = parity(&format!("steps = 1\nbatch = {batch}\naccumulate = {accumulate}"), mixer);
            let (task, model) = open(&recipe);
            let mut trainer = Trainer::new(&task, &recipe.train, &model, 3, &device()).unwrap();
            let loss = trainer.step().unwrap();
            (loss, trainer.position().tokens)
        };
        let ((packed, tokens), (apart, same)) = (loss(6, 1), loss(1, 6));
        assert!((packed - apart).abs() < 1e-5, "{mixer}: {packed} {apart}");
        assert_eq!(tokens, same);
        assert!((6 * 2..=6 * 9).contains(&(tokens as usize)));
    }
}

#[test]
fn training_learns_short_strings_and_is_the_same_twice() {
    let recipe = parity("steps = 60\nbatch = 16\nwarmup = 5\nweight_decay = 0.0", "delta_net");
    let (task, model) = open(&recipe);
    let train = || {
        let mut trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
        let losses = losses(&mut trainer, 60);
        (losses, weights(trainer.model()))
    };
    let (first, again) = (train(), train());
    assert_eq!(first, again);
    let loss = |step: usize| f64::from_bits(first.0[step]);
    // Guessing costs ln 2 = 0.69 a symbol once the model knows which tokens are answers.
    assert!(loss(0) > 1.0 && loss(59) < 0.5, "{} to {}", loss(0), loss(59));
}

#[test]
fn a_budget_in_tokens_counts_the_average_string() {
    let recipe = parity("tokens = 5500\nbatch = 10", "retnet");
    let (task, model) = open(&recipe);
    let trainer = Trainer::new(&task, &recipe.train, &model, 1, &device()).unwrap();
    assert_eq!(trainer.steps(), Some(100));
}

#[test]
fn scores_have_a_stable_form_on_disk() {
    let part = LengthScore { shortest: 2, longest: 9, tested: 64, answers: 352, steps: 0.5, strings: 0.25 };
    let text = serde_json::to_string(&part).unwrap();
    assert_eq!(
        text,
        "{\"shortest\":2,\"longest\":9,\"tested\":64,\"answers\":352,\"answers_right\":0.5,\"strings_right\":0.25}"
    );
    assert_eq!(serde_json::from_str::<LengthScore>(&text).unwrap(), part);
}
