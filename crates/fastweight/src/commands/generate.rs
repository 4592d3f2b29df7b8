//! `fastweight generate`: continues a text.

use std::fs;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use fastweight::train::generate::{Generator, Sampling};
use fastweight::train::run;
use serde_json::json;

use crate::commands::footprint::Work;
use crate::commands::limits;
use crate::error::CommandError;
use crate::global::Global;
use crate::output;
use crate::progress;
use crate::values::whole;

const EXAMPLE: &str = "\
The prompt comes from --prompt, --prompt-file or standard input. Only the continuation is written,
token by token as it is made. The same run, prompt and seed give the same text.

Example:
  fastweight generate runs/bible --prompt \"In the beginning\" --tokens 400 --temperature 0.8 --seed 7
  echo \"And God said\" | fastweight generate runs/bible --top-p 0.9 --json";

/// Arguments of `fastweight generate`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub struct Args {
    /// Run folder, or one of its checkpoints
    run: PathBuf,
    /// Text to continue
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// File with the text to continue
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Tokens to write
    #[arg(long, value_name = "N", default_value_t = 200, allow_negative_numbers = true,
        value_parser = whole::<usize>(0..=1 << 40))]
    tokens: usize,
    /// Divides the logits: lower is more predictable, 0 always takes the most likely token
    #[arg(long, value_name = "X", default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f64,
    /// Draw only from the most likely tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f64,
}

/// Writes the continuation.
///
/// # Errors
/// A run that cannot be loaded, a prompt that is missing, sampling options out of range.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let device = global.device()?;
    limits::check_loading(&args.run)?;
    let loaded = run::load(&args.run, &device).map_err(CommandError::train)?;
    loaded.notes.iter().for_each(progress::note);
    let tokenizer = loaded.tokenizer().map_err(CommandError::train)?;
    let vocab = loaded.model.config().vocab;
    if tokenizer.vocab_size() != vocab {
        return Err(CommandError::input(format_args!(
            "the tokenizer has {} tokens, the model of {} has {vocab}; put back the tokenizer file it was trained with",
            tokenizer.vocab_size(),
            args.run.display()
        )));
    }
    let prompt = prompt(args)?;
    let seed = global.seed.unwrap_or(0);
    let sampling = Sampling { temperature: args.temperature, top_p: args.top_p, seed };
    let ids = tokenizer.encode(&prompt).map_err(CommandError::input)?;
    if ids.is_empty() {
        return Err(CommandError::input(
            "the tokenizer of the run has no token for this prompt; give another one",
        ));
    }
    let work = Work::Generating { prompt: ids.len(), tokens: args.tokens };
    limits::check_trained(&args.run.display().to_string(), loaded.model.config(), work)?;

    let began = Instant::now();
    let generator = Generator::new(&loaded.model, &ids, sampling).map_err(CommandError::train)?;
    let generator = generator.only(tokenizer.known());
    let mut decoder = tokenizer.stream_decoder();
    let mut text = String::new();
    let mut show = |piece: String| {
        if global.json {
            text.push_str(&piece);
            return Ok(());
        }
        output::stream(&piece)
    };
    for id in generator.take(args.tokens) {
        let piece = decoder.push(id.map_err(CommandError::train)?).map_err(CommandError::input)?;
        show(piece)?;
    }
    show(decoder.finish().map_err(CommandError::input)?)?;
    if !global.json {
        return output::line("");
    }
    output::json(&json!({
        "text": text, "prompt_tokens": ids.len(), "tokens": args.tokens, "seed": seed,
        "temperature": args.temperature, "top_p": args.top_p,
        "seconds": began.elapsed().as_secs_f64(),
    }))
}

fn prompt(args: &Args) -> Result<String, CommandError> {
    let text = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => read(path)?,
        (None, None) => read_standard_input()?,
    };
    if text.is_empty() {
        return Err(CommandError::input(
            "the prompt is empty; give at least one character with --prompt, --prompt-file or on standard input",
        ));
    }
    Ok(text)
}

fn read(path: &Path) -> Result<String, CommandError> {
    let bytes = fs::read(path).map_err(|cause| {
        CommandError::input(format_args!(
            "could not read the prompt in {}: {cause}; --prompt-file expects a text file",
            path.display()
        ))
    })?;
    utf8(bytes, &path.display().to_string())
}

fn read_standard_input() -> Result<String, CommandError> {
    let mut input = io::stdin().lock();
    if input.is_terminal() {
        return Err(CommandError::input(
            "there is no prompt; give it with --prompt \"...\", --prompt-file FILE or on standard input",
        ));
    }
    let mut bytes = Vec::new();
    input.read_to_end(&mut bytes).map_err(|cause| {
        CommandError::input(format_args!(
            "could not read the prompt from standard input: {cause}; use --prompt"
        ))
    })?;
    utf8(bytes, "standard input")
}

fn utf8(bytes: Vec<u8>, origin: &str) -> Result<String, CommandError> {
    String::from_utf8(bytes).map_err(|cause| {
        CommandError::input(format_args!(
            "the prompt in {origin} is not UTF-8 text: the byte at offset {} begins no valid character; convert it to UTF-8",
            cause.utf8_error().valid_up_to()
        ))
    })
}
