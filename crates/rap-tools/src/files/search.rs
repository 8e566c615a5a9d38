//! Search of contents by a regular expression, within bounds of time, files and matches.

use std::io::Read;
use std::time::{Duration, Instant};

use rap_tool::prelude::*;
use regex_automata::meta::Regex;

use super::roots::RootedPath;
use super::{FILE_BYTES, open_file, walk};

/// Longest time of a search.
const WITHIN: Duration = Duration::from_secs(20);
/// Maximum number of files that are read, and of matches.
const FILES: usize = 20_000;
const MATCHES: usize = 200;
/// Maximum length of a line in the result, in characters.
const LINE_CHARS: usize = 300;
/// Maximum size of a compiled expression, in bytes.
const PATTERN_BYTES: usize = 1024 * 1024;

pub(super) fn search(rooted: &RootedPath<'_>, pattern: &str) -> Result<String> {
    let config = Regex::config().nfa_size_limit(Some(PATTERN_BYTES)).hybrid_cache_capacity(PATTERN_BYTES);
    let regex = Regex::builder().configure(config).build(pattern);
    let regex =
        regex.map_err(|error| Error::new(format!("the pattern is not a regular expression: {error}")))?;
    let (end, mut files, mut found, mut cut) = (Instant::now() + WITHIN, 0, Vec::new(), None);
    walk(rooted, |dir, path, shown| {
        files += 1;
        if files > FILES || Instant::now() > end {
            cut = Some("not all files were searched; search a smaller directory");
            return Ok(false);
        }
        // A file that cannot be read or was just deleted is left out.
        let Ok(file) = open_file(dir, path) else { return Ok(true) };
        let mut content = Vec::new();
        let read = file.take(FILE_BYTES + 1).read_to_end(&mut content);
        if read.is_err() || content.len() as u64 > FILE_BYTES {
            return Ok(true);
        }
        let Ok(content) = String::from_utf8(content) else { return Ok(true) };
        for (number, line) in content.lines().enumerate() {
            if !regex.is_match(line) {
                continue;
            }
            if found.len() == MATCHES {
                cut = Some("there are more matches; use a narrower pattern");
                return Ok(false);
            }
            let line: String = line.trim().chars().take(LINE_CHARS).collect();
            found.push(format!("{shown}:{}: {line}", number + 1));
        }
        Ok(true)
    })?;
    if found.is_empty() && cut.is_none() {
        return Ok("no matches".into());
    }
    found.extend(cut.map(|why| format!("[{why}]")));
    Ok(found.join("\n"))
}
