//! Finds evidence for requirements in a source file. Pure functions on text.

/// A test, an argument or a probe for one requirement.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Evidence {
    pub(crate) id: String,
    pub(crate) file: String,
    pub(crate) kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A test with a line `Proves: TC-01, TC-02` in its doc comment.
    Test { name: String },
    /// A comment `Argued: TC-01 why`.
    Argument { why: String },
    /// A probe of the checker.
    Probe { name: String },
}

impl Kind {
    /// Formats a line of the page, which is in a directory below the root.
    pub(crate) fn to_markdown(&self, file: &str) -> String {
        let link = format!("[{file}](../{file})");
        match self {
            Kind::Test { name } => format!("test `{name}` in {link}"),
            Kind::Argument { why } => format!("argued in {link}: {why}"),
            Kind::Probe { name } => format!("probe `{name}` in {link}"),
        }
    }
}

/// Finds the evidence in a file.
pub(crate) fn of(file: &str, text: &str) -> Vec<Evidence> {
    // Probes in test files are fixtures and do not count.
    let has_probes = file.starts_with("crates/rap-conformance/src/") && !file.ends_with("tests.rs");
    let found = comments(text).chain(has_probes.then(|| probes(text)).into_iter().flatten());
    let named = |(ids, kind): (Vec<String>, Kind)| ids.into_iter().map(move |id| (id, kind.clone()));
    found.flat_map(named).map(|(id, kind)| Evidence { id, file: file.to_owned(), kind }).collect()
}

fn comments(text: &str) -> impl Iterator<Item = (Vec<String>, Kind)> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    (0..lines.len()).filter_map(move |number| {
        if let Some(listed) = lines[number].strip_prefix("/// Proves: ") {
            let name = lines[number..].iter().find_map(|line| function(line)).unwrap_or("unknown");
            return Some((ids(listed).0, Kind::Test { name: name.to_owned() }));
        }
        let argued = lines[number].trim_start_matches('/').trim_start().strip_prefix("Argued: ");
        let is_comment = lines[number].starts_with("//");
        argued.filter(|_| is_comment).map(|argued| {
            let (ids, why) = ids(argued);
            (ids, Kind::Argument { why: why.trim_end_matches('.').to_owned() })
        })
    })
}

/// Splits a text into the ids at its beginning and the rest.
fn ids(text: &str) -> (Vec<String>, &str) {
    let mut rest = text;
    let mut ids = Vec::new();
    while let Some(id) = rest.get(..5).filter(|id| is_id(id)) {
        ids.push(id.to_owned());
        rest = rest[5..].trim_start_matches(',').trim_start();
    }
    (ids, rest)
}

fn is_id(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() == 5
        && bytes[..2].iter().all(u8::is_ascii_uppercase)
        && bytes[2] == b'-'
        && bytes[3..].iter().all(u8::is_ascii_digit)
}

fn function(line: &str) -> Option<&str> {
    let (_, after) = line.split_once("fn ").filter(|(before, _)| !before.contains("//"))?;
    after.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// Finds each `Probe { name: "…", requirements: &["…", …], … }`.
fn probes(text: &str) -> impl Iterator<Item = (Vec<String>, Kind)> {
    text.split("Probe {").skip(1).filter_map(|probe| {
        let (_, name) = probe.split_once("name: \"")?;
        let (name, rest) = name.split_once('"')?;
        let (_, listed) = rest.split_once("requirements: &[")?;
        let (listed, _) = listed.split_once(']')?;
        let ids = listed.split('"').filter(|id| is_id(id)).map(str::to_owned).collect();
        Some((ids, Kind::Probe { name: name.to_owned() }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(String, Kind)> {
        of("crates/rap-conformance/src/f.rs", text)
            .into_iter()
            .map(|evidence| (evidence.id, evidence.kind))
            .collect()
    }

    #[test]
    fn tests_arguments_and_probes_are_found() {
        let test = Kind::Test { name: "it_is_so".into() };
        let text = "    /// Proves: TC-01, SE-20\n    #[tokio::test]\n    async fn it_is_so() {\n";
        assert_eq!(found(text), [("TC-01".into(), test.clone()), ("SE-20".into(), test)]);
        let argument = Kind::Argument { why: "because, as LC-02 says, it is".into() };
        let text = "x(); // no\n// Argued: TC-02, CN-02 because, as LC-02 says, it is.\n";
        assert_eq!(found(text), [("TC-02".into(), argument.clone()), ("CN-02".into(), argument)]);
        let probe = Kind::Probe { name: "knocks".into() };
        let text = "Probe {\n  name: \"knocks\",\n  requirements: &[\"TR-01\"],\n  checks: \"Knocks.\",\n}";
        assert_eq!(found(text), [("TR-01".into(), probe)]);
        assert_eq!(found("Proves: TC-01 in prose, and struct Probe { name: &'static str }"), []);
    }
}
