//! AVX-512 and AVX2 lanes.

use std::arch::x86_64::*;

use super::simd::{Kernel, Lanes};

/// Whether the features of [`run_avx512`] are there.
pub fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && has_avx2()
}

/// Whether the features of [`run_avx2`] are there.
pub fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Entry of every kernel on AVX-512.
///
/// # Safety
/// [`has_avx512`] is true.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller vouches for the features.
    unsafe { kernel.run::<Avx512, 4>() }
}

/// Entry of every kernel on AVX2.
///
/// # Safety
/// [`has_avx2`] is true.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller vouches for the features.
    unsafe { kernel.run::<Avx2, 2>() }
}

/// Sixteen lanes.
#[derive(Debug, Clone, Copy)]
pub struct Avx512(__m512);

/// Eight lanes.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(__m256);

/// Transposes eight rows of eight.
///
/// # Safety
/// As [`Lanes::transpose`] for a tile of eight.
#[inline(always)]
unsafe fn transpose_8x8(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    // SAFETY: the caller vouches for the instruction set and for both tiles.
    unsafe {
        let (a0, a1) = (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(from_stride)));
        let from = from.add(2 * from_stride);
        let (a2, a3) = (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(from_stride)));
        let from = from.add(2 * from_stride);
        let (a4, a5) = (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(from_stride)));
        let from = from.add(2 * from_stride);
        let (a6, a7) = (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(from_stride)));
        let (b0, b1) = (_mm256_unpacklo_ps(a0, a1), _mm256_unpackhi_ps(a0, a1));
        let (b2, b3) = (_mm256_unpacklo_ps(a2, a3), _mm256_unpackhi_ps(a2, a3));
        let (b4, b5) = (_mm256_unpacklo_ps(a4, a5), _mm256_unpackhi_ps(a4, a5));
        let (b6, b7) = (_mm256_unpacklo_ps(a6, a7), _mm256_unpackhi_ps(a6, a7));
        let (c0, c1) = (_mm256_shuffle_ps::<0x44>(b0, b2), _mm256_shuffle_ps::<0xEE>(b0, b2));
        let (c2, c3) = (_mm256_shuffle_ps::<0x44>(b1, b3), _mm256_shuffle_ps::<0xEE>(b1, b3));
        let (c4, c5) = (_mm256_shuffle_ps::<0x44>(b4, b6), _mm256_shuffle_ps::<0xEE>(b4, b6));
        let (c6, c7) = (_mm256_shuffle_ps::<0x44>(b5, b7), _mm256_shuffle_ps::<0xEE>(b5, b7));
        _mm256_storeu_ps(to, _mm256_permute2f128_ps::<0x20>(c0, c4));
        _mm256_storeu_ps(to.add(to_stride), _mm256_permute2f128_ps::<0x20>(c1, c5));
        _mm256_storeu_ps(to.add(2 * to_stride), _mm256_permute2f128_ps::<0x20>(c2, c6));
        _mm256_storeu_ps(to.add(3 * to_stride), _mm256_permute2f128_ps::<0x20>(c3, c7));
        _mm256_storeu_ps(to.add(4 * to_stride), _mm256_permute2f128_ps::<0x31>(c0, c4));
        _mm256_storeu_ps(to.add(5 * to_stride), _mm256_permute2f128_ps::<0x31>(c1, c5));
        _mm256_storeu_ps(to.add(6 * to_stride), _mm256_permute2f128_ps::<0x31>(c2, c6));
        _mm256_storeu_ps(to.add(7 * to_stride), _mm256_permute2f128_ps::<0x31>(c3, c7));
    }
}

// SAFETY of every `unsafe` block on values below: a value of the type exists, so the instruction set is
// there (see `Lanes`); loads and stores are vouched for by the caller.
macro_rules! value_operations {
    ($($name:ident = $intrinsic:ident;)*) => { $(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { $intrinsic(self.0, other.0) })
        }
    )* };
}

impl Lanes for Avx512 {
    const COUNT: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        Self(unsafe { _mm512_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: vouched for by the caller.
        Self(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: vouched for by the caller.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn load_partial(from: *const f32, count: usize) -> Self {
        // SAFETY: masked lanes are not touched; the rest is vouched for by the caller.
        Self(unsafe { _mm512_maskz_loadu_ps((1u16 << count) - 1, from) })
    }

    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, count: usize) {
        // SAFETY: masked lanes are not touched; the rest is vouched for by the caller.
        unsafe { _mm512_mask_storeu_ps(to, (1u16 << count) - 1, self.0) }
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }

    value_operations! {
        add = _mm512_add_ps;
        sub = _mm512_sub_ps;
        mul = _mm512_mul_ps;
        div = _mm512_div_ps;
        max = _mm512_max_ps;
        min = _mm512_min_ps;
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, limit.0);
            Self(_mm512_maskz_mov_ps(keep, self.0))
        }
    }

    #[inline(always)]
    fn exponent_of_two(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let bits = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
            Self(_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(127 << 23))))
        }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for i in [0, 8] {
            for j in [0, 8] {
                // SAFETY: quarters of the tiles that the caller vouches for.
                unsafe {
                    transpose_8x8(
                        from.add(i * from_stride + j),
                        from_stride,
                        to.add(j * to_stride + i),
                        to_stride,
                    );
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn sum_rows(from: *const f32, stride: usize, to: *mut f32) {
        // SAFETY: vouched for by the caller.
        unsafe {
            let [a, b, c, d] = [
                quarter_sums(from, stride),
                quarter_sums(from.add(4 * stride), stride),
                quarter_sums(from.add(8 * stride), stride),
                quarter_sums(from.add(12 * stride), stride),
            ];
            let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
            let even = _mm512_shuffle_f32x4::<0x88>(ab, cd);
            let odd = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
            _mm512_storeu_ps(to, _mm512_add_ps(even, odd));
        }
    }
}

/// Four registers to one, each quarter of which holds the four sums of that quarter.
///
/// # Safety
/// The CPU supports AVX-512; the registers are readable.
#[inline(always)]
unsafe fn quarter_sums(from: *const f32, stride: usize) -> __m512 {
    // SAFETY: vouched for by the caller.
    unsafe {
        let (a, b) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(stride)));
        let (c, d) = (_mm512_loadu_ps(from.add(2 * stride)), _mm512_loadu_ps(from.add(3 * stride)));
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        _mm512_add_ps(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xee>(ab, cd))
    }
}

impl Lanes for Avx2 {
    const COUNT: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        Self(unsafe { _mm256_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: vouched for by the caller.
        Self(unsafe { _mm256_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: vouched for by the caller.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
    }

    value_operations! {
        add = _mm256_add_ps;
        sub = _mm256_sub_ps;
        mul = _mm256_mul_ps;
        div = _mm256_div_ps;
        max = _mm256_max_ps;
        min = _mm256_min_ps;
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let half = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        }
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_and_ps(self.0, _mm256_cmp_ps::<_CMP_NLT_UQ>(x.0, limit.0)) })
    }

    #[inline(always)]
    fn exponent_of_two(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let bits = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0));
            Self(_mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23))))
        }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: vouched for by the caller.
        unsafe { transpose_8x8(from, from_stride, to, to_stride) }
    }
}
