//! From a document to a configuration, section by section.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use rap_protocol::Secret;

use super::document::{Setting, Table};
use super::outside::Outside;
use super::section::{Notes, Section};
use super::{
    Agent, BaseUrl, Config, Error, Limits, Model, Place, Problem, Provider, Server, Store, ToolGlob,
    ToolServer, value,
};

/// Where the models of OpenAI are.
const OPENAI: &str = "https://api.openai.com/v1";

/// The longest name of an agent.
const AGENT_NAME_BYTES: usize = 128;

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
        let config = Config {
            server: read_in("server", server, &mut notes, |section| read_server(section, outside)),
            store: read_in("store", store, &mut notes, |section| read_store(section, outside)),
            model: read_in("model", model, &mut notes, |section| read_model(section, outside)),
            agents: read_agents(agents, &mut notes),
            tool_servers: read_tool_servers(tool_servers, &mut notes, outside),
            limits: read_in("limits", limits, &mut notes, Limits::read),
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

fn read_in<T>(
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProviderName {
    OpenAi,
    Scripted,
}

fn read_model(section: &mut Section<'_>, outside: &Outside<'_>) -> Model {
    let place = section.place_of("provider");
    let chosen = section.read("provider", provider_name).unwrap_or(ProviderName::Scripted);
    if let (ProviderName::OpenAi, Some(place)) = (chosen, place) {
        require_for_openai(section, &place);
    }
    let name = section.read("name", filled_text);
    let base_url = section.read("base_url", value::base_url);
    let api_key = section.read("api_key", |setting| api_key(setting, chosen, outside)).flatten();
    let script = section.read("script", |setting| script(setting, chosen, outside)).flatten();
    let images = section.read("images", value::boolean).unwrap_or(Config::default().model.images);
    let provider = match chosen {
        ProviderName::Scripted => Provider::Scripted { script },
        ProviderName::OpenAi => {
            let openai = || BaseUrl::new(OPENAI).expect("bug: a constant URL");
            let (name, base_url) = (name.unwrap_or_default(), base_url.unwrap_or_else(openai));
            Provider::OpenAi { name, base_url, api_key }
        }
    };
    Model { provider, images }
}

fn require_for_openai(section: &mut Section<'_>, place: &Place) {
    if section.place_of("name").is_none() {
        section.refuse("name", place.clone(), Problem::Missing("which model of the provider is it?"));
    }
    if section.place_of("base_url").is_none() && section.place_of("api_key").is_none() {
        let hint = "api.openai.com wants a key, such as \"env:OPENAI_API_KEY\"";
        section.refuse("api_key", place.clone(), Problem::Missing(hint));
    }
}

fn provider_name(setting: &Setting) -> Result<ProviderName, Problem> {
    let expected = "\"anthropic\", \"openai\" or \"scripted\"";
    let name = value::shown(setting, expected, |text| match text {
        "anthropic" => Some(None),
        "openai" => Some(Some(ProviderName::OpenAi)),
        "scripted" => Some(Some(ProviderName::Scripted)),
        _ => None,
    })?;
    let instead = "use \"openai\" with a base_url, or \"scripted\"";
    name.ok_or(Problem::NotYet { what: "the provider anthropic", instead })
}

fn api_key(
    setting: &Setting,
    chosen: ProviderName,
    outside: &Outside<'_>,
) -> Result<Option<Secret>, Problem> {
    match chosen {
        ProviderName::OpenAi => outside.secret(setting).map(Some),
        ProviderName::Scripted => Ok(None),
    }
}

fn script(
    setting: &Setting,
    chosen: ProviderName,
    outside: &Outside<'_>,
) -> Result<Option<PathBuf>, Problem> {
    match chosen {
        ProviderName::Scripted => outside.readable(setting).map(Some),
        ProviderName::OpenAi => Ok(None),
    }
}

fn filled_text(setting: &Setting) -> Result<String, Problem> {
    value::shown(setting, "a string that is not empty", |text| {
        (!text.trim().is_empty()).then(|| text.to_owned())
    })
}

fn read_agents(tables: Vec<(Place, Table)>, notes: &mut Notes) -> Vec<Agent> {
    let mut agents: Vec<(Place, Agent)> = Vec::new();
    for (begin, table) in tables {
        let at = place_in(&table, "name", begin);
        let agent = read_in("agent", table, notes, |section| {
            let agent = read_agent(section, &at)?;
            let twin = agents.iter().find(|(_, other)| other.name == agent.name);
            if let Some((other, _)) = twin {
                section.refuse("name", at.clone(), Problem::Repeated(other.clone()));
            }
            Some(agent)
        });
        agents.extend(agent.map(|agent| (at, agent)));
    }
    if agents.is_empty() {
        return vec![Agent::default()];
    }
    agents.into_iter().map(|(_, agent)| agent).collect()
}

/// Where a table has this key; without it, where the table begins.
fn place_in(table: &Table, key: &str, begin: Place) -> Place {
    table.get(key).map_or(begin, |setting| setting.place.clone())
}

fn read_agent(section: &mut Section<'_>, at: &Place) -> Option<Agent> {
    if section.place_of("name").is_none() {
        section.refuse("name", at.clone(), Problem::Missing("every agent has a name"));
    }
    section.not_yet("model", "an agent's own model", "all agents use [model]");
    let name = section.read("name", agent_name);
    let system = section.read("system", |setting| value::text(setting).map(str::to_owned));
    let expected = "an array of strings such as [\"*\"]";
    let tools = section.read_list("tools", expected, tool_glob);
    let usual = Agent::default();
    Some(Agent { name: name?, system: system.unwrap_or(usual.system), tools: tools.unwrap_or(usual.tools) })
}

fn agent_name(setting: &Setting) -> Result<String, Problem> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    value::shown(setting, "1 to 128 letters, digits, `_`, `-` and `.`", |text| {
        let fits = !text.is_empty() && text.len() <= AGENT_NAME_BYTES && text.bytes().all(plain);
        fits.then(|| text.to_owned())
    })
}

fn tool_glob(setting: &Setting) -> Result<ToolGlob, Problem> {
    value::shown(setting, "the name of a tool, in which * stands for any letters", ToolGlob::new)
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
