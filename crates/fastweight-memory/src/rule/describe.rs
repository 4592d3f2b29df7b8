//! Names of the choices, as recipes write them, and their formulas.

use super::{Bias, Learner, Memory, Retention, Rule};

impl Memory {
    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vector => "vector",
            Self::Matrix => "matrix",
            Self::Mlp => "mlp",
        }
    }
}

impl Bias {
    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::DotProduct => "dot_product",
            Self::Squared => "squared",
            Self::Huber => "huber",
            Self::Lp => "lp",
        }
    }
}

impl Retention {
    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::ScalarDecay => "scalar_decay",
            Self::ChannelDecay => "channel_decay",
            Self::Directed => "directed",
            Self::ElasticNet => "elastic_net",
            Self::Lq => "lq",
            Self::Kl => "kl",
            Self::Bregman => "bregman",
        }
    }
}

impl Learner {
    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gradient => "gradient",
            Self::Momentum => "momentum",
            Self::Proximal => "proximal",
            Self::NewtonSchulz => "newton_schulz",
        }
    }

    /// One letter for tables.
    pub(super) fn letter(self) -> &'static str {
        match self {
            Self::Gradient => "G",
            Self::Momentum => "M",
            Self::Proximal => "P",
            Self::NewtonSchulz => "N",
        }
    }
}

impl Rule {
    /// The rule as a recipe's mixer, `{ kind = "rule", memory = "matrix", .. }`; numbers at their default are left out.
    pub fn recipe(&self) -> String {
        let choices = [
            ("memory", self.memory.name()),
            ("bias", self.bias.name()),
            ("retention", self.retention.name()),
            ("learner", self.learner.name()),
        ];
        let mut parts = vec!["kind = \"rule\"".to_owned()];
        parts.extend(choices.map(|(choice, name)| format!("{choice} = {name:?}")));
        let plain = Self::default();
        if self.gradient_at != plain.gradient_at {
            parts.push("gradient_at = \"decayed\"".into());
        }
        let floats = [
            ("huber_delta", self.huber_delta, plain.huber_delta),
            ("p", self.p, plain.p),
            ("q", self.q, plain.q),
            ("l1", self.l1, plain.l1),
        ];
        parts.extend(floats.into_iter().filter(|(_, a, b)| a != b).map(|(n, a, _)| format!("{n} = {a:?}")));
        let flags = [("smooth", self.smooth), ("mirror", self.mirror)];
        parts.extend(flags.into_iter().filter(|(_, on)| *on).map(|(name, _)| format!("{name} = true")));
        let counts = [
            ("window", self.window, plain.window),
            ("chunk", self.chunk, plain.chunk),
            ("expansion", self.expansion, plain.expansion),
        ];
        parts.extend(counts.into_iter().filter(|(_, a, b)| a != b).map(|(n, a, _)| format!("{n} = {a}")));
        format!("{{ {} }}", parts.join(", "))
    }

    /// The architecture as a formula.
    pub fn memory_text(&self) -> String {
        match self.memory {
            Memory::Vector => "vector s [K], M(x) = s * x".into(),
            Memory::Matrix => "matrix S [K, V], M(x) = Sᵀx".into(),
            Memory::Mlp => format!("MLP, M(x) = x + W₂ᵀ silu(W₁ᵀx), {} K hidden channels", self.expansion),
        }
    }

    /// The attentional bias as a formula.
    pub fn bias_text(&self) -> String {
        let loss = match self.bias {
            Bias::DotProduct => "dot product, -⟨M(k), v⟩".to_owned(),
            Bias::Squared => "squared error, ½ |M(k) - v|²".to_owned(),
            Bias::Huber => format!(
                "Huber, ½ |e|² up to |e| = δ, then δ(|e| - δ/2); e = M(k) - v, δ = {}",
                self.huber_delta
            ),
            Bias::Lp => {
                let smooth = if self.smooth { " (smoothed at 0)" } else { "" };
                format!("l_p, Σ |M(k) - v|^p, p = {}{smooth}", self.p)
            }
        };
        if self.window > 1 { format!("{loss}, over the last {} tokens", self.window) } else { loss }
    }

    /// The retention as a formula.
    pub fn retention_text(&self) -> String {
        match self.retention {
            Retention::None => "½ |W - Wₜ₋₁|² (nothing is forgotten)".into(),
            Retention::ScalarDecay => "½ |W - αₜWₜ₋₁|², αₜ = exp(gₜ) a head".into(),
            Retention::ChannelDecay => "½ |W - diag(αₜ)Wₜ₋₁|², αₜ = exp(gₜ) a key channel".into(),
            Retention::Directed => "½ |W - (αₜI - ηₜkkᵀ)Wₜ₋₁|² (also forgets along the key)".into(),
            Retention::ElasticNet => format!("½ |W - αₜWₜ₋₁|² + ηₜ l₁ |W|₁, l₁ = {}", self.l1),
            Retention::Lq if self.mirror => {
                format!("½ |W|_q² - ⟨αₜAₜ₋₁, W⟩ (mirror map of the l_q norm), q = {}", self.q)
            }
            Retention::Lq => format!("l_q norm through A, W = A/|A|_q^(q-2), q = {}", self.q),
            Retention::Kl => "KL(W ‖ Wₜ₋₁^αₜ), every value's row over the keys sums to 1".into(),
            Retention::Bregman => {
                "Bregman divergence of Σ_{i<t} ηᵢ lossᵢ + ½ |W|² (the whole history)".into()
            }
        }
    }

    /// The learner as a formula.
    pub fn learner_text(&self) -> String {
        let at = if self.chunk > 1 {
            format!(", gradients at the start of chunks of {}", self.chunk)
        } else {
            String::new()
        };
        match self.learner {
            Learner::Gradient => format!("one gradient step, rate ηₜ{at}"),
            Learner::Momentum => format!("momentum, Pₜ = μₜPₜ₋₁ - ηₜ∇{at}"),
            Learner::Proximal => "exact minimiser of loss and retention".into(),
            Learner::NewtonSchulz => {
                format!("Newton-Schulz (5 iterations) on the momentum Pₜ = μₜPₜ₋₁ - ηₜ∇{at}")
            }
        }
    }
}
