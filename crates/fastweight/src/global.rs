//! Options every subcommand shares.

use std::num::NonZeroUsize;

use burn::tensor::Device;

use crate::error::CommandError;

/// Options every subcommand shares.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Options of every subcommand")]
pub struct Global {
    /// Write results as JSON, one object per line
    #[arg(long, global = true)]
    pub json: bool,
    /// Start of every random choice; replaces the seed of a recipe or preset
    #[arg(long, global = true, value_name = "N")]
    pub seed: Option<u64>,
    /// Show no progress
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// Threads to compute with [default: one per core]
    #[arg(long, global = true, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Where to compute: flex (the CPU), or cuda, vulkan, metal, rocm, wgpu when built with that feature
    #[arg(long, global = true, value_name = "NAME", default_value = "flex")]
    pub device: String,
}

/// Devices that exist as cargo features of this package.
const DEVICE_FEATURES: [&str; 5] = ["cuda", "vulkan", "metal", "rocm", "wgpu"];

impl Global {
    /// Gives the thread pool its size. Call once, before any computation.
    ///
    /// # Errors
    /// [`CommandError::Failure`] when the operating system refuses the threads.
    pub fn start_threads(&self) -> Result<(), CommandError> {
        let Some(threads) = self.threads else { return Ok(()) };
        rayon::ThreadPoolBuilder::new().num_threads(threads.get()).build_global().map_err(|cause| {
            CommandError::failure(format_args!(
                "{threads} threads could not be started ({cause}); give --threads a smaller number"
            ))
        })
    }

    /// The device named by `--device`.
    ///
    /// # Errors
    /// [`CommandError::Input`] for an unknown name, or a device this build does not hold.
    pub fn device(&self) -> Result<Device, CommandError> {
        match self.device.as_str() {
            "flex" | "cpu" => Ok(Device::flex()),
            #[cfg(feature = "cuda")]
            "cuda" => Ok(Device::cuda(0)),
            #[cfg(feature = "vulkan")]
            "vulkan" => Ok(Device::vulkan(burn::tensor::DeviceKind::DefaultDevice)),
            #[cfg(feature = "metal")]
            "metal" => Ok(Device::metal(burn::tensor::DeviceKind::DefaultDevice)),
            #[cfg(feature = "rocm")]
            "rocm" => Ok(Device::rocm(0)),
            #[cfg(feature = "wgpu")]
            "wgpu" => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            known if DEVICE_FEATURES.contains(&known) => Err(CommandError::input(format_args!(
                "this build cannot compute on {known:?}; build it with `cargo build --release --features {known}`, \
                 or leave --device out to compute on the CPU"
            ))),
            other => Err(CommandError::input(format_args!(
                "--device knows flex (the CPU), {}; got {other:?}",
                DEVICE_FEATURES.join(", ")
            ))),
        }
    }
}
