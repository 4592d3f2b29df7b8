//! Any mixer's configuration, as recipes write it.

use burn::tensor::Device;
use schemars::JsonSchema;
use serde::de::Deserializer;
use serde::{Deserialize, Serialize};

use crate::choice::{self, Choice, Options};
use crate::context::{MOST_WINDOW, validate_conv};
use crate::init::initialise;
use crate::layers::{
    CombaConfig, DeltaNetConfig, DeltaProductConfig, DlaConfig, Elu1LinearAttentionConfig,
    GatedDeltaNetConfig, GatedLinearAttentionConfig, Hgrn2Config, KimiDeltaAttentionConfig, LayerConfig,
    LightningAttentionConfig, LinearAttentionConfig, LstmConfig, Mamba2Config, MemoraConfig,
    MixtureOfMemoriesConfig, MonetaConfig, RetNetConfig, RuleConfig, Rwkv7Config, Rwkv7DeaConfig,
    SoftmaxAttentionConfig, SrwmConfig, TitansConfig, TitansMacConfig, TitansMagConfig, TitansMalConfig,
    TitansMlpConfig, TttLinearConfig, TttMlpConfig, YaadConfig,
};
use crate::{LayerContext, MemoryError, Mixer, StateSize};

/// Which mixer a layer has, and its options.
///
/// Written as a name, `"delta_net"`, or as a table, `{ kind = "softmax_attention", window = 64 }`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(transform = choice::or_name)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MixerConfig {
    /// `softmax_attention`: causal softmax attention.
    SoftmaxAttention(SoftmaxAttentionConfig),
    /// `linear_attention`: linear attention without normaliser.
    LinearAttention(LinearAttentionConfig),
    /// `elu1_linear_attention`: normalised linear attention with the feature map ELU + 1.
    #[serde(rename = "elu1_linear_attention")]
    Elu1LinearAttention(Elu1LinearAttentionConfig),
    /// `retnet`: linear attention with a fixed decay per head.
    #[serde(rename = "retnet")]
    RetNet(RetNetConfig),
    /// `lightning_attention`: linear attention with a fixed decay per head and layer.
    LightningAttention(LightningAttentionConfig),
    /// `mamba2`: linear attention with a decay per head and token.
    #[serde(rename = "mamba2")]
    Mamba2(Mamba2Config),
    /// `delta_net`: the delta rule.
    DeltaNet(DeltaNetConfig),
    /// `gated_delta_net`: the delta rule with a decay per head and token.
    GatedDeltaNet(GatedDeltaNetConfig),
    /// `gla`: gated linear attention, a decay per key channel and token.
    #[serde(rename = "gla")]
    GatedLinearAttention(GatedLinearAttentionConfig),
    /// `hgrn2`: gated linear attention whose keys are what the forget gate leaves free.
    #[serde(rename = "hgrn2")]
    Hgrn2(Hgrn2Config),
    /// `kda`: Kimi Delta Attention, the delta rule with a decay per key channel and token.
    #[serde(rename = "kda")]
    KimiDeltaAttention(KimiDeltaAttentionConfig),
    /// `comba`: the gated delta rule with a learned strength of removal and a query corrected by the key.
    Comba(CombaConfig),
    /// `delta_product`: several steps of the delta rule a token.
    DeltaProduct(DeltaProductConfig),
    /// `titans`: a matrix memory written with momentum.
    Titans(TitansConfig),
    /// `ttt_linear`: an inner linear model that learns while it reads, in mini-batches.
    TttLinear(TttLinearConfig),
    /// `ttt_mlp`: an inner two-layer network that learns while it reads, in mini-batches.
    TttMlp(TttMlpConfig),
    /// `titans_mlp`: a network for a memory, written with momentum.
    TitansMlp(TitansMlpConfig),
    /// `titans_mac`: Titans, memory as a context of attention, segment by segment.
    #[schemars(schema_with = "choice::options::<TitansMacConfig>")]
    TitansMac(TitansMacConfig),
    /// `titans_mag`: Titans, memory as a gate beside attention in a window.
    #[schemars(schema_with = "choice::options::<TitansMagConfig>")]
    TitansMag(TitansMagConfig),
    /// `titans_mal`: Titans, memory as a layer below attention in a window.
    #[schemars(schema_with = "choice::options::<TitansMalConfig>")]
    TitansMal(TitansMalConfig),
    /// `dla`: deep linear attention, a network for a memory with the dot product for a loss.
    Dla(DlaConfig),
    /// `lstm`: the long short-term memory.
    Lstm(LstmConfig),
    /// `srwm`: the self-referential weight matrix.
    Srwm(SrwmConfig),
    /// `mixture_of_memories`: a shared memory, and several of which a router gives each token a few.
    MixtureOfMemories(MixtureOfMemoriesConfig),
    /// `moneta`: a memory that learns by the `l_p` loss under an `l_q` norm.
    #[schemars(schema_with = "choice::options::<MonetaConfig>")]
    Moneta(MonetaConfig),
    /// `yaad`: a memory that learns by the Huber loss with a threshold a token.
    #[schemars(schema_with = "choice::options::<YaadConfig>")]
    Yaad(YaadConfig),
    /// `memora`: a memory of positive weights under KL retention.
    #[schemars(schema_with = "choice::options::<MemoraConfig>")]
    Memora(MemoraConfig),
    /// `rule`: any sound rule of the algebra, by its four choices.
    #[schemars(schema_with = "choice::options::<RuleConfig>")]
    Rule(RuleConfig),
    /// `rwkv7`: the time mix of RWKV-7.
    #[serde(rename = "rwkv7")]
    Rwkv7(Rwkv7Config),
    /// `rwkv7_dea`: the time mix of RWKV-7 with DEA, an attention over a few numbers and the id of every token.
    #[serde(rename = "rwkv7_dea")]
    Rwkv7Dea(Rwkv7DeaConfig),
}

macro_rules! each {
    ($config:expr, $variant:ident, $inner:ident => $result:expr) => {
        each!(@ $config, $variant, $inner, $result, SoftmaxAttention LinearAttention Elu1LinearAttention
            RetNet LightningAttention Mamba2 DeltaNet GatedDeltaNet
            GatedLinearAttention Hgrn2 KimiDeltaAttention Comba DeltaProduct Titans TttLinear TttMlp TitansMlp
            TitansMac TitansMag TitansMal Dla Lstm Srwm MixtureOfMemories Moneta Yaad Memora Rule Rwkv7 Rwkv7Dea)
    };
    (@ $config:expr, $variant:ident, $inner:ident, $result:expr, $($name:ident)*) => {
        match $config {
            $(MixerConfig::$name($inner) => {
                #[allow(unused)]
                use Mixer::$name as $variant;
                $result
            })*
        }
    };
}

impl MixerConfig {
    /// Names of all mixers, in the order of the documentation.
    pub const NAMES: [&'static str; 30] = [
        SoftmaxAttentionConfig::NAME,
        LinearAttentionConfig::NAME,
        Elu1LinearAttentionConfig::NAME,
        RetNetConfig::NAME,
        LightningAttentionConfig::NAME,
        Mamba2Config::NAME,
        DeltaNetConfig::NAME,
        GatedDeltaNetConfig::NAME,
        GatedLinearAttentionConfig::NAME,
        Hgrn2Config::NAME,
        KimiDeltaAttentionConfig::NAME,
        CombaConfig::NAME,
        DeltaProductConfig::NAME,
        TitansConfig::NAME,
        TttLinearConfig::NAME,
        TttMlpConfig::NAME,
        TitansMlpConfig::NAME,
        TitansMacConfig::NAME,
        TitansMagConfig::NAME,
        TitansMalConfig::NAME,
        DlaConfig::NAME,
        LstmConfig::NAME,
        SrwmConfig::NAME,
        MixtureOfMemoriesConfig::NAME,
        MonetaConfig::NAME,
        YaadConfig::NAME,
        MemoraConfig::NAME,
        RuleConfig::NAME,
        Rwkv7Config::NAME,
        Rwkv7DeaConfig::NAME,
    ];

    /// The mixer of a name, with its default options.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::with_options(name, Options::new())?.ok()
    }

    /// The mixer's name in recipes.
    pub fn name(&self) -> &'static str {
        fn name<C: LayerConfig>(_: &C) -> &'static str {
            C::NAME
        }
        each!(self, Layer, config => name(config))
    }

    /// Width of the layer's short convolutions, 0 for none.
    pub fn conv_width(&self) -> usize {
        each!(self, Layer, config => config.conv_width())
    }

    /// Whether a session's state grows with every token read: softmax attention without a window, and DEA.
    pub fn state_grows(&self) -> bool {
        each!(self, Layer, config => config.state_grows())
    }

    /// Whether the layer routes tokens and has a load-balance loss.
    pub fn routes(&self) -> bool {
        matches!(self, Self::MixtureOfMemories(_))
    }

    /// Checks the options against the layer's geometry.
    ///
    /// # Errors
    /// [`MemoryError::Setting`] names the setting and what to change.
    pub fn validate(&self, ctx: &LayerContext) -> Result<(), MemoryError> {
        each!(self, Layer, config => config.validate(ctx))
    }

    /// The layer with all parameters zero, to be initialised or loaded.
    ///
    /// # Errors
    /// Those of [`MixerConfig::validate`].
    pub fn build(&self, ctx: &LayerContext, device: &Device) -> Result<Mixer, MemoryError> {
        each!(self, Layer, config => config.build(ctx, device).map(Layer))
    }

    /// The layer with weights drawn from the context's seed.
    ///
    /// # Errors
    /// Those of [`MixerConfig::validate`].
    pub fn init(&self, ctx: &LayerContext, device: &Device) -> Result<Mixer, MemoryError> {
        Ok(initialise(self.build(ctx, device)?, ctx.seed, ctx.layers))
    }

    /// Trained parameters, exact, without building the layer; `usize::MAX` for a layer with a size that
    /// [`MixerConfig::validate`] refuses as too large.
    pub fn parameter_count(&self, ctx: &LayerContext) -> usize {
        if !self.is_countable(ctx, 0) {
            return usize::MAX;
        }
        each!(self, Layer, config => config.parameter_count(ctx))
    }

    /// Bytes of one sequence's state after `tokens` tokens; `usize::MAX` for a layer with a size that
    /// [`MixerConfig::validate`] refuses as too large, and for more than 2^36 tokens.
    pub fn state_size(&self, ctx: &LayerContext, tokens: usize) -> StateSize {
        if !self.is_countable(ctx, tokens) {
            return StateSize { fixed: usize::MAX, growing: 0 };
        }
        each!(self, Layer, config => config.state_size(ctx, tokens))
    }

    /// Bytes that all heads together keep of a token for the backward pass, where their memories are deep; none for a layer
    /// with a size that [`MixerConfig::validate`] refuses as too large.
    pub fn deep_training_bytes(&self, ctx: &LayerContext) -> Option<usize> {
        if !self.is_countable(ctx, 0) {
            return None;
        }
        each!(self, Layer, config => config.deep_training_bytes(ctx))
    }

    /// Whether no product of the layer's sizes overflows.
    fn is_countable(&self, ctx: &LayerContext, tokens: usize) -> bool {
        let conv_width = self.conv_width();
        let heads = match self {
            Self::SoftmaxAttention(config) => config.kv_heads.unwrap_or(ctx.heads),
            _ => ctx.heads,
        };
        let known = match self {
            Self::Rule(config) => config.validate_rule().is_ok(),
            Self::DeltaProduct(config) => config.validate_steps().is_ok(),
            Self::GatedLinearAttention(config) => config.validate_rank().is_ok(),
            Self::Rwkv7(config) => config.validate_ranks(self.name(), ctx.width).is_ok(),
            Self::Rwkv7Dea(config) => config.validate_sizes(ctx.width).is_ok(),
            Self::TttMlp(config) => config.options().validate_memory().is_ok(),
            Self::TitansMlp(config) => config.options().validate_memory().is_ok(),
            Self::Dla(config) => config.options().validate_memory().is_ok(),
            Self::TitansMac(config) => config.validate_sizes().is_ok(),
            Self::TitansMag(config) => config.validate_sizes().is_ok(),
            Self::TitansMal(config) => config.validate_sizes().is_ok(),
            Self::Lstm(config) => config.validate_hidden().is_ok(),
            Self::MixtureOfMemories(config) => config.validate_memories().is_ok(),
            Self::Moneta(config) => config.validate_sizes().is_ok(),
            Self::Yaad(config) => config.validate_sizes().is_ok(),
            Self::Memora(config) => config.validate_sizes().is_ok(),
            _ => true,
        };
        known
            && ctx.validate_bounds(self.name()).is_ok()
            && validate_conv(self.name(), conv_width.max(2)).is_ok()
            && heads <= ctx.heads
            && tokens <= MOST_WINDOW
    }
}

impl<'de> Deserialize<'de> for MixerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        choice::deserialize(deserializer)
    }
}

impl Choice for MixerConfig {
    const WHAT: &'static str = "mixer";

    fn names() -> &'static [&'static str] {
        &Self::NAMES
    }

    fn with_options(name: &str, options: Options) -> Option<Result<Self, String>> {
        fn parse<C: LayerConfig>(options: Options) -> Result<C, String> {
            choice::parse(C::NAME, options)
        }
        Some(match name {
            SoftmaxAttentionConfig::NAME => parse(options).map(Self::SoftmaxAttention),
            LinearAttentionConfig::NAME => parse(options).map(Self::LinearAttention),
            Elu1LinearAttentionConfig::NAME => parse(options).map(Self::Elu1LinearAttention),
            RetNetConfig::NAME => parse(options).map(Self::RetNet),
            LightningAttentionConfig::NAME => parse(options).map(Self::LightningAttention),
            Mamba2Config::NAME => parse(options).map(Self::Mamba2),
            DeltaNetConfig::NAME => parse(options).map(Self::DeltaNet),
            GatedDeltaNetConfig::NAME => parse(options).map(Self::GatedDeltaNet),
            Rwkv7Config::NAME => parse(options).map(Self::Rwkv7),
            Rwkv7DeaConfig::NAME => parse(options).map(Self::Rwkv7Dea),
            GatedLinearAttentionConfig::NAME => parse(options).map(Self::GatedLinearAttention),
            Hgrn2Config::NAME => parse(options).map(Self::Hgrn2),
            KimiDeltaAttentionConfig::NAME => parse(options).map(Self::KimiDeltaAttention),
            CombaConfig::NAME => parse(options).map(Self::Comba),
            DeltaProductConfig::NAME => parse(options).map(Self::DeltaProduct),
            TttLinearConfig::NAME => parse(options).map(Self::TttLinear),
            TttMlpConfig::NAME => parse(options).map(Self::TttMlp),
            TitansMlpConfig::NAME => parse(options).map(Self::TitansMlp),
            TitansMacConfig::NAME => parse(options).map(Self::TitansMac),
            TitansMagConfig::NAME => parse(options).map(Self::TitansMag),
            TitansMalConfig::NAME => parse(options).map(Self::TitansMal),
            DlaConfig::NAME => parse(options).map(Self::Dla),
            TitansConfig::NAME => parse(options).map(Self::Titans),
            LstmConfig::NAME => parse(options).map(Self::Lstm),
            SrwmConfig::NAME => parse(options).map(Self::Srwm),
            MixtureOfMemoriesConfig::NAME => parse(options).map(Self::MixtureOfMemories),
            MonetaConfig::NAME => parse(options).map(Self::Moneta),
            YaadConfig::NAME => parse(options).map(Self::Yaad),
            MemoraConfig::NAME => parse(options).map(Self::Memora),
            RuleConfig::NAME => RuleConfig::read(options).map(Self::Rule),
            _ => return None,
        })
    }
}
