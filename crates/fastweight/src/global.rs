//! Options every subcommand shares.

use burn::tensor::Device;

use crate::error::CommandError;
use crate::output::count;
use crate::values::whole;

/// Options every subcommand shares.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Options of every subcommand")]
pub struct Global {
    /// Write results as JSON, one object per line
    #[arg(long, global = true)]
    pub json: bool,
    /// Start of every random choice; replaces the seed of a recipe or preset
    #[arg(long, global = true, value_name = "N", allow_negative_numbers = true,
        value_parser = whole::<u64>(0..=u64::MAX))]
    pub seed: Option<u64>,
    /// Show no progress
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// Threads to compute with [default: one per core]
    #[arg(long, global = true, value_name = "N", allow_negative_numbers = true,
        value_parser = whole::<usize>(1..=MOST_THREADS))]
    pub threads: Option<usize>,
    /// Where to compute: flex (the CPU), or cuda, vulkan, metal, rocm, wgpu when built with that feature
    #[arg(long, global = true, value_name = "NAME", default_value = "flex")]
    pub device: String,
}

/// Most threads of the pool; starting many more takes minutes.
const MOST_THREADS: u64 = 1024;

/// Bytes of a thread's stack, as many as a main thread usually has.
const STACK: usize = 8 << 20;

/// Devices that exist as cargo features of this package.
const DEVICE_FEATURES: [&str; 5] = ["cuda", "vulkan", "metal", "rocm", "wgpu"];

impl Global {
    /// Starts the thread pool and runs `body` on one of its threads. Call once, before any computation.
    ///
    /// A thread outside the pool hands over every parallel piece of work and sleeps until it is done, which takes
    /// longer than most pieces of a small training.
    ///
    /// # Errors
    /// [`CommandError::Failure`] when the operating system refuses the threads; what `body` returns.
    pub fn within_threads(
        &self,
        body: impl FnOnce() -> Result<(), CommandError> + Send,
    ) -> Result<(), CommandError> {
        let threads = self.threads.unwrap_or(0);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).stack_size(STACK);
        pool.build_global().map_err(|cause| {
            CommandError::failure(format_args!(
                "{} could not be started ({cause}); give --threads a smaller number",
                if threads == 0 { "the threads".to_owned() } else { count(threads, "thread") }
            ))
        })?;
        rayon::scope(|_| body())
    }

    /// Checks that `--device` is a name of a device, whether or not this build holds it.
    ///
    /// # Errors
    /// [`CommandError::Input`] for an unknown name.
    pub fn check_device(&self) -> Result<(), CommandError> {
        match self.device.as_str() {
            "flex" | "cpu" => Ok(()),
            known if DEVICE_FEATURES.contains(&known) => Ok(()),
            other => Err(CommandError::input(format_args!(
                "--device knows flex (the CPU), {}; got {other:?}",
                DEVICE_FEATURES.join(", ")
            ))),
        }
    }

    /// The device named by `--device`.
    ///
    /// # Errors
    /// [`CommandError::Input`] for an unknown name, a device this build does not hold, or one this
    /// machine does not have.
    pub fn device(&self) -> Result<Device, CommandError> {
        match self.device.as_str() {
            "flex" | "cpu" => Ok(Device::flex()),
            #[cfg(feature = "cuda")]
            "cuda" => present("cuda", || Device::cuda(0)),
            #[cfg(feature = "vulkan")]
            "vulkan" => present("vulkan", || Device::vulkan(burn::tensor::DeviceKind::DefaultDevice)),
            #[cfg(feature = "metal")]
            "metal" => present("metal", || Device::metal(burn::tensor::DeviceKind::DefaultDevice)),
            #[cfg(feature = "rocm")]
            "rocm" => present("rocm", || Device::rocm(0)),
            #[cfg(feature = "wgpu")]
            "wgpu" => present("wgpu", || Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            known => self.check_device().and(Err(CommandError::input(format_args!(
                "this build cannot compute on {known:?}; build it with `cargo build --release --features \
                 fastweight/{known}`, or leave --device out to compute on the CPU"
            )))),
        }
    }
}

/// Computes something on the device: where driver or hardware are missing, its backend panics.
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal", feature = "rocm", feature = "wgpu"))]
fn present(
    name: &str,
    device: impl FnOnce() -> Device + std::panic::UnwindSafe,
) -> Result<Device, CommandError> {
    use std::panic;

    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let found = panic::catch_unwind(|| {
        let device = device();
        burn::tensor::Tensor::<1>::ones([1], &device).sum().into_data();
        device
    });
    panic::set_hook(hook);
    found.map_err(|cause| {
        let cause = cause.downcast_ref::<String>().map_or("no device was found", String::as_str);
        CommandError::input(format_args!(
            "{name} cannot compute on this machine ({cause}); check its driver, or leave --device out to compute on the CPU"
        ))
    })
}
