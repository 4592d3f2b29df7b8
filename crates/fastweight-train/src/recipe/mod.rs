//! Recipes: TOML files that say what to train on which tasks.
//!
//! [`Recipe::load`] reads and validates one; every error names line and column and shows the line.

mod changes;
mod parse;
mod place;
mod resolve;
mod task;
mod validate;

use fastweight_memory::{ChannelMixerConfig, MixerConfig, NormKind};
use fastweight_models::HaltingConfig;
use schemars::transform::{RecursiveTransform, Transform};
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};

pub use changes::{QuickRecipe, TrainChanges};
pub use parse::RecipeError;
pub use resolve::{ParameterMatch, ResolvedModel};
pub use task::{TaskKind, TaskRecipe};

/// A recipe: one task or several, how to train, and the model or models to train on each.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// Title shown in progress and reports; defaults to the file's name.
    pub name: String,
    /// What the models learn: `[task]`, or the first of `[[tasks]]`.
    pub task: TaskRecipe,
    /// The other ones of `[[tasks]]`.
    pub further: Vec<TaskRecipe>,
    /// How they are trained, where a task does not say otherwise; [`Recipe::parts`] puts both together.
    pub train: TrainRecipe,
    /// Fields shared by every model; the whole model when there are no `[[models]]`.
    pub model: ModelRecipe,
    /// The models to compare.
    pub models: Vec<ModelRecipe>,
    /// How they are compared.
    pub compare: CompareRecipe,
    /// The text the recipe was read from, kept for reports and run folders.
    pub source: String,
    /// Changes made since, such as another seed; one line each.
    pub changes: Vec<String>,
}

/// A recipe of Fastweight: what to learn, how to train, and which models.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Recipe")]
struct RecipeFile {
    /// Title in progress and reports; the file's name when absent.
    #[serde(default)]
    name: String,
    /// What the models learn.
    task: Option<TaskRecipe>,
    /// Several tasks, in place of `task`.
    #[serde(default)]
    tasks: Vec<TaskRecipe>,
    /// How the models are trained; required.
    train: Option<TrainRecipe>,
    /// The model, or what all of `models` share.
    #[serde(default)]
    model: ModelRecipe,
    /// The models to compare.
    #[serde(default)]
    models: Vec<ModelRecipe>,
    /// How they are compared.
    #[serde(default)]
    compare: CompareRecipe,
}

/// The JSON Schema of a recipe's file, for editors and for listing what a recipe can hold.
pub fn schema() -> serde_json::Value {
    let mut schema = schemars::schema_for!(RecipeFile);
    let plain = |part: &mut Schema| {
        if let Some(serde_json::Value::String(text)) = part.get_mut("description") {
            *text = without_links(text);
        }
    };
    RecursiveTransform(plain).transform(&mut schema);
    schema.to_value()
}

/// A doc comment with the names of its links in place of the links, ``[`name`]`` and ``[`name`](path)``.
fn without_links(text: &str) -> String {
    let mut parts = text.split("[`");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once("`]").unwrap_or((part, ""));
        let rest =
            rest.strip_prefix('(').and_then(|link| link.split_once(')')).map_or(rest, |(_, rest)| rest);
        plain += &format!("`{name}`{rest}");
    }
    plain
}

/// How the models are trained: AdamW with a linear warm-up and a cosine.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrainRecipe {
    /// Budget in optimizer steps. Exactly one of `steps`, `tokens` and `seconds` is given.
    #[schemars(range(min = 1, max = validate::MOST_STEPS))]
    pub steps: Option<usize>,
    /// Budget in training tokens, rounded up to whole steps.
    #[schemars(range(min = 1, max = validate::MOST_TOKENS))]
    pub tokens: Option<u64>,
    /// Budget in seconds of training (evaluation is not counted).
    #[schemars(range(max = validate::MOST_SECONDS), extend("exclusiveMinimum" = 0))]
    pub seconds: Option<f64>,
    /// Sequences in one forward pass.
    #[schemars(range(min = 1))]
    pub batch: usize,
    /// Forward passes added up into one optimizer step.
    #[serde(default = "one")]
    #[schemars(range(min = 1))]
    pub accumulate: usize,
    /// Peak learning rate.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub learning_rate: f64,
    /// Linear warm-up, in steps or as a fraction of the budget.
    #[serde(default)]
    pub warmup: Warmup,
    /// Learning rate at the end of the cosine, as a fraction of the peak.
    #[serde(default = "default_min_lr")]
    #[schemars(range(min = 0, max = 1))]
    pub min_lr: f64,
    /// Decoupled weight decay, on matrices only.
    #[serde(default = "default_weight_decay")]
    #[schemars(range(min = 0))]
    pub weight_decay: f32,
    /// Largest global gradient norm; 0 turns clipping off.
    #[serde(default = "default_clip")]
    #[schemars(range(min = 0))]
    pub clip: f64,
    /// AdamW's decay rates of the first and second moment.
    #[serde(default = "default_betas", deserialize_with = "two_numbers")]
    pub betas: [f32; 2],
    /// Factor on the load-balance losses of layers that route tokens; 0.01 when absent.
    #[serde(default = "default_balance", skip_serializing_if = "is_default_balance")]
    #[schemars(range(min = 0))]
    pub balance: f64,
    /// Steps between evaluations; 0 evaluates at the end only.
    #[serde(default)]
    pub eval_every: usize,
    /// Batches of 64 rows (recall) or strings (formal language; 0 for all), or windows per row (text; 0 for all), in one
    /// evaluation on the way.
    #[serde(default = "default_eval_batches")]
    pub eval_batches: usize,
    /// Score at which training stops early.
    pub target: Option<f64>,
    /// Seeds; one training each.
    #[serde(default = "default_seeds")]
    #[schemars(length(min = 1))]
    pub seeds: Vec<u64>,
    /// Steps between checkpoints of a run; 0 keeps the final one only.
    #[serde(default = "default_checkpoint_every")]
    pub checkpoint_every: usize,
    /// Checkpoints kept, newest first.
    #[serde(default = "default_keep")]
    #[schemars(range(min = 1))]
    pub keep: usize,
}

/// Length of the learning rate's linear warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a number of steps such as 50, or a fraction such as 0.1")]
pub enum Warmup {
    /// Optimizer steps.
    Steps(usize),
    /// Fraction of the budget.
    Fraction(f64),
}

impl Default for Warmup {
    fn default() -> Self {
        Warmup::Fraction(0.1)
    }
}

/// A preset's name, a whole description, or a preset with changes. The vocabulary comes from the task.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelRecipe {
    /// Name in tables and plots.
    pub name: Option<String>,
    /// Peak learning rate of this model, in place of the shared one.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub learning_rate: Option<f64>,
    /// A preset to start from: a family and a size, such as `gated_delta_net-small`.
    pub preset: Option<String>,
    /// Model width.
    #[schemars(range(min = 1))]
    pub width: Option<usize>,
    /// Number of blocks.
    #[schemars(range(min = 1))]
    pub layers: Option<usize>,
    /// Heads of each mixer.
    #[schemars(range(min = 1))]
    pub heads: Option<usize>,
    /// Key size of a head; `width / heads` when absent.
    #[schemars(range(min = 1))]
    pub head_dim: Option<usize>,
    /// Value size of a head; as `head_dim` when absent.
    #[schemars(range(min = 1))]
    pub value_dim: Option<usize>,
    /// Mixers, repeated over the layers.
    pub mixers: Option<Vec<MixerConfig>>,
    /// Channel mixers, repeated over the layers; SwiGLU when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel_mixers: Option<Vec<ChannelMixerConfig>>,
    /// Hidden width of the channel mixers; each kind has its own when absent.
    #[schemars(range(min = 1))]
    pub mlp_hidden: Option<usize>,
    /// Times that the blocks are applied; once when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub rounds: Option<usize>,
    /// When tokens stop before the last round; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub halting: Option<HaltingConfig>,
    /// Whether the head shares the embedding's weights; not when absent.
    pub tied: Option<bool>,
    /// Kind of the norms: `rms` or `layer`; RMS when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm: Option<NormKind>,
    /// Whether the embeddings pass a norm before the first block; not when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_norm: Option<bool>,
    /// Epsilon of the norms; 1e-5 when absent.
    #[schemars(range(max = 0.1), extend("exclusiveMinimum" = 0))]
    pub norm_eps: Option<f64>,
}

/// What is held equal between compared models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MatchBy {
    /// The same number of training tokens.
    Tokens,
    /// The same wall-clock training time.
    Seconds,
}

/// How several models are compared.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CompareRecipe {
    /// Adjust each model's MLP width until its parameter count is within 5% of the first model's.
    #[serde(default = "yes")]
    pub match_parameters: bool,
    /// What is held equal; must agree with the budget in `[train]`, which it defaults to.
    pub match_by: Option<MatchBy>,
    /// Learning rates each model tries on the first seed before the comparison; the best by score is kept.
    #[serde(default)]
    pub learning_rates: Vec<f64>,
    /// Length of each trial, as a fraction of the budget.
    #[serde(default = "default_pilot")]
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub pilot: f64,
    /// Changes made by `--quick`.
    #[serde(default)]
    pub quick: QuickRecipe,
}

impl Default for CompareRecipe {
    fn default() -> Self {
        CompareRecipe {
            match_parameters: true,
            match_by: None,
            learning_rates: Vec::new(),
            pilot: default_pilot(),
            quick: QuickRecipe::default(),
        }
    }
}

fn one() -> usize {
    1
}
fn yes() -> bool {
    true
}
fn default_min_lr() -> f64 {
    0.1
}
fn default_weight_decay() -> f32 {
    0.1
}
fn default_clip() -> f64 {
    1.0
}
fn default_balance() -> f64 {
    0.01
}
fn is_default_balance(balance: &f64) -> bool {
    *balance == default_balance()
}
fn default_betas() -> [f32; 2] {
    [0.9, 0.95]
}
/// Exactly two numbers; an array type would take the first two of more.
fn two_numbers<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<[f32; 2], D::Error> {
    let numbers = Vec::<f32>::deserialize(deserializer)?;
    let count = numbers.len();
    numbers.try_into().map_err(|_| serde::de::Error::invalid_length(count, &"two numbers"))
}
/// The same, for a key that may be absent.
fn some_two_numbers<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<[f32; 2]>, D::Error> {
    two_numbers(deserializer).map(Some)
}
fn default_eval_batches() -> usize {
    4
}
fn default_seeds() -> Vec<u64> {
    vec![1]
}
fn default_checkpoint_every() -> usize {
    200
}
fn default_keep() -> usize {
    2
}
fn default_pilot() -> f64 {
    0.2
}
