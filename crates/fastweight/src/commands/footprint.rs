//! The memory that work with a model takes: one estimate for training, scoring and generating.
//!
//! Kept tensors are counted from the layers. What passes by while one layer computes, and what the program and its
//! allocator hold beside, are fitted to peaks of the process measured on Linux with two threads: 355 MiB for the recipe of
//! text and 107 MiB for that of recall, where the estimate is within 1%. At other batches of the text recipe it is 14%
//! below (batch 2) to 5% above (batch 32). Mixers that keep less than Gated DeltaNet, such as linear attention, are
//! overestimated; those that keep a second state, such as momentum, underestimated.

use fastweight::memory::channel::MoleConfig;
use fastweight::memory::{ChannelMixerConfig, MixerConfig};
use fastweight::models::ModelConfig;
use fastweight::train::recipe::{TaskKind, TaskRecipe};
use fastweight::train::{Task, evaluate};

/// Bytes of a number.
const FLOAT32: f64 = 4.0;
/// Bytes of the program, its threads' stacks and what the allocator keeps.
const PROCESS: f64 = 48.0 * (1 << 20) as f64;
/// Bytes of a parameter in training: weight, gradient and two moments.
const TRAINED_PARAMETER: f64 = 16.0;
/// The same while a checkpoint is written: weight and moments live, copied and encoded.
const SAVED_PARAMETER: f64 = 36.0;
/// The same while a checkpoint is read: weight and moments, the file they come from, and the model.
const LOADED_PARAMETER: f64 = 24.0;
/// The same while a checkpoint without moments is read: the file, and the weights that become the model's.
const STORED_PARAMETER: f64 = 8.0;
/// Bytes of a number of a table while it is exported: in the model, copied and encoded.
const EXPORTED_NUMBER: f64 = 12.0;
/// Bytes of a byte of text: the text, and its tokens in 32 bits.
const TEXT_BYTE: f64 = 5.0;
/// Tokens after which a kernel saves a matrix state for its backward pass.
const CHUNK: usize = 32;
/// Tensors of a chunk's tokens, and of one matrix state, in a kernel thread's workspace.
const CHUNK_TENSORS: f64 = 12.0;
const MATRIX_TENSORS: f64 = 4.0;
/// Tensors of scores that an attention of tensor operations keeps; half of each lies before the diagonal.
const SCORE_TENSORS: f64 = 6.0;

/// Most tokens of a rule's chunk that are computed together.
const RULE_BLOCK: usize = 32;
/// Copies of every token's weights, or of a chunk's matrix between tokens, that a rule's training pass keeps.
const WEIGHT_COPIES: f64 = 7.0;
/// Copies of a token's inputs and errors that it keeps, and matrices between tokens of one head.
const RULE_ROWS: f64 = 10.0;

/// Tokens up to which a ledger counts; a session that holds more of them than this fits nowhere.
const MOST_TOKENS: usize = 1 << 36;

/// A part of the memory that some work takes.
pub struct Part {
    /// What it holds.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: f64,
    /// What makes it smaller.
    pub lower: &'static str,
}

/// Work with a model.
#[derive(Debug, Clone, Copy)]
pub enum Work {
    /// Training.
    Training {
        /// Rows of a forward pass.
        batch: usize,
        /// Tokens in a row.
        time: usize,
        /// Tokens of a row that have a loss.
        scored: usize,
        /// Tokens of a forward pass while the model is scored.
        evaluated: usize,
        /// Bytes of the text.
        text: u64,
    },
    /// Reading a checkpoint.
    Loading {
        /// Whether it holds the optimizer's moments.
        moments: bool,
    },
    /// Reading a checkpoint and writing its lookup experts as tables.
    Exporting,
    /// Scoring.
    Scoring {
        /// Rows of a forward pass.
        batch: usize,
        /// Tokens in a row.
        time: usize,
        /// Tokens of a row that are scored.
        scored: usize,
    },
    /// Continuing a prompt.
    Generating {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to write.
        tokens: usize,
    },
}

/// What the work takes.
pub fn of(config: &ModelConfig, work: Work) -> Vec<Part> {
    let parameters = config.parameter_count() as f64;
    match work {
        Work::Training { batch, time, scored, evaluated, text } => {
            let tokens = batch as f64 * time as f64;
            let kept: f64 =
                (0..config.layers).map(|layer| kept(config, layer) + kept_by_id(config, layer, time)).sum();
            let kept = kept * config.rounds as f64;
            let matrices = matrix_layers(config);
            let states = matrices * states(config, batch, time);
            let logits = batch as f64 * scored as f64 * config.vocab as f64 * 2.0 * FLOAT32;
            let activations = tokens * (kept + working(config) + 2.0 * config.width as f64) * FLOAT32;
            let activations = activations.max(passing(config, evaluated as f64));
            // While a checkpoint is written the activations are gone.
            let saved = parameters * (SAVED_PARAMETER - TRAINED_PARAMETER) - activations - logits - states;
            vec![
                parameter_part(parameters * TRAINED_PARAMETER + saved.max(0.0)),
                logits_part(logits),
                activation_part(activations),
                matrix_part(states + if matrices > 0.0 { kernel_workspace(config) } else { 0.0 }),
                Part {
                    name: "the program and the text",
                    bytes: PROCESS + text as f64 * TEXT_BYTE,
                    lower: "the text",
                },
            ]
        }
        Work::Loading { moments: true } => vec![parameter_part(parameters * LOADED_PARAMETER)],
        Work::Loading { moments: false } => {
            let tables = tables(config, |mole| mole.tables);
            vec![
                parameter_part((parameters - tables) * STORED_PARAMETER),
                table_part(tables * STORED_PARAMETER),
            ]
        }
        Work::Exporting => vec![
            parameter_part(parameters * LOADED_PARAMETER),
            table_part(tables(config, |mole| !mole.tables) * EXPORTED_NUMBER),
        ],
        Work::Scoring { batch, time, scored } => {
            let rows = batch as f64;
            vec![
                logits_part(rows * scored as f64 * config.vocab as f64 * 2.0 * FLOAT32),
                activation_part(passing(config, rows * time as f64)),
                session_part(rows * config.state_bytes(time).total() as f64),
            ]
        }
        Work::Generating { prompt, tokens } => vec![
            logits_part(prompt as f64 * config.vocab as f64 * FLOAT32),
            activation_part(passing(config, prompt as f64)),
            session_part(config.state_bytes(prompt.saturating_add(tokens).min(MOST_TOKENS)).total() as f64),
        ],
    }
}

/// How [`evaluate::score`] reads a task.
pub fn scoring(task: &Task) -> Work {
    match task {
        Task::Recall(recall) => {
            Work::Scoring { batch: evaluate::ROWS, time: recall.length, scored: recall.pairs }
        }
        Task::Formal(formal) => {
            let time = 2 * formal.longest;
            Work::Scoring { batch: evaluate::ROWS, time, scored: time }
        }
        Task::Text(text) => {
            Work::Scoring { batch: evaluate::LANES, time: text.context, scored: text.context }
        }
    }
}

/// Tokens of a forward pass while a model is scored on a recipe's task.
pub fn evaluated(task: &TaskRecipe) -> usize {
    let (rows, times) = match task.kind {
        TaskKind::Recall => (evaluate::ROWS, 1),
        TaskKind::FormalLanguage => (evaluate::ROWS, 2),
        TaskKind::Text => (evaluate::LANES, 1),
    };
    task.length().saturating_mul(rows * times)
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

fn is_matrix(config: &ModelConfig, layer: usize) -> bool {
    let attends = matches!(config.mixer(layer), MixerConfig::SoftmaxAttention(_));
    !attends && deep(config, layer) == 0.0
}

/// Numbers of a token that the deep memories of a layer keep for their backward pass.
fn deep(config: &ModelConfig, layer: usize) -> f64 {
    config.mixer(layer).deep_training_bytes(&config.context(layer)).unwrap_or(0) as f64 / FLOAT32
}

fn matrix_layers(config: &ModelConfig) -> f64 {
    let layers = (0..config.layers).filter(|layer| is_matrix(config, *layer)).count();
    (layers * config.rounds) as f64
}

fn states(config: &ModelConfig, batch: usize, time: usize) -> f64 {
    let context = config.context(0);
    chunk_states(batch, time, context.heads, context.head_dim, context.value_dim)
}

fn kernel_workspace(config: &ModelConfig) -> f64 {
    let context = config.context(0);
    workspace(context.head_dim, context.value_dim)
}

/// Channels of q and k, and of v, of all heads.
fn channels(config: &ModelConfig) -> [f64; 2] {
    let context = config.context(0);
    let heads = context.heads as f64;
    [2.0 * heads * context.head_dim as f64, heads * context.value_dim as f64]
}

/// The lookup experts of a layer, if it has them.
fn lookup_experts(config: &ModelConfig, layer: usize) -> Option<&MoleConfig> {
    match config.channel_mixer(layer) {
        ChannelMixerConfig::Mole(mole) => Some(mole),
        _ => None,
    }
}

/// Numbers in the tables, made or to be made, of the layers whose lookup experts are `chosen`.
fn tables(config: &ModelConfig, chosen: impl Fn(&MoleConfig) -> bool) -> f64 {
    let layers = (0..config.layers).filter_map(|layer| Some((layer, lookup_experts(config, layer)?)));
    let sizes = layers.filter(|(_, mole)| chosen(mole));
    sizes.map(|(layer, mole)| mole.table_size(&config.context(layer)) as f64).sum()
}

/// Numbers of a token that lookup experts keep for their backward pass: of a network gate, up, their product and the
/// output, weighed and not; of a table the row, weighed and not.
fn experts_kept(config: &ModelConfig, layer: usize) -> f64 {
    let width = config.width as f64;
    lookup_experts(config, layer).map_or(0.0, |mole| {
        let inside = if mole.tables { 0.0 } else { 3.0 * mole.expert_hidden(&config.context(layer)) as f64 };
        mole.experts as f64 * (inside + 2.0 * width)
    })
}

/// Numbers of a token in flight while lookup experts compute: one network, or the rows of a table.
fn experts_working(config: &ModelConfig, layer: usize) -> f64 {
    let width = config.width as f64;
    lookup_experts(config, layer).map_or(0.0, |mole| match mole.tables {
        true => 2.0 * mole.experts as f64 * width,
        false => 4.0 * mole.expert_hidden(&config.context(layer)) as f64 + 3.0 * width,
    })
}

/// Numbers of a token that a layer keeps for its backward pass, matrix states apart.
fn kept(config: &ModelConfig, layer: usize) -> f64 {
    let [keys, values] = channels(config);
    // Residual stream and its normalisation, before the mixer and before the MLP; gate, up and their product.
    let block = 4.0 * config.width as f64 + 3.0 * config.mlp_hidden() as f64;
    let convolved = if config.mixer(layer).conv_width() > 0 { keys + values } else { 0.0 };
    // q, k and v projected, convolved, then q and k normalised or rotated.
    let inputs = keys + values + convolved + keys;
    // Reading, what the kernel saves of it, and with a memory the output gate and the gated reading.
    let attends = matches!(config.mixer(layer), MixerConfig::SoftmaxAttention(_));
    let readings = if attends { 2.0 } else { 4.0 };
    let memory = inputs + readings * values + deep(config, layer);
    // Queries, keys and values, as read and as attention takes them, and its reading; with a segment two of each a token.
    let attention = match config.mixer(layer) {
        MixerConfig::TitansMac(_) => 6.0 * (keys + values),
        MixerConfig::TitansMag(_) | MixerConfig::TitansMal(_) => 3.0 * (keys + values),
        _ => 0.0,
    };
    block + experts_kept(config, layer) + memory + attention + own(config, layer) + written(config, layer)
}

/// Numbers of a token that a rule without a fused operator keeps, for all heads.
fn written(config: &ModelConfig, layer: usize) -> f64 {
    let context = config.context(layer);
    let (rule, by_output) = match config.mixer(layer) {
        MixerConfig::Rule(config) if config.rule.fused().is_none() => (config.rule, false),
        MixerConfig::Moneta(config) => (config.rule(), true),
        MixerConfig::Yaad(config) => (config.rule(), true),
        MixerConfig::Memora(config) => (config.rule(), true),
        _ => return 0.0,
    };
    let shapes = rule.layer_shapes(context.head_dim, context.value_dim);
    let sum = |of: fn(&[usize; 2]) -> usize| shapes.iter().map(of).sum::<usize>() as f64;
    let block = rule.chunk.min(RULE_BLOCK) as f64;
    let head = if rule.forms_weights() {
        WEIGHT_COPIES * sum(|[rows, cols]| rows * cols)
    } else {
        let pairs = if by_output { sum(|[_, cols]| *cols) } else { RULE_ROWS };
        RULE_ROWS * sum(|[rows, cols]| rows + cols) + WEIGHT_COPIES * block * pairs
    };
    context.heads as f64 * head
}

/// Numbers of a token that sequential layers and mixtures keep besides.
fn own(config: &ModelConfig, layer: usize) -> f64 {
    let [keys, values] = channels(config);
    let mixer = config.mixer(layer);
    match mixer {
        // Gates before and after their sigmoids, parts of them, cells and outputs.
        MixerConfig::Lstm(lstm) => 20.0 * lstm.hidden.unwrap_or(values as usize) as f64,
        // What a deep memory keeps, for every memory; and the copies that it reads.
        MixerConfig::MixtureOfMemories(mixture) => {
            let memories = 1.0 + mixture.memories as f64;
            memories * (12.0 * (keys + values) + 24.0 * config.heads as f64 * mixture.chunk as f64)
        }
        // The matrix that a token reads, what it adds and what is left.
        MixerConfig::Srwm(_) => 3.0 * mixer.state_size(&config.context(layer), 0).fixed as f64 / FLOAT32,
        _ => 0.0,
    }
}

/// Numbers of a token that a layer keeps for its backward pass where it has vectors for each token id: the rows of its
/// tables, what is added to and multiplied with them, and the scores of an attention that is tensor operations.
fn kept_by_id(config: &ModelConfig, layer: usize, time: usize) -> f64 {
    let [keys, values] = channels(config);
    let (width, rows) = (config.width as f64, 3.0);
    let mixer = match config.mixer(layer) {
        MixerConfig::Rwkv7(options) if options.token_keys_values => rows * (0.5 * keys + values),
        MixerConfig::Rwkv7Dea(options) => {
            let query = options.query_dim as f64;
            SCORE_TENSORS * 0.5 * time as f64 + 6.0 * query + (rows + 6.0) * (query + width)
        }
        _ => 0.0,
    };
    let channel = match config.channel_mixer(layer) {
        ChannelMixerConfig::DeepEmbed(_) => rows * width,
        ChannelMixerConfig::Rwkv7DeepEmbed(options) => {
            rows * (options.rank as f64).powi(2) + 2.0 * config.mlp_hidden() as f64
        }
        _ => 0.0,
    };
    mixer + channel
}

/// Numbers of a token in flight while one layer computes, forward or backward.
fn working(config: &ModelConfig) -> f64 {
    let [keys, values] = channels(config);
    let by_id = (0..config.layers).map(|layer| working_by_id(config, layer)).fold(0.0, f64::max);
    let experts = (0..config.layers).map(|layer| experts_working(config, layer)).fold(0.0, f64::max);
    4.0 * config.mlp_hidden() as f64 + experts + 3.0 * (keys + values) + 5.0 * config.width as f64 + by_id
}

/// Numbers of a token in flight where a layer has vectors for each token id, fitted as those of [`working`].
fn working_by_id(config: &ModelConfig, layer: usize) -> f64 {
    let mixer = match config.mixer(layer) {
        MixerConfig::Rwkv7Dea(options) => 4.0 * (options.query_dim + config.width) as f64,
        _ => 0.0,
    };
    let channel = match config.channel_mixer(layer) {
        ChannelMixerConfig::Rwkv7DeepEmbed(options) => 2.5 * (options.rank as f64).powi(2),
        _ => 0.0,
    };
    mixer.max(channel)
}

/// Bytes in flight while tokens are read without gradients.
fn passing(config: &ModelConfig, tokens: f64) -> f64 {
    tokens * (working(config) + config.width as f64) * FLOAT32
}

fn parameter_part(bytes: f64) -> Part {
    Part {
        name: "parameters and their moments",
        bytes,
        lower: "width, layers, heads, mlp_hidden or the experts",
    }
}

fn table_part(bytes: f64) -> Part {
    let lower = "the vocabulary, width, layers or the number of experts";
    Part { name: "the tables of the lookup experts", bytes, lower }
}

fn logits_part(bytes: f64) -> Part {
    Part { name: "logits", bytes, lower: "batch, the sequences or the vocabulary" }
}

fn activation_part(bytes: f64) -> Part {
    Part { name: "activations", bytes, lower: "batch, the sequences, width or layers" }
}

fn matrix_part(bytes: f64) -> Part {
    Part { name: "matrix states", bytes, lower: "head_dim, value_dim, heads or batch" }
}

fn session_part(bytes: f64) -> Part {
    Part { name: "the session's state", bytes, lower: "the prompt or the number of tokens" }
}
