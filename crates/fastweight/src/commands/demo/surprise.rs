//! How strongly every token of a text would change a Titans memory, and what the memory's gates make of it.

use std::path::Path;
use std::time::Duration;

use burn::module::Module;
use burn::tensor::module::embedding;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fastweight::memory::{MemoryError, Mixer};
use fastweight::models::LanguageModel;
use fastweight::tasks::TaskError;
use fastweight::tasks::text::{TextSource, Tokenizer};
use fastweight::train::task::TextTask;
use fastweight::train::trainer::Moment;
use fastweight::train::{Recipe, Task, TrainError, Trainer, run};
use serde::Serialize;

use super::Name;
use super::check::{Check, Experiment};
use crate::error::CommandError;
use crate::global::Global;
use crate::progress::Progress;

/// The first six chapters of Genesis in the King James version.
const TEXT: &str = include_str!("genesis.txt");
const RECIPE: &str = include_str!("surprise.toml");

/// Tokens of the passage, which is read twice in a row.
const PASSAGE: usize = 80;

/// One token of the passage, and what it did to the memory.
#[derive(Debug, Clone, Serialize)]
pub struct Token {
    /// Which token, from 0.
    pub token: usize,
    /// Its text.
    pub text: String,
    /// Norm of the inner gradient, over all heads.
    pub surprise: f64,
    /// Rate of the write, the mean over the heads.
    pub theta: f64,
    /// Momentum, the mean over the heads.
    pub eta: f64,
    /// Forgetting, the mean over the heads.
    pub alpha: f64,
}

/// Reads a passage twice with the first Titans layer of a trained model, or of a small one trained here.
///
/// # Errors
/// A text or run that cannot be read, a model without a Titans memory, a training that fails.
pub fn trace(
    data: Option<&Path>,
    trained: Option<&Path>,
    global: &Global,
    device: &Device,
) -> Result<(Experiment, Vec<Token>), CommandError> {
    let source = match data {
        Some(path) => TextSource::open(path),
        None => TextSource::from_text("genesis.txt", TEXT),
    };
    let source = source.map_err(CommandError::input)?;
    let (model, tokenizer) = match trained {
        Some(folder) => {
            let loaded = run::load(folder, device).map_err(CommandError::train)?;
            let tokenizer = loaded.tokenizer().map_err(CommandError::train)?;
            (loaded.model, tokenizer)
        }
        None => (train(&source, global, device)?, Tokenizer::Byte),
    };
    let passage = passage(&source, &tokenizer)?;
    let tokens = read(&model, &tokenizer, &passage, device)?;
    let mean = |tokens: &[Token]| tokens.iter().map(|t| t.surprise).sum::<f64>() / tokens.len() as f64;
    let (first, second) = tokens.split_at(passage.len());
    let most = tokens.iter().map(|t| t.alpha.max(t.eta)).fold(0.0, f64::max);
    let mut checks = vec![
        Check::at_least("least surprise", 0.0, tokens.iter().map(|t| t.surprise).fold(f64::MAX, f64::min)),
        Check::at_most("largest forgetting or momentum", 1.0, most),
    ];
    let ratio = mean(second) / mean(first);
    let quantity = "surprise of the second reading over that of the first";
    // Another text, model or seed may do as it likes.
    let own = data.is_some() || trained.is_some() || global.seed.is_some();
    let check =
        if own { Check::at_least(quantity, 0.0, ratio) } else { Check::at_most(quantity, 1.0, ratio) };
    checks.insert(0, check);
    let about = if own {
        "A passage read twice in a row by a Titans memory: how strongly each token would change it."
    } else {
        "A passage read twice in a row by a Titans memory: the inner gradient is smaller where the memory knows what comes."
    };
    Ok((Experiment { name: Name::Surprise, about, checks }, tokens))
}

/// A small model of the text.
fn train(source: &TextSource, global: &Global, device: &Device) -> Result<LanguageModel, CommandError> {
    let recipe = Recipe::parse(RECIPE).map_err(CommandError::input)?;
    let context = recipe.task.context.unwrap_or_default();
    let held_out = recipe.task.held_out.unwrap_or_default();
    let text = TextTask::new(source, Tokenizer::Byte, held_out, context)
        .map_err(|error| match error {
            TaskError::TooShort { .. } => {
                let needed = ((context + 1) as f64 / (1.0 - held_out)).max(context as f64 / held_out).ceil();
                CommandError::input(format_args!(
                    "the text has {} bytes, expected at least {needed} to train a small memory on; give a longer one, or \
                     a trained model with --run",
                    source.text().len()
                ))
            }
            other => CommandError::train(other.into()),
        })?;
    let task = Task::Text(Box::new(text));
    let model = recipe.resolve_first(task.vocab()).map_err(CommandError::train)?;
    let seed = global.seed.unwrap_or(0);
    let mut trainer =
        Trainer::new(&task, &recipe.train, &model, seed, device).map_err(CommandError::train)?;
    let mut progress = Progress::new(global, "training a small Titans memory on the text");
    progress.milestone(0.0, None, "a few seconds");
    let trained = trainer.run(&mut |trainer, moment| {
        if moment == Moment::Step {
            let left = Duration::try_from_secs_f64(trainer.seconds_left()).ok();
            let step = trainer.position().step;
            progress.at(trainer.fraction(), left, || format!("step {step}"));
        }
        Ok(())
    });
    progress.finish();
    trained.map_err(CommandError::train)?;
    Ok(trainer.model().valid())
}

/// The passage: where the text's last tenth begins, at the start of a line if there is one near.
fn passage(source: &TextSource, tokenizer: &Tokenizer) -> Result<Vec<u32>, CommandError> {
    let text = source.text();
    let mut start = text.len() - text.len() / 10;
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    let start = text[start..].find('\n').filter(|at| *at < 1000).map_or(start, |at| start + at + 1);
    let mut end = text.len().min(start + 20 * PASSAGE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut tokens = tokenizer.encode(&text[start..end]).map_err(CommandError::input)?;
    tokens.truncate(PASSAGE);
    if tokens.is_empty() {
        return Err(CommandError::input("the text is too short to show a passage of it; give a longer one"));
    }
    Ok(tokens)
}

/// Reads the passage twice with the first Titans layer.
fn read(
    model: &LanguageModel,
    tokenizer: &Tokenizer,
    passage: &[u32],
    device: &Device,
) -> Result<Vec<Token>, CommandError> {
    let ids: Vec<u32> = passage.iter().chain(passage).copied().collect();
    let data: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let tokens = Tensor::<2, Int>::from_data(TensorData::new(data, [1, ids.len()]), device);
    let surprise = first_titans(model, tokens)?;
    let [_, _, heads] = surprise.gradient.dims();
    let rows = |x: Tensor<3>| -> Result<Vec<Vec<f64>>, CommandError> {
        let values: Vec<f64> = x.into_data().iter::<f32>().map(f64::from).collect();
        Ok(values.chunks(heads).map(<[f64]>::to_vec).collect())
    };
    let gradient = rows(surprise.gradient)?;
    let [theta, eta, alpha] = [surprise.theta, surprise.eta, surprise.alpha].map(rows);
    let (theta, eta, alpha) = (theta?, eta?, alpha?);
    let mean = |row: &[f64]| row.iter().sum::<f64>() / row.len() as f64;
    ids.iter()
        .enumerate()
        .map(|(i, id)| {
            Ok(Token {
                token: i,
                text: tokenizer.decode(&[*id]).map_err(CommandError::input)?,
                surprise: gradient[i].iter().map(|g| g * g).sum::<f64>().sqrt(),
                theta: mean(&theta[i]),
                eta: mean(&eta[i]),
                alpha: mean(&alpha[i]),
            })
        })
        .collect()
}

/// What the tokens do to the first Titans layer of the model.
fn first_titans(
    model: &LanguageModel,
    tokens: Tensor<2, Int>,
) -> Result<fastweight::memory::layers::Surprise, CommandError> {
    let failed = |error: MemoryError| CommandError::train(TrainError::from(error));
    let mut x = embedding(model.embedding.weight.val(), tokens);
    let mut shared = fastweight::memory::Shared::default();
    for block in &model.blocks {
        if let Mixer::Titans(layer) = &block.mixer {
            let normed = block.mixer_norm.forward(x).map_err(|error| failed(error.into()))?;
            return layer.surprise(normed).map_err(failed);
        }
        x = block.forward(x, None, None, &mut shared).map_err(failed)?.0;
    }
    Err(CommandError::input("the run's model has no titans layer; train one with mixers = [\"titans\"]"))
}
