//! The rules of the literature, each with its four choices, its update, its objective, its state and its source.

use super::{Bias, GradientAt, Learner, Memory, Retention, Rule};

mod linear;
mod nonlinear;
mod sequential;

/// How a named rule is defined.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Definition {
    /// A cell of the algebra.
    Cell(Rule),
    /// A rule with a step of its own.
    Special(Special),
}

/// Rules that are no cell of the algebra.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// Every pair kept: the exact Nadaraya-Watson estimate with the softmax kernel.
    Softmax,
    /// The Nadaraya-Watson estimate with the kernel of ELU + 1, in two sums.
    Normalised,
    /// Undecayed read with a learned factor, query corrected by the key.
    Comba,
    /// Several delta steps a token.
    DeltaProduct,
    /// Decays a channel, removal along one key and write along another.
    Rwkv7,
    /// The value as the output that is decorrelated.
    Oja,
    /// Test-time training of a matrix behind a layer normalisation.
    TttLinear,
    /// Test-time training of an MLP behind a layer normalisation.
    TttMlp,
    /// Cells with a gate each for what enters, stays and is read.
    Lstm,
    /// A matrix that makes the key, the target and the rates of its own delta step.
    Srwm,
    /// Matrices behind layer normalisations, a few of which learn a token.
    MixtureOfMemories,
}

/// A rule of the literature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NamedRule {
    /// The name of `fastweight rules explain` and, where there is such a layer, of the mixer in recipes.
    pub name: &'static str,
    /// The name in papers.
    pub title: &'static str,
    /// What the memory is.
    pub architecture: &'static str,
    /// The inner loss that a write lowers.
    pub attentional_bias: &'static str,
    /// What a write keeps of the memory before it.
    pub retention: &'static str,
    /// How a write lowers the loss.
    pub learner: &'static str,
    /// Write, then read.
    pub equation: &'static str,
    /// What the new memory minimises.
    pub objective: &'static str,
    /// Size of the state of one sequence and layer, in elements; H heads, K key and V value channels a head, T
    /// tokens, E hidden channels of an MLP a key channel. A short convolution of width W adds (W - 1) H (2 K + V).
    pub state_size: &'static str,
    /// Where it was published.
    pub source: &'static str,
    /// How it is computed.
    pub definition: Definition,
}

/// Sizes that a state's bytes depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Heads H.
    pub heads: usize,
    /// Key channels a head, K.
    pub key: usize,
    /// Value channels a head, V.
    pub value: usize,
    /// Tokens read, T.
    pub tokens: usize,
}

impl NamedRule {
    /// Float32 bytes of the memory of one sequence and layer, without a short convolution.
    pub fn state_bytes(&self, sizes: &Sizes) -> usize {
        let Sizes { heads, key, value, tokens } = *sizes;
        let head = match self.definition {
            Definition::Cell(rule) => rule.state_elements(key, value),
            Definition::Special(special) => match special {
                Special::Softmax => tokens * (key + value),
                Special::Normalised => key * (value + 1),
                Special::Comba | Special::DeltaProduct | Special::Rwkv7 | Special::Oja => key * value,
                Special::TttLinear => 2 * (key * value + value) + 1,
                Special::TttMlp => 2 * (8 * key * key + 5 * key) + 1,
                Special::Lstm => 2 * value,
                Special::Srwm => key * (value + 2 * key + 4),
                Special::MixtureOfMemories => 2 * 5 * key * value,
            },
        };
        4 * heads * head
    }

    /// Why no layer of recipes has the rule; none for one that a layer has.
    pub fn no_recipe(&self) -> Option<&'static str> {
        (self.definition == Definition::Special(Special::Oja)).then_some(
            "its write takes the value's own direction out of the memory, which is no loss of the four choices, and no layer \
             has it; `fastweight rules explain oja` computes it",
        )
    }

    /// Whether the memory needs K = V.
    pub fn needs_square(&self) -> bool {
        match self.definition {
            Definition::Cell(rule) => rule.memory != Memory::Matrix,
            Definition::Special(special) => matches!(special, Special::TttLinear | Special::TttMlp),
        }
    }
}

/// All named rules.
pub fn all() -> impl Iterator<Item = &'static NamedRule> {
    linear::RULES.iter().chain(&nonlinear::RULES).chain(&sequential::RULES)
}

/// The rule of a name.
pub fn by_name(name: &str) -> Option<&'static NamedRule> {
    all().find(|rule| rule.name == name)
}

const BASE: Rule = Rule {
    memory: Memory::Matrix,
    bias: Bias::Squared,
    retention: Retention::None,
    learner: Learner::Gradient,
    gradient_at: GradientAt::Previous,
    huber_delta: 1.0,
    p: 3.0,
    smooth: false,
    q: 4.0,
    mirror: false,
    l1: 1e-3,
    window: 1,
    chunk: 1,
    expansion: 4,
};

const fn cell(memory: Memory, bias: Bias, retention: Retention, learner: Learner) -> Definition {
    Definition::Cell(Rule { memory, bias, retention, learner, ..BASE })
}

const fn decayed(retention: Retention) -> Definition {
    Definition::Cell(Rule { retention, gradient_at: GradientAt::Decayed, ..BASE })
}

const DOT: &str = "dot product, -⟨Sᵀk, v⟩";
const SQUARED: &str = "squared error, ½ |Sᵀk - v|²";
const NOTHING: &str = "½ |S - Sₜ₋₁|² (nothing is forgotten)";
const MATRIX: &str = "matrix S [K, V]";
const MLP: &str = "MLP, M(x) = x + W₂ᵀ silu(W₁ᵀx), hidden width E K, E = 4";
const MLP_STATE: &str = "H 2 E K²";
