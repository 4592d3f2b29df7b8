//! Properties of the recall task, over every preset and purpose.

use std::collections::{BTreeMap, HashSet};

use fastweight_tasks::recall::{
    Filler, RecallConfig, batch, by_name, evaluation_batch, names, score_by_pairs,
};
use fastweight_tasks::{IGNORE, Tally, TokenBatch, score};

/// Every rule of the task on one row.
fn check_row(config: &RecallConfig, tokens: &[u32], targets: &[i64]) {
    let (n, half) = (config.pairs, config.vocab as u32 / 2);
    assert_eq!((tokens.len(), targets.len()), (config.length, config.length));
    let pairs: BTreeMap<u32, u32> = (0..n).map(|i| (tokens[2 * i], tokens[2 * i + 1])).collect();
    assert_eq!(pairs.len(), n, "keys differ");
    assert_eq!(pairs.values().collect::<HashSet<_>>().len(), n, "values differ");
    assert!(pairs.keys().all(|key| (1..half).contains(key)));
    assert!(pairs.values().all(|value| (half..config.vocab as u32).contains(value)));

    assert!(
        targets[..2 * n].iter().all(|&target| target == IGNORE),
        "nothing is asked while pairs are written"
    );
    let mut asked = HashSet::new();
    for t in 2 * n..config.length {
        assert!((tokens[t] as usize) < config.vocab);
        if targets[t] == IGNORE {
            assert!(!pairs.contains_key(&tokens[t]), "filler {} at {t} is a key of the row", tokens[t]);
            if config.filler == Filler::Zero {
                assert_eq!(tokens[t], 0);
            }
        } else {
            assert_eq!((t - 2 * n) % 2, 0);
            assert_eq!(targets[t], i64::from(pairs[&tokens[t]]), "the target at a key is its value");
            assert!(asked.insert(tokens[t]), "asked twice");
        }
    }
    assert_eq!(asked.len(), n, "every key is asked for");
}

fn check(config: &RecallConfig, rows: &TokenBatch, batch: usize) {
    assert_eq!((rows.batch, rows.time), (batch, config.length));
    assert_eq!(rows.rows().count(), batch);
    assert_eq!(rows.scored(), batch * config.pairs);
    for (tokens, targets) in rows.rows() {
        check_row(config, tokens, targets);
    }
}

#[test]
fn every_preset_obeys_every_rule() {
    for name in names() {
        let config = by_name(name).unwrap();
        for seed in [0, 1, u64::MAX] {
            for index in [0, 3, u64::MAX] {
                check(&config, &batch(&config, seed, index, 5).unwrap(), 5);
                check(&config, &evaluation_batch(&config, seed, index, 5).unwrap(), 5);
            }
        }
    }
}

#[test]
fn tightest_sizes_and_zero_filler_obey_every_rule() {
    for (vocab, length, pairs) in [(4, 4, 1), (5, 4, 1), (4, 9, 1), (34, 64, 16), (35, 67, 16), (18, 32, 8)] {
        for filler in [Filler::Random, Filler::Zero] {
            let config = RecallConfig { filler, ..RecallConfig::new(vocab, length, pairs) };
            check(&config, &batch(&config, 9, 0, 50).unwrap(), 50);
        }
    }
}

#[test]
fn published_sizes_are_presets() {
    for (length, pairs) in [(64, 4), (128, 8), (256, 16), (256, 32), (256, 64), (1024, 256)] {
        let config = by_name(&format!("t{length}_n{pairs}")).unwrap();
        assert_eq!(config, RecallConfig::new(8192, length, pairs));
        assert_eq!(config.power, 0.01);
    }
    assert_eq!(by_name("small_t64_n8").unwrap(), RecallConfig::new(256, 64, 8));
}

#[test]
fn a_batch_is_a_pure_function_of_config_seed_and_index() {
    let config = by_name("small_t64_n8").unwrap();
    let base = batch(&config, 1, 2, 4).unwrap();
    assert_eq!(base, batch(&config, 1, 2, 4).unwrap());
    assert_ne!(base, batch(&config, 1, 3, 4).unwrap());
    assert_ne!(base, batch(&config, 2, 2, 4).unwrap());
    let other = RecallConfig { power: 0.02, ..config.clone() };
    assert_ne!(base.tokens, batch(&other, 1, 2, 4).unwrap().tokens);
    assert_eq!(config.with_pairs(4), RecallConfig::new(256, 64, 4));
}

#[test]
fn rows_do_not_depend_on_the_batch_size() {
    let config = by_name("small_t64_n8").unwrap();
    let whole = batch(&config, 1, 0, 12).unwrap();
    for size in [1, 3, 4, 6] {
        let parts: Vec<u32> =
            (0..12 / size as u64).flat_map(|i| batch(&config, 1, i, size).unwrap().tokens).collect();
        assert_eq!(parts, whole.tokens);
    }
}

#[test]
fn evaluation_rows_are_not_training_rows() {
    let config = by_name("small_t32_n4").unwrap();
    let rows = |b: &TokenBatch| b.rows().map(|(tokens, _)| tokens.to_vec()).collect::<HashSet<_>>();
    let train = rows(&batch(&config, 0, 0, 2000).unwrap());
    assert_eq!(train.len(), 2000, "training rows repeat");
    for seed in [0, 1] {
        assert!(train.is_disjoint(&rows(&evaluation_batch(&config, seed, 0, 2000).unwrap())));
    }
}

/// With one pair nothing is drawn without replacement, so the share of each place is its probability.
#[test]
fn query_places_follow_the_power_law() {
    let config = RecallConfig::new(64, 42, 1);
    let rows = batch(&config, 3, 0, 40_000).unwrap();
    let mut counts = [0.0; 20];
    for (_, targets) in rows.rows() {
        let place = targets.iter().position(|&target| target != IGNORE).unwrap();
        counts[(place - 2) / 2] += 1.0;
    }
    let weights: Vec<f64> = (1..=20).map(|i| f64::from(i).powf(0.01 - 1.0)).collect();
    let total: f64 = weights.iter().sum();
    for (i, (count, weight)) in counts.iter().zip(&weights).enumerate() {
        let (expected, p) = (40_000.0 * weight / total, weight / total);
        let deviation = (40_000.0 * p * (1.0 - p)).sqrt();
        assert!((count - expected).abs() < 5.0 * deviation, "place {i}: {count} against {expected}");
    }
}

#[test]
fn every_token_is_used_as_key_value_and_filler() {
    let config = RecallConfig::new(16, 16, 2);
    let rows = batch(&config, 0, 0, 500).unwrap();
    let (mut keys, mut values, mut fillers) = (HashSet::new(), HashSet::new(), HashSet::new());
    for (tokens, targets) in rows.rows() {
        keys.extend([tokens[0], tokens[2]]);
        values.extend([tokens[1], tokens[3]]);
        fillers.extend((4..16).filter(|&t| targets[t] == IGNORE).map(|t| tokens[t]));
    }
    assert_eq!(keys, (1..8).collect());
    assert_eq!(values, (8..16).collect());
    assert_eq!(fillers, (0..16).collect());
}

/// The generator is part of every published figure: a change of a single bit has to be seen and meant.
#[test]
fn the_generator_has_not_drifted() {
    let hash = |b: &TokenBatch| {
        let bytes = b
            .tokens
            .iter()
            .flat_map(|t| t.to_le_bytes())
            .chain(b.targets.iter().flat_map(|t| t.to_le_bytes()));
        bytes.fold(0xcbf2_9ce4_8422_2325u64, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    };
    let config = by_name("small_t64_n8").unwrap();
    assert_eq!(hash(&batch(&config, 7, 11, 8).unwrap()), 7_343_291_825_093_617_093);
    assert_eq!(hash(&evaluation_batch(&config, 7, 11, 8).unwrap()), 3_127_149_765_098_899_941);
}

#[test]
fn scores_count_queries_only_and_by_pairs() {
    let config = by_name("small_t32_n4").unwrap();
    let mut rows = batch(&config, 0, 0, 3).unwrap();
    let more = batch(&config.with_pairs(8), 0, 0, 2).unwrap();
    rows.tokens.extend(&more.tokens);
    rows.targets.extend(&more.targets);
    rows.batch += more.batch;
    let mut answers: Vec<u32> =
        rows.targets.iter().map(|&target| u32::try_from(target).unwrap_or(0)).collect();
    assert_eq!(score(&rows, &answers).unwrap(), Tally { correct: 28, total: 28 });
    let wrong = rows.targets.iter().rposition(|&target| target != IGNORE).unwrap();
    answers[wrong] = 0;
    let by_pairs = score_by_pairs(&rows, &answers).unwrap();
    let expected = [(4, Tally { correct: 12, total: 12 }), (8, Tally { correct: 15, total: 16 })];
    assert_eq!(by_pairs, BTreeMap::from(expected));
    assert!(score_by_pairs(&rows, &answers[1..]).is_err());
}

#[test]
fn impossible_sizes_say_what_to_change() {
    let good = RecallConfig::new(256, 64, 8);
    for (config, words) in [
        (RecallConfig { pairs: 0, ..good.clone() }, ["pairs is 0", "at least 1"]),
        (RecallConfig { pairs: 17, ..good.clone() }, ["length is 64", "4 x pairs = 68"]),
        (RecallConfig { pairs: usize::MAX, ..good.clone() }, ["length is 64", "fewer pairs"]),
        (RecallConfig { vocab: 17, ..good.clone() }, ["vocab is 17", "= 18"]),
        (RecallConfig { vocab: 0, ..good.clone() }, ["vocab is 0", "= 18"]),
        (RecallConfig { vocab: usize::MAX, ..good.clone() }, ["vocab is", "32-bit"]),
        (RecallConfig { power: 0.0, ..good.clone() }, ["power is 0", "above 0"]),
        (RecallConfig { power: f64::NAN, ..good.clone() }, ["power is NaN", "above 0"]),
    ] {
        let message = batch(&config, 0, 0, 1).unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
    assert!(batch(&good, 0, 0, 0).unwrap_err().to_string().contains("batch is 0"));
}

#[test]
fn an_unknown_preset_suggests_the_nearest() {
    let message = by_name("smal_t64_n8").unwrap_err().to_string();
    assert!(
        message.contains("did you mean \"small_t64_n8\"?") && message.contains("t1024_n256"),
        "{message}"
    );
    assert!(!by_name("zzz").unwrap_err().to_string().contains("did you mean"));
}

#[test]
fn settings_are_read_strictly() {
    let config: RecallConfig = serde_json::from_str(r#"{"vocab": 256, "length": 64, "pairs": 8}"#).unwrap();
    assert_eq!(config, RecallConfig::new(256, 64, 8));
    let zero: RecallConfig =
        serde_json::from_str(r#"{"vocab": 256, "length": 64, "pairs": 8, "power": 0.1, "filler": "zero"}"#)
            .unwrap();
    assert_eq!((zero.power, zero.filler), (0.1, Filler::Zero));
    let error =
        serde_json::from_str::<RecallConfig>(r#"{"vocab": 256, "lenght": 64, "pairs": 8}"#).unwrap_err();
    assert!(error.to_string().contains("lenght"), "{error}");
}

#[test]
fn a_batch_prints_its_questions() {
    let rows = TokenBatch {
        tokens: vec![1, 9, 1, 0],
        targets: vec![IGNORE, IGNORE, 9, IGNORE],
        batch: 1,
        time: 4,
        documents: None,
    };
    assert_eq!(rows.to_string(), "1 9 1>9 0\n");
}
