//! Converts a document to a configuration, section by section.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use rap_io::secret_box::Key;
use rap_protocol::{HostPort, Secret, UrlPolicy};

use super::agent::{Common, read_agents};
use super::document::{Setting, Table};
use super::limits;
use super::model::read_model;
use super::resolver::Resolver;
use super::section::{Diagnostics, Section};
use super::{Config, Error, Limits, Location, Problem, Server, Store, ToolServer, has_short_token, value};

/// A configuration with the diagnostics of reading it. It is valid only if there are no mistakes.
pub(super) struct Draft {
    pub(super) config: Config,
    pub(super) diagnostics: Diagnostics,
}

impl Draft {
    pub(super) fn from_document(document: Table, resolver: &Resolver<'_>) -> Self {
        let mut diagnostics = Diagnostics::default();
        let mut root = Section::new("", document, &mut diagnostics);
        let [server, store, model, limits] =
            ["server", "store", "model", "limits"].map(|key| root.table(key));
        let [agents, tool_servers] = ["agent", "tool_server"].map(|key| root.tables(key));
        root.finish();
        let limits = read_in("limits", limits, &mut diagnostics, read_limits);
        let model = read_in("model", model, &mut diagnostics, |section| read_model(section, resolver));
        let common = Common { model: &model, limits: &limits, resolver };
        let mut config = Config {
            server: read_in("server", server, &mut diagnostics, |section| read_server(section, resolver)),
            store: read_in("store", store, &mut diagnostics, |section| read_store(section, resolver)),
            agents: read_agents(agents, &mut diagnostics, &common),
            tool_servers: read_tool_servers(tool_servers, &mut diagnostics, resolver),
            model,
            limits,
            secret_files: Vec::new(),
        };
        config.secret_files = resolver.secret_files();
        Draft { config, diagnostics }
    }

    /// Returns the configuration, or all mistakes in the order of their locations.
    pub(super) fn into_result(self) -> Result<Config, Error> {
        let mut mistakes = self.diagnostics.mistakes;
        mistakes.sort_by(|a, b| a.location.cmp(&b.location));
        if mistakes.is_empty() { Ok(self.config) } else { Err(Error::Mistakes(mistakes)) }
    }
}

pub(super) fn read_in<T>(
    name: &'static str,
    table: Table,
    diagnostics: &mut Diagnostics,
    read: impl FnOnce(&mut Section<'_>) -> T,
) -> T {
    let mut section = Section::new(name, table, diagnostics);
    let value = read(&mut section);
    section.finish();
    value
}

fn read_limits(section: &mut Section<'_>) -> Limits {
    let mut read = Limits::default();
    limits::read(rap_agent::Limits::TABLE, &mut read.thread, section);
    limits::read(Limits::TABLE, &mut read, section);
    read
}

fn read_server(section: &mut Section<'_>, resolver: &Resolver<'_>) -> Server {
    let listen_at = section.location_of("listen");
    let listen = section.read("listen", address).unwrap_or(Server::default().listen);
    let has_url = section.location_of("public_url").is_some();
    let public_url = section.read("public_url", value::base_url);
    let tokens_at = section.location_of("tokens");
    let expected = "an array of strings such as [\"env:RAP_TOKEN\"]";
    let tokens = section.read_list("tokens", expected, |item| resolver.secret(item));
    // Invalid tokens have been reported already.
    let open = tokens.as_ref().map_or(tokens_at.is_none(), Vec::is_empty);
    let ip = listen.ip().to_canonical();
    if let Some(location) = listen_at {
        if open && !ip.is_loopback() {
            section.refuse("listen", location.clone(), Problem::OpenToTheNetwork(listen));
        }
        if !has_url && ip.is_unspecified() {
            section.refuse("listen", location, Problem::NoPublicUrl(listen));
        }
    }
    let tokens = tokens.unwrap_or_default();
    if let Some(location) = tokens_at.filter(|_| !ip.is_loopback() && has_short_token(&tokens)) {
        section.refuse("tokens", location, Problem::ShortToken);
    }
    let url_policy = section.read("url_policy", url_policy).unwrap_or(UrlPolicy::of_listener(ip));
    let expected = "an array of hosts with their ports such as [\"tools.internal:8443\"]";
    let allow_hosts = section.read_list("allow_hosts", expected, host_port).unwrap_or_default();
    Server { listen, public_url, tokens, url_policy, allow_hosts }
}

fn address(setting: &Setting) -> Result<SocketAddr, Problem> {
    value::parse_text(setting, "an address and a port such as \"127.0.0.1:7420\"", |text| {
        match text.strip_prefix("localhost:") {
            Some(port) => Some((Ipv4Addr::LOCALHOST, port.parse().ok()?).into()),
            None => text.parse().ok(),
        }
    })
}

fn url_policy(setting: &Setting) -> Result<UrlPolicy, Problem> {
    value::parse_text(setting, "\"public\", \"private\" or \"loopback\"", UrlPolicy::from_name)
}

fn host_port(setting: &Setting) -> Result<HostPort, Problem> {
    value::parse_text(setting, "a host and its port such as \"tools.internal:8443\"", HostPort::parse)
}

fn read_store(section: &mut Section<'_>, resolver: &Resolver<'_>) -> Store {
    let (url_at, key_at) = (section.location_of("url"), section.location_of("key"));
    let url = section.read("url", |setting| store_url(setting, resolver));
    let key = section.read("key", |setting| store_key(setting, resolver));
    match (url, key) {
        (Some(StoreUrl::Postgres(url)), Some(key)) => return Store::Postgres { url, key },
        (Some(StoreUrl::Postgres(_)), None) => {
            // An invalid key has been reported already.
            if let Some(location) = url_at.filter(|_| key_at.is_none()) {
                section.refuse("key", location, Problem::Missing(KEY_NEEDED));
            }
        }
        (url, key) => {
            if let Some(location) = key_at.filter(|_| key.is_some()) {
                section.refuse("key", location, Problem::Expected(NO_KEY));
            }
            if let Some(StoreUrl::Sqlite(path)) = url {
                return Store::Sqlite(path);
            }
        }
    }
    Config::default().store
}

const KEY_NEEDED: &str =
    "a Postgres database needs store.key, the same on every node. Make one: openssl rand -hex 32";
const NO_KEY: &str = "no store.key, since the key of a SQLite database is in a file beside it";
const STORE_EXPECTED: &str =
    "\"sqlite:PATH\", such as \"sqlite:rap.db\", or \"postgres://USER:PASSWORD@HOST/DATABASE\"";

enum StoreUrl {
    Sqlite(PathBuf),
    Postgres(Secret),
}

/// Parses `sqlite:PATH` or `postgres://…`. A URL with a password can be given as `env:NAME` or `file:PATH`. Errors do not
/// contain the URL.
fn store_url(setting: &Setting, resolver: &Resolver<'_>) -> Result<StoreUrl, Problem> {
    let url = value::text(setting)?;
    if ["postgres:", "postgresql:", "env:", "file:"].iter().any(|scheme| url.starts_with(scheme)) {
        let url = resolver.secret(setting)?;
        let is_postgres =
            ["postgres://", "postgresql://"].iter().any(|scheme| url.expose().starts_with(scheme));
        return if is_postgres {
            Ok(StoreUrl::Postgres(url))
        } else {
            Err(Problem::Expected(STORE_EXPECTED))
        };
    }
    let path = url.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path));
    match path {
        None | Some("") => Err(Problem::Expected(STORE_EXPECTED)),
        Some(path) if path.starts_with(':') || path.contains('?') => {
            Err(Problem::Expected("the path of a file after sqlite:, without parameters"))
        }
        Some(path) => Ok(StoreUrl::Sqlite(resolver.path(path, &setting.location))),
    }
}

fn store_key(setting: &Setting, resolver: &Resolver<'_>) -> Result<Secret, Problem> {
    let key = resolver.secret(setting)?;
    let expected = "64 hexadecimal digits or the base64 of 32 bytes, or env:NAME, or file:PATH";
    Key::parse(key.expose()).map(|_| key.clone()).map_err(|_| Problem::Expected(expected))
}

/// Returns the location of a key; without the key, that of the table.
pub(super) fn location_in(table: &Table, key: &str, begin: Location) -> Location {
    table.get(key).map_or(begin, |setting| setting.location.clone())
}

fn read_tool_servers(
    tables: Vec<(Location, Table)>,
    diagnostics: &mut Diagnostics,
    resolver: &Resolver<'_>,
) -> Vec<ToolServer> {
    let mut servers: Vec<(Location, ToolServer)> = Vec::new();
    for (begin, table) in tables {
        let at = location_in(&table, "url", begin);
        let server = read_in("tool_server", table, diagnostics, |section| {
            let server = read_tool_server(section, &at, resolver)?;
            let duplicate = servers.iter().find(|(_, other)| other.url.to_url() == server.url.to_url());
            if let Some((other, _)) = duplicate {
                section.refuse("url", at.clone(), Problem::Repeated(other.clone()));
            }
            Some(server)
        });
        servers.extend(server.map(|server| (at, server)));
    }
    servers.into_iter().map(|(_, server)| server).collect()
}

fn read_tool_server(section: &mut Section<'_>, at: &Location, resolver: &Resolver<'_>) -> Option<ToolServer> {
    if section.location_of("url").is_none() {
        section.refuse("url", at.clone(), Problem::Missing("every tool server needs a URL"));
    }
    let url = section.read("url", value::base_url);
    let bearer = section.read("bearer", |setting| resolver.secret(setting));
    for key in ["hmac", "mtls", "sigv4"] {
        section.unsupported(key, key, "use bearer");
    }
    Some(ToolServer { url: url?, bearer })
}
