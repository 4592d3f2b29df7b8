//! What a small matrix memory returns: overwriting, crosstalk, forgetting, partial writes.

use burn::tensor::Device;

use super::Name;
use super::check::{Check, Experiment};
use super::numbers::Numbers;
use super::sequence::{Precision, Rule, Sequence, Write};
use crate::error::CommandError;

const E1: [f64; 2] = [1.0, 0.0];
const E2: [f64; 2] = [0.0, 1.0];

/// Two values under one key.
pub fn same_key_twice(numbers: &Numbers, device: &Device) -> Result<Experiment, CommandError> {
    let mut checks = Vec::new();
    for precision in Precision::both(device) {
        // A third value channel of ones adds up the normaliser z . q.
        let (first, second) = ([1.0, 0.0, 1.0], [0.0, 1.0, 1.0]);
        let writes = [Write::new(&E1, &first), Write::new(&E1, &second)];
        let sums = Sequence::of_writes(&writes, &E1).answer(Rule::Additive, precision)?;
        let additive = [sums[0] / sums[2], sums[1] / sums[2]];
        let delta = Sequence::of_writes(&[Write::new(&E1, &E1), Write::new(&E1, &E2)], &E1);
        let delta = delta.answer(Rule::Delta, precision)?;
        let expected = &numbers.delta_memory;
        for (rule, expected, computed) in [
            ("additive, normalised", expected.same_key_twice_additive_read.value, &additive[..]),
            ("delta", expected.same_key_twice_delta_read.value, &delta),
        ] {
            let quantity = format!("{rule} reading, {}", precision.label());
            checks.push(Check::equal(quantity, &expected, precision.tolerance(), computed));
        }
    }
    let about = "One key is written twice, first with the value [1, 0], then with [0, 1]. Adding keeps the mean of both; \
                 the delta rule replaces the first.";
    Ok(Experiment { name: Name::SameKeyTwice, about, checks })
}

/// The reading of the first of two unit keys with inner product `rho`, then of the second.
pub fn crosstalk_readings(rho: f64, rule: Rule, precision: Precision) -> Result<[Vec<f64>; 2], CommandError> {
    let second = [rho, (1.0 - rho * rho).sqrt()];
    let writes = [Write::new(&E1, &E1), Write::new(&second, &E2)];
    let read = |query: &[f64]| Sequence::of_writes(&writes, query).answer(rule, precision);
    Ok([read(&E1)?, read(&second)?])
}

/// Two keys that are not orthogonal.
pub fn crosstalk(numbers: &Numbers, device: &Device) -> Result<Experiment, CommandError> {
    let mut checks = Vec::new();
    for precision in Precision::both(device) {
        for (rho, expected) in numbers.inner_products() {
            let [old, new] = crosstalk_readings(rho, Rule::Delta, precision)?;
            let label = precision.label();
            let (tolerance, rho) = (precision.tolerance(), format!("k1.k2 = {rho}"));
            checks.push(Check::equal(format!("old key, {rho}, {label}"), &expected, tolerance, &old));
            checks.push(Check::equal(format!("new key, {rho}, {label}"), &E2, tolerance, &new));
        }
    }
    let about = "The delta rule writes [1, 0] under k1, then [0, 1] under k2. The new key reads its value exactly; the old \
                 one reads (1 - (k1.k2)^2) [1, 0] + (k1.k2) [0, 1].";
    Ok(Experiment { name: Name::Crosstalk, about, checks })
}

/// A gated write decays everything else.
pub fn forgetting(numbers: &Numbers, device: &Device) -> Result<Experiment, CommandError> {
    let mut checks = Vec::new();
    let expected = &numbers.delta_memory;
    for precision in Precision::both(device) {
        for (decay, expected) in
            [(0.8, expected.gated_unrelated_key_read.value), (1.0, expected.no_forgetting_read.value)]
        {
            let writes = [Write::new(&E2, &E2), Write { decay, ..Write::new(&E1, &E1) }];
            let computed = Sequence::of_writes(&writes, &E2).answer(Rule::Delta, precision)?;
            let quantity = format!("old key, decay {decay}, {}", precision.label());
            checks.push(Check::equal(quantity, &expected, precision.tolerance(), &computed));
        }
    }
    let about = "[0, 1] is written under one key, then something else under an orthogonal key while the state decays by \
                 0.8. The first key reads 0.8 of its value; without decay (the control) all of it.";
    Ok(Experiment { name: Name::Forgetting, about, checks })
}

/// Writes of strength 0.5.
pub fn half_step(numbers: &Numbers, device: &Device) -> Result<Experiment, CommandError> {
    let mut checks = Vec::new();
    for precision in Precision::both(device) {
        let half = |value| Write { beta: 0.5, ..Write::new(&E1, value) };
        let computed = Sequence::of_writes(&[half(&E1), half(&E2)], &E1).answer(Rule::Delta, precision)?;
        let expected = numbers.delta_memory.half_beta_read.value;
        let quantity = format!("reading, {}", precision.label());
        checks.push(Check::equal(quantity, &expected, precision.tolerance(), &computed));
    }
    let about = "One key is written twice with strength 0.5. Each write closes half of the distance between what the key \
                 reads and its new value.";
    Ok(Experiment { name: Name::HalfStep, about, checks })
}

/// Erasing along a key.
pub fn householder(device: &Device) -> Result<Experiment, CommandError> {
    let mut checks = Vec::new();
    for precision in Precision::both(device) {
        for (beta, kind, expected) in
            [(0.5, "shrinks", [1.5, 2.0]), (1.0, "projects", [0.0, 2.0]), (2.0, "reflects", [-3.0, 2.0])]
        {
            let write = Write { beta, ..Write::new(&E1, &[0.0]) };
            let sequence = Sequence { initial: Some(vec![3.0, 2.0]), ..Sequence::of_writes(&[write], &E1) };
            let computed = sequence.run(Rule::Delta, precision)?.state;
            let quantity = format!("state, beta {beta} ({kind}), {}", precision.label());
            checks.push(Check::equal(quantity, &expected, precision.tolerance(), &computed));
        }
    }
    let about = "Writing the value 0 under the unit key [1, 0] multiplies the state [3, 2] by I - beta k k^T: a part of it \
                 along the key is erased, all of it, or it is turned around.";
    Ok(Experiment { name: Name::Householder, about, checks })
}

/// How far back an exponential moving average sees.
pub fn moving_average(device: &Device) -> Result<Experiment, CommandError> {
    const TIME: usize = 400;
    let mut checks = Vec::new();
    for precision in Precision::both(device) {
        let is_last = |t: usize, n: usize| f64::from(u8::from(t + n >= TIME));
        let v = (0..TIME).flat_map(|t| [is_last(t, 7), is_last(t, 44), 1.0]).collect();
        let ones = vec![1.0; TIME];
        let mut sequence = Sequence::new(1, 3, ones.clone(), ones, v);
        sequence.gate = vec![0.9f64.ln(); TIME];
        let sums = sequence.answer(Rule::Additive, precision)?;
        for (n, expected, sum) in [(7, 0.522, sums[0]), (44, 0.990, sums[1])] {
            let quantity = format!("weight of the last {n} terms, {}", precision.label());
            checks.push(Check::equal(quantity, &[expected], 5e-4, &[sum / sums[2]]));
        }
    }
    let about = "A linear memory that decays by 0.9 a token is an exponential moving average: the last 7 of 400 terms hold \
                 52.2% of the weight, the last 44 hold 99.0%.";
    Ok(Experiment { name: Name::MovingAverage, about, checks })
}
