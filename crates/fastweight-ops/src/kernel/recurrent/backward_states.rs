//! The states inside a chunk, computed again for the [backward pass](super::backward).

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by row and register")]

use super::backward::{BLOCK, STRETCH, Workspace};
use super::{Rule, sweeps};
use crate::kernel::simd::Lanes;
use crate::kernel::tile::ROWS;

/// What a walk over a chunk's tokens leaves.
trait Walk {
    /// The states after every token, and the gradients of the queries, which read them; else the states at the
    /// start of every stretch.
    const EVERY_TOKEN: bool;
}

struct Starts;

impl Walk for Starts {
    const EVERY_TOKEN: bool = false;
}

struct Tokens;

impl Walk for Tokens {
    const EVERY_TOKEN: bool = true;
}

/// Columns of values and tokens of a walk.
#[derive(Clone, Copy)]
struct Part {
    /// First column.
    column: usize,
    /// First row in the history.
    row: usize,
    /// First token and the one after the last.
    tokens: [usize; 2],
}

/// From the states at the chunk's start those at the start of every further stretch.
///
/// # Safety
/// The CPU supports `L`; the workspace holds the chunk, its writes and its start.
#[inline(always)]
pub(super) unsafe fn stretch_starts<L: Lanes, const WIDE: usize, R: Rule>(
    w: &Workspace,
    columns: usize,
    tokens: usize,
) {
    let last = (tokens - 1) / STRETCH * STRETCH;
    if last > 0 {
        // SAFETY: vouched for by the caller.
        unsafe { walk::<L, WIDE, R, Starts>(w, 0, columns, [0, last]) };
    }
}

/// The states of the block's columns, before the stretch and after each token, as the forward pass had them, and the
/// block's share of the gradients of the queries.
///
/// # Safety
/// As [`stretch_starts`], which has run.
#[inline(always)]
pub(super) unsafe fn states_again<L: Lanes, const WIDE: usize, R: Rule>(
    w: &Workspace,
    column: usize,
    rows: usize,
    tokens: [usize; 2],
) {
    // SAFETY: vouched for by the caller.
    unsafe { walk::<L, WIDE, R, Tokens>(w, column, rows, tokens) };
}

#[inline(always)]
unsafe fn walk<L: Lanes, const WIDE: usize, R: Rule, W: Walk>(
    w: &Workspace,
    column: usize,
    rows: usize,
    tokens: [usize; 2],
) {
    let width = w.ds.stride;
    // SAFETY: rows and registers inside the matrices.
    unsafe {
        let mut j = 0;
        // Two registers of keys share what is spread over the lanes, where there are registers enough.
        while WIDE >= 4 && j + 2 * L::COUNT <= width {
            register_columns::<L, 2, R, W>(w, column, rows, tokens, j);
            j += 2 * L::COUNT;
        }
        while j < width {
            register_columns::<L, 1, R, W>(w, column, rows, tokens, j);
            j += L::COUNT;
        }
    }
}

#[inline(always)]
unsafe fn register_columns<L: Lanes, const N: usize, R: Rule, W: Walk>(
    w: &Workspace,
    column: usize,
    rows: usize,
    tokens: [usize; 2],
    j: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let mut row = 0;
        while row + ROWS <= rows {
            history::<L, ROWS, N, R, W>(w, Part { column: column + row, row, tokens }, j);
            row += ROWS;
        }
        while row < rows {
            history::<L, 1, N, R, W>(w, Part { column: column + row, row, tokens }, j);
            row += 1;
        }
    }
}

/// `M` columns and `N` registers of keys, which stay in registers from token to token.
#[inline(always)]
unsafe fn history<L: Lanes, const M: usize, const N: usize, R: Rule, W: Walk>(
    w: &Workspace,
    part: Part,
    first: usize,
) {
    let Part { column, row, tokens: [from, to] } = part;
    // SAFETY: vouched for by the caller.
    unsafe {
        let zero = [[L::splat(0.0); N]; M];
        let (mut s, mut p) = (zero, zero);
        for m in 0..M {
            for n in 0..N {
                let j = first + n * L::COUNT;
                s[m][n] = L::load(w.start(from).at(column + m, j));
                if R::MOMENTUM {
                    p[m][n] = L::load(w.start_p(from).at(column + m, j));
                }
                if W::EVERY_TOKEN {
                    s[m][n].store(w.states.at(row + m, j));
                    if R::MOMENTUM {
                        p[m][n].store(w.momenta.at(row + m, j));
                    }
                }
            }
        }
        for t in from..to {
            let sweeps = sweeps(t);
            let zero = [L::splat(0.0); N];
            let (mut decay, mut write, mut value_key, mut d_q) = (zero, zero, zero, zero);
            for n in 0..N {
                let j = first + n * L::COUNT;
                if !R::COLUMN_GATES {
                    decay[n] = L::load(w.staged.decay.at(t, j));
                }
                write[n] = L::load(w.staged.write.at(t, j));
                if R::ADDS_VALUE {
                    value_key[n] = L::load(w.staged.value_key.at(t, j));
                }
                if W::EVERY_TOKEN {
                    d_q[n] = L::load(w.d_q.at(t, j));
                }
            }
            for m in 0..M {
                let u = L::splat(*w.u.at(t, column + m));
                let v = if R::ADDS_VALUE { L::splat(*w.v.at(t, column + m)) } else { u };
                let d_o = if W::EVERY_TOKEN { L::splat(*w.d_o.at(t, column + m)) } else { u };
                let mu = L::splat(if R::MOMENTUM { *w.staged.momenta::<R>(t, column + m) } else { 0.0 });
                if R::COLUMN_GATES {
                    decay = [L::splat(*w.staged.decays(t, column + m)); N];
                }
                let after = (t + 1 - from) * BLOCK + row + m;
                for n in 0..N {
                    let j = first + n * L::COUNT;
                    let mut state = s[m][n].mul(decay[n]);
                    if R::MOMENTUM {
                        let mut momentum = write[n].mul_add(u, p[m][n].mul(mu));
                        if sweeps {
                            momentum = momentum.flush_tiny();
                        }
                        p[m][n] = momentum;
                        state = if R::SCALES_MOMENTUM {
                            L::splat(w.staged.momentum_rate(t)).mul_add(momentum, state)
                        } else {
                            state.add(momentum)
                        };
                    } else {
                        state = write[n].mul_add(u, state);
                    }
                    if R::ADDS_VALUE {
                        state = value_key[n].mul_add(v, state);
                    }
                    if sweeps {
                        state = state.flush_tiny();
                    }
                    s[m][n] = state;
                    if W::EVERY_TOKEN {
                        state.store(w.states.at(after, j));
                        d_q[n] = state.mul_add(d_o, d_q[n]);
                        if R::MOMENTUM {
                            p[m][n].store(w.momenta.at(after, j));
                        }
                    }
                }
            }
            if W::EVERY_TOKEN {
                for n in 0..N {
                    d_q[n].store(w.d_q.at(t, first + n * L::COUNT));
                }
            } else if (t + 1).is_multiple_of(STRETCH) {
                for m in 0..M {
                    for n in 0..N {
                        let j = first + n * L::COUNT;
                        s[m][n].store(w.start(t + 1).at(column + m, j));
                        if R::MOMENTUM {
                            p[m][n].store(w.start_p(t + 1).at(column + m, j));
                        }
                    }
                }
            }
        }
    }
}
