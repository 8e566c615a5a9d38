//! Reads `[[tool_server]]` tables: a server at a URL with its credentials, a command to start, or a server that ships with
//! rap. Reads the TLS settings of the server, too.

use std::path::PathBuf;

use rap_agent::Valid;
use rap_io::credentials::{Authorization, Credentials};
use rap_io::oauth::OauthClient;
use rap_io::reloading::SecretSource;
use rap_io::sigv4::AccessKey;
use rap_io::tls::{ClientCertificates, ClientTls, ServerTls};
use rap_io::webhook::SigningKeys;
use rap_runtime::CallbackAuth;

use super::document::{Setting, Table, Value};
use super::read::{location_in, read_in, read_within};
use super::resolver::Resolver;
use super::section::{Diagnostics, Section};
use super::started_tool::read_started;
use super::{Location, Problem, ToolServer, ToolSource, limits, value};

/// The keys that say where a server is or how it is started. Exactly one is set.
const SOURCES: [&str; 3] = ["url", "command", "run"];
const NO_SOURCE: &str = "every tool server needs a URL, or command or run to start it";
/// Keys of a tool server that are only for one with a URL.
const ONLY_WITH_URL: [&str; 5] = ["hmac", "callback_auth", "tls", "oauth", "sigv4"];
/// Keys of a tool server whose values are tables.
const TABLES: [&str; 3] = ["tls", "oauth", "sigv4"];
const ONE_AUTHORIZATION: &str =
    "only one of bearer, oauth and sigv4, because each is sent in the header Authorization";
const HMAC_EXPECTED: &str = "one to four keys, each whsec_ and the base64 of 24 to 64 bytes, or env:NAME, or file:PATH; make one: \
     echo whsec_$(openssl rand -base64 32)";

pub(super) fn read_tool_servers(
    tables: Vec<(Location, Table)>,
    diagnostics: &mut Diagnostics,
    resolver: &Resolver<'_>,
) -> Vec<ToolServer> {
    let mut servers: Vec<(Location, ToolServer)> = Vec::new();
    for (begin, mut table) in tables {
        let key = SOURCES.into_iter().find(|key| table.contains_key(*key)).unwrap_or("url");
        let at = location_in(&table, key, begin);
        if key != "url" {
            for (key, location) in
                ONLY_WITH_URL.iter().filter_map(|key| Some((*key, table.remove(*key)?.location)))
            {
                let empty = Section::new("tool_server", Table::new(), diagnostics);
                refuse_and_finish(
                    empty,
                    key,
                    location,
                    Problem::Expected("url: a server that is started uses a bearer token"),
                );
            }
        }
        let nested = TABLES.map(|key| table.remove(key));
        let server = read_in("tool_server", table, diagnostics, |section| {
            let mut server = read_tool_server(section, &at, resolver)?;
            if let ToolSource::Start { name, .. } = &mut server.source {
                *name = unused_name(name, servers.iter().map(|(_, other)| other));
            }
            let same = |other: &ToolServer| match (other.url(), server.url()) {
                (Some(one), Some(other)) => one.to_url() == other.to_url(),
                _ => false,
            };
            if let Some((other, _)) = servers.iter().find(|(_, other)| same(other)) {
                section.refuse("url", at.clone(), Problem::Repeated(other.clone()));
            }
            Some(server)
        });
        let [tls, oauth, sigv4] = nested;
        let credentials = server.as_ref().map(|server| server.credentials.clone()).unwrap_or_default();
        let mut authorizations: Vec<(Location, Authorization)> =
            credentials.authorization.clone().into_iter().map(|bearer| (at.clone(), bearer)).collect();
        let tls = tls.and_then(|setting| read_client_tls(setting, diagnostics, resolver));
        authorizations.extend(oauth.and_then(|setting| read_oauth(setting, diagnostics, resolver)));
        authorizations.extend(sigv4.and_then(|setting| read_sigv4(setting, diagnostics, resolver)));
        if let [_, (second, _), ..] = authorizations.as_slice() {
            let empty = Section::new("tool_server", Table::new(), diagnostics);
            refuse_and_finish(empty, "bearer", second.clone(), Problem::Expected(ONE_AUTHORIZATION));
        }
        let authorization = authorizations.into_iter().next().map(|(_, authorization)| authorization);
        let credentials = Credentials { authorization, tls, ..credentials };
        servers.extend(server.map(|server| (at, ToolServer { credentials, ..server })));
    }
    servers.into_iter().map(|(_, server)| server).collect()
}

/// Returns the name, with a number if another server has it.
fn unused_name<'a>(name: &str, others: impl Iterator<Item = &'a ToolServer>) -> String {
    let taken: Vec<&str> = others
        .filter_map(|other| match &other.source {
            ToolSource::Start { name, .. } => Some(name.as_str()),
            ToolSource::Url(_) => None,
        })
        .collect();
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    let mut names = std::iter::once(name.to_owned()).chain(numbered);
    names.find(|name| !taken.contains(&name.as_str())).unwrap_or_default()
}

fn refuse_and_finish(mut section: Section<'_>, key: &str, location: Location, problem: Problem) {
    section.refuse(key, location, problem);
    section.finish();
}

fn read_tool_server(section: &mut Section<'_>, at: &Location, resolver: &Resolver<'_>) -> Option<ToolServer> {
    let set: Vec<&str> = SOURCES.into_iter().filter(|key| section.location_of(key).is_some()).collect();
    match set[..] {
        [] => section.refuse("url", at.clone(), Problem::Missing(NO_SOURCE)),
        [_] => {}
        [_, second, ..] => section.refuse(
            second,
            section.location_of(second).unwrap_or(at.clone()),
            Problem::Expected("only one of url, command and run"),
        ),
    }
    let call_timeout = section.read("call_timeout", |setting| limits::parse(&Valid::DurationOrNone, setting));
    if set.first().is_some_and(|key| *key != "url") {
        let source = read_started(section, at, resolver)?;
        return Some(ToolServer {
            source,
            credentials: Credentials::default(),
            callback_auth: None,
            call_timeout,
        });
    }
    section.mark_known(&TABLES);
    let url = section.read("url", value::base_url);
    let bearer = section.read("bearer", |setting| resolver.secret_source(setting));
    // An invalid key has been reported already.
    let has_hmac = section.location_of("hmac").is_some();
    let hmac = section.read("hmac", |setting| signing_keys(setting, resolver)).unwrap_or_default();
    let callback_auth_at = section.location_of("callback_auth");
    let callback_auth = section.read("callback_auth", callback_auth);
    let is_unsigned = callback_auth == Some(CallbackAuth::Hmac) && hmac.is_empty() && !has_hmac;
    if let Some(location) = callback_auth_at.filter(|_| is_unsigned) {
        section.refuse("hmac", location, Problem::Missing("callback_auth = \"hmac\" needs a key"));
    }
    let authorization = bearer.map(Authorization::Bearer);
    let credentials = Credentials { authorization, hmac, tls: None };
    Some(ToolServer { source: ToolSource::Url(url?), credentials, callback_auth, call_timeout })
}

fn callback_auth(setting: &Setting) -> Result<CallbackAuth, Problem> {
    value::parse_text(setting, "\"hmac\" or \"tls\"", |text| match text {
        "hmac" => Some(CallbackAuth::Hmac),
        "tls" => Some(CallbackAuth::Tls),
        _ => None,
    })
}

/// Reads one key or a list of keys. Errors do not contain them.
pub(super) fn signing_keys(setting: &Setting, resolver: &Resolver<'_>) -> Result<Vec<SecretSource>, Problem> {
    let sources: Vec<SecretSource> = match &setting.value {
        Value::List(items) => {
            items.iter().map(|item| resolver.secret_source(item)).collect::<Result<_, _>>()?
        }
        _ => vec![resolver.secret_source(setting)?],
    };
    let mut keys = Vec::new();
    for source in &sources {
        keys.extend(resolver.secrets(source)?);
    }
    SigningKeys::parse(&keys).map_err(|_| Problem::Expected(HMAC_EXPECTED))?;
    Ok(sources)
}

/// Returns the table of a setting such as `tls`. Any other value is a mistake.
fn nested(
    name: &'static str,
    key: &'static str,
    setting: Setting,
    diagnostics: &mut Diagnostics,
) -> (Location, Table) {
    let location = setting.location.clone();
    let root = Table::from([(key.to_owned(), setting)]);
    (location, read_within(name, root, diagnostics, |section| section.table(key)))
}

fn read_client_tls(
    setting: Setting,
    diagnostics: &mut Diagnostics,
    resolver: &Resolver<'_>,
) -> Option<ClientTls> {
    let (location, table) = nested("tool_server", "tls", setting, diagnostics);
    read_within("tool_server.tls", table, diagnostics, |section| {
        let [cert, key, ca] = ["cert", "key", "ca"].map(|key| read_file(section, key, resolver));
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => {
                section.refuse("cert", location, Problem::Missing("cert and key belong together"));
                None
            }
        };
        (identity.is_some() || ca.is_some()).then_some(ClientTls { identity, ca })
    })
}

pub(super) fn read_server_tls(
    setting: Setting,
    diagnostics: &mut Diagnostics,
    resolver: &Resolver<'_>,
) -> Option<ServerTls> {
    let (location, table) = nested("server", "tls", setting, diagnostics);
    read_within("server.tls", table, diagnostics, |section| {
        for key in ["cert", "key"] {
            if section.location_of(key).is_none() {
                section.refuse(key, location.clone(), Problem::Missing("TLS needs cert and key"));
            }
        }
        let [cert, key, client_ca] =
            ["cert", "key", "client_ca"].map(|key| read_file(section, key, resolver));
        Some(ServerTls { cert: cert?, key: key?, client_ca, clients: ClientCertificates::Required })
    })
}

fn read_file(section: &mut Section<'_>, key: &'static str, resolver: &Resolver<'_>) -> Option<PathBuf> {
    section.read(key, |setting| resolver.file(setting, key == "key"))
}

fn read_oauth(
    setting: Setting,
    diagnostics: &mut Diagnostics,
    resolver: &Resolver<'_>,
) -> Option<(Location, Authorization)> {
    let (location, table) = nested("tool_server", "oauth", setting, diagnostics);
    read_within("tool_server.oauth", table, diagnostics, |section| {
        require(section, &["token_url", "client_id", "client_secret"], &location);
        let token_url = section.read("token_url", value::base_url);
        let client_id = section.read("client_id", word);
        let client_secret = section.read("client_secret", |setting| resolver.secret_source(setting));
        let [scope, audience] = ["scope", "audience"]
            .map(|key| section.read(key, |setting| value::text(setting).map(str::to_owned)));
        let (token_url, client_id, client_secret) = (token_url?.to_url(), client_id?, client_secret?);
        let client = OauthClient { token_url, client_id, client_secret, scope, audience };
        Some((location, Authorization::Oauth(client)))
    })
}

fn read_sigv4(
    setting: Setting,
    diagnostics: &mut Diagnostics,
    resolver: &Resolver<'_>,
) -> Option<(Location, Authorization)> {
    let (location, table) = nested("tool_server", "sigv4", setting, diagnostics);
    read_within("tool_server.sigv4", table, diagnostics, |section| {
        require(section, &["region", "service"], &location);
        let [region, service] = ["region", "service"].map(|key| section.read(key, word));
        let mut secret = |key: &'static str, variable: &'static str| {
            let given = section.location_of(key).is_some();
            let found = section.read(key, |setting| resolver.secret(setting));
            found.or_else(|| resolver.variable_if_set(variable).filter(|_| !given))
        };
        let id = secret("access_key_id", "AWS_ACCESS_KEY_ID");
        let key = secret("secret_access_key", "AWS_SECRET_ACCESS_KEY");
        let session = secret("session_token", "AWS_SESSION_TOKEN");
        let (Some(id), Some(secret)) = (id, key) else {
            let why = "an access key is needed: access_key_id and secret_access_key, or the environment variables \
                       AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
            section.refuse("access_key_id", location, Problem::Missing(why));
            return None;
        };
        let key =
            AccessKey { id: id.expose().to_owned(), secret, session, region: region?, service: service? };
        Some((location, Authorization::Sigv4(key)))
    })
}

fn require(section: &mut Section<'_>, keys: &[&'static str], location: &Location) {
    for key in keys {
        if section.location_of(key).is_none() {
            section.refuse(key, location.clone(), Problem::Missing("this key is required"));
        }
    }
}

fn word(setting: &Setting) -> Result<String, Problem> {
    value::parse_text(setting, "a word of visible ASCII characters", |text| {
        let is_word = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        is_word.then(|| text.to_owned())
    })
}
