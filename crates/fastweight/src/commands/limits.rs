//! Refuses recipes that no memory of this machine holds, before anything is allocated.

use fastweight::memory::MixerConfig;
use fastweight::models::ModelConfig;
use fastweight::train::Recipe;

use crate::error::CommandError;

/// Bytes of a parameter in training: weight, gradient and two moments, float32.
const PARAMETER_BYTES: f64 = 16.0;
/// Bytes of a logit in training: value and gradient, float32.
const LOGIT_BYTES: f64 = 8.0;
/// Bytes of a number.
const FLOAT32: f64 = 4.0;
/// Tensors of a layer kept for its backward pass, one `width` a token each: the residual stream around both
/// halves and the two normalisations.
const WIDTH_TENSORS: f64 = 6.0;
/// The same for every channel of q, k and v: projected, convolved or rotated, and normalised.
const HEAD_TENSORS: f64 = 3.0;
/// The same for every hidden channel of the MLP: gate, up, activated gate and product.
const HIDDEN_TENSORS: f64 = 4.0;
/// Tokens after which a kernel saves a matrix state for its backward pass.
const CHUNK: usize = 32;
/// Tensors of a chunk's tokens, and of one matrix state, in a kernel thread's workspace.
const CHUNK_TENSORS: f64 = 12.0;
const MATRIX_TENSORS: f64 = 4.0;

/// Checks sizes one by one, then every model, then the memory that training takes: parameters, logits,
/// activations for the backward pass, matrix states and the kernels' workspace.
///
/// # Errors
/// A size beyond anything this program trains, a model that is none, or more memory than the machine has.
pub fn check(recipe: &Recipe) -> Result<(), CommandError> {
    check_sizes(recipe)?;
    recipe.parts().iter().try_for_each(check_part)
}

/// Checks the models of a recipe of one task.
fn check_part(recipe: &Recipe) -> Result<(), CommandError> {
    let (task, train) = (&recipe.task, &recipe.train);
    for model in recipe.resolve(task.vocab()).map_err(CommandError::train)? {
        let name = &model.name;
        model.config.validate().map_err(|error| CommandError::input(format_args!("{name}: {error}")))?;
        let work = format!("training {name} ({} parameters)", model.parameters);
        refuse_memory(&work, &training(&model.config, model.parameters, train.batch, task.length()))?;
    }
    Ok(())
}

/// Checks the sizes of a recipe one by one.
///
/// # Errors
/// A size beyond anything this program trains.
pub fn check_sizes(recipe: &Recipe) -> Result<(), CommandError> {
    recipe.parts().iter().try_for_each(check_part_sizes)
}

fn check_part_sizes(recipe: &Recipe) -> Result<(), CommandError> {
    let (task, train) = (&recipe.task, &recipe.train);
    refuse(
        "task",
        &[
            ("vocab", task.vocab, 1 << 24),
            ("length", task.length, 1 << 24),
            ("longest", task.longest, 1 << 22),
            ("context", task.context, 1 << 24),
        ],
    )?;
    refuse(
        "train",
        &[
            ("batch", Some(train.batch), 1 << 20),
            ("accumulate", Some(train.accumulate), 1 << 20),
            ("eval_batches", Some(train.eval_batches), 1 << 20),
        ],
    )?;
    for model in std::iter::once(&recipe.model).chain(&recipe.models) {
        refuse(
            "model",
            &[
                ("width", model.width, 1 << 16),
                ("layers", model.layers, 1 << 10),
                ("heads", model.heads, 1 << 10),
                ("head_dim", model.head_dim, 1 << 14),
                ("value_dim", model.value_dim, 1 << 14),
                ("mlp_hidden", model.mlp_hidden, 1 << 20),
            ],
        )?;
    }
    Ok(())
}

/// A part of the memory that some work takes.
pub struct Part {
    /// What it holds.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: f64,
    /// What makes it smaller.
    pub lower: &'static str,
}

/// Refuses work that takes more memory than the machine has.
///
/// # Errors
/// [`CommandError::Input`] with the estimate and what to lower.
pub fn refuse_memory(work: &str, parts: &[Part]) -> Result<(), CommandError> {
    let needed: f64 = parts.iter().map(|part| part.bytes).sum();
    let largest = parts.iter().max_by(|a, b| a.bytes.total_cmp(&b.bytes));
    let (Some(memory), Some(largest)) = (memory(), largest) else { return Ok(()) };
    if needed <= memory {
        return Ok(());
    }
    Err(CommandError::input(format_args!(
        "{work} needs about {:.1} GiB, {:.1} GiB of it for {}, this machine has {:.1} GiB; make {} smaller",
        gib(needed),
        gib(largest.bytes),
        largest.name,
        gib(memory),
        largest.lower
    )))
}

/// Bytes of a kernel's saved matrix states: one a chunk and sequence, the last ones among them.
pub fn chunk_states(batch: usize, time: usize, heads: usize, key: usize, value: usize) -> f64 {
    let chunks = batch as f64 * (time.div_ceil(CHUNK) + 1) as f64;
    chunks * heads as f64 * key as f64 * value as f64 * FLOAT32
}

/// Bytes of the workspaces of all kernel threads.
pub fn workspace(key: usize, value: usize) -> f64 {
    let (key, value) = (key as f64, value as f64);
    let thread = CHUNK as f64 * (key + value) * CHUNK_TENSORS + MATRIX_TENSORS * key * value;
    rayon::current_num_threads() as f64 * thread * FLOAT32
}

fn training(config: &ModelConfig, parameters: usize, batch: usize, time: usize) -> [Part; 4] {
    let tokens = batch as f64 * time as f64;
    let context = config.context(0);
    let (heads, key, value) = (context.heads, context.head_dim, context.value_dim);
    let channels = heads as f64 * (2 * key + value) as f64;
    let kept = WIDTH_TENSORS * config.width as f64
        + HEAD_TENSORS * channels
        + HIDDEN_TENSORS * config.mlp_hidden() as f64;
    let matrix = |layer: &usize| !matches!(config.mixer(*layer), MixerConfig::SoftmaxAttention(_));
    let matrices = (0..config.layers).filter(matrix).count() as f64;
    let states = matrices * chunk_states(batch, time, heads, key, value);
    let workspace = if matrices > 0.0 { workspace(key, value) } else { 0.0 };
    [
        Part {
            name: "parameters and their moments",
            bytes: parameters as f64 * PARAMETER_BYTES,
            lower: "width, layers, heads or mlp_hidden",
        },
        Part {
            name: "logits",
            bytes: tokens * config.vocab as f64 * LOGIT_BYTES,
            lower: "batch, the sequences or the vocabulary",
        },
        Part {
            name: "activations",
            bytes: tokens * config.layers as f64 * kept * FLOAT32,
            lower: "batch, the sequences, width or layers",
        },
        Part {
            name: "matrix states",
            bytes: states + workspace,
            lower: "head_dim, value_dim, heads or batch",
        },
    ]
}

fn refuse(section: &str, sizes: &[(&str, Option<usize>, usize)]) -> Result<(), CommandError> {
    match sizes.iter().find(|(_, size, most)| size.is_some_and(|size| size > *most)) {
        Some((key, size, most)) => Err(CommandError::input(format_args!(
            "`{key}` in [{section}] is {}, expected at most {most}; is there a digit too many?",
            size.unwrap_or_default()
        ))),
        None => Ok(()),
    }
}

fn gib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 30)
}

/// Bytes of memory of this machine, where the system tells.
fn memory() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}
