//! Tells the report which compiler built it.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let compiler = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(compiler).arg("--version").output().ok();
    if let Some(version) = version.and_then(|output| String::from_utf8(output.stdout).ok()) {
        println!("cargo:rustc-env=FASTWEIGHT_RUSTC={}", version.trim());
    }
}
