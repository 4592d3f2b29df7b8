//! Several models on the same tasks, trained one after the other at equal budget.

mod results;
mod table;
mod trials;

use std::path::PathBuf;

use burn::module::Module;
use burn::tensor::Device;

pub use results::{Entry, REPORT, RESULTS, Trial};
pub use table::{BinRow, Column, Row, Spread, rows};

use crate::checkpoint;
use crate::diagnose;
use crate::error::TrainError;
use crate::evaluate;
use crate::files::{self, FolderLock};
use crate::progress::{Event, Progress};
use crate::recipe::{ParameterMatch, Recipe, ResolvedModel, TaskKind};
use crate::task::{Metric, Task};
use crate::trainer::{Moment, Trainer};
use results::Results;

/// Tokens that the decoding speed is measured over.
const DECODED: usize = 256;
/// Points of a stored loss curve, at most about twice this.
const CURVE: usize = 200;

/// Where to compare.
#[derive(Debug, Clone)]
pub struct Options {
    /// Folder of results; created when missing.
    pub folder: PathBuf,
    /// Text that takes the place of the recipe's, in every task that learns one.
    pub data: Option<PathBuf>,
    /// Train everything again although results are there.
    pub restart: bool,
}

/// The outcome of a comparison.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The recipe.
    pub recipe: Recipe,
    /// One outcome per task, in the recipe's order.
    pub tasks: Vec<TaskComparison>,
    /// Sentences about the fairness of the comparison.
    pub notes: Vec<String>,
    /// A sentence for each training that diverged and has no result.
    pub diverged: Vec<String>,
}

/// The outcome of a comparison on one task.
#[derive(Debug, Clone)]
pub struct TaskComparison {
    /// The task's name.
    pub name: String,
    /// The recipe of this task alone, the task's changes to the shared settings made.
    pub recipe: Recipe,
    /// What the scores measure.
    pub metric: Metric,
    /// Tokens in a training sequence, in the longest one where they differ.
    pub length: usize,
    /// The models, in the recipe's order.
    pub models: Vec<ResolvedModel>,
    /// One entry per model and seed, in the recipe's order.
    pub entries: Vec<Entry>,
    /// One row per model.
    pub rows: Vec<Row>,
    /// Trials of learning rates, if there were any.
    pub trials: Vec<Trial>,
}

impl Comparison {
    /// Every result: for each task, one per model and seed.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.tasks.iter().flat_map(|task| &task.entries)
    }
}

/// Trains and scores every model of `recipe` on every task with every seed.
///
/// Each result is appended to `results.jsonl` in the folder as it is made; a comparison that was interrupted takes
/// the results it finds there for the same model, task, seed, recipe and data, and trains the rest. A training that diverges
/// is told of in [`Comparison::diverged`], and the others go on.
///
/// # Errors
/// Bad recipe or data, a folder in use or of a training run, a disk that is full.
pub fn compare(
    recipe: &Recipe,
    options: &Options,
    device: &Device,
    on_event: &mut dyn FnMut(Event),
) -> Result<Comparison, TrainError> {
    let open = |part: Recipe| {
        let data = options.data.as_deref().filter(|_| part.task.kind == TaskKind::Text);
        let task = Task::open(&part.task, data)?;
        let models = part.resolve(task.vocab())?;
        Ok((part, task, models))
    };
    let parts: Vec<_> = recipe.parts().into_iter().map(open).collect::<Result<_, TrainError>>()?;
    files::refuse_others_files(&options.folder, &[REPORT])?;
    files::create_folder(&options.folder)?;
    let _lock = FolderLock::take(&options.folder)?;
    if !checkpoint::list(&options.folder).is_empty() {
        let reason = "holds a training run".into();
        return Err(TrainError::ForeignFolder { path: options.folder.clone(), reason });
    }
    let mut results = Results::open(&options.folder, options.restart)?;
    let (mut notes, mut diverged) = (Vec::new(), Vec::new());
    for (part, task, models) in &parts {
        let about = fairness(part, models).into_iter().chain(task.caution().map(str::to_owned));
        notes.extend(about.map(|note| match parts.len() {
            1 => note,
            _ => format!("{}: {note}", part.task.name()),
        }));
    }
    notes.iter().for_each(|note| on_event(Event::Note(note)));

    let count = parts.iter().map(|(part, _, models)| models.len() * part.train.seeds.len()).sum();
    let mut tasks = Vec::with_capacity(parts.len());
    let mut index = 0;
    for (part, task, mut models) in parts {
        let trials =
            trials::choose_learning_rates(&part, &task, &mut models, &mut results, device, on_event)?;
        let mut entries = Vec::with_capacity(models.len() * part.train.seeds.len());
        for model in &models {
            for &seed in &part.train.seeds {
                let place = Place { recipe: &part, task: &task, model, seed, index, count };
                match place.entry(&mut results, device, on_event) {
                    Ok(entry) => entries.push(entry),
                    Err(error @ TrainError::NonFinite { .. }) => {
                        on_event(Event::Note(&error.to_string()));
                        diverged.push(error.to_string());
                    }
                    Err(error) => return Err(error),
                }
                index += 1;
            }
        }
        let rows = rows(&models, &entries);
        let (name, metric, length) = (part.task.name().to_string(), task.metric(), task.length());
        tasks.push(TaskComparison { name, recipe: part, metric, length, models, entries, rows, trials });
    }
    let used = tasks.iter().map(|task| task.entries.len()).sum();
    if let Some(left) = results.count().checked_sub(used).filter(|left| *left > 0) {
        let (are, results) = if left == 1 { ("is", "result") } else { ("are", "results") };
        on_event(Event::Note(&format!(
            "{left} earlier {results} in the folder {are} of other models, seeds, data or settings and not shown; --fresh \
             removes them all"
        )));
    }
    Ok(Comparison { recipe: recipe.clone(), tasks, notes, diverged })
}

fn key(recipe: &Recipe, task: &Task, model: &ResolvedModel, seed: u64) -> String {
    format!("{}-{}", recipe.fingerprint(model, seed), task.fingerprint())
}

struct Place<'a> {
    recipe: &'a Recipe,
    task: &'a Task,
    model: &'a ResolvedModel,
    seed: u64,
    /// Number of this training, from 0.
    index: usize,
    /// Trainings in all.
    count: usize,
}

impl Place<'_> {
    /// The result that is there already, or that of a training.
    fn entry(
        &self,
        results: &mut Results,
        device: &Device,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<Entry, TrainError> {
        let Place { recipe, task, model, seed, index, count } = *self;
        let (name, metric) = (recipe.task.name(), task.metric());
        let key = key(recipe, task, model, seed);
        let known = results.find(&model.name, seed, &key);
        let reused = known.is_some();
        let entry = match known {
            // A task may have got another name since.
            Some(entry) => Entry { task: name.to_string(), ..entry },
            None => {
                let parameters = model.parameters;
                on_event(Event::Started {
                    model: &model.name,
                    task: name,
                    metric,
                    seed,
                    parameters,
                    index,
                    count,
                    fraction: 0.0,
                });
                let entry = self.train(key, device, on_event).map_err(|error| self.named(error))?;
                results.append(&entry)?;
                entry
            }
        };
        let score = entry.score;
        on_event(Event::Finished { model: &model.name, task: name, metric, seed, score, reused });
        Ok(entry)
    }

    /// `error` with the model and seed that diverged.
    fn named(&self, error: TrainError) -> TrainError {
        match error {
            TrainError::NonFinite { step, what, place } => {
                let (model, task) = (&self.model.name, self.recipe.task.name());
                let place = format!("{place} of the model {model} with seed {} on {task}", self.seed);
                TrainError::NonFinite { step, what, place }
            }
            other => other,
        }
    }

    fn train(
        &self,
        key: String,
        device: &Device,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<Entry, TrainError> {
        let Place { recipe, task, model, seed, index, count } = *self;
        let more = count - index - 1;
        let mut trainer = Trainer::new(task, &recipe.train, model, seed, device)?;
        let (mut curve, mut losses) = (Vec::new(), Vec::new());
        let mut next = 0.0;
        let score = trainer.run(&mut |trainer, moment| {
            let position = trainer.position();
            match moment {
                Moment::Step => {
                    if trainer.fraction() >= next {
                        losses.extend(position.losses.last().map(|(_, loss)| (position.tokens, *loss)));
                        next = trainer.fraction() + 1.0 / CURVE as f64;
                    }
                    on_event(Event::Step(Progress::of(trainer, &model.name, more)));
                }
                Moment::Evaluated => {
                    curve.retain(|(tokens, _)| *tokens != position.tokens);
                    curve.extend(position.scores.last().map(|(_, score)| (position.tokens, *score)));
                    on_event(Event::Evaluated(Progress::of(trainer, &model.name, more)));
                }
                Moment::Settled => {}
            }
            Ok(())
        })?;
        let position = trainer.position();
        let trained = trainer.model().valid();
        let at_step = |error| diagnose::at_step(error, position.step);
        Ok(Entry {
            model: model.name.clone(),
            task: recipe.task.name().to_string(),
            seed,
            score: score.score,
            params: model.parameters,
            state_bytes: evaluate::state_bytes(&trained, task.vocab(), task.length()).map_err(at_step)?,
            train_tokens_per_s: position.tokens as f64 / position.seconds.max(f64::MIN_POSITIVE),
            decode_tokens_per_s: evaluate::decode_tokens_per_s(&trained, task.vocab(), DECODED)
                .map_err(at_step)?,
            seconds: position.seconds,
            learning_rate: model.learning_rate,
            steps: position.step,
            tokens: position.tokens,
            curve,
            losses,
            by_pairs: evaluate::recall_by_pairs(&trained, task, recipe.train.eval_batches)
                .map_err(at_step)?,
            bins: score.bins.into_iter().flatten().collect(),
            by_length: evaluate::by_length(&trained, task).map_err(at_step)?,
            config: model.config.clone(),
            key,
        })
    }
}

/// What a reader should know before believing the table.
fn fairness(recipe: &Recipe, models: &[ResolvedModel]) -> Vec<String> {
    let Some(reference) = models.first() else { return Vec::new() };
    let mut notes = Vec::new();
    for model in models {
        let off = 100.0 * (model.parameters as f64 / reference.parameters.max(1) as f64 - 1.0);
        if model.matching == ParameterMatch::Apart {
            let why = if recipe.compare.match_parameters { "cannot be matched" } else { "is not matched" };
            notes.push(format!(
                "{} has {} parameters, {off:+.1}% from {}'s {}: the parameter count {why} within 5%",
                model.name, model.parameters, reference.name, reference.parameters
            ));
        }
    }
    notes
}
