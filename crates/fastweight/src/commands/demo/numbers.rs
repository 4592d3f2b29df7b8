//! The seeded example and the numbers expected of it.

use std::collections::BTreeMap;
use std::path::Path;

use fastweight::memory::names::types_in_words;
use serde::Deserialize;

use crate::error::CommandError;

const EMBEDDED: &str = include_str!("seed_demo.json");

/// A short sequence of one head, the outputs recorded for it, and the readings expected of a 2x2 memory.
#[derive(Debug, Deserialize)]
pub struct Numbers {
    /// Queries `[T][K]`.
    pub q: Vec<[f64; 4]>,
    /// Keys `[T][K]`.
    pub k: Vec<[f64; 4]>,
    /// Values `[T][V]`.
    pub v: Vec<[f64; 3]>,
    /// ELU+1 linear attention as weights over all earlier tokens.
    pub elu1_explicit: Vec<[f64; 3]>,
    /// ELU+1 linear attention as a recurrence.
    pub elu1_recurrent: Vec<[f64; 3]>,
    /// Softmax attention.
    pub softmax: Vec<[f64; 3]>,
    /// Readings of a 2x2 memory.
    pub delta_memory: DeltaMemory,
}

/// Readings of a 2x2 memory after two writes.
#[derive(Debug, Deserialize)]
pub struct DeltaMemory {
    /// Two values under one key, added.
    pub same_key_twice_additive_read: Reading,
    /// Two values under one key, corrected.
    pub same_key_twice_delta_read: Reading,
    /// The first of two keys after the second was written, by their inner product.
    pub crosstalk_old_key_read: ByInnerProduct,
    /// An old value after a write that decays by 0.8.
    pub gated_unrelated_key_read: Reading,
    /// Two values under one key with half steps.
    pub half_beta_read: Reading,
    /// An old value after a write without decay.
    pub no_forgetting_read: Reading,
}

/// One reading.
#[derive(Debug, Deserialize)]
pub struct Reading {
    /// What the memory returns.
    pub value: [f64; 2],
}

/// Readings by inner product.
#[derive(Debug, Deserialize)]
pub struct ByInnerProduct {
    /// The inner product, written as a decimal number, and the reading.
    pub value_by_rho: BTreeMap<String, [f64; 2]>,
}

impl Numbers {
    /// The embedded numbers, or those of a file of the same layout.
    ///
    /// # Errors
    /// [`CommandError::Input`] when the file cannot be read or has another layout.
    pub fn load(path: Option<&Path>) -> Result<Self, CommandError> {
        let (name, text) = match path {
            None => ("the embedded example".into(), EMBEDDED.into()),
            Some(path) => {
                let name = path.display().to_string();
                let text = std::fs::read_to_string(path).map_err(|cause| {
                    CommandError::input(format_args!(
                        "cannot read {name}: {cause}; `fastweight demo --help` says what the file holds"
                    ))
                })?;
                (name, text)
            }
        };
        let wrong = |reason: String| {
            CommandError::input(format_args!(
                "{name} does not have the layout that `fastweight demo --help` describes: {reason}; leave --numbers out to use the embedded one"
            ))
        };
        let numbers: Self =
            serde_json::from_str(&text).map_err(|cause| wrong(types_in_words(&cause.to_string())))?;
        let time = numbers.q.len();
        let lengths =
            [&numbers.v, &numbers.elu1_explicit, &numbers.elu1_recurrent, &numbers.softmax].map(Vec::len);
        if time < 2 || numbers.k.len() != time || lengths != [time; 4] {
            return Err(wrong(format!(
                "q, k, v and the outputs need the same number of tokens, two at least, and q has {time}"
            )));
        }
        if numbers.inner_products().len() != numbers.delta_memory.crosstalk_old_key_read.value_by_rho.len() {
            return Err(wrong("an inner product of unit keys is not a number in [-1, 1]".into()));
        }
        Ok(numbers)
    }

    /// Inner products of two unit keys, each with the reading expected of the first.
    pub fn inner_products(&self) -> Vec<(f64, [f64; 2])> {
        let readings = &self.delta_memory.crosstalk_old_key_read.value_by_rho;
        let products = readings.iter().map(|(rho, reading)| (rho.parse::<f64>(), *reading));
        products
            .filter_map(|(rho, reading)| rho.ok().filter(|rho| rho.abs() <= 1.0).map(|rho| (rho, reading)))
            .collect()
    }
}
