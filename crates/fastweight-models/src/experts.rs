//! Lookup experts of a model: as networks, as tables, and the bytes that either form reads.

use burn::tensor::{Device, Tensor};
use fastweight_memory::ChannelMixerConfig;
use fastweight_memory::channel::{ExpertBytes, MoleConfig};

use crate::{Block, LanguageModel, ModelConfig, ModelError};

/// The lookup experts of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerExperts {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Its experts.
    pub experts: usize,
    /// Whether the model at hand has them as tables.
    pub are_tables: bool,
    /// Their bytes as networks.
    pub networks: ExpertBytes,
    /// Their bytes as tables.
    pub tables: ExpertBytes,
}

impl ModelConfig {
    /// The same model with its lookup experts as tables.
    ///
    /// # Errors
    /// [`ModelError::Setting`]: the model has no lookup experts, or has them as tables already.
    pub fn with_tables(&self) -> Result<Self, ModelError> {
        let mut names: Vec<String> = Vec::new();
        let mut networks = false;
        for layer in 0..self.layers.min(self.channel_mixers.len()) {
            let mixer = self.channel_mixer(layer);
            let tables = matches!(mixer, ChannelMixerConfig::Mole(mole) if mole.tables);
            networks |= !tables && matches!(mixer, ChannelMixerConfig::Mole(_));
            let name = format!("{}{}", mixer.name(), if tables { " with tables" } else { "" });
            if !names.contains(&name) {
                names.push(name);
            }
        }
        if !networks {
            let expected = "`mole` with experts as networks in one layer at least: only those become tables";
            return Err(ModelError::Setting {
                setting: "channel_mixers",
                found: names.join(", "),
                expected: expected.into(),
            });
        }
        Ok(self.with_experts(true))
    }

    /// The same model with its lookup experts as tables, or as networks.
    fn with_experts(&self, tables: bool) -> Self {
        let mixers = self.channel_mixers.iter().map(|mixer| match mixer {
            ChannelMixerConfig::Mole(mole) => ChannelMixerConfig::Mole(MoleConfig { tables, ..mole.clone() }),
            other => other.clone(),
        });
        Self { channel_mixers: mixers.collect(), ..self.clone() }
    }

    /// The layers with lookup experts and the bytes of both forms, from the sizes of their tensors, which are not filled.
    ///
    /// # Errors
    /// Those of [`ModelConfig::validate`].
    pub fn experts(&self) -> Result<Vec<LayerExperts>, ModelError> {
        self.validate()?;
        let (device, period) = (Device::flex(), self.channel_mixers.len());
        let bytes = |layer: usize, tables: bool| {
            let config = self.with_experts(tables);
            let map = config.channel_mixer(layer).build(&config.context(layer), &device);
            let map = map.map_err(|source| ModelError::Layer { layer, source })?;
            Ok::<_, ModelError>(map.expert_bytes())
        };
        let mut found: Vec<LayerExperts> = Vec::new();
        for layer in 0..self.layers {
            let ChannelMixerConfig::Mole(mole) = self.channel_mixer(layer) else { continue };
            // Layers of the same channel mixer have experts of the same sizes.
            if let Some(same) = found.iter().find(|known| known.layer + period == layer) {
                found.push(LayerExperts { layer, ..same.clone() });
            } else if let (Some(networks), Some(tables)) = (bytes(layer, false)?, bytes(layer, true)?) {
                let (experts, are_tables) = (mole.experts, mole.tables);
                found.push(LayerExperts { layer, experts, are_tables, networks, tables });
            }
        }
        Ok(found)
    }
}

impl LanguageModel {
    /// The same model with its lookup experts as tables, for inference: the outputs are equal to float rounding, and a
    /// token reads one row of `width` numbers an expert instead of the expert's weights. A table holds
    /// `vocab * experts * width` numbers a layer.
    ///
    /// # Errors
    /// Those of [`ModelConfig::with_tables`].
    pub fn export_tables(&self) -> Result<Self, ModelError> {
        let config = self.config.with_tables()?;
        // Every token of the vocabulary, as the first block reads it.
        let device = self.embedding.weight.val().device();
        let all = Tensor::arange(0..config.vocab as i64, &device).unsqueeze_dim::<2>(0);
        let vectors = self.embed(all)?.0.squeeze_dim::<2>(0);
        let tables = |(layer, block): (usize, &Block)| {
            let mlp = block.mlp.to_tables(vectors.clone());
            let mlp = mlp.map_err(|source| ModelError::Layer { layer, source })?;
            Ok::<_, ModelError>(Block { mlp, ..block.clone() })
        };
        let blocks = self.blocks.iter().enumerate().map(tables).collect::<Result<_, _>>()?;
        Ok(Self { blocks, config, ..self.clone() })
    }
}
