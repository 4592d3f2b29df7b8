//! Pieces of the [backward pass](super::backward) between the products: factors of the rows, the pairs of
//! tokens, and the gradients of write rates and log gates.

use super::backward::{BackwardTask, Workspace};
use super::gates::{CHUNK, Decays, gate_gradients, is_reset};
use super::memory::{Place, Rule, denominators};
use super::simd::Lanes;
use super::tile::load_some;

/// Output gradients with their factors, writes from the prediction errors, and the gradients of the
/// denominators.
///
/// # Safety
/// The CPU supports `L`; the matrices hold the task's current chunk.
#[inline(always)]
pub(super) unsafe fn row_gradients<L: Lanes, R: Rule>(
    x: &BackwardTask<'_, R>,
    w: &Workspace,
    place: Place,
    decays: Decays,
) {
    let dims = x.inputs.dims;
    let columns = x.task.columns.len();
    let gated = x.inputs.gate.is_some();
    // SAFETY: rows below CHUNK; `beta` was checked to reach the last token.
    unsafe {
        if R::NORMALISED {
            denominators::<L>(w.q, w.p, w.z, decays, place.rows, w.d_denominator.start);
        }
        for i in 0..place.rows {
            let valid = i < place.tokens;
            let mut factor = dims.scale;
            if R::NORMALISED {
                factor = 1.0 / *w.d_denominator.at(0, i);
                *w.d_denominator.at(0, i) = factor;
            }
            let beta = if R::DELTA && valid { x.inputs.beta[place.position + i * dims.heads] } else { 0.0 };
            *w.beta.at(0, i) = beta;
            let (factor, beta) = (L::splat(factor), L::splat(beta));
            let decay = L::splat(*decays.since_start(i));
            let from = x.grads.o.filter(|_| valid).map_or(std::ptr::null(), |grad| {
                grad.as_ptr().wrapping_add((place.position + i * dims.heads) * dims.value)
            });
            let left = if from.is_null() { 0 } else { columns };
            let from = from.wrapping_add(x.task.columns.start);
            let mut j = 0;
            while j < w.d_o.stride {
                let d_o = load_some::<L>(from.wrapping_add(j), left.saturating_sub(j)).mul(factor);
                d_o.store(w.d_o.at(i, j));
                if gated {
                    d_o.mul(decay).store(w.d_o_start.at(i, j));
                }
                if R::DELTA {
                    L::load(w.error.at(i, j)).mul(beta).store(w.u.at(i, j));
                }
                j += L::COUNT;
            }
        }
        if R::DELTA {
            for i in place.rows..CHUNK {
                let mut j = 0;
                while j < w.u.stride {
                    L::splat(0.0).store(w.u.at(i, j));
                    j += L::COUNT;
                }
            }
        }
    }
}

/// `G` and `H` from the plain products: decays, the denominators' share, nothing on the diagonal of `H`.
///
/// A pair `j < i` adds `(do_i.u_j) P_ij + (dv_i.u_j) A_ij` to the gradient of `c_i` and takes it off that of
/// `c_j`. Summing pairs instead of `q.dq + k.dk` leaves out the diagonal, which would cancel to rounding
/// errors far above the gradient of a strong gate.
///
/// # Safety
/// The CPU supports `L`; the matrices hold the task's current chunk.
#[inline(always)]
pub(super) unsafe fn mask<L: Lanes, R: Rule>(w: &Workspace, decays: Decays, rows: usize) {
    let by_row = w.by_row.start;
    // SAFETY: cells on and left of the diagonal's register.
    unsafe {
        for i in 0..rows {
            *by_row.add(i) = 0.0;
        }
        for i in 0..rows {
            let mut sum = L::splat(0.0);
            let mut j = 0;
            while j <= i {
                let decay = L::load(w.decay.at(i, j));
                let mut g = L::load(w.g.at(i, j));
                if R::NORMALISED {
                    g = g.add(L::splat(*w.d_denominator.at(0, i)));
                }
                g.mul(decay).store(w.g.at(i, j));
                let mut pairs = g.mul(L::load(w.p.at(i, j)));
                if R::DELTA {
                    let h = L::load(w.h.at(i, j));
                    pairs = h.mul_add(L::load(w.a.at(i, j)), pairs);
                    h.mul(decay.same(0.0).sub(decay)).store(w.h.at(i, j));
                }
                let pairs = decays.only_before(i, j, pairs);
                sum = sum.add(pairs);
                L::load(by_row.add(j)).sub(pairs).store(by_row.add(j));
                j += L::COUNT;
            }
            *by_row.add(i) += sum.sum();
            if R::DELTA {
                *w.h.at(i, i) = 0.0;
            }
        }
    }
}

/// `<dS, S> + <dz, z>` of the states at the chunk's end and start.
///
/// # Safety
/// The CPU supports `L`; the matrices hold the task's current chunk.
#[inline(always)]
pub(super) unsafe fn inner_product<L: Lanes, R: Rule>(w: &Workspace, columns: usize) -> f32 {
    // SAFETY: rows below `columns`; padding is zero.
    unsafe {
        let mut sum = L::splat(0.0);
        for i in 0..columns {
            let mut j = 0;
            while j < w.st.stride {
                sum = L::load(w.st.at(i, j)).mul_add(L::load(w.dst.at(i, j)), sum);
                j += L::COUNT;
            }
        }
        if R::NORMALISED {
            let mut j = 0;
            while j < w.z.stride {
                sum = L::load(w.z.at(0, j)).mul_add(L::load(w.dz.at(0, j)), sum);
                j += L::COUNT;
            }
        }
        sum.sum()
    }
}

/// Gradients of the write rates and the log gates.
///
/// # Safety
/// The CPU supports `L`; the matrices hold the task's current chunk.
#[inline(always)]
pub(super) unsafe fn scalar_gradients<L: Lanes, R: Rule>(
    x: &BackwardTask<'_, R>,
    w: &Workspace,
    place: Place,
    through: f32,
) {
    let (inputs, heads, split) = (x.inputs, x.inputs.dims.heads, x.task.split);
    let part = split * inputs.token_heads();
    // SAFETY: tokens of the chunk, in arrays of the checked lengths.
    unsafe {
        if R::DELTA {
            for i in 0..place.tokens {
                let mut sum = L::splat(0.0);
                let mut j = 0;
                while j < w.error.stride {
                    sum = L::load(w.error.at(i, j)).mul_add(L::load(w.d_error.at(i, j)), sum);
                    j += L::COUNT;
                }
                *x.targets.beta.at(part + place.position + i * heads) = sum.sum();
            }
        }
        if inputs.gate.is_some() {
            let by_row = w.by_row.at(0, 0);
            gate_gradients(by_row, w.by_row.at(1, 0), through, place.tokens);
            for i in 0..place.tokens {
                let position = place.position + i * heads;
                let reset = is_reset(inputs.gate.at(position, x.task.head));
                *x.targets.gate.at(part + position) = if reset { 0.0 } else { *by_row.add(i) };
            }
        }
    }
}
