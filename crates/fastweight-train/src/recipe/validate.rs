//! What a recipe must satisfy; a fault names the section and the key, and so its line.

use fastweight_memory::MemoryError;
use fastweight_models::ModelError;
use fastweight_tasks::TaskError;

use super::place::Fault;
use super::task::OWN_KEYS;
use super::{MatchBy, ModelRecipe, QuickRecipe, Recipe, TrainRecipe, Warmup, is_default_balance};

/// Largest budgets; anything above is a slip.
pub(super) const MOST_STEPS: usize = 1_000_000_000;
pub(super) const MOST_TOKENS: u64 = 10_000_000_000_000;
pub(super) const MOST_SECONDS: f64 = 1e8;

impl Recipe {
    /// Checks the recipe with and without the changes of `[compare.quick]`.
    pub(super) fn validate_all(&self) -> Result<(), Fault> {
        self.validate()?;
        self.validate_quick()
    }

    pub(super) fn validate_quick(&self) -> Result<(), Fault> {
        self.clone().with_quick().validate().map_err(|fault| {
            let task = fault.task.and_then(|index| self.tasks().nth(index)).unwrap_or(&self.task);
            let key = |quick: &QuickRecipe| {
                let given = quick.given();
                let mut keys = given.iter().filter(|(_, given)| *given).map(|(key, _)| *key);
                // A size that is wrong together with another one is shown where the quick run changes it.
                keys.clone().find(|key| *key == fault.key).or_else(|| keys.rfind(|_| fault.section == "task"))
            };
            let (section, name, key) = match (key(&task.quick), key(&self.compare.quick)) {
                (Some(key), _) if self.further.is_empty() => ("quick", "task.quick", key),
                (Some(key), _) => ("quick", "tasks.quick", key),
                (None, key) => ("compare.quick", "compare.quick", key.unwrap_or("quick")),
            };
            let message = format!("[{name}]: {}", fault.message);
            Fault { task: fault.task, ..Fault::new(section, key, message) }
        })
    }

    fn validate(&self) -> Result<(), Fault> {
        let mut names: Vec<&str> = Vec::new();
        for (index, task) in self.tasks().enumerate() {
            let fault = |key, message| Err(Fault { task: Some(index), ..Fault::new("task", key, message) });
            if task.name().trim().is_empty() || task.name().chars().any(char::is_control) {
                return fault("name", "the task's name is empty or holds a control character".to_string());
            }
            if names.contains(&task.name()) {
                let message =
                    format!("two tasks are called {:?}; give each a `name` of its own", task.name());
                return fault("name", message);
            }
            if task.model.learning_rate.is_some() {
                let message = "a task's learning rate belongs in its [tasks.train]";
                let fault = Fault::new("model", "learning_rate", message);
                return Err(Fault { task: Some(index), ..fault });
            }
            names.push(task.name());
        }
        self.parts().into_iter().enumerate().try_for_each(|(index, part)| {
            part.validate_part().map_err(|fault| Fault { task: Some(index), ..fault })
        })
    }

    /// Checks a recipe of one task.
    fn validate_part(&self) -> Result<(), Fault> {
        if self.name.chars().any(char::is_control) {
            return Err(Fault::new("", "name", "the name holds a control character, such as a line break"));
        }
        self.validate_task()?;
        self.train.validate()?;
        match (self.compare.match_by, self.match_by()) {
            (Some(asked), budget) if asked != budget => {
                let (asked, needed) = match asked {
                    MatchBy::Seconds => ("seconds", "`seconds = ...`"),
                    MatchBy::Tokens => ("tokens", "`steps = ...` or `tokens = ...`"),
                };
                let message = format!("match_by = \"{asked}\" needs the budget {needed} in [train]");
                return Err(Fault::new("compare", "match_by", message));
            }
            _ => {}
        }
        if let Some(bad) = self.compare.learning_rates.iter().find(|rate| !positive(**rate)) {
            return Err(Fault::new("compare", "learning_rates", format!("{bad} is not a positive number")));
        }
        if !(self.compare.pilot > 0.0 && self.compare.pilot <= 1.0) {
            return Err(Fault::new("compare", "pilot", "expected a fraction of the budget in (0, 1]"));
        }
        if self.model.learning_rate.is_some() {
            let message =
                "the shared learning rate belongs in [train]; a model's own one in its [[models]] entry";
            return Err(Fault::new("model", "learning_rate", message));
        }
        self.validate_models()?;
        self.validate_balance()
    }

    /// Refuses a factor on load-balance losses where no model has one.
    fn validate_balance(&self) -> Result<(), Fault> {
        let models = || self.resolve(self.assumed_vocab()).unwrap_or_default();
        if is_default_balance(&self.train.balance) || models().iter().any(|model| model.config.routes()) {
            return Ok(());
        }
        let message = "no model has a layer that routes tokens, such as mixture_of_memories, and so no load-balance \
                       loss; leave `balance` out";
        Err(Fault::new("train", "balance", message))
    }

    fn validate_models(&self) -> Result<(), Fault> {
        if self.models.is_empty() {
            self.model.validate("model")?;
            return self.model.validate_config("model", self.assumed_vocab());
        }
        let mut names: Vec<String> = Vec::new();
        for (index, entry) in self.models.iter().enumerate() {
            let section = format!("models.{index}");
            let fields = entry.over(&self.model);
            fields.validate(&section)?;
            let Some(name) = fields.name.clone().or_else(|| fields.preset.clone()) else {
                return Err(Fault::new(&section, "mixers", "this model has no `name`"));
            };
            if names.contains(&name) {
                return Err(Fault::new(
                    &section,
                    "name",
                    format!("two models are called {name:?}; names must differ"),
                ));
            }
            if let Some(rate) = entry.learning_rate.filter(|rate| !positive(*rate)) {
                return Err(Fault::new(
                    &section,
                    "learning_rate",
                    format!("{rate} is not a positive number"),
                ));
            }
            fields.validate_config(&section, self.assumed_vocab())?;
            names.push(name);
        }
        Ok(())
    }

    /// The vocabulary as far as the recipe says it; a tokenizer's is known when it is opened.
    fn assumed_vocab(&self) -> usize {
        self.task.vocab()
    }

    fn validate_task(&self) -> Result<(), Fault> {
        let task = &self.task;
        let (own, foreign): (Vec<_>, Vec<_>) = OWN_KEYS.iter().partition(|key| key.kind == task.kind);
        if let Some(key) = foreign.into_iter().find(|key| (key.given)(task)) {
            let names: Vec<String> = own.iter().map(|key| format!("`{}`", key.name)).collect();
            let message = format!(
                "`{}` is not an option of a {} task, which has {}",
                key.name,
                task.kind.name(),
                names.join(", ")
            );
            return Err(Fault::new("task", key.name, message));
        }
        for key in own.into_iter().filter(|key| !(key.given)(task)) {
            if let Some(hint) = key.needed {
                let message = format!("a {} task needs `{}`{hint}", task.kind.name(), key.name);
                return Err(Fault::new("task", "kind", message));
            }
        }
        if task.held_out.is_some_and(|share| !(share > 0.0 && share < 1.0)) {
            return Err(Fault::new("task", "held_out", "expected a fraction in (0, 1), such as 0.05"));
        }
        if task.context == Some(0) {
            return Err(Fault::new("task", "context", "expected at least 1 token in a training window"));
        }
        let sizes = task.recall().map(|config| config.validate());
        match sizes.or_else(|| task.formal().map(|config| config.validate())) {
            Some(Err(TaskError::Setting { setting, found, expected, advice, .. })) => Err(Fault::new(
                "task",
                setting,
                format!("{setting} is {found}, expected {expected}; {advice}"),
            )),
            Some(Err(other)) => Err(Fault::new("task", "kind", other.to_string())),
            Some(Ok(())) | None => Ok(()),
        }
    }
}

impl TrainRecipe {
    fn validate(&self) -> Result<(), Fault> {
        let fault = |key: &str, message: &str| Err(Fault::new("train", key, message));
        let given = [
            ("steps", self.steps.is_some()),
            ("tokens", self.tokens.is_some()),
            ("seconds", self.seconds.is_some()),
        ];
        let given: Vec<&str> = given.iter().filter(|(_, given)| *given).map(|(key, _)| *key).collect();
        match given[..] {
            [_] => {}
            [] => return fault("steps", "no budget: give one of `steps`, `tokens` and `seconds`"),
            [_, second, ..] => {
                return fault(second, "more than one budget: give one of `steps`, `tokens` and `seconds`");
            }
        }
        if self.steps == Some(0) || self.tokens == Some(0) || self.seconds.is_some_and(|s| !positive(s)) {
            return fault(given[0], "the budget must be above zero");
        }
        if self.steps.is_some_and(|steps| steps > MOST_STEPS)
            || self.tokens.is_some_and(|tokens| tokens > MOST_TOKENS)
            || self.seconds.is_some_and(|seconds| seconds > MOST_SECONDS)
        {
            let message = "the budget is too large: at most 1e9 steps, 1e13 tokens or 1e8 seconds";
            return fault(given[0], message);
        }
        let checks = [
            ("batch", self.batch >= 1, "expected at least 1 sequence"),
            ("accumulate", self.accumulate >= 1, "expected at least 1 forward pass"),
            ("learning_rate", positive(self.learning_rate), "expected a positive number, such as 3e-3"),
            ("min_lr", (0.0..=1.0).contains(&self.min_lr), "expected a fraction of learning_rate in [0, 1]"),
            ("weight_decay", self.weight_decay.is_finite() && self.weight_decay >= 0.0, "expected 0 or more"),
            ("balance", self.balance.is_finite() && self.balance >= 0.0, "expected 0 or more, such as 0.01"),
            ("clip", self.clip.is_finite() && self.clip >= 0.0, "expected a gradient norm, or 0 for none"),
            ("betas", self.betas.iter().all(|b| (0.0..1.0).contains(b)), "expected two numbers in [0, 1)"),
            ("seeds", !self.seeds.is_empty(), "expected at least one seed"),
            ("keep", self.keep >= 1, "expected at least 1 checkpoint"),
            ("target", self.target.is_none_or(f64::is_finite), "expected a finite score"),
        ];
        for (key, ok, message) in checks {
            if !ok {
                return fault(key, message);
            }
        }
        if let Warmup::Fraction(share) = self.warmup
            && !(0.0..1.0).contains(&share)
        {
            return fault(
                "warmup",
                "expected a whole number of steps, or a fraction of the budget in [0, 1)",
            );
        }
        if let (Warmup::Steps(warmup), Some(steps)) = (self.warmup, self.steps)
            && warmup > steps
        {
            let message = format!(
                "a warm-up of {warmup} steps is longer than the budget of {steps}; expected at most {steps}"
            );
            return fault("warmup", &message);
        }
        let mut seeds = self.seeds.clone();
        seeds.sort_unstable();
        if seeds.windows(2).any(|pair| pair[0] == pair[1]) {
            return fault("seeds", "a seed is listed twice; the same seed gives the same result");
        }
        Ok(())
    }
}

impl ModelRecipe {
    /// Whether the fields describe a model that can be built with `vocab` token ids.
    fn validate_config(&self, section: &str, vocab: usize) -> Result<(), Fault> {
        let fault = |key: &str, message: String| Err(Fault::new(section, key, message));
        let config = match self.config(vocab) {
            Ok(config) => config,
            Err(error) => return fault("preset", error.to_string()),
        };
        match config.validate() {
            Ok(()) => Ok(()),
            Err(ModelError::Setting { setting, found, expected }) => {
                // A size that is not given follows from the width.
                let key =
                    if setting == "mlp_hidden" && self.mlp_hidden.is_none() { "width" } else { setting };
                fault(key, format!("{setting} is {found}, expected {expected}"))
            }
            Err(
                error
                @ ModelError::Layer { layer, source: MemoryError::Setting { layer: name, setting, .. } },
            ) => {
                let key = if setting == "head_dim" && self.head_dim.is_none() { "heads" } else { setting };
                let mixer = Some(if name == config.channel_mixer(layer).name() {
                    ("channel_mixers", layer % config.channel_mixers.len())
                } else {
                    ("mixers", layer % config.mixers.len())
                });
                Err(Fault { mixer, ..Fault::new(section, key, error.to_string()) })
            }
            Err(error) => fault("mixers", error.to_string()),
        }
    }

    /// Whether the fields are enough for a model.
    fn validate(&self, section: &str) -> Result<(), Fault> {
        if let Some(name) = &self.name {
            if name.trim().is_empty() {
                return Err(Fault::new(section, "name", "the model's name is empty"));
            }
            if name.chars().any(char::is_control) {
                let message = "the model's name holds a control character, such as a line break";
                return Err(Fault::new(section, "name", message));
            }
        }
        if self.norm_eps.is_some_and(|eps| !(eps > 0.0 && eps <= 0.1)) {
            return Err(Fault::new(section, "norm_eps", "expected a number in (0, 0.1], such as 1e-5"));
        }
        if self.preset.is_some() {
            return Ok(());
        }
        if self.mixers.as_ref().is_none_or(Vec::is_empty) {
            return Err(Fault::new(section, "mixers", "no model is described: give `preset` or `mixers`"));
        }
        let sizes = [("width", self.width), ("layers", self.layers), ("heads", self.heads)];
        match sizes.iter().find(|(_, size)| size.is_none_or(|size| size == 0)) {
            Some((key, None)) => {
                let message =
                    format!("`{key}` is missing: a model needs `width`, `layers` and `heads`, or a `preset`");
                Err(Fault::new(section, key, message))
            }
            Some((key, Some(_))) => Err(Fault::new(section, key, format!("`{key}` must be at least 1"))),
            None => Ok(()),
        }
    }
}

fn positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}
