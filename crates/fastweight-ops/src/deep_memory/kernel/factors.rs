//! What the weights after each token of a piece keep of those before the piece: the numbers of the dual form, and
//! their gradients. `super::super::factors` says what they mean; here they are recurrences over the tokens.

/// What the tokens of a piece bring, a number each.
#[derive(Debug, Clone, Default)]
pub(super) struct Scalars {
    pub rate: Vec<f32>,
    pub momentum: Option<Vec<f32>>,
    pub decay: Option<Vec<f32>>,
    pub threshold: Option<Vec<f32>>,
}

/// How a memory uses them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// The reading token's rate counts.
    pub reading: bool,
    /// A token reads before it writes.
    pub before: bool,
}

/// The factors of a piece, or their gradients. Vectors have `width` numbers, a lane for each token, zero past the
/// last one.
#[derive(Debug, Clone)]
pub(super) struct Factors {
    /// Of the weights before the piece, for each reader.
    pub keep: Vec<f32>,
    /// Of the momentum before the piece.
    pub carry: Vec<f32>,
    /// Of what each token wrote, `[token, reader]`.
    pub mix: Vec<f32>,
    /// The same for the weights after the piece.
    pub end_keep: f32,
    pub end_carry: f32,
    pub end_mix: Vec<f32>,
    /// For the momentum after it.
    pub hold: f32,
    pub gather: Vec<f32>,
}

/// The recurrences that the factors come from: one row for each token.
#[derive(Debug, Clone)]
struct Tables {
    keep: Vec<f32>,
    carry: Vec<f32>,
    hold: Vec<f32>,
    /// What the weights and the momentum after token t hold of token s, before its rate: `[t, s]`.
    mix: Vec<f32>,
    gather: Vec<f32>,
}

/// Factors with all that their gradients need.
#[derive(Debug, Clone)]
pub(super) struct Table {
    rules: Rules,
    width: usize,
    tables: Tables,
    pub factors: Factors,
}

/// Zero where products of decays would become denormal.
fn flush(x: f32) -> f32 {
    if x.abs() < 1e-30 { 0.0 } else { x }
}

impl Factors {
    pub fn zeros(width: usize) -> Self {
        let row = || vec![0.0; width];
        Self {
            keep: row(),
            carry: row(),
            mix: vec![0.0; width * width],
            end_keep: 0.0,
            end_carry: 0.0,
            end_mix: row(),
            hold: 0.0,
            gather: row(),
        }
    }
}

impl Table {
    pub fn new(width: usize, rules: Rules) -> Self {
        let row = || vec![0.0; width];
        let square = || vec![0.0; width * width];
        let tables = Tables { keep: row(), carry: row(), hold: row(), mix: square(), gather: square() };
        Self { rules, width, tables, factors: Factors::zeros(width) }
    }

    /// The factors of a piece.
    pub fn fill(&mut self, scalars: &Scalars) {
        let (width, count) = (self.width, scalars.rate.len());
        let Factors { keep, carry, mix, end_mix, gather, .. } = &mut self.factors;
        for row in [&mut *keep, carry, mix, end_mix, gather] {
            row.fill(0.0);
        }
        let last = count - 1;
        if self.rules.reading {
            for (t, rate) in scalars.rate.iter().enumerate() {
                (keep[t], carry[t], gather[t]) = (1.0, *rate, 1.0);
                (0..=t).for_each(|s| mix[s * width + t] = *rate);
            }
            end_mix[..count].fill(scalars.rate[last]);
            (self.factors.end_keep, self.factors.hold) = (1.0, 1.0);
            self.factors.end_carry = scalars.rate[last];
            return;
        }
        let x = &mut self.tables;
        for t in 0..count {
            let kept = scalars.decay.as_ref().map_or(1.0, |decay| 1.0 - decay[t]);
            let held = scalars.momentum.as_ref().map_or(0.0, |momentum| momentum[t]);
            let [keep, carry, hold] = match t {
                0 => [1.0, 0.0, 1.0],
                t => [x.keep[t - 1], x.carry[t - 1], x.hold[t - 1]],
            };
            x.hold[t] = flush(held * hold);
            x.keep[t] = flush(kept * keep);
            x.carry[t] = flush(kept * carry + x.hold[t]);
            for s in 0..t {
                let (at, before) = (t * width + s, (t - 1) * width + s);
                x.gather[at] = flush(held * x.gather[before]);
                x.mix[at] = flush(kept * x.mix[before] + x.gather[at]);
            }
            (x.gather[t * width + t], x.mix[t * width + t]) = (1.0, 1.0);
        }
        for t in 0..count {
            let Some(source) = t.checked_sub(usize::from(self.rules.before)) else {
                keep[0] = 1.0;
                continue;
            };
            (keep[t], carry[t]) = (x.keep[source], x.carry[source]);
            for s in 0..=source {
                mix[s * width + t] = x.mix[source * width + s] * scalars.rate[s];
            }
        }
        for s in 0..count {
            end_mix[s] = x.mix[last * width + s] * scalars.rate[s];
            gather[s] = x.gather[last * width + s] * scalars.rate[s];
        }
        self.factors.end_keep = x.keep[last];
        self.factors.end_carry = x.carry[last];
        self.factors.hold = x.hold[last];
    }

    /// Adds the gradients of rates, momenta and decays, `[3][count]`, to `to`, from those of the factors.
    pub fn backward(&self, d: &Factors, scalars: &Scalars, to: &mut [Vec<f32>; 3]) {
        let (width, count) = (self.width, scalars.rate.len());
        let last = count - 1;
        let [d_rate, d_momentum, d_decay] = to;
        if self.rules.reading {
            for (t, d_rate) in d_rate.iter_mut().enumerate().take(count) {
                *d_rate += d.carry[t] + (0..=t).map(|s| d.mix[s * width + t]).sum::<f32>();
            }
            d_rate[last] += d.end_carry + d.end_mix[..count].iter().sum::<f32>();
            return;
        }
        let x = &self.tables;
        let shift = usize::from(self.rules.before);
        // Gradients of the rows of the tables after token t.
        let (mut d_mix, mut d_gather) = (vec![0.0; count], vec![0.0; count]);
        let (mut d_keep, mut d_carry, mut d_hold) = (d.end_keep, d.end_carry, d.hold);
        for s in 0..count {
            d_mix[s] = d.end_mix[s] * scalars.rate[s];
            d_gather[s] = d.gather[s] * scalars.rate[s];
            d_rate[s] += d.end_mix[s] * x.mix[last * width + s] + d.gather[s] * x.gather[last * width + s];
        }
        for t in (0..count).rev() {
            let reader = t + shift;
            if reader < count {
                d_keep += d.keep[reader];
                d_carry += d.carry[reader];
                for s in 0..=t {
                    let d_read = d.mix[s * width + reader];
                    d_mix[s] += d_read * scalars.rate[s];
                    d_rate[s] += d_read * x.mix[t * width + s];
                }
            }
            let kept = scalars.decay.as_ref().map_or(1.0, |decay| 1.0 - decay[t]);
            let held = scalars.momentum.as_ref().map_or(0.0, |momentum| momentum[t]);
            let [keep, carry, hold] = match t {
                0 => [1.0, 0.0, 1.0],
                t => [x.keep[t - 1], x.carry[t - 1], x.hold[t - 1]],
            };
            d_hold += d_carry;
            let mut d_kept = d_keep * keep + d_carry * carry;
            let mut d_held = d_hold * hold;
            for s in 0..t {
                d_gather[s] += d_mix[s];
                d_kept += d_mix[s] * x.mix[(t - 1) * width + s];
                d_held += d_gather[s] * x.gather[(t - 1) * width + s];
                d_mix[s] *= kept;
                d_gather[s] *= held;
            }
            d_momentum[t] += d_held;
            d_decay[t] -= d_kept;
            (d_keep, d_carry, d_hold) = (d_keep * kept, d_carry * kept, d_hold * held);
        }
    }
}
