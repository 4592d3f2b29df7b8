//! What holds for every operator, whatever the numbers and the sizes.

#[path = "../support/mod.rs"]
mod support;

mod agreement;
mod arguments;
mod arguments_gated;
mod channels;
mod comba;
mod delta_product;
mod differences;
mod equalities;
mod gates;
mod layout;
mod noncausal;
mod partition;
mod short_convolution;
mod ttt;
mod ttt_arguments;

use proptest::test_runner::{Config, RngSeed};
use support::{Arrays, Form, Outcome, Problem, error_against, relative_rms, rms};

/// The forms that callers can reach.
const PUBLIC: [Form; 4] = [Form::Fused, Form::Composed, Form::Steps, Form::TrackedSteps];

/// A modest number of cases from a fixed seed.
fn cases(cases: u32) -> Config {
    Config { cases, rng_seed: RngSeed::Fixed(2026), failure_persistence: None, ..Config::default() }
}

/// Every output, and every gradient where there are any, within the tolerances of the fixtures.
fn assert_same(label: &str, found: &Outcome, expected: &Outcome, double: bool) {
    let (forward, gradient) = if double { (1e-10, 1e-10) } else { (1e-5, 1e-4) };
    assert_close(label, "output", &found.outputs, &expected.outputs, forward);
    if !found.grads.is_empty() {
        assert_close(label, "gradient", &found.grads, &expected.grads, gradient);
    }
}

/// Each array against its own RMS, or against a hundredth of that of `v` (`o`) where it is tiny.
fn assert_close(label: &str, what: &str, found: &Arrays, expected: &Arrays, limit: f64) {
    let names = |arrays: &Arrays| arrays.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{label}: {what}s");
    let floor =
        ["v", "o"].iter().find_map(|name| expected.get(*name)).map_or(0.0, |array| rms(&array.values));
    for (name, expected) in expected {
        let found = &found[name];
        assert_eq!(found.shape, expected.shape, "{label}: {what} {name}");
        let error = error_against(&found.values, &expected.values, rms(&expected.values).max(0.01 * floor));
        assert!(error <= limit, "{label}: {what} {name} is off by {error:.2e}, allowed {limit:.0e}");
    }
}

fn compute(problem: &Problem, form: Form) -> Outcome {
    support::run(problem, form).unwrap_or_else(|error| panic!("{}: {error}", form.name()))
}

fn close(found: &[f64], expected: &[f64], limit: f64) {
    let error = relative_rms(found, expected);
    assert!(error <= limit, "off by {error:.2e}, allowed {limit:.0e}");
}
