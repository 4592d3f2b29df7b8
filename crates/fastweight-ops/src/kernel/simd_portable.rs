//! Lanes as a plain array, left to the compiler.

use super::simd::Lanes;

/// Four lanes in an array; needs no instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Portable([f32; 4]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Portable {
    const COUNT: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for four numbers; an array of f32 has their alignment.
        Self(unsafe { *from.cast::<[f32; 4]>() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as for `load`.
        unsafe { *to.cast::<[f32; 4]>() = self.0 }
    }

    // Without a hardware FMA `f32::mul_add` is a library call, hence two roundings.
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * factor.0[i] + addend.0[i]))
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        (self.0[0] + self.0[1]) + (self.0[2] + self.0[3])
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        self.0[0].max(self.0[1]).max(self.0[2].max(self.0[3]))
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: Self) -> Self {
        Self(std::array::from_fn(|i| if x.0[i] < limit.0[i] { 0.0 } else { self.0[i] }))
    }

    #[inline(always)]
    fn exponent_of_two(self) -> Self {
        Self(self.0.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(127 << 23))))
    }
}
