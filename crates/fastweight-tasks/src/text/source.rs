//! Reading text from a file or a folder of files.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::TaskError;

/// One file of a [`TextSource`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// The file it was read from.
    pub path: PathBuf,
    /// Its bytes within [`TextSource::text`].
    pub bytes: Range<usize>,
}

/// UTF-8 text in memory, with the boundaries of the files it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextSource {
    text: String,
    documents: Vec<Document>,
}

impl TextSource {
    /// Reads a file, or every file below a folder in the order of their paths.
    ///
    /// In a folder, hidden files, empty files and links to folders are passed over. Files are joined as they
    /// are, with nothing in between.
    ///
    /// # Errors
    /// [`TaskError::Read`], [`TaskError::NotAFile`], [`TaskError::NotUtf8`] with the offset of the first bad
    /// byte, [`TaskError::Empty`] when there is no text at all.
    pub fn open(path: &Path) -> Result<Self, TaskError> {
        let kind = fs::metadata(path).map_err(|source| TaskError::Read { path: path.into(), source })?;
        let mut files = Vec::new();
        if kind.is_dir() {
            list(path, &mut files)?;
            files.sort();
        } else if kind.is_file() {
            files.push(path.into());
        } else {
            return Err(TaskError::NotAFile { path: path.into() });
        }

        let mut source = Self { text: String::new(), documents: Vec::new() };
        for file in files {
            let content = read(&file)?;
            if !content.is_empty() {
                let start = source.text.len();
                source.text.push_str(&content);
                source.documents.push(Document { path: file, bytes: start..source.text.len() });
            }
        }
        if source.text.is_empty() {
            return Err(TaskError::Empty { path: path.into() });
        }
        Ok(source)
    }

    /// One text that is already in memory; `name` stands in for its path.
    ///
    /// # Errors
    /// [`TaskError::Empty`] when there is no text.
    pub fn from_text(name: &str, text: &str) -> Result<Self, TaskError> {
        if text.is_empty() {
            return Err(TaskError::Empty { path: name.into() });
        }
        let documents = vec![Document { path: name.into(), bytes: 0..text.len() }];
        Ok(Self { text: text.to_owned(), documents })
    }

    /// All the text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The files, in order; their ranges follow each other without gaps.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// The nearest start of a character at or before byte `byte`.
    pub(crate) fn character_start(&self, byte: usize) -> usize {
        (0..=byte.min(self.text.len())).rev().find(|&i| self.text.is_char_boundary(i)).unwrap_or(0)
    }
}

/// Adds every regular file below `folder`, hidden ones and links to folders left out.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), TaskError> {
    let fail = |path: &Path| {
        let path = path.to_path_buf();
        move |source| TaskError::Read { path, source }
    };
    for entry in fs::read_dir(folder).map_err(fail(folder))? {
        let entry = entry.map_err(fail(folder))?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        let kind = entry.file_type().map_err(fail(&path))?;
        if kind.is_dir() {
            list(&path, files)?;
        } else if fs::metadata(&path).map_err(fail(&path))?.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, TaskError> {
    let bytes = fs::read(path).map_err(|source| TaskError::Read { path: path.into(), source })?;
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let line = 1 + bytes[..offset].iter().filter(|&&byte| byte == b'\n').count();
        TaskError::NotUtf8 { path: path.into(), offset, line, byte: bytes[offset] }
    })
}
