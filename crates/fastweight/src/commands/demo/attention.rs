//! Two forms of one operator, two operators on one input, and the order of time.

use burn::tensor::{Device, Distribution, Tensor};

use super::Name;
use super::check::{Check, Experiment};
use super::numbers::Numbers;
use super::sequence::{Precision, Rule, Sequence, Write, largest_difference, numbers};
use crate::error::CommandError;

/// The seeded example as a sequence.
fn seeded(numbers: &Numbers) -> Sequence {
    Sequence::new(4, 3, numbers.q.concat(), numbers.k.concat(), numbers.v.concat())
}

/// ELU+1 linear attention as weights over all earlier tokens, and as a recurrence.
pub fn explicit_recurrent(
    expected: &Numbers,
    seed: u64,
    device: &Device,
) -> Result<Experiment, CommandError> {
    const LENGTHS: [usize; 5] = [16, 64, 256, 1024, 4096];
    const SIZE: usize = 8;
    let example = seeded(expected);
    let (explicit, recurrent) = (example.explicit(), example.run(Rule::Normalised, Precision::Float64)?.o);
    let recorded = [
        ("explicit", &explicit, &expected.elu1_explicit),
        ("recurrent", &recurrent, &expected.elu1_recurrent),
    ];
    let mut checks: Vec<Check> = recorded
        .map(|(form, computed, recorded)| {
            let difference = largest_difference(computed, &recorded.concat());
            Check::at_most(format!("seeded example, {form} against recorded"), 1e-12, difference)
        })
        .into();

    let time = LENGTHS[LENGTHS.len() - 1];
    let host = Device::flex();
    host.seed(seed);
    let draw = || numbers(Tensor::<2>::random([time, SIZE], Distribution::Normal(0.0, 1.0), &host));
    let random = Sequence::new(SIZE, SIZE, draw(), draw(), draw());
    let explicit = random.explicit();
    let forms = [
        ("float64 recurrent loop", 1e-12, random.run(Rule::Normalised, Precision::Float64)?.o),
        ("float32 sequence operator", 1e-5, random.run(Rule::Normalised, Precision::Float32(device))?.o),
        ("float32 one token at a time", 1e-5, random.normalised_steps(device)?),
    ];
    let starts = [0].into_iter().chain(LENGTHS);
    for (form, bound, readings) in forms {
        for (start, end) in starts.clone().zip(LENGTHS) {
            let stretch = start * SIZE..end * SIZE;
            let largest = largest_difference(&explicit[stretch.clone()], &vec![0.0; stretch.len()]);
            let difference = largest_difference(&readings[stretch.clone()], &explicit[stretch]);
            let quantity = format!("{form}, tokens {} to {end}", start + 1);
            checks.push(Check::at_most(quantity, bound, difference / largest));
        }
    }
    let about = "ELU+1 linear attention as explicit weights over all earlier tokens (float64) and as a recurrence with a \
                 fixed state are the same function. On random tokens: the largest difference in a stretch of the \
                 sequence, over the largest output there.";
    Ok(Experiment { name: Name::ExplicitRecurrent, about, checks })
}

/// ELU+1 linear attention beside softmax attention.
pub fn linear_softmax(expected: &Numbers, device: &Device) -> Result<Experiment, CommandError> {
    let example = seeded(expected);
    let mut checks = Vec::new();
    for precision in Precision::both(device) {
        let linear = example.run(Rule::Normalised, precision)?.o;
        let softmax = example.run(Rule::Softmax, precision)?.o;
        let label = precision.label();
        let recorded = largest_difference(&softmax, &expected.softmax.concat());
        checks.push(Check::at_most(
            format!("softmax against recorded, {label}"),
            precision.tolerance(),
            recorded,
        ));
        let difference = largest_difference(&linear, &softmax);
        checks.push(Check::equal(
            format!("linear against softmax, {label}"),
            &[0.92144],
            5e-6,
            &[difference],
        ));
    }
    let about = "ELU+1 linear attention is not an approximation of softmax attention: on the seeded example their outputs \
                 differ by up to 0.92144.";
    Ok(Experiment { name: Name::LinearSoftmax, about, checks })
}

/// Outputs do not depend on later tokens.
pub fn future_leak(expected: &Numbers, device: &Device) -> Result<Experiment, CommandError> {
    let mut example = seeded(expected);
    let tokens = expected.q.len();
    let changed_token = tokens * 5 / 8;
    example.gate = vec![-0.1; tokens];
    let mut changed = example.clone();
    let add_one =
        |x: &mut [f64], size: usize| x[changed_token * size..][..size].iter_mut().for_each(|x| *x += 1.0);
    add_one(&mut changed.q, example.key);
    add_one(&mut changed.k, example.key);
    add_one(&mut changed.v, example.value);

    let cut = changed_token * example.value;
    let mut checks = Vec::new();
    for (name, rule) in [
        ("softmax attention", Rule::Softmax),
        ("gated linear attention", Rule::Additive),
        ("ELU+1 linear attention", Rule::Normalised),
        ("gated delta rule", Rule::Delta),
    ] {
        let before = example.run(rule, Precision::Float32(device))?.o;
        let after = changed.run(rule, Precision::Float32(device))?.o;
        let earlier = largest_difference(&before[..cut], &after[..cut]);
        let later = largest_difference(&before[cut..], &after[cut..]);
        checks.push(Check::equal(format!("{name}, change before the token"), &[0.0], 0.0, &[earlier]));
        checks.push(Check::at_least(format!("{name}, change from the token on"), 1e-3, later));
    }
    let (before, after) = (example.noncausal(device)?, changed.noncausal(device)?);
    let leak = largest_difference(&before[..cut], &after[..cut]);
    checks.push(Check::at_least("non-causal sum, change before the token (leaks)", 1e-3, leak));
    let about = "One token of the seeded example is changed. Outputs before it keep every bit, later ones change. A sum \
                 over the whole sequence fails this check: it tells earlier tokens about the later one.";
    Ok(Experiment { name: Name::FutureLeak, about, checks })
}

/// What reading before writing loses.
pub fn read_before_write(expected: &Numbers, device: &Device) -> Result<Experiment, CommandError> {
    let example = seeded(expected);
    let (key, value, tokens) = (example.key, example.value, expected.q.len());
    // Every token twice: first only its query, with nothing to write, then as it is.
    let twice = |x: &[f64], size: usize, first: fn(f64) -> f64| -> Vec<f64> {
        x.chunks(size)
            .flat_map(|x| x.iter().map(|&x| first(x)).chain(x.iter().copied()).collect::<Vec<_>>())
            .collect()
    };
    let q = twice(&example.q, key, |x| x);
    let interleaved =
        Sequence::new(key, value, q, twice(&example.k, key, |_| 0.0), twice(&example.v, value, |_| 0.0));
    // What each token reads of itself: (q_t . k_t) v_t.
    let own: Vec<f64> = (0..tokens)
        .flat_map(|t| {
            let weight: f64 = expected.q[t].iter().zip(&expected.k[t]).map(|(q, k)| q * k).sum();
            expected.v[t].map(|v| weight * v)
        })
        .collect();

    let mut checks = Vec::new();
    for precision in Precision::both(device) {
        let (label, tolerance) = (precision.label(), precision.tolerance());
        let readings = interleaved.run(Rule::Additive, precision)?.o;
        let order = |offset: usize| -> Vec<f64> {
            readings.chunks(value).skip(offset).step_by(2).flatten().copied().collect()
        };
        let (read_first, write_first) = (order(0), order(1));
        checks.push(Check::equal(
            format!("read first, first token, {label}"),
            &vec![0.0; value],
            0.0,
            &read_first[..value],
        ));
        checks.push(Check::equal(
            format!("write first, first token, {label}"),
            &own[..value],
            tolerance,
            &write_first[..value],
        ));
        let lost: Vec<f64> = write_first.iter().zip(&read_first).map(|(w, r)| w - r).collect();
        let quantity = format!("lost at every token, against (q.k) v, {label}");
        checks.push(Check::at_most(quantity, tolerance, largest_difference(&lost, &own)));

        let (e1, v1) = ([1.0, 0.0], [1.0, 0.0]);
        let nothing = Write { beta: 0.0, ..Write::new(&e1, &v1) };
        for (order, write, expected) in [("read", nothing, [0.0, 0.0]), ("write", Write::new(&e1, &v1), v1)] {
            let computed = Sequence::of_writes(&[write], &e1).answer(Rule::Delta, precision)?;
            let quantity = format!("delta rule, {order} first, the token's own key, {label}");
            checks.push(Check::equal(quantity, &expected, tolerance, &computed));
        }
    }
    let about = "A memory that is read before the token is written returns zero at the first token, and at every token \
                 misses what the token itself says: its own key finds nothing.";
    Ok(Experiment { name: Name::ReadBeforeWrite, about, checks })
}
