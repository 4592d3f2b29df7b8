//! The built command, run as a person or a script runs it.

mod bench;
mod compare;
mod errors;
mod export;
mod generate;
mod help;
mod options;
mod recipes;
mod rules;
mod support;
mod tasks;
mod train;
