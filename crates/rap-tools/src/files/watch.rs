//! `watch_files`: compares the files with their last state at regular intervals.
//!
//! The state is stored with each event. Changes during a restart of the server are found after it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use globset::{GlobBuilder, GlobMatcher};
use rap_tool::prelude::*;
use serde_json::json;

use super::roots::Roots;
use super::walk;

/// Maximum number of files that one subscription watches.
const FILES: usize = 5000;
/// Pause between two scans, and while files still change. Scans may take at most a twentieth of the time.
const PAUSE: Duration = Duration::from_millis(500);
const SETTLE: Duration = Duration::from_millis(100);
const SHARE: u32 = 20;
/// Maximum number of scans that wait until files no longer change.
const SETTLING_SCANS: usize = 20;
/// Maximum number of paths of one kind in an event.
const PATHS: usize = 100;

/// Time of change and size of the files, by path.
type FileStates = BTreeMap<String, String>;

pub(super) async fn watch(
    roots: Arc<Roots>,
    path: String,
    glob: Option<String>,
    subscribe: Subscribe,
) -> Result<()> {
    let glob = glob.map(|glob| {
        let built = GlobBuilder::new(&glob).literal_separator(true).build();
        built.map_err(|error| Error::new(format!("the glob is not valid: {error}")))
    });
    let glob = Arc::new(glob.transpose()?.map(|glob| glob.compile_matcher()));
    let rescan = || scan(Arc::clone(&roots), path.clone(), Arc::clone(&glob));
    let before: Option<FileStates> = subscribe.cursor()?;
    let is_new = before.is_none();
    let mut known = match before {
        Some(known) => known,
        None => rescan().await?.0,
    };
    let subscription = subscribe.confirm(format!("Watching {} files.", known.len())).await?;
    if is_new {
        subscription.save(&known).await?;
    }
    let mut pause = Duration::ZERO;
    loop {
        tokio::time::sleep(pause).await;
        let (mut now, took) = rescan().await?;
        pause = PAUSE.max(took * SHARE);
        if now == known {
            continue;
        }
        for _ in 0..SETTLING_SCANS {
            tokio::time::sleep(SETTLE).await;
            let next = rescan().await?.0;
            if next == now {
                break;
            }
            now = next;
        }
        if let Some(text) = changes(&known, &now) {
            subscription.send(Event::new(text).cursor(&now)).await?;
        }
        known = now;
    }
}

/// Reads the state of the files. A directory that is gone has none.
async fn scan(
    roots: Arc<Roots>,
    path: String,
    glob: Arc<Option<GlobMatcher>>,
) -> Result<(FileStates, Duration)> {
    let looked = tokio::task::spawn_blocking(move || {
        let (began, mut known) = (Instant::now(), FileStates::new());
        let rooted = roots.resolve(&path)?;
        match rooted.dir.metadata(&rooted.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((known, began.elapsed())),
            Err(error) => return Err(rooted.failed(&error)),
            Ok(_) => {}
        }
        walk(&rooted, |dir, file, shown| {
            if glob.as_ref().as_ref().is_some_and(|glob| !glob.is_match(shown)) {
                return Ok(true);
            }
            if known.len() == FILES {
                let text =
                    format!("there are more than {FILES} files; watch a smaller directory, or set glob");
                return Err(Error::new(text));
            }
            // A file that was just deleted is left out.
            if let Ok(metadata) = dir.symlink_metadata(file) {
                let changed = metadata.modified().map_or(SystemTime::UNIX_EPOCH, |time| time.into_std());
                let nanos = changed.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
                known.insert(shown.to_owned(), format!("{nanos:x}.{:x}", metadata.len()));
            }
            Ok(true)
        })?;
        Ok((known, began.elapsed()))
    });
    looked.await.map_err(|_| Error::new("the tool failed unexpectedly"))?
}

/// Returns the text of the event about the difference, or `None` if there is none.
fn changes(before: &FileStates, now: &FileStates) -> Option<String> {
    let mut event = serde_json::Map::new();
    let mut add = |kind: &str, paths: Vec<&String>| {
        if !paths.is_empty() {
            let more = paths.len().saturating_sub(PATHS);
            event.insert(kind.into(), json!(&paths[..paths.len() - more]));
            if more > 0 {
                event.insert(format!("more_{kind}"), json!(more));
            }
        }
    };
    add("created", now.keys().filter(|path| !before.contains_key(*path)).collect());
    add(
        "changed",
        now.iter()
            .filter(|(path, state)| before.get(*path).is_some_and(|old| old != *state))
            .map(|(path, _)| path)
            .collect(),
    );
    add("deleted", before.keys().filter(|path| !now.contains_key(*path)).collect());
    (!event.is_empty()).then(|| serde_json::Value::Object(event).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states(files: &[(&str, &str)]) -> FileStates {
        files.iter().map(|(path, state)| ((*path).to_owned(), (*state).to_owned())).collect()
    }

    #[test]
    fn an_event_names_what_was_created_changed_and_deleted() {
        let before = states(&[("a", "1"), ("b", "1"), ("c", "1")]);
        let now = states(&[("a", "1"), ("b", "2"), ("d", "1")]);
        assert_eq!(changes(&before, &now).unwrap(), r#"{"changed":["b"],"created":["d"],"deleted":["c"]}"#);
        assert_eq!(changes(&now, &now), None);
        let many: FileStates = (0..150).map(|number| (format!("{number:03}"), "1".into())).collect();
        let text = changes(&FileStates::new(), &many).unwrap();
        assert!(
            text.contains(r#""099""#) && !text.contains(r#""100""#) && text.contains(r#""more_created":50"#)
        );
    }
}
