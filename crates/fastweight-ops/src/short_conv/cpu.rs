//! Fused short convolution: registers hold channels, parallel pieces hold stretches of time.
//!
//! Written on the history of a sequence, its `W - 1` carried inputs and then its own: row `t + w` of the
//! history meets tap `w` at token `t`, and the rows from `T` on are the final state.

use std::ops::Range;

use super::ConvSizes;
use crate::fused::{Forward, FusedOp};
use crate::kernel::InstructionSet;
use crate::kernel::simd::{Kernel, Lanes, dispatch};
use crate::kernel::workspace::SharedOut;
use crate::pointwise::{add, load, pieces, run, silu, store};

/// Inputs `[x, weight, initial]` and `[bias]` if any, outputs `[y, state]`.
#[derive(Debug)]
pub struct FusedShortConv {
    /// Sizes of the call.
    pub sizes: ConvSizes,
}

/// A stretch of one sequence.
struct Piece {
    /// Position of the sequence among the states.
    state: usize,
    /// First token of the sequence, counted through all rows.
    start: usize,
    /// Tokens of the sequence.
    time: usize,
    /// Tokens of the piece, counted in the sequence.
    tokens: Range<usize>,
}

/// What both passes read.
#[derive(Clone, Copy)]
struct View<'a> {
    sizes: &'a ConvSizes,
    x: &'a [f32],
    /// Taps `[W, C]`.
    taps: &'a [f32],
    initial: &'a [f32],
    bias: Option<&'a [f32]>,
}

impl<'a> View<'a> {
    fn new(sizes: &'a ConvSizes, inputs: &[&'a [f32]], taps: &'a [f32]) -> Self {
        Self { sizes, x: inputs[0], taps, initial: inputs[2], bias: inputs.get(3).copied() }
    }

    /// A row of a sequence's history.
    #[inline(always)]
    fn history(&self, piece: &Piece, row: usize) -> *const f32 {
        let (channels, carried) = (self.sizes.channels, self.sizes.width - 1);
        if row < carried {
            self.initial[(piece.state * carried + row) * channels..].as_ptr()
        } else {
            self.x[(piece.start + row - carried) * channels..].as_ptr()
        }
    }

    /// The sum before SiLU at a token, from its rows of the history.
    ///
    /// # Safety
    /// The instruction set of `L` is there; `channel` and `left` name channels of the row.
    #[inline(always)]
    unsafe fn convolve<L: Lanes>(&self, rows: &[*const f32], channel: usize, left: usize) -> L {
        // SAFETY: vouched for by the caller.
        unsafe {
            let mut sum = match self.bias {
                Some(bias) => load::<L>(bias.as_ptr().add(channel), left),
                None => L::splat(0.0),
            };
            for (w, row) in rows.iter().enumerate() {
                let tap = load::<L>(self.taps.as_ptr().add(w * self.sizes.channels + channel), left);
                sum = load::<L>(row.add(channel), left).mul_add(tap, sum);
            }
            sum
        }
    }
}

impl FusedShortConv {
    fn pieces(&self) -> Vec<Piece> {
        let ConvSizes { batch, time, channels, .. } = self.sizes;
        let sequences: Vec<Range<usize>> = match &self.sizes.offsets {
            Some(offsets) => offsets.ranges().collect(),
            None => (0..batch).map(|row| row * time..(row + 1) * time).collect(),
        };
        let cut = |(state, range): (usize, Range<usize>)| {
            let (start, time) = (range.start, range.len());
            pieces(time, channels).into_iter().map(move |tokens| Piece { state, start, time, tokens })
        };
        sequences.into_iter().enumerate().flat_map(cut).collect()
    }

    /// `[C, W]` to `[W, C]`.
    fn taps(&self, weight: &[f32]) -> Vec<f32> {
        let ConvSizes { channels, width, .. } = self.sizes;
        (0..width * channels).map(|at| weight[at % channels * width + at / channels]).collect()
    }

    /// Writes the last rows of each history.
    fn final_states(&self, view: &View<'_>, pieces: &[Piece]) -> Vec<f32> {
        let ConvSizes { channels, width, .. } = self.sizes;
        let mut state = view.initial.to_vec();
        for piece in pieces.iter().filter(|piece| piece.tokens.end == piece.time) {
            for row in 0..width - 1 {
                // SAFETY: a row of the history has as many numbers as there are channels.
                let last =
                    unsafe { std::slice::from_raw_parts(view.history(piece, piece.time + row), channels) };
                let at = (piece.state * (width - 1) + row) * channels;
                state[at..at + channels].copy_from_slice(last);
            }
        }
        state
    }
}

impl FusedOp for FusedShortConv {
    fn name(&self) -> &'static str {
        super::OPERATOR
    }

    fn output_shapes(&self) -> Vec<Vec<usize>> {
        let ConvSizes { batch, time, channels, width, .. } = self.sizes;
        let states = self.sizes.offsets.as_ref().map_or(batch, crate::Offsets::documents);
        vec![vec![batch, time, channels], vec![states, width - 1, channels]]
    }

    fn forward(&self, inputs: &[&[f32]], _save: bool) -> Forward {
        let (taps, pieces) = (self.taps(inputs[1]), self.pieces());
        let view = View::new(&self.sizes, inputs, &taps);
        let mut y = vec![0.0; view.x.len()];
        let (to, set) = (SharedOut::new(&mut y), InstructionSet::active());
        run(&pieces, |piece| dispatch(set, Value { view, piece, to }));
        let state = self.final_states(&view, &pieces);
        Forward { outputs: vec![y, state], saved: vec![] }
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        _saved: &[Vec<f32>],
        grads: &[Option<&[f32]>],
        needs: &[bool],
    ) -> Vec<Option<Vec<f32>>> {
        let ConvSizes { channels, width, .. } = self.sizes;
        let (taps, pieces) = (self.taps(inputs[1]), self.pieces());
        let view = View::new(&self.sizes, inputs, &taps);
        let set = InstructionSet::active();
        let mut d_sum = vec![0.0; view.x.len()];
        if let Some(d_y) = grads[0] {
            let to = SharedOut::new(&mut d_sum);
            run(&pieces, |piece| dispatch(set, SumGradient { view, piece, d_y, to }));
        }
        let (mut d_x, mut d_initial) = (vec![0.0; view.x.len()], vec![0.0; view.initial.len()]);
        if let Some(d_state) = grads[1] {
            d_initial.copy_from_slice(d_state);
        }
        let to = [SharedOut::new(&mut d_x), SharedOut::new(&mut d_initial)];
        let (d_sum, d_state) = (&d_sum[..], grads[1]);
        let parts = run(&pieces, |piece| dispatch(set, Gradient { view, piece, d_sum, d_state, to }));
        let mut d_taps = vec![0.0; (width + 1) * channels];
        parts.iter().for_each(|part| add(&mut d_taps, part));
        let d_weight = (0..width * channels).map(|at| d_taps[at % width * channels + at / width]).collect();
        let d_bias = d_taps.split_off(width * channels);
        let all = [d_x, d_weight, d_initial, d_bias];
        all.into_iter().zip(needs).map(|(gradient, &needed)| needed.then_some(gradient)).collect()
    }
}

struct Value<'a> {
    view: View<'a>,
    piece: &'a Piece,
    to: SharedOut,
}

impl Kernel for Value<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        let Self { view, piece, to } = self;
        let channels = view.sizes.channels;
        let mut rows = vec![std::ptr::null(); view.sizes.width];
        for token in piece.tokens.clone() {
            rows.iter_mut().enumerate().for_each(|(w, row)| *row = view.history(piece, token + w));
            let out = (piece.start + token) * channels;
            for channel in (0..channels).step_by(L::COUNT) {
                let left = channels - channel;
                // SAFETY: channels stay inside the rows; this piece alone writes its tokens.
                unsafe {
                    let sum = view.convolve::<L>(&rows, channel, left);
                    store(if view.sizes.silu { silu(sum).0 } else { sum }, to.at(out + channel), left);
                }
            }
        }
    }
}

/// Gradient of the sum before SiLU.
struct SumGradient<'a> {
    view: View<'a>,
    piece: &'a Piece,
    d_y: &'a [f32],
    to: SharedOut,
}

impl Kernel for SumGradient<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) {
        let Self { view, piece, d_y, to } = self;
        let channels = view.sizes.channels;
        let mut rows = vec![std::ptr::null(); view.sizes.width];
        for token in piece.tokens.clone() {
            rows.iter_mut().enumerate().for_each(|(w, row)| *row = view.history(piece, token + w));
            let out = (piece.start + token) * channels;
            for channel in (0..channels).step_by(L::COUNT) {
                let left = channels - channel;
                // SAFETY: channels stay inside the rows; this piece alone writes its tokens.
                unsafe {
                    let mut d_sum = load::<L>(d_y.as_ptr().add(out + channel), left);
                    if view.sizes.silu {
                        d_sum = d_sum.mul(silu(view.convolve::<L>(&rows, channel, left)).1);
                    }
                    store(d_sum, to.at(out + channel), left);
                }
            }
        }
    }
}

/// From the gradient of the sums to those of the inputs, the initial state, the taps and the bias.
struct Gradient<'a> {
    view: View<'a>,
    piece: &'a Piece,
    d_sum: &'a [f32],
    d_state: Option<&'a [f32]>,
    /// Gradients of `x` and of the initial state.
    to: [SharedOut; 2],
}

impl Kernel for Gradient<'_> {
    /// Gradients of the taps and then of the bias, `[W + 1, C]`.
    type Output = Vec<f32>;

    #[inline(always)]
    unsafe fn run<L: Lanes, const WIDE: usize>(self) -> Vec<f32> {
        let ConvSizes { channels, width, .. } = *self.view.sizes;
        let (piece, [d_x, d_initial]) = (self.piece, self.to);
        let mut d_taps = vec![0.0; (width + 1) * channels];
        // SAFETY: channels stay inside the rows; this piece alone writes its tokens, and the first piece of
        // a sequence alone its initial state.
        unsafe {
            if piece.tokens.start == 0 {
                for row in 0..width - 1 {
                    self.history_gradient::<L>(
                        row,
                        d_initial.at((piece.state * (width - 1) + row) * channels),
                    );
                }
            }
            for token in piece.tokens.clone() {
                self.history_gradient::<L>(token + width - 1, d_x.at((piece.start + token) * channels));
            }
            for channel in (0..channels).step_by(L::COUNT) {
                let to = d_taps.as_mut_ptr().add(channel);
                let mut w = 0;
                while w + 4 <= width {
                    self.tap_gradients::<L, 4>(w, channel, to);
                    w += 4;
                }
                while w < width {
                    self.tap_gradients::<L, 1>(w, channel, to);
                    w += 1;
                }
                let mut sum = L::splat(0.0);
                for token in piece.tokens.clone() {
                    sum = sum.add(load::<L>(self.sum_at(token).add(channel), channels - channel));
                }
                store(sum, to.add(width * channels), channels - channel);
            }
        }
        d_taps
    }
}

impl Gradient<'_> {
    #[inline(always)]
    fn sum_at(&self, token: usize) -> *const f32 {
        self.d_sum[(self.piece.start + token) * self.view.sizes.channels..].as_ptr()
    }

    /// Gradient of a row of the history: through every token that it meets, and as a final state.
    #[inline(always)]
    unsafe fn history_gradient<L: Lanes>(&self, row: usize, to: *mut f32) {
        let ConvSizes { channels, width, .. } = *self.view.sizes;
        let (state, time) = (self.piece.state, self.piece.time);
        for channel in (0..channels).step_by(L::COUNT) {
            let left = channels - channel;
            // SAFETY: channels stay inside the rows.
            unsafe {
                let mut sum = match self.d_state {
                    Some(d_state) if row >= time => {
                        let at = (state * (width - 1) + row - time) * channels + channel;
                        load::<L>(d_state.as_ptr().add(at), left)
                    }
                    _ => L::splat(0.0),
                };
                for w in (row + 1).saturating_sub(time)..width.min(row + 1) {
                    let tap = load::<L>(self.view.taps.as_ptr().add(w * channels + channel), left);
                    sum = load::<L>(self.sum_at(row - w).add(channel), left).mul_add(tap, sum);
                }
                store(sum, to.add(channel), left);
            }
        }
    }

    /// Gradients of `N` taps from `first` on, over the piece's tokens.
    #[inline(always)]
    unsafe fn tap_gradients<L: Lanes, const N: usize>(&self, first: usize, channel: usize, to: *mut f32) {
        let channels = self.view.sizes.channels;
        let left = channels - channel;
        // SAFETY: channels stay inside the rows.
        unsafe {
            let mut sums = [L::splat(0.0); N];
            for token in self.piece.tokens.clone() {
                let d_sum = load::<L>(self.sum_at(token).add(channel), left);
                for (n, sum) in sums.iter_mut().enumerate() {
                    let row = self.view.history(self.piece, token + first + n);
                    *sum = load::<L>(row.add(channel), left).mul_add(d_sum, *sum);
                }
            }
            for (n, sum) in sums.into_iter().enumerate() {
                store(sum, to.add((first + n) * channels), left);
            }
        }
    }
}
