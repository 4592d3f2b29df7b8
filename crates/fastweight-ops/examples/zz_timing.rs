use fastweight_ops::delta::cpu::*; use fastweight_ops::linear::cpu::*; use fastweight_ops::normalised_linear::cpu::*;
use fastweight_ops::fused::FusedOp; use fastweight_ops::kernel::*;
fn numbers(len: usize, seed: u64) -> Vec<f32> { let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1; (0..len).map(|_| { x ^= x << 13; x ^= x >> 7; x ^= x << 17; (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0 }).collect() }
fn cpu() -> f64 { let mut s = 0.0; for e in std::fs::read_dir("/proc/self/task").unwrap() { let p = e.unwrap().path().join("schedstat"); if let Ok(t) = std::fs::read_to_string(p) { s += t.split(' ').next().unwrap().parse::<f64>().unwrap(); } } s / 1e6 }
fn stat() -> (f64, f64, f64) { let t = std::fs::read_to_string("/proc/self/stat").unwrap(); let r: Vec<f64> = t.rsplit(')').next().unwrap().split_whitespace().skip(1).map(|x| x.parse().unwrap_or(0.0)).collect(); (r[6], r[10]*10.0, r[11]*10.0) }
fn time(name: &str, n: usize, mut f: impl FnMut()) { f(); f(); let (mut best, mut bc) = (f64::MAX, f64::MAX); let s0 = stat(); for _ in 0..n { let c = cpu(); let t = std::time::Instant::now(); f(); best = best.min(t.elapsed().as_secs_f64() * 1e3); bc = bc.min(cpu() - c); } let s1 = stat(); let n=n as f64; println!("{name:36} wall {best:8.3} ms  cpu/2 {:8.3} ms  faults {} user {:.1} sys {:.1} per call", bc / 2.0, (s1.0-s0.0)/n, (s1.1-s0.1)/n, (s1.2-s0.2)/n); }
fn main() {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let n: usize = std::env::args().nth(2).map_or(20, |x| x.parse().unwrap());
    for set in InstructionSet::available() { with_instruction_set(set, || {
      for (k, v, b, t, h) in [(64usize,64usize,4usize,2048usize,4usize),(60,60,4,2048,4),(128,128,4,2048,4),(20,20,4,2048,4),(64,64,1,8192,1)] {
        let d = Dims { batch: b, time: t, heads: h, key: k, value: v, scale: (k as f32).powf(-0.5), offsets: None };
        let nt = b*t*h;
        let mut keys = numbers(nt*k,2); for x in keys.chunks_exact_mut(k) { let s = x.iter().map(|x| x*x).sum::<f32>().sqrt(); x.iter_mut().for_each(|x| *x/=s); }
        let beta: Vec<f32> = numbers(nt,4).iter().map(|x| 0.5*(x+1.0)).collect();
        let state = numbers(b*h*k*v,6);
        let gates = |s: f32| -> Vec<f32> { numbers(nt,5).iter().map(|x| 0.5*s*(x-1.0)).collect() };
        let base = vec![numbers(nt*k,1), keys, numbers(nt*v,3)];
        let z: Vec<f32> = numbers(b*h*k,7).iter().map(|x| x.abs()).collect();
        let add = |v: &[Vec<f32>], m: Vec<Vec<f32>>| -> Vec<Vec<f32>> { let mut v = v.to_vec(); v.extend(m); v };
        let mut ops: Vec<(String, Box<dyn FusedOp>, Vec<Vec<f32>>)> = vec![];
        ops.push(("gated_delta_weak".into(), Box::new(FusedDelta{dims:d.clone(),gated:true}), add(&base, vec![beta.clone(), state.clone(), gates(0.1)])));
        ops.push(("gated_delta_strong".into(), Box::new(FusedDelta{dims:d.clone(),gated:true}), add(&base, vec![beta.clone(), state.clone(), gates(60.0)])));
        ops.push(("delta".into(), Box::new(FusedDelta{dims:d.clone(),gated:false}), add(&base, vec![beta.clone(), state.clone()])));
        ops.push(("linear".into(), Box::new(FusedLinear{dims:d.clone(),gate:GateKind::None}), add(&base, vec![state.clone()])));
        ops.push(("linear_token".into(), Box::new(FusedLinear{dims:d.clone(),gate:GateKind::PerToken}), add(&base, vec![state.clone(), gates(0.1)])));
        ops.push(("normalised_gated".into(), Box::new(FusedNormalisedLinear{dims:d.clone(),gated:true}), add(&base, vec![state.iter().map(|x| x.abs()).collect(), z, gates(0.1)])));
        for (name, op, inputs) in ops {
            let name = format!("{set:?} k{k}v{v}b{b}h{h} {name}"); if !name.contains(&filter) { continue; }
            let inputs: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            let grads: Vec<Vec<f32>> = op.output_shapes().iter().enumerate().map(|(i,s)| numbers(s.iter().product(), 10+i as u64)).collect();
            let grads: Vec<Option<&[f32]>> = grads.iter().map(|g| Some(g.as_slice())).collect();
            let needs = vec![true; inputs.len()];
            time(&format!("{name} fwd"), n, || { std::hint::black_box(op.forward(&inputs, false)); });
            time(&format!("{name} fwd save"), n, || { std::hint::black_box(op.forward(&inputs, true)); });
            time(&format!("{name} f+b"), n, || { let f = op.forward(&inputs, true); std::hint::black_box(op.backward(&inputs, &f.saved, &grads, &needs)); });
        }
      }
    }); }
}
