//! Random streams that are a pure function of what they are for.
//!
//! Numbers are made from ChaCha words here, so that no library's sampling change can alter a data set.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// What a stream's examples are for. Streams of different purposes share no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Train,
    Evaluate,
}

/// A generator for one example of a data set.
pub(crate) struct Stream(ChaCha8Rng);

impl Stream {
    /// The stream of example number `example` of the data set that `name` and `settings` describe.
    ///
    /// Key: seed, hash of name and settings, purpose; ChaCha's own stream number: the example.
    pub fn new(name: &str, settings: &[u64], purpose: Purpose, seed: u64, example: u64) -> Self {
        let description = name.bytes().chain(settings.iter().flat_map(|setting| setting.to_le_bytes()));
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&fnv1a(description).to_le_bytes());
        key[16] = match purpose {
            Purpose::Train => 1,
            Purpose::Evaluate => 2,
        };
        let mut generator = ChaCha8Rng::from_seed(key);
        generator.set_stream(example);
        Self(generator)
    }

    /// A whole number in `[0, bound)`, without bias; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // Lemire 2019: the high half of word * bound, rejecting the words that would be over-represented.
        let threshold = bound.wrapping_neg().checked_rem(bound).unwrap_or(0);
        loop {
            let product = u128::from(self.0.next_u64()) * u128::from(bound);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }

    /// A number in `(0, 1]` with 53 random bits.
    pub fn unit(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

/// The 64-bit FNV-1a hash.
fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(name: &str, settings: &[u64], purpose: Purpose, seed: u64, example: u64) -> Vec<u64> {
        let mut stream = Stream::new(name, settings, purpose, seed, example);
        (0..8).map(|_| stream.below(1 << 40)).collect()
    }

    #[test]
    fn every_part_of_the_key_matters() {
        let base = words("a", &[1, 2], Purpose::Train, 3, 4);
        assert_eq!(base, words("a", &[1, 2], Purpose::Train, 3, 4));
        for other in [
            words("b", &[1, 2], Purpose::Train, 3, 4),
            words("a", &[2, 1], Purpose::Train, 3, 4),
            words("a", &[1, 2], Purpose::Evaluate, 3, 4),
            words("a", &[1, 2], Purpose::Train, 4, 4),
            words("a", &[1, 2], Purpose::Train, 3, 5),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn below_is_even_and_in_range() {
        let mut stream = Stream::new("die", &[], Purpose::Train, 0, 0);
        let mut faces = [0; 6];
        for _ in 0..60_000 {
            faces[stream.below(6) as usize] += 1;
        }
        assert!(faces.iter().all(|&n: &i32| (n - 10_000).abs() < 500), "{faces:?}");
        assert_eq!(stream.below(1), 0);
        assert_eq!(stream.below(0), 0);
    }

    #[test]
    fn unit_is_above_zero_and_at_most_one() {
        let mut stream = Stream::new("unit", &[], Purpose::Train, 0, 0);
        let draws: Vec<f64> = (0..10_000).map(|_| stream.unit()).collect();
        assert!(draws.iter().all(|&u| u > 0.0 && u <= 1.0));
        let mean = draws.iter().sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}
