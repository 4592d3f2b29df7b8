//! Training, evaluation, comparison, checkpoints and reports.
//!
//! A [`recipe::Recipe`] says what to train on which task; [`run::train`] trains one model into a
//! run folder that survives being killed at any moment, [`compare::compare`] trains several and
//! [`report::write`] shows them side by side. Progress is reported through callbacks; nothing here prints.
//!
//! Call them on a thread of the rayon pool, inside `rayon::scope(|_| ..)`: from any other thread every parallel piece
//! of work is handed over and waited for, which costs small models up to a third of their speed.

pub mod checkpoint;
pub mod compare;
mod diagnose;
pub mod error;
pub mod evaluate;
pub mod export;
pub mod files;
pub mod generate;
pub mod gradients;
pub mod optimizer;
pub mod progress;
pub mod recipe;
pub mod report;
pub mod run;
pub mod schedule;
pub mod task;
pub mod trainer;

pub use error::TrainError;
pub use recipe::Recipe;
pub use task::Task;
pub use trainer::Trainer;
