//! One call of an operator as named arrays, and every form that can compute it.

#![allow(dead_code)]

pub mod asserts;
mod delta_loops;
mod gated_loops;
mod loops;
mod momentum_loops;
pub mod parts;
pub mod random;
mod tensors;
mod ttt;

use std::collections::BTreeMap;

use fastweight_ops::{Offsets, OpError};

/// Numbers with a shape, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Array {
    pub fn new(shape: &[usize], values: Vec<f64>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{shape:?}");
        Self { shape: shape.to_vec(), values }
    }

    pub fn zeros(shape: &[usize]) -> Self {
        Self::new(shape, vec![0.0; shape.iter().product()])
    }
}

/// Arrays by name, as in the fixtures: tokens `q k v g beta ...`, states `S z M k_cache v_cache`, output `o`.
pub type Arrays = BTreeMap<String, Array>;

/// Names of the states that go from one stretch of tokens to the next.
pub const STATES: [&str; 3] = ["S", "z", "M"];

/// The operators under test, by the names the fixtures use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operator {
    Softmax,
    Linear,
    ScalarGatedLinear,
    NormalisedLinear,
    Delta,
    GatedDelta,
    Gla,
    Kda,
    Dplr,
    MomentumDelta,
    Titans,
    /// With gates for each column of the memory.
    TitansChannels,
    DeltaProduct,
    Comba,
    TttLinear,
}

impl Operator {
    pub const ALL: [Self; 15] = [
        Self::Softmax,
        Self::Linear,
        Self::ScalarGatedLinear,
        Self::NormalisedLinear,
        Self::Delta,
        Self::GatedDelta,
        Self::Gla,
        Self::Kda,
        Self::Dplr,
        Self::MomentumDelta,
        Self::Titans,
        Self::TitansChannels,
        Self::DeltaProduct,
        Self::Comba,
        Self::TttLinear,
    ];

    /// Whether the fixtures have cases of it; the others are held to finite differences of their loops.
    pub fn has_fixtures(self) -> bool {
        !matches!(self, Self::DeltaProduct | Self::Comba | Self::TitansChannels)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::Linear => "linear_attn",
            Self::ScalarGatedLinear => "simple_gla",
            Self::NormalisedLinear => "linear_attn_elu1",
            Self::Delta => "delta_rule",
            Self::GatedDelta => "gated_delta_rule",
            Self::Gla => "gla",
            Self::Kda => "kda",
            Self::Dplr => "dplr_rwkv7",
            Self::MomentumDelta => "momentum_delta_rule",
            Self::Titans => "titans_linear",
            Self::TitansChannels => "titans_channels",
            Self::DeltaProduct => "delta_product",
            Self::Comba => "comba",
            Self::TttLinear => "ttt_linear",
        }
    }

    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operator| operator.name() == name)
    }

    /// Whether it holds a second matrix, its momentum.
    pub fn has_momentum(self) -> bool {
        matches!(self, Self::MomentumDelta | Self::Titans | Self::TitansChannels)
    }
}

/// One call with the gradients that come from above.
#[derive(Debug, Clone)]
pub struct Problem {
    pub operator: Operator,
    /// Inputs and initial states.
    pub inputs: Arrays,
    /// Upstream gradients of `o` and the final states.
    pub up: Arrays,
    pub scale: f64,
    pub window: Option<usize>,
    pub offsets: Option<Vec<usize>>,
}

impl Problem {
    pub fn shape(&self, name: &str) -> &[usize] {
        &self.inputs[name].shape
    }

    pub fn time(&self) -> usize {
        self.shape("q")[1]
    }

    /// Size of a value; it is the last axis, behind the steps of a token where there are any.
    pub fn value(&self) -> usize {
        self.shape("v").last().copied().unwrap_or(0)
    }

    pub fn offsets(&self) -> Result<Option<Offsets>, OpError> {
        self.offsets.as_deref().map(|offsets| Offsets::new(offsets, self.time())).transpose()
    }

    /// Independent sequences: rows, or documents of the one row.
    pub fn sequences(&self) -> usize {
        self.offsets.as_ref().map_or(self.shape("q")[0], |offsets| offsets.len() - 1)
    }

    /// Adds initial states of zero where none are given, so that every form reports their gradients.
    pub fn with_states(mut self) -> Self {
        let [heads, key] = [self.shape("q")[2], self.shape("q")[3]];
        let value = self.value();
        let sequences = self.sequences();
        let memory = || Array::zeros(&[sequences, heads, key, value]);
        if self.operator == Operator::TttLinear {
            self.inputs.entry("W".into()).or_insert_with(memory);
            let bias = || Array::zeros(&[sequences, heads, 1, value]);
            self.inputs.entry("bias".into()).or_insert_with(bias);
        } else if self.operator != Operator::Softmax {
            self.inputs.entry("S".into()).or_insert_with(memory);
        }
        if self.operator.has_momentum() {
            self.inputs.entry("M".into()).or_insert_with(memory);
        }
        if self.operator == Operator::NormalisedLinear {
            self.inputs.entry("z".into()).or_insert_with(|| Array::zeros(&[sequences, heads, key]));
        }
        self
    }
}

/// What a form computed: outputs by name (`o`, `S`, `z`), and gradients by the name of the input.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    pub outputs: Arrays,
    /// Empty for a form that computes none.
    pub grads: Arrays,
}

/// The forms that have to agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The plain float64 loop.
    Reference,
    /// The fused kernel.
    Fused,
    /// Tensor operations in float32.
    Composed,
    /// Tensor operations in float64.
    Composed64,
    /// One token at a time, states updated in place, no gradients.
    Steps,
    /// One token at a time with gradients through all of them.
    TrackedSteps,
}

impl Form {
    pub const ALL: [Self; 6] =
        [Self::Reference, Self::Fused, Self::Composed, Self::Composed64, Self::Steps, Self::TrackedSteps];

    pub fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference f64",
            Self::Fused => "fused",
            Self::Composed => "composed",
            Self::Composed64 => "composed f64",
            Self::Steps => "steps",
            Self::TrackedSteps => "steps with gradients",
        }
    }

    pub fn is_f64(self) -> bool {
        matches!(self, Self::Reference | Self::Composed64)
    }
}

/// Computes a problem in one form.
pub fn run(problem: &Problem, form: Form) -> Result<Outcome, OpError> {
    match form {
        Form::Reference => loops::run(problem),
        _ => tensors::run(problem, form),
    }
}

pub fn rms(values: &[f64]) -> f64 {
    (values.iter().map(|x| x * x).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

/// RMS of the difference over `yardstick`; infinite for anything that is not finite.
pub fn error_against(found: &[f64], expected: &[f64], yardstick: f64) -> f64 {
    if found.len() != expected.len() || found.iter().any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let difference: Vec<f64> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
    match rms(&difference) {
        0.0 => 0.0,
        error => error / yardstick,
    }
}

/// Relative RMS error of `found`.
pub fn relative_rms(found: &[f64], expected: &[f64]) -> f64 {
    error_against(found, expected, rms(expected))
}
