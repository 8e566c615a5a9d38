//! `cargo xtask requirements`: writes `docs/conformance.md`, which lists what proves each requirement of the
//! specification.
//!
//! The page is generated from `requirements.tsv`, the `Proves:` and `Argued:` lines of the code, and the probes of the
//! checker. With `--check` nothing is written. A requirement with neither proof nor argument, an id that does not exist
//! and a page that is out of date are errors.

mod evidence;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use evidence::{Evidence, Kind};

use crate::root;

const DATA: &str = "crates/rap-conformance/requirements.tsv";
const PAGE: &str = "docs/conformance.md";
/// Directories that are searched for evidence.
const SOURCES: [&str; 3] = ["crates", "examples", "xtask"];
const CHAPTERS: [(&str, &str); 5] = [
    ("TC", "Closing threads"),
    ("CN", "Cancelling calls"),
    ("TR", "Transport"),
    ("SE", "Subscriptions and events"),
    ("LC", "Life of a call"),
];

struct Requirement<'a> {
    id: &'a str,
    level: &'a str,
    who: &'a str,
    text: &'a str,
}

/// Writes the page and reports missing evidence.
pub(crate) fn write() -> ExitCode {
    report(written(&root()))
}

/// Reports missing evidence and an outdated page.
pub(crate) fn check() -> ExitCode {
    report(checked(&root()))
}

fn report(outcome: io::Result<Vec<String>>) -> ExitCode {
    match outcome {
        Ok(mistakes) if mistakes.is_empty() => return ExitCode::SUCCESS,
        Ok(mistakes) => mistakes.iter().for_each(|mistake| eprintln!("xtask: {mistake}")),
        Err(error) => eprintln!("xtask: the requirements could not be read: {error}"),
    }
    ExitCode::FAILURE
}

fn written(root: &Path) -> io::Result<Vec<String>> {
    let data = fs::read_to_string(root.join(DATA))?;
    let (requirements, evidence) = (parse(&data), gather(root)?);
    fs::write(root.join(PAGE), page(&requirements, &evidence))?;
    Ok(mistakes(&requirements, &evidence))
}

fn checked(root: &Path) -> io::Result<Vec<String>> {
    let data = fs::read_to_string(root.join(DATA))?;
    let (requirements, evidence) = (parse(&data), gather(root)?);
    let mut mistakes = mistakes(&requirements, &evidence);
    if fs::read_to_string(root.join(PAGE)).unwrap_or_default() != page(&requirements, &evidence) {
        mistakes.push(format!("{PAGE} is out of date; run `cargo xtask requirements`"));
    }
    Ok(mistakes)
}

fn parse(data: &str) -> Vec<Requirement<'_>> {
    let row = |line| match str::split(line, '\t').collect::<Vec<&str>>()[..] {
        [id, level, who, text] => Some(Requirement { id, level, who, text }),
        _ => None,
    };
    data.lines().skip(1).filter_map(row).collect()
}

/// Collects all evidence, in the order of file names.
fn gather(root: &Path) -> io::Result<Vec<Evidence>> {
    let mut evidence = Vec::new();
    for file in sources(root)? {
        let name = file
            .strip_prefix(root)
            .expect("bug: every file was found below the root")
            .to_string_lossy()
            .into_owned();
        evidence.extend(evidence::of(&name, &fs::read_to_string(&file)?));
    }
    Ok(evidence)
}

/// Lists the Rust and Python files of the workspace, in the order of their names.
pub(crate) fn sources(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for source in SOURCES {
        walk(&root.join(source), &mut files)?;
    }
    files.sort();
    Ok(files)
}

fn walk(directory: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() && !path.ends_with("target") {
            walk(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "py") {
            files.push(path);
        }
    }
    Ok(())
}

fn mistakes(requirements: &[Requirement<'_>], evidence: &[Evidence]) -> Vec<String> {
    let mut mistakes = Vec::new();
    for Evidence { id, file, .. } in evidence {
        if !requirements.iter().any(|requirement| requirement.id == id) {
            mistakes.push(format!("{file} names {id}, which is not a requirement in {DATA}"));
        }
    }
    for requirement in requirements {
        // A probe checks any implementation. Evidence for ours is a test or an argument.
        let shown =
            |known: &Evidence| known.id == requirement.id && !matches!(known.kind, Kind::Probe { .. });
        if !evidence.iter().any(shown) {
            mistakes.push(format!("nothing proves {}: {}", requirement.id, requirement.text));
        }
    }
    mistakes
}

fn page(requirements: &[Requirement<'_>], evidence: &[Evidence]) -> String {
    let mut page = String::from(
        "# What proves each requirement\n\n\
         Written by `cargo xtask requirements` from the specification's normative sentences\n\
         ([requirements.tsv](../crates/rap-conformance/requirements.tsv)), the `Proves:` and `Argued:` lines of the code, and the\n\
         probes of `rap check`. Do not edit it. A *probe* checks any implementation from outside; the tests run the probes\n\
         against ours. A *test* checks only ours. If no test can show that a requirement is met, a comment in the code\n\
         *argues* why it is.\n",
    );
    for (prefix, title) in CHAPTERS {
        line(&mut page, &format!("\n## {title}"));
        for requirement in requirements.iter().filter(|requirement| requirement.id.starts_with(prefix)) {
            let Requirement { id, level, who, text } = requirement;
            // Markdown would treat `<group_id>` as an HTML tag.
            line(&mut page, &format!("\n**{id}** {level}, {who}: {}\n", text.replace('<', "&lt;")));
            for known in evidence.iter().filter(|known| known.id == *id) {
                line(&mut page, &format!("- {}", known.kind.to_markdown(&known.file)));
            }
        }
    }
    page
}

fn line(page: &mut String, text: &str) {
    writeln!(page, "{text}").expect("bug: writing to a string does not fail");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_requirement_has_evidence_and_the_page_is_up_to_date() {
        assert_eq!(checked(&root()).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn missing_evidence_and_unknown_ids_are_reported() {
        let requirements = parse("id\tlevel\twho\ttext\nTC-01\tMUST\ttool\tOne\nTC-02\tMAY\ttool\tTwo\n");
        let evidence = evidence::of("a.rs", "/// Proves: TC-01, TC-09\n#[test]\nfn it_is_so() {}\n");
        assert_eq!(
            mistakes(&requirements, &evidence),
            [
                format!("a.rs names TC-09, which is not a requirement in {DATA}"),
                "nothing proves TC-02: Two".into()
            ]
        );
        let page = page(&requirements, &evidence);
        assert!(page.contains("**TC-01** MUST, tool: One\n\n- test `it_is_so`"), "{page}");
    }
}
