//! RWKV-7 against its formulas, written as plain float64 loops over one sequence.

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod channel_mix;
mod plain;
mod time_mix;
