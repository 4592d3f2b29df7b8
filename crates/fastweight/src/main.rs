//! The `fastweight` command: a thin layer over the library crates. Everything it does to a file, a
//! model or a task is a library call; here are only arguments, progress, tables and exit codes.

mod cli;
mod commands;
mod error;
mod global;
mod output;
mod progress;
mod training;

use std::panic::{self, PanicHookInfo};
use std::process::ExitCode;

use clap::Parser;
use mimalloc::MiMalloc;

/// A training step allocates and frees large tensors; glibc gives their pages back to the system each
/// time, which costs a fifth of the processor time of a small training.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Exit code of an internal error, as `sysexits.h` has it (`EX_SOFTWARE`).
const EXIT_INTERNAL: u8 = 70;

fn main() -> ExitCode {
    panic::set_hook(Box::new(|info| progress::note(internal_error(info))));
    let cli = cli::Cli::parse();
    match panic::catch_unwind(move || cli.run()) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            if !error.is_broken_pipe() {
                progress::note(format_args!("error: {error}"));
            }
            error.exit_code()
        }
        Err(_) => ExitCode::from(EXIT_INTERNAL),
    }
}

fn internal_error(info: &PanicHookInfo<'_>) -> String {
    let what = info.payload_as_str().unwrap_or("no message");
    let place = info.location().map(|place| format!(" at {place}")).unwrap_or_default();
    format!(
        "internal error{place}: {what}. This is a bug in fastweight, not in what you gave it; \
         please report it with this message and the command you ran. Files on disk are whole."
    )
}
