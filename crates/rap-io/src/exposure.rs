//! Warns about files with secrets or conversations that other users of the machine can read.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Returns true if users other than its owner can read or write a file.
pub(crate) fn is_exposed(file: &Metadata) -> bool {
    file.mode() & 0o077 != 0
}

/// Logs a warning with the command that protects those of the files which other users can read or write. Files that do
/// not exist are ignored.
pub fn warn_if_exposed(paths: &[PathBuf]) {
    if let Some(command) = protecting_command(paths) {
        tracing::warn!("other users can read or write files of this server; run: {command}");
    }
}

fn protecting_command(paths: &[PathBuf]) -> Option<String> {
    let exposed = |path: &&PathBuf| fs::metadata(path).is_ok_and(|file| is_exposed(&file));
    let exposed: Vec<String> = paths.iter().filter(exposed).map(|path| quoted(path)).collect();
    (!exposed.is_empty()).then(|| format!("chmod 600 {}", exposed.join(" ")))
}

/// Quotes a path for the shell, if it needs that.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte);
    if text.bytes().all(is_plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_command_names_the_files_that_others_can_read_or_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let files = [("private", 0o600), ("it's group", 0o640), ("others", 0o604), ("written", 0o602)];
        let mut paths = vec![path("missing")];
        for (name, mode) in files {
            fs::write(path(name), "").unwrap();
            fs::set_permissions(path(name), fs::Permissions::from_mode(mode)).unwrap();
            paths.push(path(name));
        }
        let at = dir.path().display();
        let expected = format!("chmod 600 '{at}/it'\\''s group' {at}/others {at}/written");
        assert_eq!(protecting_command(&paths), Some(expected));
        assert_eq!(protecting_command(&paths[..2]), None);
    }
}
