//! The learning rate over a run: linear warm-up, then half a cosine.

use crate::recipe::Warmup;

/// Warm-up and cosine decay over a budget that may be counted in steps or in time.
///
/// burn's schedulers are sequences that count their own calls; this one is a pure function of the position, so that
/// nothing has to be saved and a budget in seconds works too.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Highest learning rate, reached at the end of the warm-up.
    pub peak: f64,
    /// Last learning rate as a fraction of `peak`.
    pub min: f64,
    /// Length of the warm-up.
    pub warmup: Warmup,
}

impl Schedule {
    /// Learning rate of the step that starts at `fraction` of the budget (in `[0, 1]`) after `step` steps.
    pub fn at(&self, step: usize, fraction: f64) -> f64 {
        let (progress, start) = match self.warmup {
            Warmup::Steps(steps) if step < steps => return self.peak * (step + 1) as f64 / steps as f64,
            // The budget's length in steps, as far as the position tells it.
            Warmup::Steps(steps) if step > 0 => (fraction, steps as f64 * fraction / step as f64),
            Warmup::Steps(_) => (fraction, 0.0),
            Warmup::Fraction(warmup) => (fraction, warmup),
        };
        if progress < start {
            let tiny = 1e-3;
            return self.peak * (progress / start).max(tiny);
        }
        let decay = ((progress - start) / (1.0 - start).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        self.peak * (self.min + (1.0 - self.min) * 0.5 * (1.0 + (std::f64::consts::PI * decay).cos()))
    }
}
