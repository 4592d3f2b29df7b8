//! The `fastweight` command: a thin layer over the library crates. Everything it does to a file, a
//! model or a task is a library call; here are only arguments, progress, tables and exit codes.

mod allocator;
mod cli;
mod commands;
mod error;
mod global;
mod memory;
mod output;
mod progress;
mod training;
mod values;

use std::panic::{self, PanicHookInfo};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

/// Exit code of an argument that does not fit, as `clap` has it.
const EXIT_USAGE: u8 = 2;

/// Exit code of an internal error, as `sysexits.h` has it (`EX_SOFTWARE`).
const EXIT_INTERNAL: u8 = 70;

fn main() -> ExitCode {
    allocator::keep_pages();
    panic::set_hook(Box::new(|info| progress::note(internal_error(info))));
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.kind() == ErrorKind::InvalidUtf8 => {
            progress::note(format_args!("error: {}", invalid_utf8()));
            return ExitCode::from(EXIT_USAGE);
        }
        Err(error) => error.exit(),
    };
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

/// Names the arguments that are not text.
fn invalid_utf8() -> String {
    let arguments: Vec<_> = std::env::args_os().collect();
    let places = arguments.windows(2).filter(|pair| pair[1].to_str().is_none()).map(|pair| {
        let value = pair[1].to_string_lossy();
        match pair[0].to_str() {
            Some(option) if option.starts_with("--") && !value.starts_with('-') => {
                format!("{option} {value:?}")
            }
            _ => format!("{value:?}"),
        }
    });
    format!("not UTF-8 text: {}; convert it to UTF-8", places.collect::<Vec<_>>().join(", "))
}

fn internal_error(info: &PanicHookInfo<'_>) -> String {
    let what = info.payload_as_str().unwrap_or("no message");
    let place = info.location().map(|place| format!(" at {place}")).unwrap_or_default();
    format!(
        "internal error{place}: {what}. This is a bug in fastweight, not in what you gave it; \
         please report it with this message and the command you ran. Files on disk are whole."
    )
}
