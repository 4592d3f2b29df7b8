//! Outcomes within the tolerances of the fixtures.

use super::{Arrays, Outcome, error_against, rms};

/// Every output, and every gradient where there are any, within the tolerances of the fixtures.
pub fn assert_same(label: &str, found: &Outcome, expected: &Outcome, double: bool) {
    let (forward, gradient) = if double { (1e-10, 1e-10) } else { (1e-5, 1e-4) };
    assert_close(label, "output", &found.outputs, &expected.outputs, forward);
    if !found.grads.is_empty() {
        assert_close(label, "gradient", &found.grads, &expected.grads, gradient);
    }
}

/// Each array against its own RMS, or against a hundredth of that of `v` (`o`) where it is tiny.
pub fn assert_close(label: &str, what: &str, found: &Arrays, expected: &Arrays, limit: f64) {
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
