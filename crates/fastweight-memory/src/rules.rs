//! Every named memory as four choices: architecture, attentional bias, retention, learner (Miras, 2504.13173).

/// A named memory, described by its four choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The mixer's name in recipes.
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
    /// Size of the state of one sequence and layer, in elements; H heads, K key and V value channels a head, T
    /// tokens. A short convolution of width W adds (W - 1) H (2 K + V).
    pub state_size: &'static str,
    /// Where it was published.
    pub source: &'static str,
}

/// All named memories, in the order of [`MixerConfig::NAMES`](crate::MixerConfig::NAMES).
pub const RULES: [Rule; 8] = [
    Rule {
        name: "softmax_attention",
        title: "Softmax attention (sliding window, grouped heads by option)",
        architecture: "none: the keys and values themselves",
        attentional_bias: "squared error weighted by similarity, ½ Σᵢ exp(qₜ·kᵢ/√K) |z - vᵢ|²",
        retention: "every pair, or the last w",
        learner: "exact minimiser over z (Nadaraya-Watson)",
        equation: "oₜ = Σ_{i≤t} softmaxᵢ(qₜ·kᵢ/√K) vᵢ",
        state_size: "T G (K + V), G key-value heads; T at most w - 1 with a window of w",
        source: "Vaswani et al. 2017, arXiv 1706.03762",
    },
    Rule {
        name: "linear_attention",
        title: "Linear attention (Hebbian rule)",
        architecture: "matrix S [K, V]",
        attentional_bias: "dot product, -⟨Sᵀk, v⟩",
        retention: "½ |S - Sₜ₋₁|² (nothing is forgotten)",
        learner: "one gradient step, rate 1",
        equation: "Sₜ = Sₜ₋₁ + kₜvₜᵀ; oₜ = Sₜᵀqₜ/√K",
        state_size: "H K V",
        source: "Katharopoulos et al. 2020, arXiv 2006.16236, without the normaliser",
    },
    Rule {
        name: "elu1_linear_attention",
        title: "Linear attention, normalised, feature map ELU + 1",
        architecture: "matrix S [K, V] and the sum of keys z [K]",
        attentional_bias: "dot product, -⟨Sᵀφ(k), v⟩",
        retention: "½ |S - Sₜ₋₁|² (nothing is forgotten)",
        learner: "one gradient step, rate 1",
        equation: "Sₜ = Sₜ₋₁ + φ(kₜ)vₜᵀ; zₜ = zₜ₋₁ + φ(kₜ); oₜ = Sₜᵀφ(qₜ)/(zₜ·φ(qₜ) + ε)",
        state_size: "H K (V + 1)",
        source: "Katharopoulos et al. 2020, arXiv 2006.16236",
    },
    Rule {
        name: "retnet",
        title: "RetNet",
        architecture: "matrix S [K, V], rotary keys",
        attentional_bias: "dot product, -⟨Sᵀk, v⟩",
        retention: "½ |S - γSₜ₋₁|², γ = 1 - 2^(-5-h) fixed per head h",
        learner: "one gradient step, rate 1",
        equation: "Sₜ = γₕSₜ₋₁ + kₜvₜᵀ; oₜ = Sₜᵀqₜ/√K",
        state_size: "H K V",
        source: "Sun et al. 2023, arXiv 2307.08621",
    },
    Rule {
        name: "lightning_attention",
        title: "Lightning Attention",
        architecture: "matrix S [K, V]",
        attentional_bias: "dot product, -⟨Sᵀk, v⟩",
        retention: "½ |S - eᵍSₜ₋₁|², g = -2^(-8h/H)(1 - l/(L-1+1e-5) + 1e-5) fixed per head h and layer l",
        learner: "one gradient step, rate 1",
        equation: "Sₜ = exp(g)Sₜ₋₁ + kₜvₜᵀ; oₜ = Sₜᵀqₜ/√K",
        state_size: "H K V",
        source: "MiniMax-01 2025, arXiv 2501.08313",
    },
    Rule {
        name: "mamba2",
        title: "Mamba-2-style scalar-gated linear attention",
        architecture: "matrix S [K, V]",
        attentional_bias: "dot product, -⟨Sᵀk, v⟩",
        retention: "½ |S - exp(gₜ)Sₜ₋₁|², gₜ = -exp(A)Dₜ from the token",
        learner: "one gradient step, rate Dₜ = softplus(Wxₜ + b)",
        equation: "Sₜ = exp(gₜ)Sₜ₋₁ + Dₜkₜvₜᵀ; oₜ = Sₜᵀqₜ + d vₜ",
        state_size: "H K V",
        source: "Dao and Gu 2024, arXiv 2405.21060",
    },
    Rule {
        name: "delta_net",
        title: "DeltaNet",
        architecture: "matrix S [K, V], unit keys",
        attentional_bias: "squared error, ½ |Sᵀk - v|²",
        retention: "½ |S - Sₜ₋₁|² (only what the key reads is replaced)",
        learner: "one gradient step, rate βₜ",
        equation: "Sₜ = Sₜ₋₁ + βₜkₜ(vₜ - Sₜ₋₁ᵀkₜ)ᵀ; oₜ = Sₜᵀqₜ/√K",
        state_size: "H K V",
        source: "Yang et al. 2024, arXiv 2406.06484",
    },
    Rule {
        name: "gated_delta_net",
        title: "Gated DeltaNet",
        architecture: "matrix S [K, V], unit keys",
        attentional_bias: "squared error, ½ |Sᵀk - v|²",
        retention: "½ |S - exp(gₜ)Sₜ₋₁|², gₜ = -exp(A) softplus(Wxₜ + b) from the token",
        learner: "one gradient step at the decayed memory, rate βₜ",
        equation: "S̃ = exp(gₜ)Sₜ₋₁; Sₜ = S̃ + βₜkₜ(vₜ - S̃ᵀkₜ)ᵀ; oₜ = Sₜᵀqₜ/√K",
        state_size: "H K V",
        source: "Yang et al. 2024, arXiv 2412.06464",
    },
];

/// The rule of a name.
pub fn by_name(name: &str) -> Option<&'static Rule> {
    RULES.iter().find(|rule| rule.name == name)
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_mixer_has_its_rule_in_order() {
        assert_eq!(super::RULES.map(|rule| rule.name), crate::MixerConfig::NAMES);
        assert!(super::by_name("delta_net").is_some() && super::by_name("delta").is_none());
    }
}
