//! Scratch memory of a thread, kept from call to call.

use std::cell::Cell;

use super::tile::Matrix;

/// Numbers in a cache line; every matrix of a workspace starts on one.
const LINE: usize = 16;

thread_local! {
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Hands out parts of a thread's scratch memory.
#[derive(Debug)]
pub struct Carver {
    next: *mut f32,
    left: usize,
}

impl Carver {
    /// A matrix of `rows` rows of `columns` numbers, whatever they hold.
    pub fn matrix(&mut self, rows: usize, columns: usize) -> Matrix {
        let size = (rows * columns).next_multiple_of(LINE);
        assert!(size <= self.left, "a workspace is carved into more than its plan asked for");
        let start = self.next;
        self.next = start.wrapping_add(size);
        self.left -= size;
        Matrix { start, stride: columns }
    }

    /// As [`Self::matrix`], with a gap of [`SPREAD`] numbers after it. Matrices of some multiple of 4,096 bytes that
    /// are used together would otherwise share the same few sets of the first-level cache, and drive each other out.
    pub fn spread(&mut self, rows: usize, columns: usize) -> Matrix {
        let matrix = self.matrix(rows, columns);
        self.matrix(1, SPREAD);
        matrix
    }
}

/// Numbers between two matrices of [`Carver::spread`], seven cache lines.
pub const SPREAD: usize = 7 * LINE;

/// Runs `body` with at least `size` numbers of scratch memory, of undefined content (never
/// uninitialised); [`Carver`] rounds each matrix up to a cache line, so leave 16 numbers for each.
pub fn with_workspace<R>(size: usize, body: impl FnOnce(Carver) -> R) -> R {
    let mut scratch = SCRATCH.take();
    if scratch.len() < size + LINE {
        scratch.clear();
        scratch.resize(size + LINE, 0.0);
    }
    let start = scratch.as_mut_ptr();
    let skip = start.align_offset(LINE * size_of::<f32>()).min(LINE);
    let carver = Carver { next: start.wrapping_add(skip), left: scratch.len() - skip };
    let result = body(carver);
    SCRATCH.set(scratch);
    result
}

/// A pointer that parallel tasks share, each writing its own part.
#[derive(Debug, Clone, Copy)]
pub struct SharedOut(*mut f32);

// SAFETY: tasks write disjoint parts; whoever shares the pointer says so.
unsafe impl Send for SharedOut {}
// SAFETY: as above.
unsafe impl Sync for SharedOut {}

impl SharedOut {
    /// Shares the memory of a slice.
    pub fn new(values: &mut [f32]) -> Self {
        Self(values.as_mut_ptr())
    }

    /// Nothing to write to; see [`Self::is_null`].
    pub fn null() -> Self {
        Self(std::ptr::null_mut())
    }

    /// Whether nothing is to be written.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Address of a number.
    #[inline(always)]
    pub fn at(self, index: usize) -> *mut f32 {
        self.0.wrapping_add(index)
    }
}

/// A vector whose numbers a kernel is about to write, all of them.
#[derive(Debug)]
pub struct Unwritten(Vec<f32>);

impl Unwritten {
    /// Room for `len` numbers.
    pub fn new(len: usize) -> Self {
        Self(Vec::with_capacity(len))
    }

    /// Where to write them.
    pub fn share(&mut self) -> SharedOut {
        SharedOut(self.0.as_mut_ptr())
    }

    /// The vector.
    ///
    /// # Safety
    /// The first `len` numbers were written, and `len` is not more than what [`Self::new`] was asked for.
    pub unsafe fn written(mut self, len: usize) -> Vec<f32> {
        // SAFETY: vouched for by the caller.
        unsafe { self.0.set_len(len) };
        self.0
    }
}
