//! Any channel mixer's configuration, as recipes write it.

use burn::tensor::Device;
use schemars::JsonSchema;
use serde::de::Deserializer;
use serde::{Deserialize, Serialize};

use super::{
    ChannelMixer, DeepEmbedConfig, MoleConfig, Rwkv7ChannelMixConfig, Rwkv7DeepEmbedConfig, SwiGluConfig,
};
use crate::choice::{self, Choice, Options};
use crate::context::setting_error;
use crate::init::initialise;
use crate::{LayerContext, MemoryError, StateSize};

/// Most hidden channels of a channel mixer.
pub const MOST_HIDDEN: usize = 1 << 24;

/// Which channel mixer a layer has, and its options.
///
/// Written as a name, `"swiglu"`, or as a table with its `kind` and options.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(transform = choice::or_name)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ChannelMixerConfig {
    /// `swiglu`: a gated map on each token.
    #[serde(rename = "swiglu")]
    SwiGlu(SwiGluConfig),
    /// `rwkv7_channel_mix`: a squared ReLU over a token mixed with the one before.
    #[serde(rename = "rwkv7_channel_mix")]
    Rwkv7ChannelMix(Rwkv7ChannelMixConfig),
    /// `deep_embed`: a feed-forward map times a vector for each token id.
    DeepEmbed(DeepEmbedConfig),
    /// `rwkv7_deep_embed`: the channel mix of RWKV-7, scaled inside by a matrix for each token id.
    #[serde(rename = "rwkv7_deep_embed")]
    Rwkv7DeepEmbed(Rwkv7DeepEmbedConfig),
    /// `mole`: lookup experts.
    Mole(MoleConfig),
}

macro_rules! each {
    ($config:expr, $variant:ident, $inner:ident => $result:expr) => {
        each!(@ $config, $variant, $inner, $result, SwiGlu Rwkv7ChannelMix DeepEmbed Rwkv7DeepEmbed Mole)
    };
    (@ $config:expr, $variant:ident, $inner:ident, $result:expr, $($name:ident)*) => {
        match $config {
            $(ChannelMixerConfig::$name($inner) => {
                #[allow(unused)]
                use ChannelMixer::$name as $variant;
                $result
            })*
        }
    };
}

impl Default for ChannelMixerConfig {
    fn default() -> Self {
        Self::SwiGlu(SwiGluConfig::default())
    }
}

impl ChannelMixerConfig {
    /// Names of all channel mixers, in the order of the documentation.
    pub const NAMES: [&'static str; 5] = [
        SwiGluConfig::NAME,
        Rwkv7ChannelMixConfig::NAME,
        DeepEmbedConfig::NAME,
        Rwkv7DeepEmbedConfig::NAME,
        MoleConfig::NAME,
    ];

    /// The channel mixer of a name, with its default options.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::with_options(name, Options::new())?.ok()
    }

    /// The mixer's name in recipes.
    pub fn name(&self) -> &'static str {
        match self {
            Self::SwiGlu(_) => SwiGluConfig::NAME,
            Self::Rwkv7ChannelMix(_) => Rwkv7ChannelMixConfig::NAME,
            Self::DeepEmbed(_) => DeepEmbedConfig::NAME,
            Self::Rwkv7DeepEmbed(_) => Rwkv7DeepEmbedConfig::NAME,
            Self::Mole(_) => MoleConfig::NAME,
        }
    }

    /// Channels inside.
    pub fn hidden(&self, ctx: &LayerContext) -> usize {
        each!(self, Map, config => config.hidden(ctx))
    }

    /// Checks the options against the layer's geometry.
    ///
    /// # Errors
    /// [`MemoryError::Setting`] names the setting and what to change.
    pub fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        match self.hidden(ctx) {
            0 => Err(setting_error(self.name(), "mlp_hidden", 0, "at least 1")),
            hidden if hidden > MOST_HIDDEN => {
                Err(setting_error(self.name(), "mlp_hidden", hidden, format!("at most {MOST_HIDDEN}")))
            }
            _ => each!(self, Map, config => config.validate(ctx)),
        }
    }

    /// The map with all parameters zero, to be initialised or loaded.
    ///
    /// # Errors
    /// Those of [`ChannelMixerConfig::validate`].
    pub fn build(&self, ctx: &LayerContext, device: &Device) -> Result<ChannelMixer, MemoryError> {
        self.validate(ctx)?;
        Ok(each!(self, Map, config => Map(config.build(ctx, device))))
    }

    /// The map with weights drawn from the context's seed.
    ///
    /// # Errors
    /// Those of [`ChannelMixerConfig::validate`].
    pub fn init(&self, ctx: &LayerContext, device: &Device) -> Result<ChannelMixer, MemoryError> {
        Ok(initialise(self.build(ctx, device)?, ctx.seed, ctx.layers))
    }

    /// Trained parameters, exact, without building the map; `usize::MAX` when there are more.
    pub fn parameter_count(&self, ctx: &LayerContext) -> usize {
        each!(self, Map, config => config.parameter_count(ctx))
    }

    /// Bytes of one sequence's state.
    pub fn state_size(&self, ctx: &LayerContext) -> StateSize {
        each!(self, Map, config => config.state_size(ctx))
    }
}

impl<'de> Deserialize<'de> for ChannelMixerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        choice::deserialize(deserializer)
    }
}

impl Choice for ChannelMixerConfig {
    const WHAT: &'static str = "channel mixer";

    fn names() -> &'static [&'static str] {
        &Self::NAMES
    }

    fn with_options(name: &str, options: Options) -> Option<Result<Self, String>> {
        Some(match name {
            SwiGluConfig::NAME => choice::parse(name, options).map(Self::SwiGlu),
            Rwkv7ChannelMixConfig::NAME => choice::parse(name, options).map(Self::Rwkv7ChannelMix),
            DeepEmbedConfig::NAME => choice::parse(name, options).map(Self::DeepEmbed),
            Rwkv7DeepEmbedConfig::NAME => choice::parse(name, options).map(Self::Rwkv7DeepEmbed),
            MoleConfig::NAME => choice::parse(name, options).map(Self::Mole),
            _ => return None,
        })
    }
}
