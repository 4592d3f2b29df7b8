//! Passes over matrices that hold a token in each lane: features are rows, so that sums over features are sums of
//! registers, and a factor of a token is a lane.

use crate::deep_memory::Activation;
use crate::deep_memory::cpu::derivatives;
use crate::kernel::simd::{InstructionSet, Kernel, Lanes, dispatch};
use crate::kernel::tile::{Matrix, copy_in, copy_out, transpose};

/// Declares a pass: a kernel whose matrices are whole registers of a workspace.
macro_rules! pass {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? } $x:ident, $lanes:ident => $body:block) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name { $($(#[$field_doc])* pub(super) $field: $type),* }

        impl $name {
            pub(super) fn run(self, set: InstructionSet) {
                dispatch(set, self);
            }
        }

        impl Kernel for $name {
            type Output = ();

            #[inline(always)]
            unsafe fn run<$lanes: Lanes, const WIDE: usize>(self) {
                let $x = self;
                // SAFETY: the matrices are parts of one workspace of whole registers, and the rows asked for are
                // inside them; arrays of the caller are as long as the head's sizes say.
                unsafe { $body }
            }
        }
    };
}
pub(super) use pass;

pass! {
    /// The activation of `count` numbers, its derivative and its second derivative.
    Activate { z: Matrix, value: Matrix, slope: Matrix, curve: Option<Matrix>, count: usize, activation: Activation }
    x, L => {
        for at in (0..x.count).step_by(L::COUNT) {
            let (value, slope, curve) = derivatives(L::load(x.z.start.add(at)), x.activation);
            value.store(x.value.start.add(at));
            slope.store(x.slope.start.add(at));
            if let Some(to) = x.curve {
                curve.store(to.start.add(at));
            }
        }
    }
}

pass! {
    /// `to = sign a b`, or added to it, of `count` numbers.
    Multiply { a: Matrix, b: Matrix, sign: f32, to: Matrix, count: usize, add: bool }
    x, L => {
        for at in (0..x.count).step_by(L::COUNT) {
            let product = L::load(x.a.start.add(at)).mul(L::load(x.b.start.add(at))).mul(L::splat(x.sign));
            let to = x.to.start.add(at);
            if x.add { product.add(L::load(to)).store(to) } else { product.store(to) }
        }
    }
}

pass! {
    /// `to = -x` of `count` numbers.
    Negate { x: Matrix, to: Matrix, count: usize }
    x, L => {
        for at in (0..x.count).step_by(L::COUNT) {
            L::splat(0.0).sub(L::load(x.x.start.add(at))).store(x.to.start.add(at));
        }
    }
}

pass! {
    /// `to = to + a` of `count` numbers.
    Add { a: Matrix, to: Matrix, count: usize }
    x, L => {
        for at in (0..x.count).step_by(L::COUNT) {
            let to = x.to.start.add(at);
            L::load(x.a.start.add(at)).add(L::load(to)).store(to);
        }
    }
}

pass! {
    /// Every token's column times `sign` and its factor, to `to`.
    Scale { x: Matrix, factor: *const f32, sign: f32, to: Matrix, rows: usize }
    x, L => {
        let mut lane = 0;
        while lane < x.x.stride {
            let factor = L::load(x.factor.add(lane)).mul(L::splat(x.sign));
            for row in 0..x.rows {
                L::load(x.x.at(row, lane)).mul(factor).store(x.to.at(row, lane));
            }
            lane += L::COUNT;
        }
    }
}

pass! {
    /// The gradients of `factor x`, where `d` is that of the product: `sums += sign sum_i x_i d_i` for every token,
    /// `to = sign factor d` or added to it. A factor is one when absent.
    Fold {
        d: Matrix,
        x: Matrix,
        factor: Option<*const f32>,
        sign: f32,
        sums: *mut f32,
        to: Matrix,
        add: bool,
        rows: usize,
    }
    x, L => {
        let width = x.d.stride;
        let mut lane = 0;
        while lane < width {
            let mut factor = L::splat(x.sign);
            if let Some(factors) = x.factor {
                factor = factor.mul(L::load(factors.add(lane)));
            }
            let mut sum = [L::splat(0.0); 2];
            for row in 0..x.rows {
                let at = row * width + lane;
                let d = L::load(x.d.start.add(at));
                sum[row % 2] = d.mul_add(L::load(x.x.start.add(at)), sum[row % 2]);
                let to = x.to.start.add(at);
                if x.add { d.mul_add(factor, L::load(to)).store(to) } else { d.mul(factor).store(to) }
            }
            let to = x.sums.add(lane);
            sum[0].add(sum[1]).mul(L::splat(x.sign)).add(L::load(to)).store(to);
            lane += L::COUNT;
        }
    }
}

pass! {
    /// `sum_i x_i^2` of every token.
    Squares { x: Matrix, sums: *mut f32, rows: usize }
    x, L => {
        let mut lane = 0;
        while lane < x.x.stride {
            let mut sum = L::splat(0.0);
            for row in 0..x.rows {
                let number = L::load(x.x.at(row, lane));
                sum = number.mul_add(number, sum);
            }
            sum.store(x.sums.add(lane));
            lane += L::COUNT;
        }
    }
}

pass! {
    /// `x weight + bias + plus - minus`, weight and bias a number for each row.
    Affine {
        x: Matrix,
        norm: Option<(*const f32, *const f32)>,
        plus: Option<Matrix>,
        minus: Option<Matrix>,
        to: Matrix,
        rows: usize,
    }
    x, L => {
        for row in 0..x.rows {
            let mut lane = 0;
            while lane < x.x.stride {
                let mut number = L::load(x.x.at(row, lane));
                if let Some((weight, bias)) = x.norm {
                    number = number.mul_add(L::splat(*weight.add(row)), L::splat(*bias.add(row)));
                }
                if let Some(plus) = x.plus {
                    number = number.add(L::load(plus.at(row, lane)));
                }
                if let Some(minus) = x.minus {
                    number = number.sub(L::load(minus.at(row, lane)));
                }
                number.store(x.to.at(row, lane));
                lane += L::COUNT;
            }
        }
    }
}

pass! {
    /// Tokens `[count, size]` of an array, `stride` numbers apart, to columns; `rows` is a tile of scratch memory.
    LoadTokens { from: *const f32, stride: usize, count: usize, size: usize, rows: Matrix, to: Matrix }
    x, L => {
        let lanes = x.to.stride;
        copy_in::<L>(x.rows, lanes, x.from, x.stride, x.count, x.size);
        transpose::<L>(x.rows, lanes, x.rows.stride, x.to);
    }
}

pass! {
    /// Columns to tokens `[count, size]` of an array, `stride` numbers apart.
    StoreTokens { from: Matrix, to: *mut f32, stride: usize, count: usize, size: usize, rows: Matrix }
    x, L => {
        transpose::<L>(x.from, x.rows.stride, x.from.stride, x.rows);
        copy_out::<L>(x.rows, x.to, x.stride, x.count, x.size);
    }
}

pass! {
    /// `to = from` transposed, whole registers both ways.
    Transpose { from: Matrix, rows: usize, columns: usize, to: Matrix }
    x, L => {
        transpose::<L>(x.from, x.rows, x.columns, x.to);
    }
}

pass! {
    /// An array `[rows, columns]` to a weight, whose padding becomes zero.
    LoadWeight { from: *const f32, rows: usize, columns: usize, to: Matrix, padded: usize }
    x, L => {
        copy_in::<L>(x.to, x.padded, x.from, x.columns, x.rows, x.columns);
    }
}

pass! {
    /// A weight to an array `[rows, columns]`.
    StoreWeight { from: Matrix, rows: usize, columns: usize, to: *mut f32 }
    x, L => {
        copy_out::<L>(x.from, x.to, x.columns, x.rows, x.columns);
    }
}

/// `sum_ij a_ij b_ij` of two weights of the same sizes.
#[derive(Debug)]
pub(super) struct InnerProduct {
    pub a: Matrix,
    pub b: Matrix,
    pub rows: usize,
    /// A whole number of registers.
    pub columns: usize,
}

impl InnerProduct {
    pub fn run(self, set: InstructionSet) -> f32 {
        dispatch(set, self)
    }
}

impl Kernel for InnerProduct {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) -> f32 {
        // SAFETY: both are weights of a workspace, whose padding is zero.
        unsafe {
            let mut sums = [L::splat(0.0); 4];
            for row in 0..self.rows {
                for (i, column) in (0..self.columns).step_by(L::COUNT).enumerate() {
                    let (a, b) = (L::load(self.a.at(row, column)), L::load(self.b.at(row, column)));
                    sums[i % 4] = a.mul_add(b, sums[i % 4]);
                }
            }
            sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum()
        }
    }
}
