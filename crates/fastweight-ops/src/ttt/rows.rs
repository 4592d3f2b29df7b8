//! What TTT-Linear does to one token's row: normalisations and their gradients, the second-order part included.
//!
//! Rows are padded to whole registers; the padding of every result is zero.

use crate::kernel::simd::Lanes;

/// The normalisation of a head, and the sizes of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Norm {
    /// Scale and shift, padded with zeros.
    pub scale: *const f32,
    pub shift: *const f32,
    /// One in the columns of a value, zero in the padding.
    pub mask: *const f32,
    /// Numbers in a padded row.
    pub padded: usize,
    /// One over the size of a value.
    pub share: f32,
}

/// What [`inner`] leaves for [`inner_backward`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Inner {
    /// Normalised reading.
    pub xh: *mut f32,
    /// `scale * (scale xh + shift - (v - k))`.
    pub y: *mut f32,
    /// The inner gradient.
    pub u: *mut f32,
}

/// `(x - mean) / d` to `out`; returns `1 / d` with `d = sqrt(var + eps)`.
///
/// # Safety
/// The CPU supports `L`; the rows are readable and writable up to `norm.padded`.
#[inline(always)]
unsafe fn normalise<L: Lanes>(x: *const f32, out: *mut f32, norm: &Norm) -> f32 {
    // SAFETY: vouched for by the caller.
    unsafe {
        let mut sum = L::splat(0.0);
        let mut j = 0;
        while j < norm.padded {
            sum = sum.add(L::load(x.add(j)));
            j += L::COUNT;
        }
        let mean = L::splat(sum.sum() * norm.share);
        let mut square = L::splat(0.0);
        j = 0;
        while j < norm.padded {
            let centred = L::load(x.add(j)).sub(mean).mul(L::load(norm.mask.add(j)));
            square = centred.mul_add(centred, square);
            centred.store(out.add(j));
            j += L::COUNT;
        }
        let inverse = 1.0 / (square.sum() * norm.share + super::EPSILON as f32).sqrt();
        let factor = L::splat(inverse);
        j = 0;
        while j < norm.padded {
            L::load(out.add(j)).mul(factor).store(out.add(j));
            j += L::COUNT;
        }
        inverse
    }
}

/// `(a - mean(a) - xh mean(a xh)) / d` of one register, given both means.
#[inline(always)]
unsafe fn projected<L: Lanes>(a: L, xh: L, shift: L, slope: L, inverse: L, mask: *const f32) -> L {
    // SAFETY: the caller vouches for a register of the mask.
    let mask = unsafe { L::load(mask) };
    slope.same(0.0).sub(xh).mul_add(slope, a.sub(shift)).mul(inverse).mul(mask)
}

/// The inner gradient of a token whose key reads `x`; returns `1 / d`.
///
/// # Safety
/// As [`normalise`], for all rows.
#[inline(always)]
pub(super) unsafe fn inner<L: Lanes>(
    x: *const f32,
    k: *const f32,
    v: *const f32,
    to: Inner,
    norm: &Norm,
) -> f32 {
    // SAFETY: vouched for by the caller.
    unsafe {
        let inverse = normalise::<L>(x, to.xh, norm);
        let (mut sum, mut along) = (L::splat(0.0), L::splat(0.0));
        let mut j = 0;
        while j < norm.padded {
            let (xh, scale) = (L::load(to.xh.add(j)), L::load(norm.scale.add(j)));
            let target = L::load(v.add(j)).sub(L::load(k.add(j)));
            let y = scale.mul_add(xh, L::load(norm.shift.add(j)).sub(target)).mul(scale);
            sum = sum.add(y);
            along = y.mul_add(xh, along);
            y.store(to.y.add(j));
            j += L::COUNT;
        }
        let (shift, slope) = (L::splat(sum.sum() * norm.share), L::splat(along.sum() * norm.share));
        let factor = L::splat(inverse);
        j = 0;
        while j < norm.padded {
            let (y, xh) = (L::load(to.y.add(j)), L::load(to.xh.add(j)));
            projected(y, xh, shift, slope, factor, norm.mask.add(j)).store(to.u.add(j));
            j += L::COUNT;
        }
        inverse
    }
}

/// `z + LN(z)` to `out`, which is padded.
///
/// # Safety
/// As [`normalise`], for all rows.
#[inline(always)]
pub(super) unsafe fn output<L: Lanes>(z: *const f32, out: *mut f32, norm: &Norm) {
    // SAFETY: vouched for by the caller.
    unsafe {
        normalise::<L>(z, out, norm);
        let mut j = 0;
        while j < norm.padded {
            let residual = L::load(z.add(j)).add(L::load(norm.shift.add(j)));
            L::load(norm.scale.add(j)).mul_add(L::load(out.add(j)), residual).store(out.add(j));
            j += L::COUNT;
        }
    }
}

/// Gradients of the scale and the shift, added up over the tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct NormGradients {
    pub scale: *mut f32,
    pub shift: *mut f32,
}

/// From the gradient `d_o` of `z + LN(z)` to that of `z`, in `dz`, and to `-eta dz`, in `write`; returns the
/// gradient of the rate that multiplies `r` in `z`. `zh` is scratch.
///
/// # Safety
/// As [`normalise`], for all rows.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn output_backward<L: Lanes>(
    z: *const f32,
    d_o: *const f32,
    r: *const f32,
    eta: f32,
    zh: *mut f32,
    dz: *mut f32,
    write: *mut f32,
    grads: NormGradients,
    norm: &Norm,
) -> f32 {
    // SAFETY: vouched for by the caller.
    unsafe {
        let inverse = normalise::<L>(z, zh, norm);
        let (mut sum, mut along) = (L::splat(0.0), L::splat(0.0));
        let mut j = 0;
        while j < norm.padded {
            let (d_o, zh) = (L::load(d_o.add(j)), L::load(zh.add(j)));
            let through = d_o.mul(L::load(norm.scale.add(j)));
            sum = sum.add(through);
            along = through.mul_add(zh, along);
            d_o.mul_add(zh, L::load(grads.scale.add(j))).store(grads.scale.add(j));
            d_o.add(L::load(grads.shift.add(j))).store(grads.shift.add(j));
            j += L::COUNT;
        }
        let (shift, slope) = (L::splat(sum.sum() * norm.share), L::splat(along.sum() * norm.share));
        let (factor, rate) = (L::splat(inverse), L::splat(-eta));
        let mut product = L::splat(0.0);
        j = 0;
        while j < norm.padded {
            let (d_o, zh) = (L::load(d_o.add(j)), L::load(zh.add(j)));
            let through = d_o.mul(L::load(norm.scale.add(j)));
            let d = d_o.add(projected(through, zh, shift, slope, factor, norm.mask.add(j)));
            product = d.mul_add(L::load(r.add(j)), product);
            d.store(dz.add(j));
            d.mul(rate).store(write.add(j));
            j += L::COUNT;
        }
        -product.sum()
    }
}

/// From the gradient `du` of the inner gradient to those of the reading, in `dx`, and of the error
/// `scale xh + shift - (v - k)`, in `d_error`, which `du` becomes.
///
/// # Safety
/// As [`normalise`], for all rows.
#[inline(always)]
pub(super) unsafe fn inner_backward<L: Lanes>(
    du: *mut f32,
    from: Inner,
    inverse: f32,
    target: (*const f32, *const f32),
    dx: *mut f32,
    grads: NormGradients,
    norm: &Norm,
) {
    let (k, v) = target;
    // SAFETY: vouched for by the caller.
    unsafe {
        let zero = L::splat(0.0);
        let factor = L::splat(inverse);
        // h = du / d
        let (mut sum_h, mut h_xh, mut du_u, mut y_xh) = (zero, zero, zero, zero);
        let mut j = 0;
        while j < norm.padded {
            let (du, xh) = (L::load(du.add(j)), L::load(from.xh.add(j)));
            let h = du.mul(factor);
            sum_h = sum_h.add(h);
            h_xh = h.mul_add(xh, h_xh);
            du_u = du.mul_add(L::load(from.u.add(j)), du_u);
            y_xh = L::load(from.y.add(j)).mul_add(xh, y_xh);
            j += L::COUNT;
        }
        let of_mean = |sum: L| L::splat(sum.sum() * norm.share);
        let (shift, slope, along_y) = (of_mean(sum_h), of_mean(h_xh), of_mean(y_xh));
        // d/d d of u is -u / d, and d d / d x is xh / V.
        let through_d = L::splat(-du_u.sum() * inverse * norm.share);
        let one = L::splat(1.0);
        let (mut sum, mut along) = (zero, zero);
        j = 0;
        while j < norm.padded {
            let (xh, y, scale) =
                (L::load(from.xh.add(j)), L::load(from.y.add(j)), L::load(norm.scale.add(j)));
            let h = L::load(du.add(j)).mul(factor);
            let dy = projected(h, xh, shift, slope, one, norm.mask.add(j));
            let wanted = L::load(v.add(j)).sub(L::load(k.add(j)));
            let error = scale.mul_add(xh, L::load(norm.shift.add(j)).sub(wanted));
            let d_error = dy.mul(scale);
            let d_scale = dy.mul_add(error, d_error.mul_add(xh, L::load(grads.scale.add(j))));
            d_scale.store(grads.scale.add(j));
            d_error.add(L::load(grads.shift.add(j))).store(grads.shift.add(j));
            let d_xh = d_error.mul_add(scale, zero.sub(h.mul_add(along_y, y.mul(slope))));
            sum = sum.add(d_xh);
            along = d_xh.mul_add(xh, along);
            d_error.store(du.add(j));
            d_xh.store(dx.add(j));
            j += L::COUNT;
        }
        let (shift, slope) = (of_mean(sum), of_mean(along));
        j = 0;
        while j < norm.padded {
            let (d_xh, xh) = (L::load(dx.add(j)), L::load(from.xh.add(j)));
            let d = projected(d_xh, xh, shift, slope, factor, norm.mask.add(j));
            through_d.mul_add(xh, d).store(dx.add(j));
            j += L::COUNT;
        }
    }
}

/// Zeroes a row.
///
/// # Safety
/// As [`normalise`].
#[inline(always)]
pub(super) unsafe fn clear<L: Lanes>(row: *mut f32, padded: usize) {
    let mut j = 0;
    while j < padded {
        // SAFETY: vouched for by the caller.
        unsafe { L::splat(0.0).store(row.add(j)) };
        j += L::COUNT;
    }
}
