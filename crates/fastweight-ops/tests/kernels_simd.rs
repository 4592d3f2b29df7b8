//! The lanes of every instruction set this machine has.

use fastweight_ops::kernel::simd::{EXP_FLOOR, InstructionSet, Kernel, Lanes, dispatch};
use fastweight_ops::kernel::with_instruction_set;

/// Applies one operation to whole registers of `x` and `y`.
struct Apply<'a> {
    operation: &'static str,
    x: &'a [f32],
    y: &'a [f32],
}

impl Kernel for Apply<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) -> Vec<f32> {
        assert!(self.x.len().is_multiple_of(L::COUNT) && self.x.len() == self.y.len(), "whole registers");
        let mut out = vec![0.0; self.x.len()];
        for i in (0..self.x.len()).step_by(L::COUNT) {
            // SAFETY: the slices are as long as whole registers; `dispatch` vouches for the set.
            unsafe {
                let x = L::load(self.x.as_ptr().add(i));
                let y = L::load(self.y.as_ptr().add(i));
                let result = match self.operation {
                    "exp" => x.exp(),
                    "flush" => x.flush_tiny(),
                    "abs" => x.abs(),
                    "mul_add" => x.mul_add(y, L::splat(0.5)),
                    "add" => x.add(y),
                    "sub" => x.sub(y),
                    "mul" => x.mul(y),
                    "div" => x.div(y),
                    "max" => x.max(y),
                    "min" => x.min(y),
                    "zero_where_below" => x.zero_where_below(y, L::splat(0.25)),
                    "sum" => L::splat(x.sum()),
                    "largest" => L::splat(x.largest()),
                    "partial" => {
                        let part = L::COUNT - 1;
                        let mut buffer = [7.0; 17];
                        L::load_partial(self.x.as_ptr().add(i), part).store(buffer.as_mut_ptr());
                        assert_eq!(buffer[part], 0.0, "lanes past the end are zero");
                        let mut buffer = [7.0; 17];
                        x.store_partial(buffer.as_mut_ptr(), part);
                        assert_eq!(buffer[part], 7.0, "numbers past the end are kept");
                        L::load(buffer.as_ptr())
                    }
                    _ => unreachable!("an operation of this test"),
                };
                result.store(out.as_mut_ptr().add(i));
            }
        }
        out
    }
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect()
}

#[test]
fn arithmetic_matches_scalars() {
    let x = numbers(64);
    let y: Vec<f32> = numbers(97)[33..].to_vec();
    type Scalar = fn(f32, f32) -> f32;
    let scalar: [(&'static str, Scalar); 9] = [
        ("abs", |x, _| x.abs()),
        ("mul_add", |x, y| x * y + 0.5),
        ("add", |x, y| x + y),
        ("sub", |x, y| x - y),
        ("mul", |x, y| x * y),
        ("div", |x, y| x / y),
        ("max", f32::max),
        ("min", f32::min),
        ("zero_where_below", |x, y| if y < 0.25 { 0.0 } else { x }),
    ];
    for set in InstructionSet::available() {
        for (operation, expected) in scalar {
            let found = dispatch(set, Apply { operation, x: &x, y: &y });
            for i in 0..x.len() {
                let expected = expected(x[i], y[i]);
                let close =
                    (found[i] - expected).abs() <= 1e-6 * expected.abs().max(1.0) || found[i] == expected;
                assert!(close, "{set:?} {operation}({}, {}) = {}, not {expected}", x[i], y[i], found[i]);
            }
        }
        let lanes = set.lanes();
        let sums = dispatch(set, Apply { operation: "sum", x: &x, y: &y });
        let largest = dispatch(set, Apply { operation: "largest", x: &x, y: &y });
        for i in 0..x.len() {
            let register = &x[i / lanes * lanes..][..lanes];
            assert!((sums[i] - register.iter().sum::<f32>()).abs() < 1e-5, "{set:?} sum");
            assert_eq!(largest[i], register.iter().fold(f32::MIN, |m, x| m.max(*x)), "{set:?} largest");
        }
        dispatch(set, Apply { operation: "partial", x: &x, y: &y });
    }
}

#[test]
fn exponential() {
    let x: Vec<f32> = (0..14_800).map(|i| EXP_FLOOR + i as f32 * 0.01).collect();
    for set in InstructionSet::available() {
        let found = dispatch(set, Apply { operation: "exp", x: &x, y: &x });
        for (x, found) in x.iter().zip(found) {
            let expected = f64::from(*x).exp();
            let error = (f64::from(found) - expected).abs() / expected;
            assert!(error < 3e-7, "{set:?}: exp({x}) = {found}, relative error {error:.1e}");
        }
        let edges: Vec<f32> =
            [-60.01, -87.0, -1e30, f32::NEG_INFINITY, 0.0, 100.0, f32::INFINITY, f32::NAN].repeat(2);
        let found = dispatch(set, Apply { operation: "exp", x: &edges, y: &edges });
        assert_eq!(&found[..5], &[0.0, 0.0, 0.0, 0.0, 1.0], "{set:?}");
        assert!(found[5].is_finite() && found[6].is_finite() && found[7].is_nan(), "{set:?}: {found:?}");
    }
}

#[test]
fn tiny_numbers_are_flushed() {
    let x = [1e-31, -1e-31, 1e-40, 1e-29, -1e-29, 0.0, 1.0, f32::NAN].repeat(2);
    for set in InstructionSet::available() {
        let found = dispatch(set, Apply { operation: "flush", x: &x, y: &x });
        assert_eq!(&found[..7], &[0.0, 0.0, 0.0, 1e-29, -1e-29, 0.0, 1.0], "{set:?}");
        assert!(found[7].is_nan(), "{set:?}: what is not a number must show");
    }
}

struct Transpose<'a>(&'a [f32]);

impl Kernel for Transpose<'_> {
    type Output = (usize, Vec<f32>);

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) -> (usize, Vec<f32>) {
        let mut out = vec![0.0; 16 * 20];
        // SAFETY: both have 16 rows, `dispatch` vouches for the set.
        unsafe { L::transpose(self.0.as_ptr(), 18, out.as_mut_ptr(), 20) };
        (L::COUNT, out)
    }
}

#[test]
fn transposed_tiles() {
    let x = numbers(16 * 18);
    for set in InstructionSet::available() {
        let (count, out) = dispatch(set, Transpose(&x));
        for i in 0..count {
            for j in 0..count {
                assert_eq!(out[j * 20 + i], x[i * 18 + j], "{set:?} cell {i}, {j}");
            }
        }
    }
}

struct SumRows<'a>(&'a [f32]);

impl Kernel for SumRows<'_> {
    type Output = (usize, Vec<f32>);

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) -> (usize, Vec<f32>) {
        let mut out = vec![f32::NAN; 16];
        // SAFETY: sixteen rows of 18 numbers; `dispatch` vouches for the set.
        unsafe { L::sum_rows(self.0.as_ptr(), 18, out.as_mut_ptr()) };
        (L::COUNT, out)
    }
}

#[test]
fn sums_of_sixteen_rows() {
    let values = numbers(16 * 18);
    for set in InstructionSet::available() {
        let (count, sums) = dispatch(set, SumRows(&values));
        for (i, sum) in sums.iter().enumerate() {
            let expected: f32 = values[i * 18..i * 18 + count].iter().sum();
            assert!((sum - expected).abs() < 1e-5, "{set:?} row {i}: {sum}, expected {expected}");
        }
    }
}

#[test]
fn the_forced_set_ends_with_its_scope() {
    let before = InstructionSet::active();
    with_instruction_set(InstructionSet::Portable, || {
        assert_eq!(InstructionSet::active(), InstructionSet::Portable);
    });
    assert_eq!(InstructionSet::active(), before);
    assert_eq!(Some(&before), InstructionSet::available().first());
}
