//! Reads the `[[tool_server]]` tables of servers that `rap serve` starts: a command, or a server that ships with rap.

use rap_io::secret_box::Key;
use rap_protocol::Secret;
use sha2::{Digest, Sha256};

use super::document::{Setting, Value};
use super::read::address;
use super::resolver::Resolver;
use super::section::Section;
use super::{Location, Problem, ToolOptions, ToolProgram, ToolSource, value};
use crate::tool_process::START_WITHIN;

pub(super) const PROGRAM: &str =
    "an array of the program and its arguments such as [\"python3\", \"server.py\"]";

pub(super) fn read_started(
    section: &mut Section<'_>,
    at: &Location,
    resolver: &Resolver<'_>,
) -> Option<ToolSource> {
    let command = section.read_list("command", PROGRAM, word);
    let run = section.read("run", shipped);
    let name = section.read("name", name);
    let bearer = section.read("bearer", |setting| resolver.secret(setting));
    let migration_key = section.read("migration_key", |setting| {
        let key = resolver.secret(setting)?;
        let expected = "64 hexadecimal digits or the base64 of 32 bytes, or env:NAME, or file:PATH";
        Key::parse(key.expose()).map_err(|_| Problem::Expected(expected))?;
        Ok(key)
    });
    let options = read_options(section, run.as_deref(), resolver);
    // A server that ships with rap has nothing to wait for.
    let start_timeout = match command {
        Some(_) => section.read("start_timeout", value::duration(value::Zero::Refused)),
        None => None,
    };
    let (name, program) = match (command, run) {
        (Some(command), _) if command.is_empty() => {
            section.refuse("command", at.clone(), Problem::Expected(PROGRAM));
            return None;
        }
        (Some(command), _) => (name.unwrap_or_else(|| command_name(&command)), ToolProgram::Command(command)),
        (None, Some(run)) => (name.unwrap_or_else(|| run.clone()), ToolProgram::Shipped(run, options)),
        (None, None) => return None,
    };
    let start_timeout = start_timeout.unwrap_or(START_WITHIN);
    let program = Box::new(program);
    Some(ToolSource::Start { name, program, bearer, start_timeout, migration_key })
}

/// Reads the options of the server that ships with rap. Those of another one are unknown keys.
fn read_options(section: &mut Section<'_>, run: Option<&str>, resolver: &Resolver<'_>) -> ToolOptions {
    let mut options = ToolOptions::default();
    if matches!(run, Some("shell" | "files")) {
        let expected = "an array of directories such as [\"/srv/project\"]";
        let path = |item: &Setting| Ok(resolver.path(value::text(item)?, &item.location));
        options.roots = section.read_list("roots", expected, path).unwrap_or_default();
    }
    if run == Some("shell") {
        let expected = "an array of commands such as [\"git *\", \"make test\"]";
        options.allow = section.read_list("allow", expected, word).unwrap_or_default();
    }
    if run == Some("webhook") {
        options.listen = section.read("listen", address);
        options.public_url = section.read("public_url", value::base_url);
        options.secrets = section.read("secrets", |setting| secrets(setting, resolver)).unwrap_or_default();
    }
    options
}

fn secrets(setting: &Setting, resolver: &Resolver<'_>) -> Result<Vec<(String, Secret)>, Problem> {
    let Value::Table(table) = &setting.value else {
        let expected = "a table such as { github = \"env:GITHUB_SECRET\" }".to_owned();
        return Err(Problem::Found { expected, found: setting.value.kind().to_owned() });
    };
    table.iter().map(|(source, secret)| Ok((source.clone(), resolver.secret(secret)?))).collect()
}

pub(super) fn word(setting: &Setting) -> Result<String, Problem> {
    let text = value::text(setting)?;
    if text.is_empty() || text.contains('\0') {
        return Err(Problem::Expected("a string that is not empty"));
    }
    Ok(text.to_owned())
}

fn shipped(setting: &Setting) -> Result<String, Problem> {
    let known = |text: &str| rap_tools::NAMES.contains(&text).then(|| text.to_owned());
    value::parse_text(setting, "\"shell\", \"files\", \"http\", \"timer\" or \"webhook\"", known)
}

/// Parses a name that is also the name of a directory.
pub(super) fn name(setting: &Setting) -> Result<String, Problem> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    value::parse_text(setting, "1 to 64 letters, digits, _, - and ., not beginning with a dot", |text| {
        let fits = (1..=64).contains(&text.len()) && !text.starts_with('.') && text.bytes().all(plain);
        fits.then(|| text.to_owned())
    })
}

/// Returns a name for a command without one: the file name of its program, and a hash of the command. It contains no
/// argument, since that may be a secret.
fn command_name(command: &[String]) -> String {
    let program = command.first().map_or("", |program| program.rsplit('/').next().unwrap_or(program));
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '-' };
    let program: String = program.chars().take(32).map(plain).collect();
    let digest = Sha256::digest(command.join("\0"));
    let hash: String = digest[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{program}-{hash}")
}
