//! Memory asked for before it is needed, a few rows at a time.
//!
//! A core keeps a few tens of cache lines on their way. Rows asked for all at once, or only when they are copied, make it
//! wait; spread evenly over a chunk's products they cost next to nothing.

/// Rows that a kernel will read or write soon: a store to a line that is not there waits for memory too.
#[derive(Debug, Clone, Copy)]
struct Rows {
    start: *const f32,
    stride: usize,
    columns: usize,
    rows: usize,
}

/// Most arrays that a chunk reads and writes.
const MOST: usize = 24;

/// Numbers in a cache line.
const LINE: usize = 16;

/// What to ask for, in the order in which it was named.
#[derive(Debug, Clone, Copy)]
pub struct Ahead {
    arrays: [Rows; MOST],
    named: usize,
    array: usize,
    row: usize,
    share: usize,
}

impl Ahead {
    /// Nothing to ask for.
    #[inline(always)]
    pub fn new() -> Self {
        let none = Rows { start: std::ptr::null(), stride: 0, columns: 0, rows: 0 };
        Self { arrays: [none; MOST], named: 0, array: 0, row: 0, share: 0 }
    }

    /// Names `rows` rows of `columns` numbers, `stride` apart. Any address will do: a prefetch never faults.
    #[inline(always)]
    pub fn name(&mut self, start: *const f32, stride: usize, columns: usize, rows: usize) {
        if rows > 0 && self.named < MOST {
            self.arrays[self.named] = Rows { start, stride, columns, rows };
            self.named += 1;
        }
    }

    /// All that was named will be asked for in so many shares.
    #[inline(always)]
    pub fn spread(mut self, shares: usize) -> Self {
        let rows: usize = self.arrays.iter().map(|array| array.rows).sum();
        self.share = rows.div_ceil(shares.max(1));
        self
    }

    /// Asks for the next shares.
    #[inline(always)]
    pub fn ask(&mut self, shares: usize) {
        for _ in 0..shares * self.share {
            if self.array == self.named {
                return;
            }
            let array = &self.arrays[self.array];
            let row = array.start.wrapping_add(self.row * array.stride);
            let end = row.wrapping_add(array.columns);
            let mut line = row.wrapping_byte_sub(row.addr() % (LINE * size_of::<f32>()));
            while line < end {
                prefetch(line);
                line = line.wrapping_add(LINE);
            }
            self.row += 1;
            if self.row == array.rows {
                (self.array, self.row) = (self.array + 1, 0);
            }
        }
    }
}

/// To the second-level cache: the first one holds what the chunk at hand works with.
#[inline(always)]
fn prefetch(address: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of any address is harmless.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
