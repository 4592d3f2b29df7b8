//! Yaad: the Huber loss with a threshold a token.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::LayerConfig;
use super::miras::{Miras, MirasOptions, miras_layer};
use crate::MemoryError;
use crate::rule::{Bias, Retention, Rule};

/// Configuration of Yaad (Behrouz et al. 2025, 2504.13173, section 5.3), a [`MirasMemory`](super::MirasMemory) with
/// `W_t = alpha W_{t-1} - eta grad 1/2 |e|^2` where the error `e = M(k) - v` is no longer than the token's threshold
/// `delta_t`, beyond it with `grad` multiplied by `delta_t / |e|`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct YaadConfig {
    /// What the layers of Miras share.
    #[serde(flatten)]
    pub options: MirasOptions,
}

impl YaadConfig {
    /// The rule that the memory follows, apart from its gates.
    pub fn rule(&self) -> Rule {
        let MirasOptions { memory, expansion, chunk, .. } = self.options;
        let retention = Retention::ScalarDecay;
        Rule { memory, bias: Bias::Huber, retention, chunk, expansion, ..Rule::default() }
    }

    fn miras(&self) -> Miras<'_> {
        Miras { name: Self::NAME, options: &self.options, rule: self.rule() }
    }

    pub(crate) fn validate_sizes(&self) -> Result<(), MemoryError> {
        self.miras().validate_sizes()
    }
}

miras_layer!(YaadConfig, "yaad");
