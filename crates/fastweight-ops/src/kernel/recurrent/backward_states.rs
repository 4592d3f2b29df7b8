//! The states inside a chunk, computed again for the [backward pass](super::backward).

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by row")]

use super::backward::{BLOCK, Workspace};
use super::{Rule, sweeps};
use crate::kernel::simd::Lanes;
use crate::kernel::tile::ROWS;

/// The states of the block's columns, before the chunk and after each token, as the forward pass had them, and the
/// block's share of the gradients of the queries, which read them.
///
/// # Safety
/// The CPU supports `L`; the workspace holds the chunk, its writes and its start.
#[inline(always)]
pub(super) unsafe fn states_again<L: Lanes, R: Rule>(
    w: &Workspace,
    column: usize,
    rows: usize,
    tokens: usize,
) {
    // SAFETY: rows and registers inside the matrices.
    unsafe {
        let mut j = 0;
        while j < w.start.stride {
            let mut row = 0;
            while row + ROWS <= rows {
                history::<L, ROWS, R>(w, column, row, tokens, j);
                row += ROWS;
            }
            while row < rows {
                history::<L, 1, R>(w, column, row, tokens, j);
                row += 1;
            }
            j += L::COUNT;
        }
    }
}

/// The same for `M` columns and one register of keys, which stay in registers from token to token.
#[inline(always)]
unsafe fn history<L: Lanes, const M: usize, R: Rule>(
    w: &Workspace,
    column: usize,
    row: usize,
    tokens: usize,
    j: usize,
) {
    // SAFETY: vouched for by the caller.
    unsafe {
        let zero = L::splat(0.0);
        let (mut s, mut p) = ([zero; M], [zero; M]);
        for m in 0..M {
            s[m] = L::load(w.start.at(column + row + m, j));
            s[m].store(w.states.at(row + m, j));
            if R::MOMENTUM {
                p[m] = L::load(w.start_p.at(column + row + m, j));
                p[m].store(w.momenta.at(row + m, j));
            }
        }
        for t in 0..tokens {
            let sweeps = sweeps(t);
            let (decay, write) = (L::load(w.staged.decay.at(t, j)), L::load(w.staged.write.at(t, j)));
            let value_key = if R::ADDS_VALUE { L::load(w.staged.value_key.at(t, j)) } else { write };
            let mut d_q = L::load(w.d_q.at(t, j));
            for m in 0..M {
                let u = L::splat(*w.u.at(t, column + row + m));
                let after = (t + 1) * BLOCK + row + m;
                s[m] = s[m].mul(decay);
                if R::MOMENTUM {
                    p[m] = write.mul_add(u, p[m].mul(L::splat(w.staged.momentum(t))));
                    if sweeps {
                        p[m] = p[m].flush_tiny();
                    }
                    p[m].store(w.momenta.at(after, j));
                    s[m] = L::splat(w.staged.momentum_rate(t)).mul_add(p[m], s[m]);
                } else {
                    s[m] = write.mul_add(u, s[m]);
                }
                if R::ADDS_VALUE {
                    s[m] = value_key.mul_add(L::splat(*w.v.at(t, column + row + m)), s[m]);
                }
                if sweeps {
                    s[m] = s[m].flush_tiny();
                }
                s[m].store(w.states.at(after, j));
                d_q = s[m].mul_add(L::splat(*w.d_o.at(t, column + row + m)), d_q);
            }
            d_q.store(w.d_q.at(t, j));
        }
    }
}
