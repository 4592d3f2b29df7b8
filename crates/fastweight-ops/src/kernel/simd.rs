//! Lanes of `f32` and the run-time choice of an instruction set.
//!
//! A kernel is written once, generic over [`Lanes`], as a [`Kernel`]; [`dispatch`] enters it through one
//! function per instruction set. Everything below that function is `#[inline(always)]`, so the whole
//! kernel is compiled for that instruction set.

use std::cell::Cell;
use std::sync::OnceLock;

use super::simd_portable::Portable;

/// Below this exponent [`Lanes::exp`] is zero: `e^-60` is 1e-26, far under any tolerance, and products
/// with anything smaller would reach denormal numbers, which take a hundred times longer.
pub const EXP_FLOOR: f32 = -60.0;

/// A register of `f32` lanes.
///
/// A value only comes into being through the `unsafe` constructors, which demand the instruction set;
/// arithmetic on a value that exists is therefore safe.
pub trait Lanes: Copy {
    /// How many lanes.
    const COUNT: usize;

    /// The same number in every lane.
    ///
    /// # Safety
    /// The CPU supports the instruction set of `Self`.
    unsafe fn splat(x: f32) -> Self;

    /// [`Self::COUNT`] numbers from `from`, at any alignment.
    ///
    /// # Safety
    /// The CPU supports the instruction set of `Self` and the numbers are readable.
    unsafe fn load(from: *const f32) -> Self;

    /// Writes the lanes to `to`, at any alignment.
    ///
    /// # Safety
    /// [`Self::COUNT`] numbers at `to` are writable.
    unsafe fn store(self, to: *mut f32);

    /// The first `count < COUNT` lanes from `from`, zero in the others.
    ///
    /// # Safety
    /// As [`Self::load`], for `count` numbers.
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0; 16];
        for (i, lane) in lanes.iter_mut().enumerate().take(count) {
            // SAFETY: the caller vouches for `count` numbers.
            *lane = unsafe { *from.add(i) };
        }
        // SAFETY: no register has more than 16 lanes; the caller vouches for the instruction set.
        unsafe { Self::load(lanes.as_ptr()) }
    }

    /// Writes the first `count < COUNT` lanes to `to`.
    ///
    /// # Safety
    /// `count` numbers at `to` are writable.
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, count: usize) {
        let mut lanes = [0.0; 16];
        // SAFETY: no register has more than 16 lanes.
        unsafe { self.store(lanes.as_mut_ptr()) };
        for (i, lane) in lanes.iter().enumerate().take(count) {
            // SAFETY: the caller vouches for `count` numbers.
            unsafe { *to.add(i) = *lane };
        }
    }

    /// `self * factor + addend`, in one rounding where the instruction set has it.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Sum lane by lane.
    fn add(self, other: Self) -> Self;
    /// Difference lane by lane.
    fn sub(self, other: Self) -> Self;
    /// Product lane by lane.
    fn mul(self, other: Self) -> Self;
    /// Quotient lane by lane.
    fn div(self, other: Self) -> Self;
    /// The larger lane by lane; `other` where either is not a number.
    fn max(self, other: Self) -> Self;
    /// The smaller lane by lane; `other` where either is not a number.
    fn min(self, other: Self) -> Self;
    /// Sum of the lanes.
    fn sum(self) -> f32;
    /// Largest lane.
    fn largest(self) -> f32;
    /// `self`, but zero in the lanes where `x < limit`.
    fn zero_where_below(self, x: Self, limit: Self) -> Self;
    /// Two to the power `n` of lanes that hold `n + 1.5 * 2^23`, for `-127 < n < 128`.
    fn exponent_of_two(self) -> Self;

    /// Transposes a `COUNT` by `COUNT` tile.
    ///
    /// # Safety
    /// The CPU supports the instruction set; `COUNT` rows of `COUNT` numbers, `from_stride` and
    /// `to_stride` numbers apart, are readable and writable and do not overlap.
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for i in 0..Self::COUNT {
            for j in 0..Self::COUNT {
                // SAFETY: inside the tiles that the caller vouches for.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * from_stride + j) };
            }
        }
    }

    /// Sums of the lanes of 16 registers, the `i`-th at `from + i * stride`, to `to`.
    ///
    /// # Safety
    /// The CPU supports the instruction set; the registers are readable, 16 numbers at `to` writable.
    #[inline(always)]
    unsafe fn sum_rows(from: *const f32, stride: usize, to: *mut f32) {
        for i in 0..16 {
            // SAFETY: vouched for by the caller.
            unsafe { *to.add(i) = Self::load(from.add(i * stride)).sum() };
        }
    }

    /// Magnitude lane by lane.
    #[inline(always)]
    fn abs(self) -> Self {
        self.max(self.same(0.0).sub(self))
    }

    /// [`Self::splat`] where a value, hence the instruction set, is at hand.
    #[inline(always)]
    fn same(self, x: f32) -> Self {
        // SAFETY: a value of this type exists, so the instruction set is there.
        unsafe { Self::splat(x) }
    }

    /// `e^x`, relative error below 3e-7; zero below [`EXP_FLOOR`], `e^88` above 88.
    ///
    /// Range reduction by `ln 2` in two parts and the degree-6 polynomial of the Cephes library's `expf`.
    #[inline(always)]
    fn exp(self) -> Self {
        let x = self.same(88.0).min(self.same(-87.0).max(self));
        let magic = self.same(12_582_912.0);
        let shifted = x.mul_add(self.same(std::f32::consts::LOG2_E), magic);
        let n = shifted.sub(magic);
        let r = n.mul_add(self.same(-0.693_359_4), x);
        let r = n.mul_add(self.same(2.121_944_4e-4), r);
        let p = self.same(1.987_569_1e-4);
        let p = p.mul_add(r, self.same(1.398_199_9e-3));
        let p = p.mul_add(r, self.same(8.333_452e-3));
        let p = p.mul_add(r, self.same(4.166_579_6e-2));
        let p = p.mul_add(r, self.same(1.666_666_5e-1));
        let p = p.mul_add(r, self.same(0.5));
        let p = p.mul_add(r.mul(r), r).add(self.same(1.0));
        p.mul(shifted.exponent_of_two()).zero_where_below(self, self.same(EXP_FLOOR))
    }

    /// Zero in the lanes of magnitude below `2^-100`, which would decay into denormal numbers.
    #[inline(always)]
    fn flush_tiny(self) -> Self {
        self.zero_where_below(self.abs(), self.same(f32::from_bits(27 << 23)))
    }
}

/// A kernel generic over the lanes.
pub trait Kernel {
    /// What it returns.
    type Output;

    /// Runs it; mark the implementation `#[inline(always)]`, and everything it calls.
    ///
    /// `WIDE` is the number of registers across a register tile of four rows that suits the instruction set.
    ///
    /// # Safety
    /// The CPU supports the instruction set of `L`; only [`dispatch`] calls this.
    unsafe fn run<L: Lanes, const WIDE: usize>(self) -> Self::Output;
}

/// An instruction set that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstructionSet {
    /// x86-64 with AVX-512 (F, BW, DQ, VL): 16 lanes.
    Avx512,
    /// x86-64 with AVX2 and FMA: 8 lanes.
    Avx2,
    /// aarch64 NEON: 4 lanes.
    Neon,
    /// Whatever the compiler makes of arrays of four.
    Portable,
}

impl InstructionSet {
    /// All of them, the fastest first.
    pub const ALL: [Self; 4] = [Self::Avx512, Self::Avx2, Self::Neon, Self::Portable];

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::simd_x86::has_avx512(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => super::simd_x86::has_avx2(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Self::Portable => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The ones this CPU has, the fastest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|set| set.is_available()).collect()
    }

    /// The one that kernels called from this thread use: the fastest available, unless
    /// [`with_instruction_set`] chose another.
    pub fn active() -> Self {
        static BEST: OnceLock<InstructionSet> = OnceLock::new();
        FORCED.get().unwrap_or_else(|| {
            *BEST.get_or_init(|| {
                Self::ALL.into_iter().find(|set| set.is_available()).unwrap_or(Self::Portable)
            })
        })
    }

    /// Lanes of a register.
    pub fn lanes(self) -> usize {
        match self {
            Self::Avx512 => 16,
            Self::Avx2 => 8,
            Self::Neon | Self::Portable => 4,
        }
    }
}

thread_local! {
    static FORCED: Cell<Option<InstructionSet>> = const { Cell::new(None) };
}

/// Runs `body` with kernels called from this thread compiled for `set`; for tests and benchmarks.
///
/// A set that the CPU lacks falls back to [`InstructionSet::Portable`].
pub fn with_instruction_set<R>(set: InstructionSet, body: impl FnOnce() -> R) -> R {
    struct Restore(Option<InstructionSet>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FORCED.set(self.0);
        }
    }
    let usable = if set.is_available() { set } else { InstructionSet::Portable };
    let _restore = Restore(FORCED.replace(Some(usable)));
    body()
}

/// Runs a kernel compiled for `set`, or for [`InstructionSet::Portable`] when the CPU lacks it.
///
/// Read [`InstructionSet::active`] on the calling thread and hand it to parallel tasks.
pub fn dispatch<K: Kernel>(set: InstructionSet, kernel: K) -> K::Output {
    match set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 if set.is_available() => {
            // SAFETY: the features were just detected.
            unsafe { super::simd_x86::run_avx512(kernel) }
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 if set.is_available() => {
            // SAFETY: the features were just detected.
            unsafe { super::simd_x86::run_avx2(kernel) }
        }
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon if set.is_available() => {
            // SAFETY: the feature was just detected.
            unsafe { super::simd_neon::run_neon(kernel) }
        }
        // SAFETY: plain arrays need no instruction set.
        _ => unsafe { kernel.run::<Portable, 2>() },
    }
}
