//! A wall clock that jumps, for one server. The library libfaketime, which is loaded into its process, adds the offset
//! in a file to the time. The monotonic clock never jumps, as on a real machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Path of the library below the directory of libraries for the machine's architecture.
const LIBRARY: &str = "faketime/libfaketimeMT.so.1";

#[derive(Debug)]
pub(crate) struct Clock {
    library: PathBuf,
    /// File with the offset in seconds.
    file: PathBuf,
}

/// Returns the path of the library, if it is installed.
pub(crate) fn library() -> Option<PathBuf> {
    let directories = fs::read_dir("/usr/lib").ok()?.flatten();
    directories.map(|directory| directory.path().join(LIBRARY)).find(|path| path.exists())
}

impl Clock {
    /// Makes a clock that shows the real time.
    pub(crate) fn new(library: &Path, file: PathBuf) -> Clock {
        let clock = Clock { library: library.to_owned(), file };
        clock.set(0);
        clock
    }

    /// Sets the clock to the real time and this number of seconds.
    pub(crate) fn set(&self, seconds: i64) {
        // The file is replaced at once, so that no process reads a part of it.
        let new = self.file.with_extension("new");
        fs::write(&new, format!("{seconds:+}\n")).and_then(|()| fs::rename(&new, &self.file)).unwrap();
    }

    /// Makes a process use the clock.
    pub(crate) fn load_into(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library).env("FAKETIME_TIMESTAMP_FILE", &self.file);
        for setting in ["FAKETIME_NO_CACHE", "FAKETIME_DONT_FAKE_MONOTONIC", "NO_FAKE_STAT"] {
            command.env(setting, "1");
        }
    }

    /// Removes what the library leaves behind when its process is killed. A later process with the same id would not start.
    pub(crate) fn clean_up(id: u32) {
        for name in ["faketime_shm", "sem.faketime_sem"] {
            fs::remove_file(format!("/dev/shm/{name}_{id}")).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_sees_the_time_of_its_clock() {
        let Some(library) = library() else { return eprintln!("libfaketime is missing") };
        let directory = tempfile::tempdir().unwrap();
        let clock = Clock::new(&library, directory.path().join("clock"));
        let ahead = || {
            let mut date = Command::new("date");
            date.arg("+%s");
            clock.load_into(&mut date);
            let shown: i64 =
                String::from_utf8(date.output().unwrap().stdout).unwrap().trim().parse().unwrap();
            shown - std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() as i64
        };
        for seconds in [0, 120, -300] {
            clock.set(seconds);
            assert!((seconds - 5..=seconds + 5).contains(&ahead()), "{seconds}: {}", ahead());
        }
    }
}
