//! Recipes: TOML files that say what to train on which task.
//!
//! [`Recipe::load`] reads and validates one; every error names line and column and shows the line.

mod parse;
mod resolve;
mod validate;

use std::path::PathBuf;

use fastweight_memory::MixerConfig;
use fastweight_tasks::formal::Language;
use fastweight_tasks::recall::Filler;
use serde::{Deserialize, Serialize};

pub use parse::RecipeError;
pub use resolve::{ParameterMatch, ResolvedModel};

/// A recipe: one task, how to train, and the model or models to train.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Title shown in progress and reports; defaults to the file's name.
    #[serde(default)]
    pub name: String,
    /// What the models learn.
    pub task: TaskRecipe,
    /// How they are trained.
    pub train: TrainRecipe,
    /// Fields shared by every model; the whole model when there are no `[[models]]`.
    #[serde(default)]
    pub model: ModelRecipe,
    /// The models to compare.
    #[serde(default)]
    pub models: Vec<ModelRecipe>,
    /// How they are compared.
    #[serde(default)]
    pub compare: CompareRecipe,
    /// The text the recipe was read from, kept for reports and run folders.
    #[serde(skip)]
    pub source: String,
    /// Changes made since, such as another seed; one line each.
    #[serde(skip)]
    pub changes: Vec<String>,
}

/// The kind of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskKind {
    /// Multi-query associative recall.
    Recall,
    /// Strings of a formal language, the answer asked after every symbol.
    FormalLanguage,
    /// Next-token prediction on a text.
    Text,
}

impl TaskKind {
    /// The name used in recipes.
    pub fn name(self) -> &'static str {
        match self {
            TaskKind::Recall => "recall",
            TaskKind::FormalLanguage => "formal_language",
            TaskKind::Text => "text",
        }
    }
}

/// The `[task]` section. Options that do not belong to `kind` are errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskRecipe {
    /// `recall`, `formal_language` or `text`.
    pub kind: TaskKind,
    /// Recall: number of token ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab: Option<usize>,
    /// Recall: tokens in a sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Recall: key-value pairs in a sequence, at most a quarter of `length`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs: Option<usize>,
    /// Recall: exponent of the power law that places queries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<f64>,
    /// Recall: what stands where nothing is written or asked, `random` or `zero`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filler: Option<Filler>,
    /// Formal language: which one, such as `parity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub language: Option<Language>,
    /// Formal language: symbols of the shortest training strings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shortest: Option<usize>,
    /// Formal language: symbols of the longest training strings; scores reach to twice as many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest: Option<usize>,
    /// Formal language: different training strings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strings: Option<usize>,
    /// Text: a UTF-8 file or a folder of them; may be given at the command instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<PathBuf>,
    /// Text: a Hugging Face `tokenizer.json`; bytes when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Text: tokens in a training window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
    /// Text: fraction of the text, at its end, that is held out for evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out: Option<f64>,
}

/// The `[train]` section.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainRecipe {
    /// Budget in optimizer steps. Exactly one of `steps`, `tokens` and `seconds` is given.
    pub steps: Option<usize>,
    /// Budget in training tokens, rounded up to whole steps.
    pub tokens: Option<u64>,
    /// Budget in seconds of training (evaluation is not counted).
    pub seconds: Option<f64>,
    /// Sequences in one forward pass.
    pub batch: usize,
    /// Forward passes added up into one optimizer step.
    #[serde(default = "one")]
    pub accumulate: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Linear warm-up, in steps or as a fraction of the budget.
    #[serde(default)]
    pub warmup: Warmup,
    /// Learning rate at the end of the cosine, as a fraction of the peak.
    #[serde(default = "default_min_lr")]
    pub min_lr: f64,
    /// Decoupled weight decay, on matrices only.
    #[serde(default = "default_weight_decay")]
    pub weight_decay: f32,
    /// Largest global gradient norm; 0 turns clipping off.
    #[serde(default = "default_clip")]
    pub clip: f64,
    /// AdamW's decay rates of the first and second moment.
    #[serde(default = "default_betas", deserialize_with = "two_numbers")]
    pub betas: [f32; 2],
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
    pub seeds: Vec<u64>,
    /// Steps between checkpoints of a run; 0 keeps the final one only.
    #[serde(default = "default_checkpoint_every")]
    pub checkpoint_every: usize,
    /// Checkpoints kept, newest first.
    #[serde(default = "default_keep")]
    pub keep: usize,
}

/// Length of the learning rate's linear warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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

/// `[model]` and each of `[[models]]`: a preset's name, a whole description, or a preset with changes.
///
/// The vocabulary comes from the task.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRecipe {
    /// Name in tables and plots.
    pub name: Option<String>,
    /// Peak learning rate of this model, in place of the shared one.
    pub learning_rate: Option<f64>,
    /// A named preset to start from.
    pub preset: Option<String>,
    /// Model width.
    pub width: Option<usize>,
    /// Number of blocks.
    pub layers: Option<usize>,
    /// Heads of each mixer.
    pub heads: Option<usize>,
    /// Key size of a head.
    pub head_dim: Option<usize>,
    /// Value size of a head.
    pub value_dim: Option<usize>,
    /// Mixers, repeated over the layers.
    pub mixers: Option<Vec<MixerConfig>>,
    /// Hidden width of the MLP.
    pub mlp_hidden: Option<usize>,
    /// Whether the head shares the embedding's weights.
    pub tied: Option<bool>,
    /// Epsilon of the norms.
    pub norm_eps: Option<f64>,
}

/// What is held equal between compared models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MatchBy {
    /// The same number of training tokens.
    Tokens,
    /// The same wall-clock training time.
    Seconds,
}

/// The `[compare]` section.
#[derive(Debug, Clone, Serialize, Deserialize)]
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

/// Changes a quick run makes to a recipe.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuickRecipe {
    /// Replaces the budget.
    pub steps: Option<usize>,
    /// Replaces `train.batch`.
    pub batch: Option<usize>,
    /// Replaces `train.seeds`.
    pub seeds: Option<Vec<u64>>,
    /// Replaces `train.eval_every`.
    pub eval_every: Option<usize>,
    /// Replaces `train.eval_batches`.
    pub eval_batches: Option<usize>,
    /// Replaces `task.length`.
    pub length: Option<usize>,
    /// Replaces `task.pairs`.
    pub pairs: Option<usize>,
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
fn default_betas() -> [f32; 2] {
    [0.9, 0.95]
}
/// Exactly two numbers; an array type would take the first two of more.
fn two_numbers<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<[f32; 2], D::Error> {
    let numbers = Vec::<f32>::deserialize(deserializer)?;
    let count = numbers.len();
    numbers.try_into().map_err(|_| serde::de::Error::invalid_length(count, &"two numbers"))
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
