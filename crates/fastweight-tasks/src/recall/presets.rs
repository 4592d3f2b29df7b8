//! Named sizes of the recall task.

use crate::TaskError;
use crate::names::closest;
use crate::recall::RecallConfig;

/// Name, vocabulary, tokens in a row, pairs. The first group is published (Arora et al. 2023), the second small.
const PRESETS: &[(&str, usize, usize, usize)] = &[
    ("t64_n4", 8192, 64, 4),
    ("t64_n8", 8192, 64, 8),
    ("t64_n16", 8192, 64, 16),
    ("t128_n8", 8192, 128, 8),
    ("t128_n32", 8192, 128, 32),
    ("t256_n16", 8192, 256, 16),
    ("t256_n32", 8192, 256, 32),
    ("t256_n64", 8192, 256, 64),
    ("t512_n64", 8192, 512, 64),
    ("t512_n128", 8192, 512, 128),
    ("t1024_n256", 8192, 1024, 256),
    ("small_t32_n4", 256, 32, 4),
    ("small_t32_n8", 256, 32, 8),
    ("small_t64_n4", 256, 64, 4),
    ("small_t64_n8", 256, 64, 8),
    ("small_t64_n16", 256, 64, 16),
    ("small_t128_n8", 256, 128, 8),
    ("small_t128_n16", 256, 128, 16),
    ("small_t128_n32", 256, 128, 32),
];

/// The names of all presets: `t<length>_n<pairs>` with vocabulary 8192, `small_..` with vocabulary 256.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|preset| preset.0)
}

/// The preset called `name`.
///
/// # Errors
/// [`TaskError::UnknownPreset`] with the nearest known name.
pub fn by_name(name: &str) -> Result<RecallConfig, TaskError> {
    PRESETS
        .iter()
        .find(|preset| preset.0 == name)
        .map(|&(_, vocab, length, pairs)| RecallConfig::new(vocab, length, pairs))
        .ok_or_else(|| TaskError::UnknownPreset {
            name: name.into(),
            suggestion: closest(name, names().map(String::from)),
            known: names().map(String::from).collect(),
        })
}
