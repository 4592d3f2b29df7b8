//! What a recipe says about a task.

use std::path::PathBuf;

use fastweight_tasks::formal::{FormalConfig, Language};
use fastweight_tasks::recall::{Filler, RecallConfig};
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};

use super::{ModelRecipe, QuickRecipe, TrainChanges};

/// The kind of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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

/// What the models learn. Options that do not belong to `kind` are errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = keys_by_kind)]
pub struct TaskRecipe {
    /// Name in tables and results; the kind or language when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What kind of task.
    pub kind: TaskKind,
    /// Recall: number of token ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub vocab: Option<usize>,
    /// Recall: tokens in a sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub length: Option<usize>,
    /// Recall: key-value pairs in a sequence, at most a quarter of `length`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub pairs: Option<usize>,
    /// Recall: exponent of the power law that places queries; 0.01 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<f64>,
    /// Recall: what stands where nothing is written or asked, `random` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filler: Option<Filler>,
    /// Formal language: which one, such as `parity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub language: Option<Language>,
    /// Formal language: symbols of the shortest training strings; 2 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub shortest: Option<usize>,
    /// Formal language: symbols of the longest training strings; 50 when absent. Scores reach to twice as many.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub longest: Option<usize>,
    /// Formal language: different training strings; 10,000 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub strings: Option<usize>,
    /// Text: a UTF-8 file or a folder of them; may be given at the command instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<PathBuf>,
    /// Text: a Hugging Face `tokenizer.json`; bytes when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Text: tokens in a training window.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub context: Option<usize>,
    /// Text: fraction of the text, at its end, that is held out for evaluation; 0.05 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 1))]
    pub held_out: Option<f64>,
    /// What this task changes in `[train]`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub train: TrainChanges,
    /// What this task changes in `[model]`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub model: ModelRecipe,
    /// What a quick run changes in this task and its training, after `[compare.quick]`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub quick: QuickRecipe,
}

/// A key that belongs to one kind of task.
pub(super) struct OwnKey {
    pub kind: TaskKind,
    pub name: &'static str,
    /// Of a key that the kind cannot do without: what a message adds to its name.
    pub needed: Option<&'static str>,
    pub given: fn(&TaskRecipe) -> bool,
}

const fn own(
    kind: TaskKind,
    name: &'static str,
    needed: Option<&'static str>,
    given: fn(&TaskRecipe) -> bool,
) -> OwnKey {
    OwnKey { kind, name, needed, given }
}

/// The keys that belong to one kind of task each; every task has the others.
pub(super) const OWN_KEYS: [OwnKey; 13] = [
    own(TaskKind::Recall, "vocab", Some(""), |task| task.vocab.is_some()),
    own(TaskKind::Recall, "length", Some(""), |task| task.length.is_some()),
    own(TaskKind::Recall, "pairs", Some(""), |task| task.pairs.is_some()),
    own(TaskKind::Recall, "power", None, |task| task.power.is_some()),
    own(TaskKind::Recall, "filler", None, |task| task.filler.is_some()),
    own(TaskKind::FormalLanguage, "language", Some(", such as \"parity\""), |task| task.language.is_some()),
    own(TaskKind::FormalLanguage, "shortest", None, |task| task.shortest.is_some()),
    own(TaskKind::FormalLanguage, "longest", None, |task| task.longest.is_some()),
    own(TaskKind::FormalLanguage, "strings", None, |task| task.strings.is_some()),
    own(TaskKind::Text, "data", None, |task| task.data.is_some()),
    own(TaskKind::Text, "tokenizer", None, |task| task.tokenizer.is_some()),
    own(TaskKind::Text, "context", Some(", the tokens in a training window"), |task| task.context.is_some()),
    own(TaskKind::Text, "held_out", None, |task| task.held_out.is_some()),
];

/// Adds to the schema of a task which keys its kind needs, and which it does not have.
fn keys_by_kind(schema: &mut Schema) {
    let kinds = [TaskKind::Recall, TaskKind::FormalLanguage, TaskKind::Text];
    let rules = kinds.map(|kind| {
        let foreign = OWN_KEYS.iter().filter(|key| key.kind != kind);
        let foreign: Map<_, _> = foreign.map(|key| (key.name.into(), false.into())).collect();
        let needed = OWN_KEYS.iter().filter(|key| key.kind == kind && key.needed.is_some());
        let needed: Vec<_> = needed.map(|key| key.name).collect();
        json!({
            "if": { "properties": { "kind": { "const": kind.name() } }, "required": ["kind"] },
            "then": { "properties": foreign, "required": needed },
        })
    });
    schema.insert("allOf".into(), rules.to_vec().into());
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Token ids of a text read as bytes.
const BYTES: usize = 256;

impl TaskRecipe {
    /// Its name in tables and results.
    pub fn name(&self) -> &str {
        let known = self.language.map_or(self.kind.name(), |language| language.name());
        self.name.as_deref().unwrap_or(known)
    }

    /// Token ids of its models, as far as the recipe says it; a tokenizer's are known when it is opened.
    pub fn vocab(&self) -> usize {
        let formal = self.formal().map(|config| config.vocab());
        formal.or(self.vocab).unwrap_or(BYTES)
    }

    /// Tokens of its longest training sequences.
    pub fn length(&self) -> usize {
        let formal = self.formal().map(|config| config.longest);
        formal.or(self.length).or(self.context).unwrap_or(1)
    }

    /// The sizes of a recall task.
    pub(crate) fn recall(&self) -> Option<RecallConfig> {
        if self.kind != TaskKind::Recall {
            return None;
        }
        let mut config = RecallConfig::new(self.vocab?, self.length?, self.pairs?);
        config.power = self.power.unwrap_or(config.power);
        config.filler = self.filler.unwrap_or_default();
        Some(config)
    }

    /// The language and strings of a formal language task.
    pub(crate) fn formal(&self) -> Option<FormalConfig> {
        if self.kind != TaskKind::FormalLanguage {
            return None;
        }
        let mut config = FormalConfig::new(self.language?);
        config.shortest = self.shortest.unwrap_or(config.shortest);
        config.longest = self.longest.unwrap_or(config.longest);
        config.strings = self.strings.unwrap_or(config.strings);
        Some(config)
    }
}
