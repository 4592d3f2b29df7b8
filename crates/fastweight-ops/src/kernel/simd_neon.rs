//! NEON lanes.

use std::arch::aarch64::*;

use super::simd::{Kernel, Lanes};

/// Entry of every kernel on NEON.
///
/// # Safety
/// The CPU has NEON.
#[target_feature(enable = "neon")]
pub unsafe fn run_neon<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller vouches for the feature.
    unsafe { kernel.run::<Neon, 4>() }
}

/// Four lanes.
#[derive(Debug, Clone, Copy)]
pub struct Neon(float32x4_t);

// SAFETY of every `unsafe` block on values below: a value of the type exists, so NEON is there.
macro_rules! value_operations {
    ($($name:ident = $intrinsic:ident;)*) => { $(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { $intrinsic(self.0, other.0) })
        }
    )* };
}

impl Lanes for Neon {
    const COUNT: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        Self(unsafe { vdupq_n_f32(x) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: vouched for by the caller.
        Self(unsafe { vld1q_f32(from) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: vouched for by the caller.
        unsafe { vst1q_f32(to, self.0) }
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { vfmaq_f32(addend.0, self.0, factor.0) })
    }

    value_operations! {
        add = vaddq_f32;
        sub = vsubq_f32;
        mul = vmulq_f32;
        div = vdivq_f32;
        max = vmaxq_f32;
        min = vminq_f32;
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe { vaddvq_f32(self.0) }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: see above.
        unsafe { vmaxvq_f32(self.0) }
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let below = vcltq_f32(x.0, limit.0);
            Self(vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(self.0), below)))
        }
    }

    #[inline(always)]
    fn exponent_of_two(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let bits = vshlq_n_s32::<23>(vreinterpretq_s32_f32(self.0));
            Self(vreinterpretq_f32_s32(vaddq_s32(bits, vdupq_n_s32(127 << 23))))
        }
    }
}
