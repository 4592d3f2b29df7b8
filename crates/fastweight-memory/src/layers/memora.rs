//! Memora: the squared loss under KL retention.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::LayerConfig;
use super::miras::{Miras, MirasOptions, miras_layer};
use crate::MemoryError;
use crate::rule::{Bias, Retention, Rule};

/// Configuration of Memora (Behrouz et al. 2025, 2504.13173, section 5.3), a [`MirasMemory`](super::MirasMemory) with
/// `W_t = softmax(alpha log W_{t-1} - eta grad 1/2 |M(k) - v|^2)`, over the inputs of each output: every column of a weight is
/// positive with sum one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MemoraConfig {
    /// What the layers of Miras share.
    #[serde(flatten)]
    pub options: MirasOptions,
}

impl MemoraConfig {
    /// The rule that the memory follows, apart from its gates.
    pub fn rule(&self) -> Rule {
        let MirasOptions { memory, expansion, chunk, .. } = self.options;
        let (bias, retention) = (Bias::Squared, Retention::Kl);
        Rule { memory, bias, retention, chunk, expansion, ..Rule::default() }
    }

    fn miras(&self) -> Miras<'_> {
        Miras { name: Self::NAME, options: &self.options, rule: self.rule() }
    }

    pub(crate) fn validate_sizes(&self) -> Result<(), MemoryError> {
        self.miras().validate_sizes()
    }
}

miras_layer!(MemoraConfig, "memora");
