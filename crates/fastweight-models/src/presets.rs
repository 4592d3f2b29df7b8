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

/// Hybrids: name, the mixers and the channel mixers repeated over the layers; SwiGLU where there are none.
const HYBRIDS: [(&str, &[&str], &[&str]); 4] = [
    ("hybrid_3to1", &["delta_net", "delta_net", "delta_net", "softmax_attention"], &[]),
    (
        "hybrid_gated_3to1",
        &["gated_delta_net", "gated_delta_net", "gated_delta_net", "softmax_attention"],
        &[],
    ),
    ("hybrid_1to1", &["gated_delta_net", "softmax_attention"], &[]),
    ("mole", &["softmax_attention"], &["mole"]),
];

fn families() -> impl Iterator<Item = &'static str> {
    MixerConfig::NAMES.into_iter().chain(HYBRIDS.iter().map(|(name, ..)| *name))
}

/// The architectures of Titans with persistent tokens and a span of attention that suit a size: their defaults are the paper's, and a
/// tiny model would be little but persistent tokens.
fn sized(mut mixer: MixerConfig, size: &str) -> MixerConfig {
    let (few, tokens) = match size {
        "tiny" => (4, 64),
        "small" => (16, 128),
        "base" => (32, 256),
        _ => return mixer,
    };
    let (persistent, span) = match &mut mixer {
        MixerConfig::TitansMac(config) => (&mut config.persistent, &mut config.segment),
        MixerConfig::TitansMag(config) => (&mut config.persistent, &mut config.window),
        MixerConfig::TitansMal(config) => (&mut config.persistent, &mut config.window),
        _ => return mixer,
    };
    (*persistent, *span) = (few, tokens);
    mixer
}

/// All presets, family by family, small to large.
pub fn names() -> Vec<String> {
    families().flat_map(|family| SIZES.iter().map(move |size| format!("{family}-{}", size.0))).collect()
}

/// The preset of a name. Its vocabulary is 256, for bytes; set `vocab` for another tokenizer.
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
    let (pattern, channels): (&[&str], &[&str]) = match HYBRIDS.iter().find(|(hybrid, ..)| *hybrid == family)
    {
        Some((_, mixers, channels)) => (mixers, channels),
        None => (&[family], &[]),
    };
    let mixer = |name: &&str| Some(sized(MixerConfig::by_name(name)?, size));
    let mixers = pattern.iter().map(mixer).collect::<Option<Vec<_>>>()?;
    let channels =
        channels.iter().map(|name| ChannelMixerConfig::by_name(name)).collect::<Option<Vec<_>>>()?;
    let layers = layers.next_multiple_of(mixers.len());
    let mut config = ModelConfig::new(vocab, width, layers, heads, mixers.first()?.clone());
    config.mixers = mixers;
    if !channels.is_empty() {
        config.channel_mixers = channels;
    }
    Some(config)
}
