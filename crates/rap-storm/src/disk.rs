//! A small file system for the runtime's files, which can be filled.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const SIZE: &str = "size=192m";
const FILLER: &str = "filler";

/// A tmpfs, which only root can mount. It is unmounted on drop.
pub(crate) struct Disk {
    path: PathBuf,
}

impl Disk {
    /// Mounts a file system on a directory. Returns `None` if that is not permitted.
    pub(crate) fn mount(path: &Path) -> Option<Disk> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", SIZE, "rap-storm"]).arg(path).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then(|| Disk { path: path.to_owned() })
    }

    /// Fills the disk, and makes room again after a time.
    pub(crate) async fn fill(&self, time: Duration) {
        let path = self.path.join(FILLER);
        if let Ok(mut file) = File::create(&path) {
            let zeros = vec![0; 64 * 1024];
            while file.write_all(&zeros).is_ok() {}
        }
        tokio::time::sleep(time).await;
        self.free();
    }

    pub(crate) fn free(&self) {
        // It is missing unless the disk is full.
        fs::remove_file(self.path.join(FILLER)).ok();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A process that still uses it keeps it until it ends.
        Command::new("umount").arg("-l").arg(&self.path).status().ok();
    }
}
