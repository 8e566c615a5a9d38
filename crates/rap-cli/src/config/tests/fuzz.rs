//! Fuzz target for configurations.

use rap_testkit::fuzz::Fuzz;

use super::*;

const SECRET: &str = "correct-horse-battery";
const WORDS: &[&str] = &[
    "[server]",
    "listen",
    "public_url",
    "tokens",
    "url_policy",
    "allow_hosts",
    "[store]",
    "url",
    "[model]",
    "provider",
    "name",
    "base_url",
    "api_key",
    "[[agent]]",
    "[agent]",
    "system",
    "tools",
    "approve",
    "[[tool_server]]",
    "bearer",
    "[limits]",
    "call_timeout",
    "body",
    "\"none\"",
    "\"10m\"",
    "\"8MiB\"",
    "\"env:SECRET\"",
    "\"file:missing\"",
    "\"sqlite:rap.db\"",
    "\"127.0.0.1:7420\"",
    "\"0.0.0.0:0\"",
    "\"http://u:p@h:1/x\"",
    "\"scripted\"",
    "= ",
    "\n",
    "[",
    "]",
    "{",
    "}",
    "'''",
    "\"\"\"",
    "#",
    "true",
    "1979-05-27",
    "0x1F",
    "inf",
];

fn seeds() -> Vec<Vec<u8>> {
    let everything = init::text();
    // The commented lines of that file are settings too.
    let uncommented = everything.replace("\n# ", "\n").replace("\n#", "\n");
    let example = format!(
        r#"[server]
listen = "127.0.0.1:7420"
tokens = ["{SECRET}", "env:SECRET"]
allow_hosts = ["h:1"]
[store]
url = "sqlite:rap.db"
[model]
provider = "openai"
name = "m"
api_key = "{SECRET}"
[[agent]]
name = "a"
tools = ["*"]
[[tool_server]]
url = "http://127.0.0.1:1"
bearer = "{SECRET}"
[limits]
call_timeout = "2h"
body = "8MiB"
held_per_thread = 5
"#
    );
    [everything, uncommented, example].map(String::into_bytes).to_vec()
}

/// An accepted configuration is accepted again. Each line of an error names the file and one of its lines.
#[test]
fn configurations() {
    let environment = Environment::from([("SECRET".to_owned(), SECRET.to_owned())]);
    let resolver = Resolver::new(&environment, Path::new("/nonexistent/rap.toml"));
    Fuzz { name: "configurations", seeds: seeds(), words: WORDS }.run(|input| {
        let text = String::from_utf8_lossy(input);
        let read = || Draft::from_document(document::parse(&text, "rap.toml")?, &resolver).into_result();
        match read() {
            Ok(config) => {
                assert!(read().is_ok());
                format!("{} agents", config.agents.len())
            }
            Err(error) => {
                let error = error.to_string();
                check_error(&error, text.lines().count());
                error
            }
        }
    });
}

fn check_error(error: &str, lines: usize) {
    for mistake in error.lines() {
        let rest = mistake.strip_prefix("rap.toml:").unwrap_or_else(|| panic!("no file in {mistake:?}"));
        let line = rest.split(':').next().and_then(|line| line.parse().ok());
        assert!(line.is_some_and(|line| (1..=lines + 1).contains(&line)), "{lines} lines: {mistake}");
    }
}
