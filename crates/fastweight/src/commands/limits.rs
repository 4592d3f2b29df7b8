//! Refuses recipes that no memory of this machine holds, before anything is allocated.

use fastweight::train::Recipe;

use crate::error::CommandError;

/// Bytes of a parameter in training: weight, gradient and two moments, float32.
const PARAMETER_BYTES: f64 = 16.0;
/// Bytes of a logit in training: value and gradient, float32.
const LOGIT_BYTES: f64 = 8.0;
/// Token ids of the byte tokenizer, the fewest a text can have.
const BYTES: usize = 256;

/// Checks sizes one by one, then the memory that weights, moments and logits take at the least.
///
/// # Errors
/// A size beyond anything this program trains, or more memory than the machine has.
pub fn check(recipe: &Recipe) -> Result<(), CommandError> {
    let (task, train) = (&recipe.task, &recipe.train);
    refuse(
        "task",
        &[
            ("vocab", task.vocab, 1 << 24),
            ("length", task.length, 1 << 24),
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
    let vocab = task.vocab.unwrap_or(BYTES);
    let tokens = train.batch as f64 * task.length.or(task.context).unwrap_or(1) as f64;
    let logits = tokens * vocab as f64 * LOGIT_BYTES;
    let Some(memory) = memory() else { return Ok(()) };
    for model in recipe.resolve(vocab).map_err(CommandError::train)? {
        let needed = model.parameters as f64 * PARAMETER_BYTES + logits;
        if needed > memory {
            return Err(CommandError::input(format_args!(
                "training {} needs at least {:.1} GiB ({} parameters, {tokens} tokens a batch), this machine has {:.1} GiB; \
                 make the model, the batch or the sequences smaller",
                model.name,
                gib(needed),
                model.parameters,
                gib(memory)
            )));
        }
    }
    Ok(())
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
