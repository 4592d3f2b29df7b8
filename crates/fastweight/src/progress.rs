//! Progress and notes on standard error: a bar with the time left on a terminal, a plain line now
//! and then elsewhere, nothing with `--quiet`. Standard output is never touched.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::global::Global;

/// Time between two plain lines where standard error is not a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Time between two redraws of the clock on a terminal.
const TICK: Duration = Duration::from_millis(500);
/// Units of a bar.
const UNITS: f64 = 1000.0;

/// Writes one line to standard error; a closed standard error is ignored.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// How far a longer piece of work has come.
pub struct Progress {
    target: Target,
    title: String,
    last_line: Instant,
}

enum Target {
    Silent,
    Bar(ProgressBar),
    Lines,
}

impl Progress {
    /// Work that begins now. On a terminal a clock runs from the first moment.
    pub fn new(global: &Global, title: impl Into<String>) -> Self {
        let title = title.into();
        let target = if global.quiet {
            Target::Silent
        } else if io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(UNITS as u64), ProgressDrawTarget::stderr());
            if let Ok(style) =
                ProgressStyle::with_template("{prefix}  {bar:24} {percent:>3}%  {elapsed}  {msg}")
            {
                bar.set_style(style.progress_chars("━╸─"));
            }
            bar.set_prefix(title.clone());
            bar.enable_steady_tick(TICK);
            Target::Bar(bar)
        } else {
            Target::Lines
        };
        Self { target, title, last_line: Instant::now() }
    }

    /// Renames the work.
    pub fn set_title(&mut self, title: impl Into<String>) {
        self.title = title.into();
        if let Target::Bar(bar) = &self.target {
            bar.set_prefix(self.title.clone());
        }
    }

    /// Shows the share of the work that is done, the time left and a status such as the score so far.
    pub fn at(&mut self, fraction: f64, left: Option<Duration>, status: impl FnOnce() -> String) {
        match &self.target {
            Target::Bar(bar) => {
                bar.set_position((fraction * UNITS) as u64);
                bar.set_message(with_time_left(left, &status()));
            }
            Target::Lines if self.last_line.elapsed() >= LINE_EVERY => self.line(fraction, left, &status()),
            Target::Silent | Target::Lines => {}
        }
    }

    /// As [`Progress::at`], and worth a plain line at once.
    pub fn milestone(&mut self, fraction: f64, left: Option<Duration>, status: &str) {
        match &self.target {
            Target::Lines => self.line(fraction, left, status),
            Target::Silent | Target::Bar(_) => self.at(fraction, left, || status.to_owned()),
        }
    }

    /// Writes a line of its own, above the bar if there is one.
    pub fn say(&self, text: &str) {
        match &self.target {
            Target::Silent => {}
            Target::Bar(bar) => bar.println(text),
            Target::Lines => note(text),
        }
    }

    /// Takes the bar away.
    pub fn finish(self) {
        if let Target::Bar(bar) = self.target {
            bar.finish_and_clear();
        }
    }

    fn line(&mut self, fraction: f64, left: Option<Duration>, status: &str) {
        self.last_line = Instant::now();
        note(format_args!("{}: {:.0}%, {}", self.title, 100.0 * fraction, with_time_left(left, status)));
    }
}

fn with_time_left(left: Option<Duration>, status: &str) -> String {
    match left {
        Some(left) => format!("{} left, {status}", clock(left)),
        None => status.to_owned(),
    }
}

/// Time left after `fraction` of the work took `spent`; absent before there is anything to judge by.
pub fn time_left(fraction: f64, spent: Duration) -> Option<Duration> {
    let left = spent.as_secs_f64() * (1.0 - fraction) / fraction;
    Duration::try_from_secs_f64(left).ok()
}

/// A duration as `m:ss`, `h:mm:ss` or days.
pub fn clock(duration: Duration) -> String {
    let seconds = duration.as_secs_f64().ceil() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours >= 100 {
        return format!("{} days", hours / 24);
    }
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_round_up_and_show_hours_only_when_there_are_any() {
        for (seconds, text) in [
            (0.0, "0:00"),
            (0.2, "0:01"),
            (59.0, "0:59"),
            (61.0, "1:01"),
            (3661.0, "1:01:01"),
            (864_000.0, "10 days"),
        ] {
            assert_eq!(clock(Duration::from_secs_f64(seconds)), text);
        }
    }

    #[test]
    fn the_time_left_is_in_proportion_and_absent_at_the_start() {
        assert_eq!(time_left(0.25, Duration::from_secs(10)), Some(Duration::from_secs(30)));
        assert_eq!(time_left(0.0, Duration::from_secs(10)), None);
        assert_eq!(time_left(1.0, Duration::from_secs(10)), Some(Duration::ZERO));
    }
}
