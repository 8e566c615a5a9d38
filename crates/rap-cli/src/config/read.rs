//! From a document to a configuration, section by section.

use std::net::{Ipv4Addr, SocketAddr};

use super::agent::{Common, read_agents};
use super::document::{Setting, Table};
use super::model::read_model;
use super::outside::Outside;
use super::section::{Notes, Section};
use super::{Config, Error, Limits, Place, Problem, Server, Store, ToolServer, value};

/// A configuration, and what was noted on the way to it. It is good only if no mistake was.
pub(super) struct Reading {
    pub(super) config: Config,
    pub(super) notes: Notes,
}

impl Reading {
    pub(super) fn of(document: Table, outside: &Outside<'_>) -> Self {
        let mut notes = Notes::default();
        let mut root = Section::new("", document, &mut notes);
        let [server, store, model, limits] =
            ["server", "store", "model", "limits"].map(|key| root.table(key));
        let [agents, tool_servers] = ["agent", "tool_server"].map(|key| root.tables(key));
        root.finish();
        let usual = Limits::default();
        let limits = read_in("limits", limits, &mut notes, |section| Limits::read(section, usual));
        let model = read_in("model", model, &mut notes, |section| read_model(section, outside));
        let common = Common { model: &model, limits: &limits, outside };
        let config = Config {
            server: read_in("server", server, &mut notes, |section| read_server(section, outside)),
            store: read_in("store", store, &mut notes, |section| read_store(section, outside)),
            agents: read_agents(agents, &mut notes, &common),
            tool_servers: read_tool_servers(tool_servers, &mut notes, outside),
            model,
            limits,
        };
        Reading { config, notes }
    }

    /// The configuration, or every mistake in the order of its place.
    pub(super) fn outcome(self) -> Result<Config, Error> {
        let mut mistakes = self.notes.mistakes;
        mistakes.sort_by(|a, b| a.place.cmp(&b.place));
        if mistakes.is_empty() { Ok(self.config) } else { Err(Error::Mistakes(mistakes)) }
    }
}

pub(super) fn read_in<T>(
    name: &'static str,
    table: Table,
    notes: &mut Notes,
    read: impl FnOnce(&mut Section<'_>) -> T,
) -> T {
    let mut section = Section::new(name, table, notes);
    let value = read(&mut section);
    section.finish();
    value
}

fn read_server(section: &mut Section<'_>, outside: &Outside<'_>) -> Server {
    let listen_at = section.place_of("listen");
    let listen = section.read("listen", address).unwrap_or(Server::default().listen);
    let has_url = section.place_of("public_url").is_some();
    let public_url = section.read("public_url", value::base_url);
    let has_tokens = section.place_of("tokens").is_some();
    let expected = "an array of strings such as [\"env:RAP_TOKEN\"]";
    let tokens = section.read_list("tokens", expected, |item| outside.secret(item));
    // Tokens that are there and wrong are told already.
    let open = tokens.as_ref().map_or(!has_tokens, Vec::is_empty);
    let ip = listen.ip().to_canonical();
    if let Some(place) = listen_at {
        if open && !ip.is_loopback() {
            section.refuse("listen", place.clone(), Problem::OpenToTheNetwork(listen));
        }
        if !has_url && ip.is_unspecified() {
            section.refuse("listen", place, Problem::NoPublicUrl(listen));
        }
    }
    let tokens = tokens.unwrap_or_default();
    Server { listen, public_url, tokens }
}

fn address(setting: &Setting) -> Result<SocketAddr, Problem> {
    value::shown(setting, "an address and a port such as \"127.0.0.1:7420\"", |text| {
        match text.strip_prefix("localhost:") {
            Some(port) => Some((Ipv4Addr::LOCALHOST, port.parse().ok()?).into()),
            None => text.parse().ok(),
        }
    })
}

fn read_store(section: &mut Section<'_>, outside: &Outside<'_>) -> Store {
    section.read("url", |setting| store_url(setting, outside)).unwrap_or(Config::default().store)
}

/// `sqlite:PATH`. The URL is not repeated, since that of another database may hold a password.
fn store_url(setting: &Setting, outside: &Outside<'_>) -> Result<Store, Problem> {
    let url = value::text(setting)?;
    if url.starts_with("postgres:") || url.starts_with("postgresql:") {
        let instead = "use \"sqlite:PATH\"";
        return Err(Problem::NotYet { what: "PostgreSQL", instead });
    }
    let path = url.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path));
    match path {
        None | Some("") => Err(Problem::Expected("\"sqlite:PATH\", such as \"sqlite:rap.db\"")),
        Some(path) if path.starts_with(':') || path.contains('?') => {
            Err(Problem::Expected("the path of a file after sqlite:, without parameters"))
        }
        Some(path) => Ok(Store::Sqlite(outside.path(path, &setting.place))),
    }
}

/// Where a table has this key; without it, where the table begins.
pub(super) fn place_in(table: &Table, key: &str, begin: Place) -> Place {
    table.get(key).map_or(begin, |setting| setting.place.clone())
}

fn read_tool_servers(
    tables: Vec<(Place, Table)>,
    notes: &mut Notes,
    outside: &Outside<'_>,
) -> Vec<ToolServer> {
    let mut servers: Vec<(Place, ToolServer)> = Vec::new();
    for (begin, table) in tables {
        let at = place_in(&table, "url", begin);
        let server = read_in("tool_server", table, notes, |section| {
            let server = read_tool_server(section, &at, outside)?;
            let twin = servers.iter().find(|(_, other)| other.url.to_url() == server.url.to_url());
            if let Some((other, _)) = twin {
                section.refuse("url", at.clone(), Problem::Repeated(other.clone()));
            }
            Some(server)
        });
        servers.extend(server.map(|server| (at, server)));
    }
    servers.into_iter().map(|(_, server)| server).collect()
}

fn read_tool_server(section: &mut Section<'_>, at: &Place, outside: &Outside<'_>) -> Option<ToolServer> {
    if section.place_of("url").is_none() {
        section.refuse("url", at.clone(), Problem::Missing("where is the tool server?"));
    }
    let url = section.read("url", value::base_url);
    let bearer = section.read("bearer", |setting| outside.secret(setting));
    for key in ["hmac", "mtls", "sigv4"] {
        section.not_yet(key, key, "use bearer");
    }
    Some(ToolServer { url: url?, bearer })
}
