//! Moneta: the `l_p` loss under an `l_q` norm.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::LayerConfig;
use super::miras::{Miras, MirasOptions, miras_layer};
use crate::MemoryError;
use crate::rule::{Bias, Retention, Rule};

/// Configuration of Moneta (Behrouz et al. 2025, 2504.13173, section 5.3), a [`MirasMemory`](super::MirasMemory) with
/// `A_t = alpha A_{t-1} - eta grad sum |M(k) - v|^p` and `W_t = A_t / |A_t|_q^(q-2)`, the norm that of all entries of a weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MonetaConfig {
    /// What the layers of Miras share.
    #[serde(flatten)]
    pub options: MirasOptions,
    /// Exponent of the loss, at least 1.
    #[schemars(range(min = 1, max = 16))]
    pub p: f64,
    /// Exponent of the norm, above 1.
    #[schemars(range(max = 16), extend("exclusiveMinimum" = 1))]
    pub q: f64,
    /// Smooths the loss's gradient at zero: `tanh(10 e)` for the sign, `sqrt(e^2 + 1e-6)` for the absolute value.
    pub smooth: bool,
    /// Reads the memory through the mirror map of `1/2 |W|_q^2`, which makes a step the minimiser of an
    /// objective, in place of the printed rule.
    pub mirror: bool,
}

impl Default for MonetaConfig {
    fn default() -> Self {
        Self { options: MirasOptions::default(), p: 3.0, q: 4.0, smooth: false, mirror: false }
    }
}

impl MonetaConfig {
    /// The rule that the memory follows, apart from its gates.
    pub fn rule(&self) -> Rule {
        let MirasOptions { memory, expansion, chunk, .. } = self.options;
        Rule {
            memory,
            bias: Bias::Lp,
            retention: Retention::Lq,
            p: self.p,
            q: self.q,
            smooth: self.smooth,
            mirror: self.mirror,
            chunk,
            expansion,
            ..Rule::default()
        }
    }

    fn miras(&self) -> Miras<'_> {
        Miras { name: Self::NAME, options: &self.options, rule: self.rule() }
    }

    pub(crate) fn validate_sizes(&self) -> Result<(), MemoryError> {
        self.miras().validate_sizes()
    }
}

miras_layer!(MonetaConfig, "moneta");
