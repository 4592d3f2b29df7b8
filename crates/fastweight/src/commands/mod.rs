//! The subcommands: each module has its `Args`, with a worked example in its help, and `run`.

pub mod bench;
pub mod compare;
pub mod demo;
pub mod eval;
mod experts;
pub mod export;
mod footprint;
pub mod generate;
pub mod ledger;
mod limits;
pub mod options;
pub mod rules;
pub mod train;
