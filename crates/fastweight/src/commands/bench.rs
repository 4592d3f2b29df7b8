//! `fastweight bench`: times every operator on this machine.

mod cases;

use std::time::{Duration, Instant};

use burn::tensor::Device;
use fastweight::ops::OpError;
use fastweight::ops::kernel::InstructionSet;
use serde::Serialize;

use crate::commands::footprint::{self, Part};
use crate::commands::limits;
use crate::error::CommandError;
use crate::global::Global;
use crate::output;
use crate::progress::{self, Progress};
use crate::values::whole;
use cases::{Gate, Operator, Shape, sequence, step};

const EXAMPLE: &str = "\
Example:
  fastweight bench --batch 4 --time 2048 --heads 4 --key 64 --value 64
  fastweight bench delta linear --time 512 --json

forward and forward+backward (gradients of every argument) are over whole sequences, step is one
token of every session. Weak gates are log gates in [-0.1, 0], strong ones in [-60, 0]. Figures
are medians in milliseconds. Beside them stands how many times as long as the gated delta rule it
took: the two run in turns, so that a machine whose speed drifts changes both.";

/// Arguments of `fastweight bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub struct Args {
    /// Operators to time [default: all]
    #[arg(value_enum)]
    operators: Vec<Operator>,
    /// Sequences in the batch
    #[arg(long, value_name = "N", default_value = "4", allow_negative_numbers = true,
        value_parser = whole::<usize>(1..=u64::MAX))]
    batch: usize,
    /// Tokens in a sequence
    #[arg(long, value_name = "N", default_value = "2048", allow_negative_numbers = true,
        value_parser = whole::<usize>(1..=u64::MAX))]
    time: usize,
    /// Heads
    #[arg(long, value_name = "N", default_value = "4", allow_negative_numbers = true,
        value_parser = whole::<usize>(1..=u64::MAX))]
    heads: usize,
    /// Key dimension of a head
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true,
        value_parser = whole::<usize>(1..=u64::MAX))]
    key: usize,
    /// Value dimension of a head
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true,
        value_parser = whole::<usize>(1..=u64::MAX))]
    value: usize,
    /// Sequences that take one step together
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true,
        value_parser = whole::<usize>(1..=u64::MAX))]
    sessions: usize,
    /// Milliseconds to spend on each figure
    #[arg(long, value_name = "MS", default_value_t = 500, allow_negative_numbers = true,
        value_parser = whole::<u64>(0..=600_000))]
    spend: u64,
}

#[derive(Serialize)]
struct Timing {
    operator: Operator,
    gate: Gate,
    forward_ms: f64,
    forward_backward_ms: f64,
    step_ms: f64,
    /// Times the gated delta rule's time under weak gates, measured in turns with it.
    forward_ratio: f64,
    forward_backward_ratio: f64,
    /// Copying the matrix states of all sessions once: the least a step can take.
    state_copy_ms: f64,
    #[serde(flatten)]
    shape: Shape,
    instruction_set: &'static str,
    threads: usize,
    device: String,
}

/// Times the operators.
///
/// # Errors
/// An unknown device, sizes an operator refuses, or standard output that cannot be written.
pub fn run(args: &Args, global: &Global) -> Result<(), CommandError> {
    let device = global.device()?;
    device.seed(global.seed.unwrap_or(0));
    let shape = Shape {
        batch: args.batch,
        time: args.time,
        heads: args.heads,
        key: args.key,
        value: args.value,
        sessions: args.sessions,
    };
    check(&shape)?;
    let all = <Operator as clap::ValueEnum>::value_variants();
    let operators = if args.operators.is_empty() { all } else { args.operators.as_slice() };
    let cases: Vec<(Operator, Gate)> = operators
        .iter()
        .flat_map(|&operator| operator.gates().iter().map(move |&gate| (operator, gate)))
        .collect();

    let spend = Duration::from_millis(args.spend);
    let mut progress = Progress::new(global, "bench");
    let state_copy_ms = time_state_copy(&shape, spend);
    let began = Instant::now();
    let mut timings = Vec::with_capacity(cases.len());
    for (done, &(operator, gate)) in cases.iter().enumerate() {
        let fraction = done as f64 / cases.len() as f64;
        progress.at(fraction, progress::time_left(fraction, began.elapsed()), || name(operator, gate));
        let (forward, forward_backward, step_ms) =
            time_case(operator, gate, &shape, &device, spend).map_err(CommandError::input)?;
        let timing = Timing {
            operator,
            gate,
            forward_ms: forward.ms,
            forward_backward_ms: forward_backward.ms,
            step_ms,
            forward_ratio: forward.ratio,
            forward_backward_ratio: forward_backward.ratio,
            state_copy_ms,
            shape,
            instruction_set: instruction_set(),
            threads: rayon::current_num_threads(),
            device: global.device.clone(),
        };
        if global.json {
            output::json(&timing)?;
        }
        timings.push(timing);
    }
    progress.finish();
    if !global.json {
        output::line(table(&timings, &shape, state_copy_ms, global))?;
    }
    Ok(())
}

/// Most numbers in one tensor: 8 GiB of float32.
const MOST: usize = 1 << 31;

fn check(shape: &Shape) -> Result<(), CommandError> {
    let Shape { batch, time, heads, key, value, sessions } = *shape;
    let products = [
        [batch, time, heads, key.max(value)],
        [sessions, time, heads, key.max(value)],
        [sessions, heads, key, value],
    ];
    let fits = |sizes: &[usize; 4]| {
        sizes
            .iter()
            .try_fold(1usize, |product, &size| product.checked_mul(size))
            .is_some_and(|product| product <= MOST)
    };
    match products.iter().find(|sizes| !fits(sizes)) {
        Some(sizes) => Err(CommandError::input(format_args!(
            "a tensor of {sizes:?} numbers is more than the {MOST} that bench allocates; choose smaller sizes"
        ))),
        None => limits::refuse_memory("bench", &needed(shape)),
    }
}

/// Arguments, results and gradients of an operator and the reference, and what they save.
fn needed(shape: &Shape) -> [Part; 2] {
    let Shape { batch, time, heads, key, value, sessions } = *shape;
    let numbers = |sizes: &[usize]| sizes.iter().map(|size| *size as f64).product::<f64>() * 4.0;
    let sequences = 4.0 * numbers(&[batch, time, heads, 5 * key + 2 * value]);
    let cache = numbers(&[sessions, time, heads, key + value]);
    let states = 3.0 * footprint::chunk_states(batch, time, heads, key, value)
        + numbers(&[3, sessions, heads, key, value]);
    [
        Part { name: "sequences", bytes: sequences.max(cache), lower: "batch, time, sessions or heads" },
        Part {
            name: "matrix states",
            bytes: states + footprint::workspace(key, value),
            lower: "key, value, heads or sessions (choose smaller sizes)",
        },
    ]
}

fn table(timings: &[Timing], shape: &Shape, state_copy_ms: f64, global: &Global) -> String {
    let mut table = output::table(["operator", "forward ms", "×", "forward+backward ms", "×", "step ms"]);
    for timing in timings {
        table.add_row([
            name(timing.operator, timing.gate),
            milliseconds(timing.forward_ms),
            format!("{:.2}", timing.forward_ratio),
            milliseconds(timing.forward_backward_ms),
            format!("{:.2}", timing.forward_backward_ratio),
            milliseconds(timing.step_ms),
        ]);
    }
    let Shape { batch, time, heads, key, value, sessions } = *shape;
    format!(
        "batch {batch}, time {time}, heads {heads}, key {key}, value {value}; step: one token of {}\n\
         device {}, {} instructions, {}\n{table}\n\
         ×: times the gated delta rule; copying the matrix states of {} takes {} ms",
        output::count(sessions, "session"),
        global.device,
        instruction_set(),
        output::count(rayon::current_num_threads(), "thread"),
        output::count(sessions, "session"),
        milliseconds(state_copy_ms),
    )
}

fn name(operator: Operator, gate: Gate) -> String {
    let operator = match (operator, gate) {
        (Operator::Delta, Gate::Weak | Gate::Strong) => "gated delta rule",
        _ => operator.title(),
    };
    match gate {
        Gate::None => operator.to_owned(),
        Gate::Weak => format!("{operator}, weak gate"),
        Gate::Strong => format!("{operator}, strong gate"),
    }
}

fn instruction_set() -> &'static str {
    match InstructionSet::active() {
        InstructionSet::Avx512 => "avx512",
        InstructionSet::Avx2 => "avx2",
        InstructionSet::Neon => "neon",
        InstructionSet::Portable => "portable",
    }
}

fn milliseconds(figure: f64) -> String {
    if figure < 10.0 { format!("{figure:.3}") } else { format!("{figure:.1}") }
}

/// What the others are compared with.
const REFERENCE: (Operator, Gate) = (Operator::Delta, Gate::Weak);

/// A median, and that of its ratios to the reference.
#[derive(Clone, Copy)]
struct Figure {
    ms: f64,
    ratio: f64,
}

fn time_case(
    operator: Operator,
    gate: Gate,
    shape: &Shape,
    device: &Device,
    spend: Duration,
) -> Result<(Figure, Figure, f64), OpError> {
    let finish = |device: &Device| {
        // A device that fails to finish reports it again at the next read of a tensor.
        let _ = device.sync();
    };
    let pair = |device: &Device| {
        [sequence(operator, gate, shape, device), sequence(REFERENCE.0, REFERENCE.1, shape, device)]
    };
    let passes = pair(device);
    let forward = in_turns(spend, |which| {
        passes[which]()?;
        finish(device);
        Ok(())
    })?;
    drop(passes);
    let autodiff = device.clone().autodiff();
    let passes = pair(&autodiff);
    let forward_backward = in_turns(spend, |which| {
        passes[which]()?.backward();
        finish(&autodiff);
        Ok(())
    })?;
    drop(passes);
    let mut token = step(operator, gate, shape, device);
    let one_step = median(spend, || {
        token()?;
        finish(device);
        Ok(())
    })?;
    Ok((forward, forward_backward, one_step))
}

/// Times `work(0)` in turns with the reference, `work(1)`: each once to warm up, then at least three times and until
/// `spend` is over.
fn in_turns(spend: Duration, mut work: impl FnMut(usize) -> Result<(), OpError>) -> Result<Figure, OpError> {
    let mut timed = |which| {
        let start = Instant::now();
        work(which).map(|()| start.elapsed().as_secs_f64() * 1e3)
    };
    let _warm = (timed(0)?, timed(1)?);
    let began = Instant::now();
    let (mut times, mut ratios) = (Vec::new(), Vec::new());
    while times.len() < 3 || began.elapsed() < spend {
        let (time, reference) = (timed(0)?, timed(1)?);
        times.push(time);
        ratios.push(time / reference);
    }
    Ok(Figure { ms: middle(times), ratio: middle(ratios) })
}

fn time_state_copy(shape: &Shape, spend: Duration) -> f64 {
    let state = vec![1.0f32; shape.sessions * shape.heads * shape.key * shape.value];
    let mut copy = vec![0.0f32; state.len()];
    let timed = median(spend, || {
        copy.copy_from_slice(&state);
        std::hint::black_box(&mut copy);
        Ok(())
    });
    timed.unwrap_or(f64::NAN)
}

/// Median milliseconds of `work`, run once to warm up, then at least three times and until `spend` is over.
fn median(spend: Duration, mut work: impl FnMut() -> Result<(), OpError>) -> Result<f64, OpError> {
    work()?;
    let began = Instant::now();
    let mut times = Vec::new();
    while times.len() < 3 || began.elapsed() < spend {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(middle(times))
}

fn middle(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
