//! Properties of the strings of formal languages, and how answers are scored.

use std::collections::HashSet;

use fastweight_tasks::formal::{FormalConfig, Language, StringTally, batch, evaluation_batch, score_strings};
use fastweight_tasks::{Tally, TaskError, TokenBatch};

fn parity() -> FormalConfig {
    FormalConfig::new(Language::Parity)
}

/// Every rule of a packed batch of parity strings of these lengths.
fn check(strings: &TokenBatch, count: usize, shortest: usize, longest: usize) {
    let lengths = strings.documents.as_ref().expect("packed documents");
    assert_eq!((lengths.len(), strings.batch), (count, 1));
    assert_eq!(lengths.iter().sum::<usize>(), strings.time);
    assert_eq!((strings.tokens.len(), strings.targets.len()), (strings.time, strings.time), "no padding");
    assert_eq!(strings.scored(), strings.time, "every symbol is asked about");
    assert!(lengths.iter().all(|length| (shortest..=longest).contains(length)), "{lengths:?}");
    assert_eq!(strings.rows().count(), count);
    for (tokens, targets) in strings.rows() {
        let mut ones = 0;
        for (bit, answer) in tokens.iter().zip(targets) {
            assert!(*bit < 2);
            ones += bit;
            assert_eq!(*answer, 2 + i64::from(ones % 2), "{tokens:?}");
        }
    }
}

#[test]
fn every_string_obeys_the_language_and_its_lengths() {
    let config = FormalConfig { shortest: 3, longest: 9, ..parity() };
    for seed in [0, 1, u64::MAX] {
        for index in [0, 5, u64::MAX] {
            check(&batch(&config, seed, index, 7).unwrap(), 7, 3, 9);
        }
    }
    for bin in config.bins() {
        check(
            &evaluation_batch(config.language, &bin, u64::MAX - 2, 7).unwrap(),
            7,
            *bin.start(),
            *bin.end(),
        );
    }
    assert_eq!(config.bins(), [3..=9, 10..=18]);
    assert_eq!(parity().bins(), [2..=50, 51..=100], "the published lengths");
    assert_eq!((config.vocab(), config.mean_length()), (4, 6.0));
}

#[test]
fn a_batch_is_a_pure_function_of_seed_and_index_however_strings_are_cut_into_batches() {
    let config = parity();
    let whole = batch(&config, 7, 3, 6).unwrap();
    assert_eq!(whole, batch(&config, 7, 3, 6).unwrap());
    assert_ne!(whole, batch(&config, 8, 3, 6).unwrap());
    assert_ne!(whole, batch(&config, 7, 4, 6).unwrap());
    let strings = |batch: &TokenBatch| -> Vec<Vec<u32>> { batch.rows().map(|row| row.0.to_vec()).collect() };
    let halves: Vec<Vec<u32>> =
        [6, 7].iter().flat_map(|index| strings(&batch(&config, 7, *index, 3).unwrap())).collect();
    assert_eq!(strings(&whole), halves);
    let bin = 51..=100;
    let all = strings(&evaluation_batch(config.language, &bin, 0, 6).unwrap());
    assert_eq!(all[4..], strings(&evaluation_batch(config.language, &bin, 4, 2).unwrap()));
}

#[test]
fn training_draws_from_as_many_strings_as_asked_for() {
    let config = FormalConfig { strings: 5, ..parity() };
    let seen = |config: &FormalConfig, seed| -> HashSet<Vec<u32>> {
        batch(config, seed, 0, 400).unwrap().rows().map(|row| row.0.to_vec()).collect()
    };
    assert_eq!(seen(&config, 1).len(), 5);
    assert_ne!(seen(&config, 1), seen(&config, 2), "the strings are the seed's");
    let long = FormalConfig { shortest: 40, ..parity() };
    assert!(seen(&long, 1).len() > 380, "10,000 strings rarely repeat");
    let tested: HashSet<Vec<u32>> = evaluation_batch(Language::Parity, &(40..=50), 0, 400)
        .unwrap()
        .rows()
        .map(|row| row.0.to_vec())
        .collect();
    assert!(seen(&long, 0).is_disjoint(&tested), "tests come from a stream of their own");
}

#[test]
fn lengths_and_answers_are_even() {
    let strings = batch(&parity(), 3, 0, 4000).unwrap();
    let lengths = strings.documents.as_ref().unwrap();
    for length in 2..=50 {
        let count = lengths.iter().filter(|l| **l == length).count() as f64;
        assert!((count - 4000.0 / 49.0).abs() < 50.0, "{count} strings of {length}");
    }
    let odd = strings.targets.iter().filter(|target| **target == 3).count() as f64;
    let share = odd / strings.time as f64;
    assert!((share - Language::Parity.chance()).abs() < 0.02, "{share}");
}

#[test]
fn a_string_counts_only_when_every_answer_is_right() {
    let strings = evaluation_batch(Language::Parity, &(2..=6), 0, 3).unwrap();
    let mut answers: Vec<u32> = strings.targets.iter().map(|target| *target as u32).collect();
    let all = strings.time;
    let tally = |steps, strings| StringTally {
        steps: Tally { correct: steps, total: all },
        strings: Tally { correct: strings, total: 3 },
    };
    assert_eq!(score_strings(&strings, &answers).unwrap(), tally(all, 3));
    let first = strings.documents.as_ref().unwrap()[0];
    answers[first] ^= 1; // the first answer of the second string
    assert_eq!(score_strings(&strings, &answers).unwrap(), tally(all - 1, 2));
    answers[first + 1] ^= 1; // and the second: still one string
    assert_eq!(score_strings(&strings, &answers).unwrap(), tally(all - 2, 2));
    answers[all - 1] ^= 1; // the last of the last
    assert_eq!(score_strings(&strings, &answers).unwrap(), tally(all - 3, 1));
    assert!(matches!(score_strings(&strings, &answers[1..]), Err(TaskError::Predictions { .. })));
}

#[test]
fn languages_have_names_and_a_typo_gets_a_suggestion() {
    for language in Language::ALL {
        assert_eq!(Language::by_name(language.name()).unwrap(), language);
        let text = serde_json::to_string(&language).unwrap();
        assert_eq!(text, format!("{:?}", language.name()));
    }
    let message = Language::by_name("partiy").unwrap_err().to_string();
    assert!(message.contains("did you mean \"parity\"?"), "{message}");
    let message = Language::by_name("xyz").unwrap_err().to_string();
    assert!(!message.contains("did you mean") && message.contains("the languages are parity"), "{message}");
}

#[test]
fn settings_out_of_range_are_refused() {
    let cases = [
        (FormalConfig { shortest: 0, ..parity() }, "shortest is 0"),
        (FormalConfig { longest: 0, ..parity() }, "longest is 0"),
        (FormalConfig { shortest: 9, longest: 8, ..parity() }, "at least shortest = 9"),
        (FormalConfig { longest: usize::MAX, ..parity() }, "at most 4194304"),
        (FormalConfig { strings: 0, ..parity() }, "strings is 0"),
    ];
    for (config, part) in cases {
        let message = batch(&config, 0, 0, 1).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
        assert_eq!(config.validate().unwrap_err().to_string(), message);
    }
    assert!(batch(&parity(), 0, 0, 0).unwrap_err().to_string().contains("batch is 0"));
    #[allow(clippy::reversed_empty_ranges)]
    for lengths in [0..=3, 5..=4] {
        let message = evaluation_batch(Language::Parity, &lengths, 0, 1).unwrap_err().to_string();
        assert!(message.contains("lengths"), "{message}");
    }
}
