//! An expected value beside the computed one.

use serde::Serialize;

use super::Name;

/// What a computed value is held against.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "relation")]
pub enum Expected {
    /// These numbers, each within the tolerance.
    Equal {
        /// The numbers.
        expected: Vec<f64>,
        /// Largest difference allowed.
        tolerance: f64,
    },
    /// No number above this.
    AtMost {
        /// The bound.
        expected: f64,
    },
    /// No number below this.
    AtLeast {
        /// The bound.
        expected: f64,
    },
}

/// One quantity of an experiment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// What was computed, and how.
    pub quantity: String,
    /// What it should be.
    #[serde(flatten)]
    pub expected: Expected,
    /// What it is.
    pub computed: Vec<f64>,
}

impl Check {
    /// A check for equal numbers.
    pub fn equal(quantity: impl Into<String>, expected: &[f64], tolerance: f64, computed: &[f64]) -> Self {
        let expected = Expected::Equal { expected: expected.to_vec(), tolerance };
        Self { quantity: quantity.into(), expected, computed: computed.to_vec() }
    }

    /// A check for one number that must not be above `bound`.
    pub fn at_most(quantity: impl Into<String>, bound: f64, computed: f64) -> Self {
        let expected = Expected::AtMost { expected: bound };
        Self { quantity: quantity.into(), expected, computed: vec![computed] }
    }

    /// A check for one number that must not be below `bound`.
    pub fn at_least(quantity: impl Into<String>, bound: f64, computed: f64) -> Self {
        let expected = Expected::AtLeast { expected: bound };
        Self { quantity: quantity.into(), expected, computed: vec![computed] }
    }

    /// Whether expected and computed agree. A number that is not finite never does.
    pub fn passes(&self) -> bool {
        let all = |holds: &dyn Fn(f64) -> bool| self.computed.iter().all(|&x| x.is_finite() && holds(x));
        match &self.expected {
            Expected::Equal { expected, tolerance } => {
                self.computed.len() == expected.len()
                    && self.computed.iter().zip(expected).all(|(c, e)| (c - e).abs() <= *tolerance)
            }
            Expected::AtMost { expected } => all(&|x| x <= *expected),
            Expected::AtLeast { expected } => all(&|x| x >= *expected),
        }
    }
}

/// A small fact about memories, with everything that was checked of it.
#[derive(Debug, Clone)]
pub struct Experiment {
    /// Its name on the command line.
    pub name: Name,
    /// What is done and what should be seen, in a sentence or two.
    pub about: &'static str,
    /// The quantities.
    pub checks: Vec<Check>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_passes_only_when_every_number_agrees() {
        assert!(Check::equal("", &[0.5, 1.0], 1e-9, &[0.5, 1.0 + 1e-10]).passes());
        assert!(Check::equal("", &[0.0], 0.0, &[0.0]).passes());
        for computed in [&[0.5, 1.1][..], &[0.5], &[0.5, 1.0, 1.0], &[0.5, f64::NAN]] {
            assert!(!Check::equal("", &[0.5, 1.0], 1e-9, computed).passes(), "{computed:?}");
        }
        assert!(Check::at_most("", 1.0, 1.0).passes() && !Check::at_most("", 1.0, 1.1).passes());
        assert!(Check::at_least("", 1.0, 1.0).passes() && !Check::at_least("", 1.0, 0.9).passes());
        assert!(
            !Check::at_most("", 1.0, f64::NAN).passes() && !Check::at_most("", 1.0, -f64::INFINITY).passes()
        );
        assert!(
            !Check::at_least("", 1.0, f64::NAN).passes() && !Check::at_least("", 1.0, f64::INFINITY).passes()
        );
    }
}
