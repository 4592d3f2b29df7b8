//! From a recipe to model configurations with matched parameter counts.

use fastweight_models::{ModelConfig, presets};
use serde::{Deserialize, Serialize};

use super::{MatchBy, ModelRecipe, Recipe};
use crate::checkpoint::crc32;
use crate::error::TrainError;

/// Parameter counts that differ by less than this share count as matched.
pub const PARAMETER_TOLERANCE: f64 = 0.05;

/// How a model's parameter count relates to the first model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParameterMatch {
    /// The first model, which the others are compared with.
    Reference,
    /// Within 5% as described.
    AsGiven,
    /// Within 5% after the MLP's hidden width was changed.
    Adjusted,
    /// More than 5% apart.
    Apart,
}

/// One model of a recipe, ready to be built.
#[derive(Debug, Clone)]
pub struct ResolvedModel {
    /// Name in tables and plots.
    pub name: String,
    /// Its configuration.
    pub config: ModelConfig,
    /// Its peak learning rate.
    pub learning_rate: f64,
    /// Whether the recipe gives it that rate alone, so that no other is tried.
    pub own_learning_rate: bool,
    /// Its trained parameters.
    pub parameters: usize,
    /// How that number relates to the first model's.
    pub matching: ParameterMatch,
}

impl Recipe {
    /// The recipe's text, below comments that name the changes made to it.
    pub fn annotated_source(&self) -> String {
        let comments: String =
            self.changes.iter().map(|change| format!("# changed for this run: {change}\n")).collect();
        format!("{comments}{}", self.source)
    }

    /// Identifies what decides the result of training `model` with `seed`: the task, the way of training and the model.
    pub fn fingerprint(&self, model: &ResolvedModel, seed: u64) -> String {
        let mut task = self.task.clone();
        // The content of the text is compared, not its place; and no name decides a result.
        (task.data, task.name) = (None, None);
        let mut train = self.train.clone();
        (train.seeds, train.checkpoint_every, train.keep) = (vec![seed], 0, 0);
        train.learning_rate = model.learning_rate;
        let parts = serde_json::json!([task, train, model.config]);
        crc32(parts.to_string().as_bytes())
    }

    /// The first model with `vocab` token ids.
    ///
    /// # Errors
    /// As [`Recipe::resolve`].
    pub fn resolve_first(&self, vocab: usize) -> Result<ResolvedModel, TrainError> {
        let models = self.resolve(vocab)?;
        // `resolve` gives one model at least.
        models.into_iter().next().ok_or(TrainError::Argument {
            name: "the recipe's list of models",
            found: "empty".into(),
            expected: "at least one model",
        })
    }

    /// What is held equal between models.
    pub fn match_by(&self) -> MatchBy {
        if self.train.seconds.is_some() { MatchBy::Seconds } else { MatchBy::Tokens }
    }

    /// The models with `vocab` token ids, the later ones matched to the first one's parameter count.
    ///
    /// # Errors
    /// An unknown preset, or a description that is not a model.
    pub fn resolve(&self, vocab: usize) -> Result<Vec<ResolvedModel>, TrainError> {
        let single = [ModelRecipe::default()];
        let entries = if self.models.is_empty() { &single[..] } else { &self.models };
        let mut resolved: Vec<ResolvedModel> = Vec::with_capacity(entries.len());
        for entry in entries {
            let fields = entry.over(&self.model);
            let mut config = fields.config(vocab)?;
            let mut parameters = config.parameter_count();
            let matching = match resolved.first() {
                None => ParameterMatch::Reference,
                Some(first) if near(parameters, first.parameters) => ParameterMatch::AsGiven,
                Some(first) if self.compare.match_parameters && entry.mlp_hidden.is_none() => {
                    config = adjusted(config, first.parameters);
                    parameters = config.parameter_count();
                    if near(parameters, first.parameters) {
                        ParameterMatch::Adjusted
                    } else {
                        ParameterMatch::Apart
                    }
                }
                Some(_) => ParameterMatch::Apart,
            };
            let name = fields.name.or(fields.preset).unwrap_or_else(|| self.name.clone());
            let learning_rate = entry.learning_rate.unwrap_or(self.train.learning_rate);
            let own_learning_rate = entry.learning_rate.is_some();
            resolved.push(ResolvedModel {
                name,
                config,
                learning_rate,
                own_learning_rate,
                parameters,
                matching,
            });
        }
        Ok(resolved)
    }
}

impl ModelRecipe {
    /// This entry's fields, the shared ones where it has none.
    pub(super) fn over(&self, shared: &ModelRecipe) -> ModelRecipe {
        ModelRecipe {
            name: self.name.clone().or_else(|| shared.name.clone()),
            learning_rate: self.learning_rate,
            preset: self.preset.clone().or_else(|| shared.preset.clone()),
            width: self.width.or(shared.width),
            layers: self.layers.or(shared.layers),
            heads: self.heads.or(shared.heads),
            head_dim: self.head_dim.or(shared.head_dim),
            value_dim: self.value_dim.or(shared.value_dim),
            mixers: self.mixers.clone().or_else(|| shared.mixers.clone()),
            channel_mixers: self.channel_mixers.clone().or_else(|| shared.channel_mixers.clone()),
            mlp_hidden: self.mlp_hidden.or(shared.mlp_hidden),
            rounds: self.rounds.or(shared.rounds),
            halting: self.halting.clone().or_else(|| shared.halting.clone()),
            tied: self.tied.or(shared.tied),
            norm: self.norm.or(shared.norm),
            embedding_norm: self.embedding_norm.or(shared.embedding_norm),
            norm_eps: self.norm_eps.or(shared.norm_eps),
        }
    }

    pub(super) fn config(&self, vocab: usize) -> Result<ModelConfig, TrainError> {
        let mut config = match &self.preset {
            Some(name) => presets::by_name(name)?,
            None => {
                let mixer = self.mixers.as_ref().and_then(|mixers| mixers.first()).cloned();
                let missing = TrainError::Argument {
                    name: "the recipe's model",
                    found: "without mixers".into(),
                    expected: "`preset` or `mixers`",
                };
                let [width, layers, heads] =
                    [self.width, self.layers, self.heads].map(Option::unwrap_or_default);
                ModelConfig::new(vocab, width, layers, heads, mixer.ok_or(missing)?)
            }
        };
        config.vocab = vocab;
        config.width = self.width.unwrap_or(config.width);
        config.layers = self.layers.unwrap_or(config.layers);
        config.heads = self.heads.unwrap_or(config.heads);
        config.head_dim = self.head_dim.or(config.head_dim);
        config.value_dim = self.value_dim.or(config.value_dim);
        config.mlp_hidden = self.mlp_hidden.or(config.mlp_hidden);
        config.rounds = self.rounds.unwrap_or(config.rounds);
        config.halting = self.halting.clone().or(config.halting);
        config.tied = self.tied.unwrap_or(config.tied);
        config.norm = self.norm.unwrap_or(config.norm);
        config.embedding_norm = self.embedding_norm.unwrap_or(config.embedding_norm);
        config.norm_eps = self.norm_eps.unwrap_or(config.norm_eps);
        if let Some(mixers) = &self.mixers {
            config.mixers.clone_from(mixers);
        }
        if let Some(mixers) = &self.channel_mixers {
            config.channel_mixers.clone_from(mixers);
        }
        Ok(config)
    }
}

fn near(count: usize, reference: usize) -> bool {
    (count as f64 - reference as f64).abs() <= PARAMETER_TOLERANCE * reference as f64
}

/// `config` with the MLP width, a multiple of 8, whose parameter count is nearest `target`.
fn adjusted(config: ModelConfig, target: usize) -> ModelConfig {
    let with = |hidden: usize| ModelConfig { mlp_hidden: Some(hidden), ..config.clone() };
    let (at_8, at_16) = (with(8).parameter_count() as f64, with(16).parameter_count() as f64);
    if at_8 == at_16 {
        // No map of the model has that width.
        return config;
    }
    let per_8 = (at_16 - at_8).max(1.0);
    let eights = 1.0 + ((target as f64 - at_8) / per_8).round();
    with(8 * eights.max(1.0) as usize)
}
