//! Changes to a recipe: what a task says otherwise, what a quick run makes smaller, another seed.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::parse::closest;
use super::validate::{MOST_SECONDS, MOST_STEPS, MOST_TOKENS};
use super::{ModelRecipe, Recipe, TaskKind, TaskRecipe, TrainRecipe, Warmup, some_two_numbers};
use crate::error::TrainError;

/// What a task changes in `[train]`: a key that is absent keeps the shared value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainChanges {
    /// Budget in optimizer steps; any of the three budgets replaces the shared one.
    #[schemars(range(min = 1, max = MOST_STEPS))]
    pub steps: Option<usize>,
    /// Budget in training tokens.
    #[schemars(range(min = 1, max = MOST_TOKENS))]
    pub tokens: Option<u64>,
    /// Budget in seconds of training.
    #[schemars(range(max = MOST_SECONDS), extend("exclusiveMinimum" = 0))]
    pub seconds: Option<f64>,
    /// Replaces `train.batch`.
    #[schemars(range(min = 1))]
    pub batch: Option<usize>,
    /// Replaces `train.accumulate`.
    #[schemars(range(min = 1))]
    pub accumulate: Option<usize>,
    /// Replaces `train.learning_rate`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub learning_rate: Option<f64>,
    /// Replaces `train.warmup`.
    pub warmup: Option<Warmup>,
    /// Replaces `train.min_lr`.
    #[schemars(range(min = 0, max = 1))]
    pub min_lr: Option<f64>,
    /// Replaces `train.weight_decay`.
    #[schemars(range(min = 0))]
    pub weight_decay: Option<f32>,
    /// Replaces `train.clip`.
    #[schemars(range(min = 0))]
    pub clip: Option<f64>,
    /// Replaces `train.betas`.
    #[serde(deserialize_with = "some_two_numbers")]
    pub betas: Option<[f32; 2]>,
    /// Replaces `train.balance`.
    #[schemars(range(min = 0))]
    pub balance: Option<f64>,
    /// Replaces `train.eval_every`.
    pub eval_every: Option<usize>,
    /// Replaces `train.eval_batches`.
    pub eval_batches: Option<usize>,
    /// Replaces `train.target`.
    pub target: Option<f64>,
    /// Replaces `train.seeds`.
    #[schemars(length(min = 1))]
    pub seeds: Option<Vec<u64>>,
}

impl TrainChanges {
    /// `shared` with these changes made.
    fn over(&self, shared: &TrainRecipe) -> TrainRecipe {
        let mut train = shared.clone();
        if self.steps.is_some() || self.tokens.is_some() || self.seconds.is_some() {
            (train.steps, train.tokens, train.seconds) = (self.steps, self.tokens, self.seconds);
        }
        train.batch = self.batch.unwrap_or(train.batch);
        train.accumulate = self.accumulate.unwrap_or(train.accumulate);
        train.learning_rate = self.learning_rate.unwrap_or(train.learning_rate);
        train.warmup = self.warmup.unwrap_or(train.warmup);
        train.min_lr = self.min_lr.unwrap_or(train.min_lr);
        train.weight_decay = self.weight_decay.unwrap_or(train.weight_decay);
        train.clip = self.clip.unwrap_or(train.clip);
        train.betas = self.betas.unwrap_or(train.betas);
        train.balance = self.balance.unwrap_or(train.balance);
        train.eval_every = self.eval_every.unwrap_or(train.eval_every);
        train.eval_batches = self.eval_batches.unwrap_or(train.eval_batches);
        train.target = self.target.or(train.target);
        train.seeds = self.seeds.clone().unwrap_or(train.seeds);
        train
    }

    /// Makes the changes of a quick run.
    fn quicken(&mut self, quick: &QuickRecipe) {
        if quick.steps.is_some() {
            (self.steps, self.tokens, self.seconds) = (quick.steps, None, None);
        }
        self.batch = quick.batch.or(self.batch);
        self.eval_every = quick.eval_every.or(self.eval_every);
        self.eval_batches = quick.eval_batches.or(self.eval_batches);
        self.seeds = quick.seeds.clone().or(self.seeds.take());
    }
}

/// What `--quick` changes in a recipe; a task's own changes come after the shared ones.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuickRecipe {
    /// Replaces the budget; a warm-up in steps keeps its share of it.
    #[schemars(range(min = 1))]
    pub steps: Option<usize>,
    /// Replaces `train.batch`.
    #[schemars(range(min = 1))]
    pub batch: Option<usize>,
    /// Replaces `train.seeds`.
    #[schemars(length(min = 1))]
    pub seeds: Option<Vec<u64>>,
    /// Replaces `train.eval_every`.
    pub eval_every: Option<usize>,
    /// Replaces `train.eval_batches`.
    pub eval_batches: Option<usize>,
    /// Replaces `length` of recall.
    #[schemars(range(min = 1))]
    pub length: Option<usize>,
    /// Replaces `pairs` of recall.
    #[schemars(range(min = 1))]
    pub pairs: Option<usize>,
    /// Replaces `longest` of a formal language.
    #[schemars(range(min = 1))]
    pub longest: Option<usize>,
}

impl QuickRecipe {
    /// Its keys, and whether each is given.
    pub(super) fn given(&self) -> [(&'static str, bool); 8] {
        [
            ("steps", self.steps.is_some()),
            ("batch", self.batch.is_some()),
            ("seeds", self.seeds.is_some()),
            ("eval_every", self.eval_every.is_some()),
            ("eval_batches", self.eval_batches.is_some()),
            ("length", self.length.is_some()),
            ("pairs", self.pairs.is_some()),
            ("longest", self.longest.is_some()),
        ]
    }

    /// Makes the changes to the sizes of `task`; of several tasks, to those that have such a size.
    fn resize(&self, task: &mut TaskRecipe, alone: bool) {
        if alone || task.kind == TaskKind::Recall {
            task.length = self.length.or(task.length);
            task.pairs = self.pairs.or(task.pairs);
        }
        if alone || task.kind == TaskKind::FormalLanguage {
            task.longest = self.longest.or(task.longest);
        }
    }
}

/// The warm-up of a quick run of `steps` steps: one in steps keeps its share of the budget, and is at most half of a budget
/// that was not in steps.
fn shorter_warmup(train: &TrainRecipe, steps: usize) -> Warmup {
    match (train.warmup, train.steps) {
        (Warmup::Steps(warmup), Some(all)) if steps < all => Warmup::Steps(warmup * steps / all),
        (Warmup::Steps(warmup), None) => Warmup::Steps(warmup.min(steps / 2)),
        (warmup, _) => warmup,
    }
}

impl Recipe {
    /// Every task, in order.
    pub fn tasks(&self) -> impl Iterator<Item = &TaskRecipe> {
        std::iter::once(&self.task).chain(&self.further)
    }

    /// One recipe for each task, with that task alone and its changes to `[train]` and `[model]` made.
    pub fn parts(&self) -> Vec<Recipe> {
        let part = |task: &TaskRecipe| Recipe {
            task: TaskRecipe {
                train: TrainChanges::default(),
                model: ModelRecipe::default(),
                quick: QuickRecipe::default(),
                ..task.clone()
            },
            further: Vec::new(),
            train: task.train.over(&self.train),
            model: ModelRecipe { learning_rate: self.model.learning_rate, ..task.model.over(&self.model) },
            ..self.clone()
        };
        self.tasks().map(part).collect()
    }

    /// The recipe of the task called `name` alone.
    ///
    /// # Errors
    /// No task has this name; the nearest one is suggested.
    pub fn only(&self, name: &str) -> Result<Recipe, TrainError> {
        let found = self.parts().into_iter().find(|part| part.task.name() == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.tasks().map(TaskRecipe::name).collect();
            let help = closest(name, names.iter().copied()).map(|name| format!("did you mean `{name}`?"));
            let message = format!("no task is called `{name}`, the recipe has {}", names.join(", "));
            super::RecipeError { path: None, place: None, line: None, message, help }.into()
        })
    }

    /// The recipe with the changes of `[compare.quick]` and of each task's `[tasks.quick]` made.
    ///
    /// # Errors
    /// The recipe makes no such changes, or the changed one is not valid.
    pub fn quick(self) -> Result<Recipe, TrainError> {
        let none = |quick: &QuickRecipe| *quick == QuickRecipe::default();
        if none(&self.compare.quick) && self.tasks().all(|task| none(&task.quick)) {
            let message = "the recipe says nothing of a quick run; say what it changes in [compare.quick], such as \
                           `steps = 100`, or leave out --quick";
            return Err(super::place::Fault::new("", "", message).at(&self.source).into());
        }
        self.validate_quick().map_err(|fault| fault.at(&self.source))?;
        let mut changed = self.with_quick();
        changed.changes.push("the changes of [compare.quick]".into());
        Ok(changed)
    }

    pub(super) fn with_quick(mut self) -> Recipe {
        let shared = self.compare.quick.clone();
        let alone = self.further.is_empty();
        let mut train = TrainChanges::default();
        train.quicken(&shared);
        let quick = train.over(&self.train);
        let whole = std::mem::replace(&mut self.train, quick);
        for task in std::iter::once(&mut self.task).chain(&mut self.further) {
            let own = std::mem::take(&mut task.quick);
            let before = task.train.over(&whole);
            for quick in [&shared, &own] {
                task.train.quicken(quick);
                quick.resize(task, alone);
            }
            if let Some(steps) = own.steps.or(shared.steps) {
                self.compare.match_by = None;
                task.train.warmup = Some(shorter_warmup(&before, steps));
            }
        }
        self
    }

    /// The recipe with `seed` in place of its seeds.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Recipe {
        self.train.seeds = vec![seed];
        for task in std::iter::once(&mut self.task).chain(&mut self.further) {
            task.train.seeds = None;
        }
        self.changes.push(format!("train.seeds = [{seed}]"));
        self
    }
}
