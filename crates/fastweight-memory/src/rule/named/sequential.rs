//! Memories that make what they learn from, or choose whether they learn.

use super::{Definition, NOTHING, NamedRule, Special};

pub(super) const RULES: [NamedRule; 3] = [
    NamedRule {
        name: "lstm",
        title: "Long short-term memory",
        architecture: "vector c, H V cells",
        attentional_bias: "dot product, -⟨c, g⟩",
        retention: "½ |c - fₜ ⊙ cₜ₋₁|²",
        learner: "one gradient step, a rate iₜ for each cell",
        equation: "cₜ = fₜ ⊙ cₜ₋₁ + iₜ ⊙ gₜ; oₜ = σ(.) ⊙ tanh(cₜ); fₜ, iₜ, gₜ of xₜ and oₜ₋₁",
        objective: "cₜ = argmin_c -⟨iₜ ⊙ gₜ, c⟩ + ½ |c - fₜ ⊙ cₜ₋₁|²",
        state_size: "2 H V: the cells and the last output",
        source: "Hochreiter and Schmidhuber 1997; Gers et al. 2000 (forget gate)",
        definition: Definition::Special(Special::Lstm),
    },
    NamedRule {
        name: "srwm",
        title: "Self-referential weight matrix",
        architecture: "matrix S [K, V + 2 K + 4] that makes its own output, query, key and rates",
        attentional_bias: "squared error between its own readings, ½ |Sᵀφ(k) - v|², v = Sₜ₋₁ᵀφ(q), φ = softmax",
        retention: NOTHING,
        learner: "one gradient step, a rate σ(β) of its own making for each of the four blocks y, q, k, β",
        equation: "y, q, k, β = Sₜ₋₁ᵀφ(xₜ); Sₜ = Sₜ₋₁ + φ(k)(σ(β) ⊙ Sₜ₋₁ᵀ(φ(q) - φ(k)))ᵀ; oₜ = y (read, then write)",
        objective: "Sₜ = argmin_S ⟨∇ Σ_blocks σ(β) ½|e|², S⟩ + ½ |S - Sₜ₋₁|², e = Sₜ₋₁ᵀφ(k) - v",
        state_size: "H K (V + 2 K + 4)",
        source: "Irie et al. 2022, arXiv 2202.05780",
        definition: Definition::Special(Special::Srwm),
    },
    NamedRule {
        name: "mixture_of_memories",
        title: "Mixture of memories (2 of n = 4 and a shared one)",
        architecture: "a shared matrix M [K, V] and n parallel ones, each behind a layer normalisation, f(x) = LN(Mᵀx)",
        attentional_bias: "squared error, ½ |LN(Mᵀk) - v|²",
        retention: "½ |M - (1 - αₜ)Mₜ₋₁|²; of a memory that is not chosen ½ |M - Mₜ₋₁|²",
        learner: "one gradient step, rate ηₜ, gradients at the start of chunks of 16; none in a memory that is not chosen",
        equation: "Mₜ = (1 - αₜ)Mₜ₋₁ - ηₜ∇M ½|LN(Mᵀkₜ) - vₜ|² where chosen; oₜ = Σᵢ gᵢ(xₜ) LN(Mᵢᵀqₜ), g of the shared one 1",
        objective: "Mₜ = argmin_M ηₜ⟨∇½|LN(Mₜ₋₁ᵀkₜ) - vₜ|², M⟩ + ½ |M - (1 - αₜ)Mₜ₋₁|²",
        state_size: "2 H (1 + n) K V: at the start of the chunk and now",
        source: "RockAI (shared and routed memories); the maps of its rates are this project's",
        definition: Definition::Special(Special::MixtureOfMemories),
    },
];
