//! Shows the events of trainings as progress.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fastweight::train::progress::{Event, Progress as Training};
use fastweight::train::task::Metric;

use crate::global::Global;
use crate::output;
use crate::progress::Progress;

/// Progress of one training or of several, one after the other.
pub struct TrainingProgress {
    progress: Progress,
    /// What the scores of the current training measure.
    metric: Metric,
    index: usize,
    count: usize,
    /// Step and score that were shown last: the final evaluation often repeats one.
    shown: Option<(usize, Option<f64>)>,
    /// Where results go, until that was said.
    folder: Option<PathBuf>,
}

impl TrainingProgress {
    /// Of trainings that have not begun, with results in `folder`.
    pub fn new(global: &Global, title: &str, folder: &Path) -> Self {
        let progress = Progress::new(global, title);
        let (metric, folder) = (Metric::Accuracy, Some(folder.to_path_buf()));
        Self { progress, metric, index: 0, count: 1, shown: None, folder }
    }

    /// Shows a sentence.
    pub fn say(&self, text: &str) {
        self.progress.say(text);
    }

    /// Shows what happened.
    pub fn show(&mut self, event: Event<'_>) {
        if let Some(folder) = self.folder.take() {
            self.say(&format!(
                "results go to {}; after an interruption the same command continues there",
                folder.display()
            ));
        }
        match event {
            Event::Note(text) => self.progress.say(text),
            Event::Started { model, task, metric, seed, parameters, index, count, fraction } => {
                (self.index, self.count, self.shown, self.metric) = (index, count, None, metric);
                let number = if count > 1 { format!(" ({}/{count})", index + 1) } else { String::new() };
                self.progress.set_title(format!("{model} on {task}, seed {seed}{number}"));
                self.progress.milestone(
                    self.fraction(fraction),
                    None,
                    &output::count(parameters, "parameter"),
                );
            }
            Event::Step(training) => {
                let metric = self.metric;
                self.progress
                    .at(self.fraction(training.fraction), left(&training), || status(&training, metric));
            }
            Event::Evaluated(training) if self.shown == Some((training.step, training.score)) => {}
            Event::Evaluated(training) => {
                self.shown = Some((training.step, training.score));
                let text = status(&training, self.metric);
                self.progress.milestone(self.fraction(training.fraction), left(&training), &text);
            }
            Event::Checkpoint { .. } => {}
            Event::Finished { model, task, metric, seed, score, reused } => {
                let origin = if reused { ", from an earlier run" } else { "" };
                let name = metric.name();
                self.progress.say(&format!("{model} on {task}, seed {seed}: {name} {score:.4}{origin}"));
            }
        }
    }

    /// Takes the display away.
    pub fn finish(self) {
        self.progress.finish();
    }

    /// Share of all trainings, when `fraction` of the current one is done.
    fn fraction(&self, fraction: f64) -> f64 {
        (self.index as f64 + fraction) / self.count.max(1) as f64
    }
}

fn left(training: &Training<'_>) -> Option<Duration> {
    Duration::try_from_secs_f64(training.seconds_left_in_all).ok().filter(|_| training.fraction > 0.0)
}

fn status(training: &Training<'_>, metric: Metric) -> String {
    let step = match training.steps {
        Some(steps) => format!("step {}/{steps}", training.step),
        None => format!("step {}", training.step),
    };
    let score = training.score.map(|score| format!(", {} {score:.4}", metric.name())).unwrap_or_default();
    format!("{step}, loss {:.4}{score}, {:.0} tokens/s", training.loss, training.tokens_per_s)
}
