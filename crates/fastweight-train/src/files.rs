//! Files that are written whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::checkpoint::CHECKPOINTS;
use crate::compare::RESULTS;
use crate::error::TrainError;

/// Locked by the process that writes to a folder.
pub(crate) const LOCK: &str = ".lock";

/// Writes `bytes` to `path`: a hidden file beside it, synced, then renamed.
///
/// # Errors
/// [`TrainError::Io`]; `path` then holds what it held before.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let temporary = hidden(path);
    let write = || -> io::Result<()> {
        write_synced(&temporary, bytes)?;
        fs::rename(&temporary, path)?;
        sync_folder(parent(path))
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        TrainError::io("write", path, source)
    })
}

/// Writes a new file and syncs it.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes renames and new names in `folder` durable. Only Unix lets folders be opened for this.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// The hidden sibling `.NAME.partial` where something is written before it takes its name.
pub(crate) fn hidden(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!(".{name}.partial"))
}

/// The folder that holds `path`.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Refuses a folder that no run was ever in when it holds a file of these names: the run would write over it.
pub(crate) fn refuse_others_files(folder: &Path, names: &[&str]) -> Result<(), TrainError> {
    let has = |name: &&&str| folder.join(name).exists();
    if [LOCK, CHECKPOINTS, RESULTS].iter().any(|name| has(&name)) {
        return Ok(());
    }
    match names.iter().find(has) {
        None => Ok(()),
        Some(name) => Err(TrainError::ForeignFolder {
            path: folder.to_path_buf(),
            reason: format!("holds {name}, which no run wrote and this one would replace"),
        }),
    }
}

/// Creates `folder` with its parents.
pub(crate) fn create_folder(folder: &Path) -> Result<(), TrainError> {
    fs::create_dir_all(folder).map_err(|source| TrainError::io("create the folder", folder, source))
}

/// Holds a folder for one process; the system lets go when the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct FolderLock {
    _file: File,
}

impl FolderLock {
    /// Takes the lock of `folder`, which exists.
    pub fn take(folder: &Path) -> Result<Self, TrainError> {
        let path = folder.join(LOCK);
        let file = File::create(&path).map_err(|source| TrainError::io("write", &path, source))?;
        match file.try_lock() {
            Ok(()) => Ok(FolderLock { _file: file }),
            Err(fs::TryLockError::WouldBlock) => Err(TrainError::Busy { path: folder.to_path_buf() }),
            Err(fs::TryLockError::Error(source)) => Err(TrainError::io("lock", &path, source)),
        }
    }
}
