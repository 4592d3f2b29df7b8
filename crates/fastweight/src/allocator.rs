//! The allocator of the command, and how long it keeps what is free.

use std::ffi::{c_int, c_long};

use mimalloc::MiMalloc;

/// A training step allocates and frees large tensors; glibc gives their pages back to the system each
/// time, which costs a fifth of the processor time of a small training.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// mimalloc's option `purge_delay`: milliseconds until free pages go back to the system.
const PURGE_DELAY: c_int = 15;

/// What it is unless somebody sets it.
const SHORT: c_long = 10;

/// Longer than a training step.
const LONG: c_long = 1000;

// SAFETY: declared as in mimalloc.h; both take any number and refuse one that is no option.
unsafe extern "C" {
    safe fn mi_option_get(option: c_int) -> c_long;
    safe fn mi_option_set_default(option: c_int, value: c_long);
}

/// Keeps free pages from step to step: after the usual 10 milliseconds most of them go back before the next step
/// asks for them again, and a small training spends a quarter of its time on page faults.
///
/// The environment variable `MIMALLOC_PURGE_DELAY` takes precedence.
pub fn keep_pages() {
    // A version with other numbers has another option there, with another value.
    if mi_option_get(PURGE_DELAY) == SHORT {
        mi_option_set_default(PURGE_DELAY, LONG);
    }
}
