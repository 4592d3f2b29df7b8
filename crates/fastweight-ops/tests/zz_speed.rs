#![allow(missing_docs)]
mod comparing;
use burn::tensor::{Device, Tensor};
use comparing::*;
use fastweight_ops::softmax::*;
use fastweight_ops::kernel::{InstructionSet, with_instruction_set};
use std::time::Instant;

unsafe extern "C" { fn clock_gettime(id: i32, t: *mut [i64; 2]) -> i32; }
/// Process CPU milliseconds / 2 cores
fn cpu() -> f64 { let mut t = [0i64; 2]; unsafe { clock_gettime(2, &mut t); } (t[0] as f64 * 1e3 + t[1] as f64 * 1e-6) / 2.0 }
fn median(mut f: impl FnMut()) -> f64 {
    f();
    let w = Instant::now();
    let mut t = vec![];
    while w.elapsed().as_secs_f64() < 1.0 || t.len() < 5 { let s = cpu(); for _ in 0..1 { f(); } t.push(cpu() - s); }
    t.sort_by(f64::total_cmp);
    t[t.len() / 4]
}
#[test]
fn speed() {
    for (b, t, h, d, w) in [(1, 2048, 16, 64, None), (16, 2048, 1, 64, None), (4, 2048, 4, 64, None), (4, 2048, 4, 64, Some(256)), (64, 64, 2, 32, None), (1, 2048, 1, 64, None), (1, 2048, 1, 128, None)] {
        for set in InstructionSet::available() { if std::env::var("ALLSETS").is_err() && set != InstructionSet::active() { continue; }
        let dev = Device::flex();
        let n = b * t * h * d;
        let mk = |s, dev: &Device| tensor::<4>(&numbers(s, n), [b, t, h, d], dev);
        let (q, k, v) = (mk(1, &dev), mk(2, &dev), mk(3, &dev));
        let o = SoftmaxOptions { window: w, ..Default::default() };
        let fwd = with_instruction_set(set, || median(|| { let _ = softmax_attention(q.clone(), k.clone(), v.clone(), None, &o).unwrap(); }));
        let dev = Device::flex().autodiff();
        let (q, k, v) = (mk(1, &dev).require_grad(), mk(2, &dev).require_grad(), mk(3, &dev).require_grad());
        let g = mk(4, &dev);
        let both = with_instruction_set(set, || median(|| { let y = softmax_attention(q.clone(), k.clone(), v.clone(), None, &o).unwrap(); let _ = (y * g.clone()).sum().backward(); }));
        let pairs: f64 = (0..t).map(|i| (i + 1).min(w.unwrap_or(usize::MAX)) as f64).sum::<f64>() * (b * h) as f64;
        let f = pairs * 2.0 * 2.0 * d as f64;
        println!("{set:?} B{b} T{t} H{h} D{d} w{w:?}: fwd {fwd:.2} ms {:.0} GF/s; both {both:.2} ms {:.0} GF/s", f / fwd / 1e6, f * 3.5 / both / 1e6);
        }
    }
}
