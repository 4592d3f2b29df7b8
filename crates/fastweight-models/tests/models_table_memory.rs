//! A token reads its rows of the experts' tables: the tables are never copied, however many tokens they have.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::tensor::{Device, Int, Tensor};
use fastweight_memory::channel::MoleConfig;
use fastweight_models::{ChannelMixerConfig, LanguageModel, MixerConfig, ModelConfig};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn add(bytes: usize) {
    PEAK.fetch_max(NOW.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const VOCAB: usize = 20_000;
const WIDTH: usize = 16;
const EXPERTS: usize = 8;

/// Bytes at the peak of `work`, beside what is held before it.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let start = NOW.load(Relaxed);
    PEAK.store(start, Relaxed);
    let result = work();
    (result, PEAK.load(Relaxed) - start)
}

fn model(device: &Device) -> LanguageModel {
    let mole = MoleConfig { experts: EXPERTS, ..MoleConfig::default() };
    let channel_mixers = vec![ChannelMixerConfig::Mole(mole)];
    let mixer = MixerConfig::by_name("delta_net").unwrap();
    ModelConfig { channel_mixers, ..ModelConfig::new(VOCAB, WIDTH, 2, 2, mixer) }.init(1, device).unwrap()
}

#[test]
fn reading_tokens_copies_no_table_and_an_export_holds_each_once() {
    let device = Device::flex();
    let model = model(&device);
    let table = VOCAB * EXPERTS * WIDTH * 4;
    let (tables, exporting) = peak(|| model.export_tables().unwrap());
    // Both tables, and the part of one that is computed: rows of the experts' outputs, twice, and what gives one.
    assert!(exporting < 2 * table + table / 2, "{exporting} bytes for two tables of {table}");
    assert!(exporting >= 2 * table);

    let ids = || Tensor::<2, Int>::from_data([[1, 19_999, 7, 12_345]], &device);
    let (_, reading) = peak(|| tables.hidden(ids(), None, None).unwrap());
    assert!(reading < table / 20, "{reading} bytes to read four tokens beside tables of {table}");
    let state = tables.zero_state(1, &device);
    let token = Tensor::<1, Int>::from_data([12_345], &device);
    let (_, stepping) = peak(|| tables.step(token, state).unwrap());
    assert!(stepping < table / 20, "{stepping} bytes for a step beside tables of {table}");
}
