//! Converts a document to a configuration, section by section.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use rap_io::keyring::Keyring;
use rap_io::proxy::TrustedProxies;
use rap_protocol::{HostPort, Secret, UrlPolicy};
use rap_runtime::PostgresDatabase;

use super::agent::{Common, read_agents};
use super::document::{Setting, Table};
use super::limits;
use super::mcp_server::read_mcp_servers;
use super::model::read_model;
use super::notify::read_notify;
use super::resolver::Resolver;
use super::section::{Diagnostics, Section};
use super::telemetry::read_telemetry;
use super::tool_server::{read_server_tls, read_tool_servers};
use super::{Config, Error, Limits, Location, Problem, Server, Store, has_short_token, value};

/// A configuration with the diagnostics of reading it. It is valid only if there are no mistakes.
pub(super) struct Draft {
    pub(super) config: Config,
    pub(super) diagnostics: Diagnostics,
}

impl Draft {
    pub(super) fn from_document(document: Table, resolver: &Resolver<'_>) -> Self {
        let mut diagnostics = Diagnostics::default();
        let mut root = Section::new("", document, &mut diagnostics);
        let [mut server, store, model, telemetry, retention, limits] =
            ["server", "store", "model", "telemetry", "retention", "limits"].map(|key| root.table(key));
        let [agents, tool_servers, mcp_servers, notify] =
            ["agent", "tool_server", "mcp_server", "notify"].map(|key| root.tables(key));
        root.finish();
        let limits = read_in("limits", limits, &mut diagnostics, read_limits);
        let model = read_in("model", model, &mut diagnostics, |section| read_model(section, resolver));
        let tls =
            server.remove("tls").and_then(|setting| read_server_tls(setting, &mut diagnostics, resolver));
        let common = Common { model: &model, limits: &limits, resolver };
        let mut config = Config {
            server: read_in("server", server, &mut diagnostics, |section| read_server(section, resolver)),
            store: read_in("store", store, &mut diagnostics, |section| read_store(section, resolver)),
            agents: read_agents(agents, &mut diagnostics, &common),
            tool_servers: read_tool_servers(tool_servers, &mut diagnostics, resolver),
            notify: read_notify(notify, &mut diagnostics, resolver),
            mcp_servers: read_mcp_servers(mcp_servers, &mut diagnostics, resolver),
            telemetry: read_in("telemetry", telemetry, &mut diagnostics, |section| {
                read_telemetry(section, resolver)
            }),
            retention: read_in("retention", retention, &mut diagnostics, |section| {
                section.read("closed_threads", value::duration_or_never).flatten()
            }),
            model,
            limits,
            secret_files: Vec::new(),
            secret_variables: Vec::new(),
        };
        config.server.tls = tls;
        config.secret_variables = resolver.secret_variables();
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

/// Reads a table whose keys are those of another section or are listed with their section, and so are not added to the known
/// keys.
pub(super) fn read_within<T>(
    name: &'static str,
    table: Table,
    diagnostics: &mut Diagnostics,
    read: impl FnOnce(&mut Section<'_>) -> T,
) -> T {
    let mut own = Diagnostics::default();
    let value = read_in(name, table, &mut own, read);
    diagnostics.mistakes.extend(own.mistakes);
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
    section.mark_known(&["tls", "trusted_proxies", "identity_header"]);
    let proxies = read_proxies(section);
    Server { listen, public_url, tokens, tls: None, proxies, url_policy, allow_hosts }
}

/// Reads `trusted_proxies` and `identity_header`, which belong together.
fn read_proxies(section: &mut Section<'_>) -> Option<TrustedProxies> {
    let at = section.location_of("trusted_proxies").or(section.location_of("identity_header"))?;
    let expected = "an array of addresses or networks such as [\"10.0.0.7\", \"10.1.0.0/16\"]";
    let networks = section.read_list("trusted_proxies", expected, |setting| {
        let is_network = |text: &str| TrustedProxies::parse("x", &[text]).is_ok();
        value::parse_text(setting, expected, |text| is_network(text).then(|| text.to_owned()))
    });
    let expected = "the name of a header such as \"X-Client-Name\"";
    let header = section.read("identity_header", |setting| {
        let is_header = |text: &str| TrustedProxies::parse(text, &["::1"]).is_ok();
        value::parse_text(setting, expected, |text| is_header(text).then(|| text.to_owned()))
    });
    match (networks, header) {
        (Some(networks), Some(header)) => TrustedProxies::parse(&header, &networks).ok(),
        (networks, header) => {
            let key = if networks.is_none() { "trusted_proxies" } else { "identity_header" };
            if networks.is_some() || header.is_some() {
                let why = "trusted_proxies and identity_header belong together";
                section.refuse(key, at, Problem::Missing(why));
            }
            None
        }
    }
}

pub(super) fn address(setting: &Setting) -> Result<SocketAddr, Problem> {
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
    let fleet_at = ["listen_url", "lease"].map(|name| (name, section.location_of(name)));
    let url = section.read("url", |setting| store_url(setting, resolver));
    let key = section.read("key", |setting| store_key(setting, resolver));
    let listen_url = section.read("listen_url", |setting| match store_url(setting, resolver)? {
        StoreUrl::Postgres(url) => Ok(url),
        StoreUrl::Sqlite(_) => Err(Problem::Expected(LISTEN_URL_EXPECTED)),
    });
    let lease = section.read("lease", store_lease);
    if matches!(url, Some(StoreUrl::Sqlite(_)) | None) {
        for (name, location) in fleet_at {
            if let Some(location) = location.filter(|_| url.is_some() || url_at.is_none()) {
                section.refuse(name, location, Problem::Expected(POSTGRES_ONLY));
            }
        }
    }
    match (url, key) {
        (Some(StoreUrl::Postgres(url)), Some(key)) => {
            let lease = lease.unwrap_or(PostgresDatabase::LEASE);
            return Store::Postgres { url, key, listen_url, lease };
        }
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
const POSTGRES_ONLY: &str = "this setting only with a Postgres database";
const LISTEN_URL_EXPECTED: &str = "\"postgres://USER:PASSWORD@HOST/DATABASE\" without the pooler";
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

/// Parses the lease of a node. A node that is slow for a moment must not lose it.
fn store_lease(setting: &Setting) -> Result<Duration, Problem> {
    let lease = value::duration(value::Zero::Refused)(setting)?;
    let valid = Duration::from_secs(1)..=Duration::from_secs(600);
    if valid.contains(&lease) { Ok(lease) } else { Err(Problem::Expected("a time from \"1s\" to \"10m\"")) }
}

fn store_key(setting: &Setting, resolver: &Resolver<'_>) -> Result<Secret, Problem> {
    let key = resolver.secret(setting)?;
    let expected = "64 hexadecimal digits or the base64 of 32 bytes, or env:NAME, or file:PATH; several keys are separated \
                    by commas, the oldest first, and each but the first has the time from which it is used: \
                    KEY@2026-12-01T00:00:00Z";
    Keyring::parse(key.expose()).map(|_| key.clone()).map_err(|_| Problem::Expected(expected))
}

/// Returns the location of a key; without the key, that of the table.
pub(super) fn location_in(table: &Table, key: &str, begin: Location) -> Location {
    table.get(key).map_or(begin, |setting| setting.location.clone())
}
