//! One training in a folder of its own, which it can be resumed from.

use std::fs;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::Device;
use fastweight_memory::parameters;
use fastweight_models::LanguageModel;
use fastweight_tasks::TaskError;
use fastweight_tasks::text::{TextSource, Tokenizer};

use crate::checkpoint::{self, CHECKPOINTS, Checkpoint, CheckpointError, RunState, STATE};
use crate::compare::RESULTS;
use crate::error::TrainError;
use crate::files::{self, FolderLock};
use crate::progress::{Event, Progress};
use crate::recipe::{Recipe, ResolvedModel, TaskKind, TaskRecipe};
use crate::task::{self, Metric, Task, TextTask};
use crate::trainer::{Moment, Position, Trainer};

/// File of a run folder that holds the recipe.
pub const RECIPE: &str = "recipe.toml";
/// File of a run folder that holds the tokenizer its model was trained with, where that is not the bytes.
pub const TOKENIZER: &str = "tokenizer.json";

/// Where and how to train.
#[derive(Debug, Clone)]
pub struct Options {
    /// The run folder; created when missing.
    pub folder: PathBuf,
    /// Text that takes the place of the recipe's.
    pub data: Option<PathBuf>,
    /// Start over although the folder holds checkpoints, which are removed.
    pub restart: bool,
}

/// How a training ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// The model.
    pub model: String,
    /// Its seed.
    pub seed: u64,
    /// Steps taken.
    pub steps: usize,
    /// Training tokens read.
    pub tokens: u64,
    /// Final score, on all evaluation data.
    pub score: f64,
    /// What it measures.
    pub metric: Metric,
    /// Trained parameters.
    pub parameters: usize,
    /// Seconds of training, evaluation not counted.
    pub seconds: f64,
    /// Training tokens per second.
    pub train_tokens_per_s: f64,
    /// Whether the target ended it before the budget.
    pub stopped_early: bool,
    /// Step of the checkpoint it continued from.
    pub resumed_from: Option<usize>,
    /// The final checkpoint.
    pub checkpoint: PathBuf,
}

/// Trains the first model of `recipe` on its first task with its first seed in `options.folder`.
///
/// A folder with checkpoints of the same recipe and data is continued from the newest usable one; the result
/// is that of an uninterrupted run, bit for bit (with a budget in steps or tokens).
///
/// # Errors
/// Bad recipe or data, a folder of another recipe or in use, a loss that is not finite, a disk that is full.
pub fn train(
    recipe: &Recipe,
    options: &Options,
    device: &Device,
    on_event: &mut dyn FnMut(Event),
) -> Result<Summary, TrainError> {
    let recipe = recipe.parts().swap_remove(0);
    let recipe = &recipe;
    let task = Task::open(&recipe.task, options.data.as_deref())?;
    let model = recipe.resolve_first(task.vocab())?;
    let seed = recipe.train.seeds.first().copied().unwrap_or_default();
    let folder = &options.folder;
    files::refuse_others_files(folder, &[RECIPE, TOKENIZER])?;
    files::create_folder(folder)?;
    let _lock = FolderLock::take(folder)?;
    if folder.join(RESULTS).is_file() {
        let reason = "holds the results of a comparison".into();
        return Err(TrainError::ForeignFolder { path: folder.clone(), reason });
    }
    if options.restart {
        remove_checkpoints(folder)?;
    }
    checkpoint::recover(folder)?;

    let mut trainer = Trainer::new(&task, &recipe.train, &model, seed, device)?;
    let run =
        Run { recipe, options, task: &task, model: &model, fingerprint: recipe.fingerprint(&model, seed) };
    if let Some(caution) = task.caution() {
        on_event(Event::Note(caution));
    }
    let resumed_from = run.resume(&mut trainer, on_event)?;
    files::write_whole(&folder.join(RECIPE), recipe.annotated_source().as_bytes())?;
    keep_tokenizer(&recipe.task, folder)?;

    let (name, metric, parameters) = (recipe.task.name(), task.metric(), model.parameters);
    on_event(Event::Started {
        model: &model.name,
        task: name,
        metric,
        seed,
        parameters,
        index: 0,
        count: 1,
        fraction: trainer.fraction(),
    });
    let every = recipe.train.checkpoint_every;
    let score = trainer.run(&mut |trainer, moment| {
        match moment {
            Moment::Step => on_event(Event::Step(Progress::of(trainer, &model.name, 0))),
            Moment::Evaluated => on_event(Event::Evaluated(Progress::of(trainer, &model.name, 0))),
            // The last step is saved once, after its evaluation.
            Moment::Settled if trainer.is_finished() => {}
            Moment::Settled if every > 0 && trainer.position().step.is_multiple_of(every) => {
                let path = run.save(trainer)?;
                on_event(Event::Checkpoint { path: &path, step: trainer.position().step });
            }
            Moment::Settled => {}
        }
        Ok(())
    })?;
    let path = run.save(&trainer)?;
    let position = trainer.position();
    on_event(Event::Checkpoint { path: &path, step: position.step });
    on_event(Event::Finished {
        model: &model.name,
        task: name,
        metric,
        seed,
        score: score.score,
        reused: false,
    });
    Ok(Summary {
        seed,
        steps: position.step,
        tokens: position.tokens,
        score: score.score,
        metric: score.metric,
        parameters: model.parameters,
        seconds: position.seconds,
        train_tokens_per_s: position.tokens as f64 / position.seconds.max(f64::MIN_POSITIVE),
        stopped_early: trainer.reached_target() && trainer.fraction() < 1.0,
        resumed_from,
        checkpoint: path,
        model: model.name,
    })
}

struct Run<'a> {
    recipe: &'a Recipe,
    options: &'a Options,
    task: &'a Task,
    model: &'a ResolvedModel,
    fingerprint: String,
}

impl Run<'_> {
    /// Puts `trainer` where the folder's newest usable checkpoint stands, if there is one.
    fn resume(
        &self,
        trainer: &mut Trainer,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<Option<usize>, TrainError> {
        let folder = &self.options.folder;
        let another = |reason: String| TrainError::Folder { path: folder.clone(), reason };
        if checkpoint::is_export(folder) {
            return Err(another("holds an exported model, which cannot be trained further".into()));
        }
        let (mut checkpoint, skipped) = match checkpoint::newest(folder) {
            Ok(found) => found,
            Err(CheckpointError::None { .. } | CheckpointError::NotARun { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        for reason in &skipped {
            on_event(Event::Note(reason));
        }
        let state = checkpoint.state.clone();
        let tokenizer = |data: &str| data.split_once(task::TOKENIZER_MARK).map(|(_, mark)| mark.to_owned());
        if tokenizer(&state.data) != tokenizer(&self.task.fingerprint()) {
            return Err(another("holds a run with another tokenizer".into()));
        }
        if state.model != self.model.config {
            // Naming the parameters that differ says more than a fingerprint.
            checkpoint.restore(trainer.model().clone())?;
        }
        if state.recipe != self.fingerprint {
            return Err(another("holds a run of another recipe or seed".into()));
        }
        if state.data != self.task.fingerprint() {
            return Err(another(format!(
                "holds a run on other data ({}, this is {})",
                state.data,
                self.task.fingerprint()
            )));
        }
        let position = Position {
            step: state.step,
            tokens: state.tokens,
            seconds: state.seconds,
            learning_rate: 0.0,
            losses: state.losses,
            scores: state.scores,
        };
        let moments = checkpoint.take_moments();
        trainer.resume(|model| checkpoint.restore(model), moments, position)?;
        on_event(Event::Note(&format!("continuing from step {}", state.step)));
        Ok(Some(state.step))
    }

    fn save(&self, trainer: &Trainer) -> Result<PathBuf, TrainError> {
        let position = trainer.position();
        let metric = self.task.metric();
        let scores = position.scores.iter().map(|(_, score)| *score);
        let better = |a: f64, b: f64| if metric.reaches(a, b) { a } else { b };
        let mut task = self.recipe.task.clone();
        if let Some(data) = self.options.data.as_ref().or(task.data.as_ref()) {
            task.data = Some(fs::canonicalize(data).unwrap_or_else(|_| data.clone()));
        }
        if let Some(tokenizer) = &mut task.tokenizer {
            *tokenizer = fs::canonicalize(&*tokenizer).unwrap_or_else(|_| tokenizer.clone());
        }
        let state = RunState {
            version: checkpoint::VERSION,
            checksum: String::new(),
            name: self.model.name.clone(),
            step: position.step,
            data_index: (position.step * self.recipe.train.accumulate) as u64,
            tokens: position.tokens,
            seconds: position.seconds,
            seed: trainer.seed(),
            score: position.scores.last().map(|(_, score)| *score),
            best_score: scores.reduce(better),
            scores: position.scores.clone(),
            losses: position.losses.clone(),
            recipe: self.fingerprint.clone(),
            data: self.task.fingerprint(),
            task,
            model: self.model.config.clone(),
            files: Default::default(),
        };
        let weights = parameters::export(trainer.model());
        checkpoint::save(
            &self.options.folder,
            state,
            &weights,
            &trainer.optimizer().export(),
            self.recipe.train.keep,
        )
    }
}

/// A trained model and where it comes from.
#[derive(Debug)]
pub struct Loaded {
    /// The model, without gradients.
    pub model: LanguageModel,
    /// Where its training stood.
    pub state: RunState,
    /// The checkpoint it was read from.
    pub folder: PathBuf,
    /// A sentence for each newer checkpoint that could not be used.
    pub notes: Vec<String>,
}

/// Loads the newest usable checkpoint of a run folder, or one checkpoint when `folder` is one.
///
/// # Errors
/// There is none, or it is broken or of a newer format.
pub fn load(folder: &Path, device: &Device) -> Result<Loaded, TrainError> {
    let (mut checkpoint, notes): (Checkpoint, Vec<String>) = if folder.join(STATE).is_file() {
        (checkpoint::load(folder)?, Vec::new())
    } else {
        checkpoint::newest(folder)?
    };
    let mut state = checkpoint.state.clone();
    let copy = checkpoint.folder.ancestors().nth(2).map(|run| run.join(TOKENIZER));
    if let (Some(tokenizer), Some(copy)) = (&mut state.task.tokenizer, copy.filter(|copy| copy.is_file())) {
        *tokenizer = copy;
    }
    let model = checkpoint.restore(state.model.build(device)?)?.valid();
    Ok(Loaded { model, state, folder: checkpoint.folder, notes })
}

impl Loaded {
    /// The task the model was trained on; with `data` that is not the text it was trained on, that text, scored as a whole.
    ///
    /// # Errors
    /// As [`Task::open`]; [`TrainError::ShortText`].
    pub fn task(&self, data: Option<&Path>) -> Result<Task, TrainError> {
        let trained = &self.state.task;
        if trained.kind != TaskKind::Text {
            return Task::open(trained, data);
        }
        self.check_tokenizer()?;
        let Some(path) = data else { return Task::open(trained, data) };
        let source = TextSource::open(path)?;
        if self.state.data.starts_with(&task::fingerprint(&source)) {
            return Task::open(trained, data);
        }
        let context = trained.context.unwrap_or(1);
        let text =
            TextTask::scored_whole(&source, self.tokenizer()?, context).map_err(|error| match error {
                TaskError::TooShort { tokens, context, .. } => TrainError::ShortText { tokens, context },
                other => other.into(),
            })?;
        Ok(Task::Text(Box::new(text)))
    }

    /// Refuses a tokenizer file that is not the one the model was trained with.
    fn check_tokenizer(&self) -> Result<(), TrainError> {
        let Some(path) = &self.state.task.tokenizer else { return Ok(()) };
        let marked = self.state.data.contains(task::TOKENIZER_MARK);
        if marked && !self.state.data.ends_with(&task::tokenizer_mark(path)?) {
            return Err(TrainError::Argument {
                name: "the tokenizer",
                found: format!("{}, which has changed", path.display()),
                expected: "the file that the model was trained with; put it back",
            });
        }
        Ok(())
    }

    /// The tokenizer of a model of text, without opening its data.
    ///
    /// # Errors
    /// The model was not trained on text, or its tokenizer cannot be read or is another one.
    pub fn tokenizer(&self) -> Result<Tokenizer, TrainError> {
        match (self.state.task.kind, &self.state.task.tokenizer) {
            (TaskKind::Text, Some(path)) => {
                self.check_tokenizer()?;
                Ok(Tokenizer::open(path)?)
            }
            (TaskKind::Text, None) => Ok(Tokenizer::Byte),
            (kind, _) => Err(TrainError::Argument {
                name: "the model's task",
                found: format!("{}, which has no text", kind.name()),
                expected: "a model that was trained on text",
            }),
        }
    }
}

/// Copies the tokenizer of `task` into a run folder, where it is not the bytes.
pub(crate) fn keep_tokenizer(task: &TaskRecipe, folder: &Path) -> Result<(), TrainError> {
    let Some(path) = &task.tokenizer else { return Ok(()) };
    let file = fs::read(path).map_err(|source| TrainError::io("read the tokenizer", path, source))?;
    files::write_whole(&folder.join(TOKENIZER), &file)
}

/// Removes the checkpoints of a run, whole or not, and nothing else.
fn remove_checkpoints(folder: &Path) -> Result<(), TrainError> {
    let all = folder.join(CHECKPOINTS);
    for entry in fs::read_dir(&all).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.trim_start_matches('.').starts_with("step-") && entry.path().is_dir() {
            fs::remove_dir_all(entry.path())
                .map_err(|source| TrainError::io("remove", &entry.path(), source))?;
        }
    }
    Ok(())
}
