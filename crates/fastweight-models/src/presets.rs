//! Models by name: a mixer (or a family) and a size, `delta_net-tiny`, `hybrid_3to1-small`, `rwkv7_full-base`.

use fastweight_memory::{ChannelMixerConfig, MixerConfig, NormKind, names};

use crate::{ModelConfig, ModelError};

/// Sizes: name, width, layers, heads, vocabulary (bytes).
const SIZES: [(&str, usize, usize, usize, usize); 4] = [
    ("tiny", 32, 2, 2, 256),
    ("small", 128, 4, 2, 256),
    ("base", 256, 8, 4, 256),
    ("large", 768, 12, 12, 256),
];

/// A family that is more than one mixer with SwiGLU and RMS normalisation.
struct Family {
    name: &'static str,
    /// Repeated over the layers.
    mixers: &'static [&'static str],
    /// Repeated over the layers.
    channel_mixers: &'static [&'static str],
    norm: NormKind,
    embedding_norm: bool,
    /// Window of its softmax attention.
    window: Option<usize>,
    /// One block, applied as often as other models of the size have layers.
    in_rounds: bool,
}

/// Mixers in turns, with SwiGLU and RMS normalisation.
const fn hybrid(name: &'static str, mixers: &'static [&'static str]) -> Family {
    Family {
        name,
        mixers,
        channel_mixers: &["swiglu"],
        norm: NormKind::Rms,
        embedding_norm: false,
        window: None,
        in_rounds: false,
    }
}

/// A model of the RWKV-7 series: layer normalisation, and one of the embeddings.
const fn rwkv7(
    name: &'static str,
    mixers: &'static [&'static str],
    channel_mixers: &'static [&'static str],
) -> Family {
    Family { channel_mixers, norm: NormKind::Layer, embedding_norm: true, ..hybrid(name, mixers) }
}

const FAMILIES: [Family; 9] = [
    hybrid("hybrid_3to1", &["delta_net", "delta_net", "delta_net", "softmax_attention"]),
    hybrid(
        "hybrid_gated_3to1",
        &["gated_delta_net", "gated_delta_net", "gated_delta_net", "softmax_attention"],
    ),
    hybrid("hybrid_1to1", &["gated_delta_net", "softmax_attention"]),
    rwkv7("rwkv7_full", &["rwkv7"], &["rwkv7_channel_mix"]),
    rwkv7("rwkv7_deep_embed", &["rwkv7"], &["rwkv7_deep_embed"]),
    rwkv7("rwkv7_dea", &["rwkv7_dea"], &["rwkv7_deep_embed"]),
    Family { channel_mixers: &["mole"], ..hybrid("mole", &["softmax_attention"]) },
    // Ren et al. 2024, 2406.07522: Mamba, MLP, sliding window, MLP, and so on.
    Family { window: Some(2048), ..hybrid("samba", &["mamba2", "softmax_attention"]) },
    // The Universal Transformer.
    Family { in_rounds: true, ..hybrid("universal", &["softmax_attention"]) },
];

/// A family's name may be a mixer's, of which it is then the whole model.
fn families() -> impl Iterator<Item = &'static str> {
    let alone = |name: &&str| FAMILIES.iter().all(|family| family.name != *name);
    MixerConfig::NAMES.into_iter().filter(alone).chain(FAMILIES.iter().map(|family| family.name))
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

/// The preset of a name. Its vocabulary is 256, for bytes; set `vocab` for another tokenizer. The window of `samba` is the
/// paper's 2048 tokens; a recipe changes it with `mixers` beside the preset.
///
/// # Errors
/// [`ModelError::Preset`] with the closest name, with the sizes of a known family, or with all families and sizes.
pub fn by_name(name: &str) -> Result<ModelConfig, ModelError> {
    find(name).ok_or_else(|| ModelError::Preset(unknown(name)))
}

/// What is wrong with the name of no preset, and the nearest one.
fn unknown(name: &str) -> String {
    let sizes = SIZES.map(|size| size.0);
    let (family, size) = name.rsplit_once('-').unwrap_or((name, ""));
    if families().any(|known| known == family) {
        return match names::closest(size, sizes) {
            Some(close) => format!("unknown preset {name:?}; did you mean \"{family}-{close}\"?"),
            None => {
                let presets = sizes.map(|size| format!("{family}-{size}")).join(", ");
                format!("unknown preset {name:?}; the presets of {family} are {presets}")
            }
        };
    }
    match names::closest(name, self::names().iter().map(String::as_str)) {
        Some(close) => format!("unknown preset {name:?}; did you mean {close:?}?"),
        None => {
            let (families, sizes) = (families().collect::<Vec<_>>().join(", "), sizes.join(", "));
            format!(
                "unknown preset {name:?}; a preset is FAMILY-SIZE with a family of {families} and a size of {sizes}"
            )
        }
    }
}

fn find(name: &str) -> Option<ModelConfig> {
    let (family, size) = name.rsplit_once('-')?;
    let &(_, width, layers, heads, vocab) = SIZES.iter().find(|candidate| candidate.0 == size)?;
    let model = |mixer| ModelConfig::new(vocab, width, layers, heads, mixer);
    let Some(family) = FAMILIES.iter().find(|candidate| candidate.name == family) else {
        return MixerConfig::by_name(family).map(|mixer| model(sized(mixer, size)));
    };
    let mixer = |name: &&str| {
        let mut mixer = sized(MixerConfig::by_name(name)?, size);
        if let MixerConfig::SoftmaxAttention(attention) = &mut mixer {
            attention.window = family.window;
        }
        Some(mixer)
    };
    let mixers = family.mixers.iter().map(mixer).collect::<Option<Vec<_>>>()?;
    let channel_mixers =
        family.channel_mixers.iter().map(|name| ChannelMixerConfig::by_name(name)).collect::<Option<_>>()?;
    let first = mixers.first()?.clone();
    Some(ModelConfig {
        layers: if family.in_rounds { 1 } else { layers.next_multiple_of(mixers.len()) },
        rounds: if family.in_rounds { layers } else { 1 },
        mixers,
        channel_mixers,
        norm: family.norm,
        embedding_norm: family.embedding_norm,
        ..model(first)
    })
}
