//! Checks that comment lines are not too wide to be read.

use std::process::ExitCode;
use std::{fs, io};

use crate::{requirements, root};

/// Maximum width of a comment line, in characters. Comments are wrapped at 120.
const MAX_WIDTH: usize = 125;

/// Lists comment lines that are too wide.
pub(crate) fn check() -> ExitCode {
    match too_wide() {
        Ok(lines) if lines.is_empty() => return ExitCode::SUCCESS,
        Ok(lines) => {
            lines.iter().for_each(|line| eprintln!("xtask: {line}: wrap this comment at 120 characters"))
        }
        Err(error) => eprintln!("xtask: the comments could not be read: {error}"),
    }
    ExitCode::FAILURE
}

fn too_wide() -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    let files = requirements::sources(&root())?;
    for path in files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs")) {
        let text = fs::read_to_string(path)?;
        let lines = text.lines().enumerate().filter(|(_, line)| is_too_wide(line));
        found.extend(lines.map(|(number, _)| format!("{}:{}", path.display(), number + 1)));
    }
    Ok(found)
}

/// Rows of tables and hidden lines of doc tests cannot be wrapped.
fn is_too_wide(line: &str) -> bool {
    let Some(comment) = line.trim_start().strip_prefix("//") else { return false };
    let text = comment.trim_start_matches(['/', '!']).trim_start();
    !text.starts_with(['|', '#']) && line.chars().count() > MAX_WIDTH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_comments_are_found_and_tables_and_code_are_not() {
        let wide = "x".repeat(MAX_WIDTH);
        for begin in ["// ", "/// ", "    //! "] {
            assert!(is_too_wide(&format!("{begin}{wide}")), "{begin}");
        }
        for line in [format!("/// | {wide} |"), format!("//! # {wide}"), format!("let x = \"{wide}\";")] {
            assert!(!is_too_wide(&line), "{line}");
        }
        assert!(!is_too_wide("// short"));
    }
}
