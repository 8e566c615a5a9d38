//! Reads `[[mcp_server]]` tables: an MCP server that is a command, or one with a URL.

use rap_agent::Valid;
use rap_protocol::Secret;
use rap_tools::mcp::Trust;
use url::Url;

use super::document::{Setting, Table, Value};
use super::read::{location_in, read_in, read_within};
use super::resolver::Resolver;
use super::section::{Diagnostics, Section};
use super::started_tool::{PROGRAM, name, word};
use super::{Location, McpOauth, McpServer, McpSource, Problem, limits, value};

const NO_SOURCE: &str = "every MCP server needs a command or a URL";
const ENVIRONMENT: &str = "a table of strings such as { TOKEN = \"env:TOKEN\" }";

pub(super) fn read_mcp_servers(
    tables: Vec<(Location, Table)>,
    diagnostics: &mut Diagnostics,
    resolver: &Resolver<'_>,
) -> Vec<McpServer> {
    let mut servers: Vec<(Location, McpServer)> = Vec::new();
    for (begin, mut table) in tables {
        let at = location_in(&table, "name", begin);
        let oauth = table.remove("oauth");
        let oauth_at = oauth.as_ref().map(|setting| setting.location.clone());
        let oauth = oauth.and_then(|setting| read_oauth(setting, diagnostics, resolver));
        let server = read_in("mcp_server", table, diagnostics, |section| {
            section.mark_known(&["oauth"]);
            let server = read_server(section, &at, oauth_at, resolver)?;
            if let Some((other, _)) = servers.iter().find(|(_, other)| other.name == server.name) {
                section.refuse("name", at.clone(), Problem::Repeated(other.clone()));
            }
            Some(server)
        });
        let oauth = oauth.unwrap_or_default();
        servers.extend(server.map(|server| (at, McpServer { oauth, ..server })));
    }
    servers.into_iter().map(|(_, server)| server).collect()
}

fn read_server(
    section: &mut Section<'_>,
    at: &Location,
    oauth_at: Option<Location>,
    resolver: &Resolver<'_>,
) -> Option<McpServer> {
    if section.location_of("name").is_none() {
        section.refuse("name", at.clone(), Problem::Missing("every MCP server needs a name"));
    }
    let (command_at, url_at) = (section.location_of("command"), section.location_of("url"));
    match (&command_at, &url_at) {
        (None, None) => section.refuse("command", at.clone(), Problem::Missing(NO_SOURCE)),
        (Some(_), Some(second)) => {
            section.refuse("url", second.clone(), Problem::Expected("only one of command and url"));
        }
        _ => {}
    }
    for (key, location) in [("bearer", section.location_of("bearer")), ("oauth", oauth_at)] {
        if let (Some(location), None) = (location, &url_at) {
            section.refuse(key, location, Problem::Expected("url: a command gets its secrets with env"));
        }
    }
    let name = section.read("name", name);
    let command = section.read_list("command", PROGRAM, word);
    let url = section.read("url", http_url);
    let env_at = section.location_of("env");
    let environment = section.read("env", |setting| environment(setting, resolver)).unwrap_or_default();
    if let (Some(location), None) = (env_at, &command_at) {
        section.refuse("env", location, Problem::Expected("command: a server with a URL has no environment"));
    }
    let prefix = section.read("prefix", prefix).unwrap_or_default();
    let trust = section.read("trust", trust).unwrap_or_default();
    let bearer = section.read("bearer", |setting| resolver.secret(setting));
    let call_timeout = section.read("call_timeout", |setting| limits::parse(&Valid::DurationOrNone, setting));
    let source = match (command, url) {
        (Some(command), _) if command.is_empty() => {
            section.refuse("command", at.clone(), Problem::Expected(PROGRAM));
            return None;
        }
        (Some(command), _) => McpSource::Command(command),
        (None, Some(url)) => McpSource::Url(url),
        (None, None) => return None,
    };
    let oauth = McpOauth::default();
    Some(McpServer { name: name?, source, prefix, trust, environment, bearer, oauth, call_timeout })
}

fn read_oauth(setting: Setting, diagnostics: &mut Diagnostics, resolver: &Resolver<'_>) -> Option<McpOauth> {
    let Value::Table(table) = setting.value else {
        let mut section = Section::new("mcp_server", Table::new(), diagnostics);
        let expected = "a table such as { client_id = \"rap\" }".to_owned();
        let found = setting.value.kind().to_owned();
        section.refuse("oauth", setting.location, Problem::Found { expected, found });
        section.finish();
        return None;
    };
    Some(read_within("mcp_server.oauth", table, diagnostics, |section| McpOauth {
        client_id: section.read("client_id", word),
        client_secret: section.read("client_secret", |setting| resolver.secret(setting)),
        scope: section.read("scope", word),
    }))
}

fn http_url(setting: &Setting) -> Result<Url, Problem> {
    value::parse_text(setting, "an http or https URL such as \"https://tools.example/mcp\"", |text| {
        Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
    })
}

fn prefix(setting: &Setting) -> Result<String, Problem> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    value::parse_text(setting, "at most 64 letters, digits, _ and -", |text| {
        (text.len() <= 64 && text.bytes().all(plain)).then(|| text.to_owned())
    })
}

fn trust(setting: &Setting) -> Result<Trust, Problem> {
    value::parse_text(setting, "\"normal\" or \"low\"", |text| match text {
        "normal" => Some(Trust::Normal),
        "low" => Some(Trust::Low),
        _ => None,
    })
}

/// Reads variables. A value is `env:NAME`, `file:PATH` or any text.
fn environment(setting: &Setting, resolver: &Resolver<'_>) -> Result<Vec<(String, Secret)>, Problem> {
    let Value::Table(table) = &setting.value else {
        let found = setting.value.kind().to_owned();
        return Err(Problem::Found { expected: ENVIRONMENT.to_owned(), found });
    };
    let variable = |(name, item): (&String, &Setting)| {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(Problem::Expected("names of variables without ="));
        }
        let text = value::text(item)?;
        let value = if text.starts_with("env:") || text.starts_with("file:") {
            resolver.secret(item)?
        } else if text.contains('\0') {
            return Err(Problem::Expected(ENVIRONMENT));
        } else {
            Secret::new(text)
        };
        Ok((name.clone(), value))
    };
    table.iter().map(variable).collect()
}
