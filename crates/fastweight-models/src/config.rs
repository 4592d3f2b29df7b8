//! Description of a language model.

use burn::tensor::Device;
use fastweight_memory::channel::MOST_HIDDEN;
use fastweight_memory::init::initialise;
use fastweight_memory::layers::GatedDeltaNetConfig;
use fastweight_memory::{
    ChannelMixerConfig, LayerContext, MOST_HEAD_CHANNELS, MOST_LAYERS, MOST_WIDTH, MixerConfig, NormKind,
    StateSize, linear,
};
use serde::{Deserialize, Serialize};

use crate::block::Block;
use crate::language_model::{Embedding, LanguageModel};
use crate::rounds::{HaltingConfig, Rounds};
use crate::{LayerBytes, ModelError, StateBytes};

/// Most token ids of a vocabulary.
const MOST_VOCAB: usize = 1 << 31;

/// Sizes and mixers of a language model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Blocks.
    pub layers: usize,
    /// Heads of every mixer.
    pub heads: usize,
    /// Key and query channels of a head; `width / heads` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Value channels of a head; as `head_dim` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<usize>,
    /// Mixers, repeated over the layers: three delta layers, then one attention, and so on.
    pub mixers: Vec<MixerConfig>,
    /// Channel mixers, repeated over the layers as the mixers are; SwiGLU when absent.
    #[serde(default = "default_channel_mixers", skip_serializing_if = "are_default")]
    pub channel_mixers: Vec<ChannelMixerConfig>,
    /// Hidden channels of the channel mixers; SwiGLU's default is 8/3 of the width, rounded up to a multiple of 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp_hidden: Option<usize>,
    /// Times that the blocks are applied, one after the other with the same weights and a state of their own each
    /// time (Universal Transformer, Dehghani et al. 2018, 1807.03819).
    #[serde(default = "one_round", skip_serializing_if = "is_one_round")]
    pub rounds: usize,
    /// When tokens stop before the last round; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub halting: Option<HaltingConfig>,
    /// The output head is the embedding.
    #[serde(default)]
    pub tied: bool,
    /// Normalisation before every mixer and channel mixer, and before the head; RMS when absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub norm: NormKind,
    /// The embeddings pass a normalisation of that kind before the first block (`ln0` of RWKV).
    #[serde(default, skip_serializing_if = "is_default")]
    pub embedding_norm: bool,
    /// Added to the mean square, or the variance, in every normalisation.
    #[serde(default = "default_norm_eps")]
    pub norm_eps: f64,
}

fn default_norm_eps() -> f64 {
    1e-5
}

fn one_round() -> usize {
    1
}

fn is_one_round(rounds: &usize) -> bool {
    *rounds == 1
}

fn default_channel_mixers() -> Vec<ChannelMixerConfig> {
    vec![ChannelMixerConfig::default()]
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn are_default(mixers: &Vec<ChannelMixerConfig>) -> bool {
    *mixers == default_channel_mixers()
}

impl Default for ModelConfig {
    /// A small Gated DeltaNet over bytes: width 64, 2 layers, 2 heads.
    fn default() -> Self {
        Self::new(256, 64, 2, 2, MixerConfig::GatedDeltaNet(GatedDeltaNetConfig::default()))
    }
}

impl ModelConfig {
    /// A model with one mixer in every layer, an untied head and default sizes elsewhere.
    pub fn new(vocab: usize, width: usize, layers: usize, heads: usize, mixer: MixerConfig) -> Self {
        Self {
            vocab,
            width,
            layers,
            heads,
            head_dim: None,
            value_dim: None,
            mixers: vec![mixer],
            channel_mixers: default_channel_mixers(),
            mlp_hidden: None,
            rounds: 1,
            halting: None,
            tied: false,
            norm: NormKind::default(),
            embedding_norm: false,
            norm_eps: default_norm_eps(),
        }
    }

    /// Checks all sizes and every layer's mixer.
    ///
    /// # Errors
    /// [`ModelError::Setting`] or [`ModelError::Layer`] says what to change.
    pub fn validate(&self) -> Result<(), ModelError> {
        let setting =
            |setting, found: String, expected: String| Err(ModelError::Setting { setting, found, expected });
        let sizes = [
            ("vocab", self.vocab),
            ("width", self.width),
            ("layers", self.layers),
            ("heads", self.heads),
            ("mixers", self.mixers.len()),
            ("channel_mixers", self.channel_mixers.len()),
            ("mlp_hidden", self.mlp_hidden()),
            ("rounds", self.rounds),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return setting(*name, "0".into(), "at least 1".into());
        }
        let bounds = [
            ("vocab", self.vocab, MOST_VOCAB),
            ("width", self.width, MOST_WIDTH),
            ("layers", self.layers, MOST_LAYERS),
            ("heads", self.heads, MOST_HEAD_CHANNELS),
            ("mlp_hidden", self.mlp_hidden(), MOST_HIDDEN),
            ("rounds", self.rounds, MOST_LAYERS / self.layers.clamp(1, MOST_LAYERS)),
        ];
        if let Some((name, size, most)) = bounds.iter().find(|(_, size, most)| size > most) {
            return setting(*name, size.to_string(), format!("at most {most}"));
        }
        if let Some(halting) = &self.halting {
            halting.validate(self.rounds)?;
        }
        if self.head_dim.is_none() && !self.width.is_multiple_of(self.heads) {
            let expected = format!("a divisor of width = {}, or give head_dim", self.width);
            return setting("heads", self.heads.to_string(), expected);
        }
        for layer in 0..self.layers {
            let context = self.context(layer);
            let mixers = self.mixer(layer).validate(&context);
            mixers
                .and_then(|()| self.channel_mixer(layer).validate(&context))
                .map_err(|source| ModelError::Layer { layer, source })?;
        }
        Ok(())
    }

    /// The mixer of a layer.
    ///
    /// # Panics
    /// When `mixers` is empty, which [`ModelConfig::validate`] reports.
    pub fn mixer(&self, layer: usize) -> &MixerConfig {
        &self.mixers[layer % self.mixers.len()]
    }

    /// The channel mixer of a layer.
    ///
    /// # Panics
    /// When `channel_mixers` is empty, which [`ModelConfig::validate`] reports.
    pub fn channel_mixer(&self, layer: usize) -> &ChannelMixerConfig {
        &self.channel_mixers[layer % self.channel_mixers.len()]
    }

    /// Geometry of a layer.
    pub fn context(&self, layer: usize) -> LayerContext {
        let head_dim = self.head_dim.unwrap_or(self.width / self.heads.max(1));
        LayerContext {
            width: self.width,
            heads: self.heads,
            head_dim,
            value_dim: self.value_dim.unwrap_or(head_dim),
            layer,
            layers: self.layers,
            norm_eps: self.norm_eps,
            mlp_hidden: self.mlp_hidden,
            vocab: self.vocab,
            seed: 0,
        }
    }

    /// Hidden channels of the channel mixer that has most.
    pub fn mlp_hidden(&self) -> usize {
        let context = self.context(0);
        self.channel_mixers.iter().map(|mixer| mixer.hidden(&context)).max().unwrap_or(0)
    }

    /// The model with weights drawn from `seed`; the same seed gives the same weights, whatever else has used
    /// random numbers.
    ///
    /// # Errors
    /// Those of [`ModelConfig::validate`].
    pub fn init(&self, seed: u64, device: &Device) -> Result<LanguageModel, ModelError> {
        Ok(initialise(self.build(device)?, seed, self.layers))
    }

    /// The model with all parameters zero, to be loaded from a checkpoint.
    ///
    /// # Errors
    /// Those of [`ModelConfig::validate`].
    pub fn build(&self, device: &Device) -> Result<LanguageModel, ModelError> {
        self.validate()?;
        let norm = || self.norm.build(self.width, self.norm_eps, device);
        let block = |layer: usize| {
            let context = self.context(layer);
            let fault = |source| ModelError::Layer { layer, source };
            let mixer = self.mixer(layer).build(&context, device).map_err(fault)?;
            let mlp = self.channel_mixer(layer).build(&context, device).map_err(fault)?;
            Ok(Block { mixer_norm: norm(), mixer, mlp_norm: norm(), mlp })
        };
        Ok(LanguageModel {
            embedding: Embedding::new(self.vocab, self.width, device),
            embedding_norm: self.embedding_norm.then(norm),
            blocks: (0..self.layers).map(block).collect::<Result<_, ModelError>>()?,
            rounds: (self.rounds > 1)
                .then(|| Rounds::new(self.rounds, self.width, self.halting.is_some(), device)),
            norm: norm(),
            head: (!self.tied).then(|| linear(self.width, self.vocab, device)),
            config: self.clone(),
        })
    }

    /// Trained parameters, exact, without building the model; `usize::MAX` when there are more.
    pub fn parameter_count(&self) -> usize {
        let product = |sizes: &[usize]| sizes.iter().fold(1, |all: usize, size| all.saturating_mul(*size));
        let norm = self.norm.parameter_count(self.width);
        let norms = norm.saturating_mul(if self.embedding_norm { 2 } else { 1 });
        let embeddings = product(&[if self.tied { 1 } else { 2 }, self.vocab, self.width]);
        let rounds = match self.rounds {
            0 | 1 => 0,
            rounds => Rounds::parameter_count(rounds, self.width, self.halting.is_some()),
        };
        let period = least_common_multiple(self.mixers.len().max(1), self.channel_mixers.len().max(1));
        let block = |layer| {
            let context = self.context(layer);
            let maps = self.channel_mixer(layer).parameter_count(&context);
            let mixers = self.mixer(layer).parameter_count(&context).saturating_add(maps);
            mixers.saturating_add(product(&[2, norm]))
        };
        // Layers with the same mixers have the same parameters, but for the model's first layer.
        let blocks = (0..period.min(self.layers)).map(|layer| match (self.layers - layer).div_ceil(period) {
            1 => block(layer),
            count => block(layer).saturating_add(product(&[block(layer + period), count - 1])),
        });
        blocks.fold(embeddings.saturating_add(norms).saturating_add(rounds), usize::saturating_add)
    }

    /// Whether a session's state grows with every token read: some layer is softmax attention without a window
    /// or has DEA.
    pub fn state_grows(&self) -> bool {
        self.mixers.iter().take(self.layers).any(MixerConfig::state_grows)
    }

    /// Whether some layer routes tokens and has a load-balance loss.
    pub fn routes(&self) -> bool {
        self.routing_layers().next().is_some()
    }

    /// The layers that route tokens, in the order a model passes them, round by round.
    pub fn routing_layers(&self) -> impl Iterator<Item = usize> {
        let layers = move || (0..self.layers).filter(|layer| self.mixer(*layer).routes());
        (0..self.rounds).flat_map(move |_| layers())
    }

    /// Bytes of one session's state after `tokens` tokens, layer by layer and round by round.
    pub fn state_bytes(&self, tokens: usize) -> StateBytes {
        let layer = |(round, layer)| {
            let context = self.context(layer);
            let mixer = self.mixer(layer).state_size(&context, tokens);
            let channel = self.channel_mixer(layer).state_size(&context);
            let size = StateSize {
                fixed: mixer.fixed.saturating_add(channel.fixed),
                growing: mixer.growing.saturating_add(channel.growing),
            };
            LayerBytes { round, layer, mixer: self.mixer(layer).name(), size }
        };
        let passes = (0..self.rounds).flat_map(|round| (0..self.layers).map(move |layer| (round, layer)));
        StateBytes { tokens, layers: passes.map(layer).collect() }
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}
