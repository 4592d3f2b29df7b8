//! Models by name: a mixer (or a hybrid, or a mixer with channel mixers of its own) and a size, `delta_net-tiny`,
//! `hybrid_3to1-small`, `mole-small`.

use fastweight_memory::{ChannelMixerConfig, MixerConfig, names};

use crate::{ModelConfig, ModelError};

/// Sizes: name, width, layers, heads, vocabulary (bytes).
const SIZES: [(&str, usize, usize, usize, usize); 4] = [
    ("tiny", 32, 2, 2, 256),
    ("small", 128, 4, 2, 256),
    ("base", 256, 8, 4, 256),
    ("large", 768, 12, 12, 256),
];

/// The hybrid whose attention has a window, and that window in the paper.
const SAMBA: &str = "samba";
const SAMBA_WINDOW: usize = 2048;

/// Hybrids: name, the mixers and the channel mixers repeated over the layers; SwiGLU where there are none.
const HYBRIDS: [(&str, &[&str], &[&str]); 5] = [
    ("hybrid_3to1", &["delta_net", "delta_net", "delta_net", "softmax_attention"], &[]),
    (
        "hybrid_gated_3to1",
        &["gated_delta_net", "gated_delta_net", "gated_delta_net", "softmax_attention"],
        &[],
    ),
    ("hybrid_1to1", &["gated_delta_net", "softmax_attention"], &[]),
    ("mole", &["softmax_attention"], &["mole"]),
    // Ren et al. 2024, 2406.07522: Mamba, MLP, sliding window, MLP, and so on.
    (SAMBA, &["mamba2", "softmax_attention"], &[]),
];

/// The Universal Transformer: one block of softmax attention, applied as often as other models of the size have layers.
const UNIVERSAL: &str = "universal";

fn families() -> impl Iterator<Item = &'static str> {
    MixerConfig::NAMES.into_iter().chain(HYBRIDS.iter().map(|(name, ..)| *name)).chain([UNIVERSAL])
}

/// All presets, family by family, small to large.
pub fn names() -> Vec<String> {
    families().flat_map(|family| SIZES.iter().map(move |size| format!("{family}-{}", size.0))).collect()
}

/// The preset of a name. Its vocabulary is 256, for bytes; set `vocab` for another tokenizer. The window of `samba` is the
/// paper's 2048 tokens; a recipe changes it with `mixers` beside the preset.
///
/// # Errors
/// [`ModelError::Preset`] with the closest name, or with all families and sizes.
pub fn by_name(name: &str) -> Result<ModelConfig, ModelError> {
    find(name).ok_or_else(|| {
        let known = names();
        let message = match names::closest(name, known.iter().map(String::as_str)) {
            Some(close) => format!("unknown preset {name:?}; did you mean {close:?}?"),
            None => {
                let families: Vec<_> = families().collect();
                let sizes: Vec<_> = SIZES.iter().map(|size| size.0).collect();
                let (families, sizes) = (families.join(", "), sizes.join(", "));
                format!(
                    "unknown preset {name:?}; a preset is FAMILY-SIZE with a family of {families} and a size of {sizes}"
                )
            }
        };
        ModelError::Preset(message)
    })
}

fn find(name: &str) -> Option<ModelConfig> {
    let (family, size) = name.rsplit_once('-')?;
    let &(_, width, layers, heads, vocab) = SIZES.iter().find(|candidate| candidate.0 == size)?;
    if family == UNIVERSAL {
        let config = ModelConfig::new(vocab, width, 1, heads, MixerConfig::by_name("softmax_attention")?);
        return Some(ModelConfig { rounds: layers, ..config });
    }
    let (pattern, channels): (&[&str], &[&str]) = match HYBRIDS.iter().find(|(hybrid, ..)| *hybrid == family)
    {
        Some((_, mixers, channels)) => (mixers, channels),
        None => (&[family], &[]),
    };
    let mut mixers = pattern.iter().map(|name| MixerConfig::by_name(name)).collect::<Option<Vec<_>>>()?;
    let channels =
        channels.iter().map(|name| ChannelMixerConfig::by_name(name)).collect::<Option<Vec<_>>>()?;
    for mixer in mixers.iter_mut().filter(|_| family == SAMBA) {
        if let MixerConfig::SoftmaxAttention(attention) = mixer {
            attention.window = Some(SAMBA_WINDOW);
        }
    }
    let layers = layers.next_multiple_of(mixers.len());
    let mut config = ModelConfig::new(vocab, width, layers, heads, mixers.first()?.clone());
    config.mixers = mixers;
    if !channels.is_empty() {
        config.channel_mixers = channels;
    }
    Some(config)
}
