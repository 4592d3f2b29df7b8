//! Running the built command on files of a temporary folder.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

/// A folder for one test, taken away at its end.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The path as an argument.
    pub fn arg(&self, name: &str) -> String {
        self.path(name).to_str().expect("a UTF-8 path").to_owned()
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), text).expect("a file in the temporary folder");
        self.arg(name)
    }
}

/// What one run of the command left.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("standard output is UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("standard error is UTF-8"),
        }
    }
}

impl Ran {
    /// The run, which must have succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    /// The run, which must have ended with `code`, nothing on standard output and one readable paragraph
    /// on standard error that has every word of `words`.
    #[track_caller]
    pub fn refused(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.stdout, "", "{self:#?}");
        self.failed(code, words)
    }

    /// As [`Ran::refused`], with results on standard output.
    #[track_caller]
    pub fn failed(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {self:#?}");
        }
        for noise in ["panicked", "RUST_BACKTRACE", "internal error", "Err("] {
            assert!(!self.stderr.contains(noise), "{noise:?} in {self:#?}");
        }
        self
    }

    /// Standard output as JSON objects, one a line.
    #[track_caller]
    pub fn json(&self) -> Vec<serde_json::Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect()
    }
}

pub fn command<S: AsRef<str>>(args: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastweight"));
    command.args(args.iter().map(AsRef::as_ref)).stdin(Stdio::null());
    command
}

pub fn run<S: AsRef<str>>(args: &[S]) -> Ran {
    command(args).output().expect("the command starts").into()
}

/// Runs with `input` on standard input.
pub fn run_with_input<S: AsRef<str>>(args: &[S], input: &[u8]) -> Ran {
    let mut child = command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input).expect("the command reads its input");
    drop(stdin);
    child.wait_with_output().expect("the command ends").into()
}

/// A running command, killed at the latest when dropped.
pub struct Running(pub Child);

impl Running {
    pub fn start<S: AsRef<str>>(args: &[S]) -> Self {
        let child = command(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Self(child.expect("the command starts"))
    }

    /// Polls until `reached`, then kills the process (SIGKILL) in whatever it is doing. True when it was
    /// still running.
    pub fn kill_when(mut self, mut reached: impl FnMut() -> bool) -> bool {
        loop {
            if reached() {
                let running = self.0.try_wait().expect("a child").is_none();
                self.0.kill().expect("a child can be killed");
                self.0.wait().expect("a killed child ends");
                return running;
            }
            if self.0.try_wait().expect("a child").is_some() {
                return false;
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lines of a file, none when it does not exist yet.
pub fn lines(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).map(|text| text.lines().map(str::to_owned).collect()).unwrap_or_default()
}
