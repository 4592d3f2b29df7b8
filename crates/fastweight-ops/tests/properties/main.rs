//! What holds for every operator, whatever the numbers and the sizes.

#[path = "../support/mod.rs"]
mod support;

mod agreement;
mod arguments;
mod arguments_gated;
mod channels;
mod equalities;
mod gates;
mod layout;
mod noncausal;
mod partition;
mod short_convolution;

use proptest::test_runner::{Config, RngSeed};
use support::asserts::{assert_close, assert_same};
use support::{Form, Outcome, Problem, relative_rms};

/// The forms that callers can reach.
const PUBLIC: [Form; 4] = [Form::Fused, Form::Composed, Form::Steps, Form::TrackedSteps];

/// A modest number of cases from a fixed seed.
fn cases(cases: u32) -> Config {
    Config { cases, rng_seed: RngSeed::Fixed(2026), failure_persistence: None, ..Config::default() }
}

fn compute(problem: &Problem, form: Form) -> Outcome {
    support::run(problem, form).unwrap_or_else(|error| panic!("{}: {error}", form.name()))
}

fn close(found: &[f64], expected: &[f64], limit: f64) {
    let error = relative_rms(found, expected);
    assert!(error <= limit, "off by {error:.2e}, allowed {limit:.0e}");
}
