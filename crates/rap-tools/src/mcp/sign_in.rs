//! Servers that ask users to sign in: finds the authorization server and registers as its client.
//!
//! The MCP server names its authorization server in a document (RFC 9728), which in turn describes itself (RFC 8414).
//! The client registers dynamically (RFC 7591) unless the configuration has a client id. Tokens are for this server
//! only (RFC 8707).

use ::http::Method;
use bytes::Bytes;
use rap_io::client::{Client, ClientLimits};
use rap_protocol::url::is_on_loopback;
use rap_protocol::{UrlPolicy, UrlRules};
use rap_tool::OauthApp;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use url::Url;

use super::McpServer;
use super::notices::excerpt;

/// Maximum size of a document, in bytes.
const DOCUMENT_BYTES: usize = 256 * 1024;

/// Ways in which a client shows its secret.
const NO_SECRET: &str = "none";
const SECRET_IN_BODY: &str = "client_secret_post";
const SECRET_IN_HEADER: &str = "client_secret_basic";

#[derive(Default, Deserialize)]
struct ProtectedResource {
    #[serde(default)]
    authorization_servers: Vec<String>,
    #[serde(default)]
    scopes_supported: Vec<String>,
    resource: Option<String>,
}

#[derive(Deserialize)]
struct AuthorizationServer {
    issuer: Option<String>,
    authorization_endpoint: String,
    token_endpoint: String,
    registration_endpoint: Option<String>,
    /// Ways in which clients show their secret. Absent is the same as `client_secret_basic`.
    #[serde(default)]
    token_endpoint_auth_methods_supported: Vec<String>,
}

impl AuthorizationServer {
    /// Returns the endpoints of a server that does not describe itself, as the protocol version 2025-03-26 says.
    fn of_version_2025_03_26(server: &Url) -> AuthorizationServer {
        let at = |path: &str| format!("{}{path}", server.origin().ascii_serialization());
        AuthorizationServer {
            issuer: None,
            authorization_endpoint: at("/authorize"),
            token_endpoint: at("/token"),
            registration_endpoint: Some(at("/register")),
            token_endpoint_auth_methods_supported: vec![NO_SECRET.to_owned()],
        }
    }

    fn supports(&self, method: &str) -> bool {
        self.token_endpoint_auth_methods_supported.iter().any(|supported| supported == method)
    }

    /// Returns the way in which a client with a secret shows it.
    fn method(&self) -> &'static str {
        let only_in_body = self.supports(SECRET_IN_BODY) && !self.supports(SECRET_IN_HEADER);
        if only_in_body { SECRET_IN_BODY } else { SECRET_IN_HEADER }
    }
}

#[derive(Deserialize)]
struct Registered {
    client_id: String,
    client_secret: Option<String>,
}

/// Returns the client for a server that has answered 401 with this challenge.
pub(super) async fn app(
    config: &McpServer,
    server: &Url,
    challenge: &str,
    redirect: &str,
) -> Result<OauthApp, String> {
    // The server names these URLs. Those of another machine must not lead to this one.
    let policy = if is_on_loopback(server) { UrlPolicy::Loopback } else { UrlPolicy::Private };
    let http = Client::new(UrlRules::from(policy), ClientLimits::default());
    let resource = resource(&http, server, challenge).await.unwrap_or_default();
    if let Some(named) = resource.resource.as_deref().filter(|named| !covers(named, server)) {
        return Err(format!("it says that its tokens are for {}", excerpt(named)));
    }
    let metadata = match resource.authorization_servers.first() {
        Some(issuer) => metadata(&http, issuer).await?,
        None => {
            let found = metadata(&http, &server.origin().ascii_serialization()).await;
            found.unwrap_or_else(|_| AuthorizationServer::of_version_2025_03_26(server))
        }
    };
    let (client_id, secret) = match &config.oauth.client_id {
        Some(id) => (id.clone(), config.oauth.client_secret.clone()),
        None => register(&http, &metadata, redirect).await?,
    };
    let app = OauthApp::new(&metadata.authorization_endpoint, &metadata.token_endpoint, client_id);
    let mut app = app.map_err(|error| error.to_string())?;
    app = app.resource(resource.resource.unwrap_or_else(|| server.to_string()));
    if let Some(secret) = secret {
        app = app.secret(secret);
        if metadata.method() == SECRET_IN_HEADER {
            app = app.secret_in_header();
        }
    }
    if let Some(issuer) = metadata.issuer {
        app = app.issuer(issuer);
    }
    let scopes = resource.scopes_supported.join(" ");
    let scope = config.oauth.scope.clone().or(parameter(challenge, "scope")).or(Some(scopes));
    if let Some(scope) = scope.filter(|scope| !scope.is_empty()) {
        app = app.scope(scope);
    }
    Ok(app)
}

/// Returns true if a server is the resource that it names, or a part of it.
fn covers(resource: &str, server: &Url) -> bool {
    let Ok(resource) = Url::parse(resource) else { return false };
    let (outer, inner) = (resource.path().trim_end_matches('/'), server.path());
    let below = inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    resource.origin() == server.origin() && below
}

/// Returns a parameter of a `WWW-Authenticate` header.
pub(super) fn parameter(challenge: &str, name: &str) -> Option<String> {
    let start = challenge.find(&format!("{name}=\""))? + name.len() + 2;
    let value = &challenge[start..];
    Some(value[..value.find('"')?].to_owned())
}

/// Reads what the server says about itself. Servers of earlier versions say nothing.
async fn resource(http: &Client, server: &Url, challenge: &str) -> Option<ProtectedResource> {
    let path = server.path().trim_end_matches('/');
    let named = parameter(challenge, "resource_metadata").and_then(|url| Url::parse(&url).ok());
    let known = [
        "/.well-known/oauth-protected-resource".to_owned() + path,
        "/.well-known/oauth-protected-resource".into(),
    ];
    let known = known.iter().filter_map(|path| server.join(path).ok());
    for url in named.into_iter().chain(known) {
        if let Some(found) = get::<ProtectedResource>(http, &url).await {
            return Some(found);
        }
    }
    None
}

async fn metadata(http: &Client, issuer: &str) -> Result<AuthorizationServer, String> {
    let issuer = Url::parse(issuer).map_err(|_| "its authorization server is not a URL".to_owned())?;
    let path = issuer.path().trim_end_matches('/');
    let candidates = [
        format!("/.well-known/oauth-authorization-server{path}"),
        format!("/.well-known/openid-configuration{path}"),
        format!("{path}/.well-known/openid-configuration"),
    ];
    for url in candidates.iter().filter_map(|path| issuer.join(path).ok()) {
        if let Some(found) = get(http, &url).await {
            return Ok(found);
        }
    }
    Err(format!("its authorization server {} does not describe itself", rap_protocol::redact::url(&issuer)))
}

async fn get<T: DeserializeOwned>(http: &Client, url: &Url) -> Option<T> {
    let answer = http.get(url, &[], DOCUMENT_BYTES).await.ok()?;
    (answer.status == 200).then(|| serde_json::from_slice(&answer.body).ok()).flatten()
}

async fn register(
    http: &Client,
    server: &AuthorizationServer,
    redirect: &str,
) -> Result<(String, Option<String>), String> {
    let missing = "its authorization server does not register clients; set oauth.client_id";
    let url = server.registration_endpoint.as_deref().and_then(|url| Url::parse(url).ok());
    let url = url.ok_or_else(|| missing.to_owned())?;
    let needs_secret =
        !server.token_endpoint_auth_methods_supported.is_empty() && !server.supports(NO_SECRET);
    let method = if needs_secret { server.method() } else { NO_SECRET };
    let request = json!({
        "client_name": "rap", "redirect_uris": [redirect], "token_endpoint_auth_method": method,
        "grant_types": ["authorization_code", "refresh_token"], "response_types": ["code"],
    });
    let body = Bytes::from(request.to_string());
    let answer = http.request(Method::POST, &url, &[], body, DOCUMENT_BYTES).await;
    let answer = answer.map_err(|error| format!("its authorization server cannot be reached: {error}"))?;
    if !(200..300).contains(&answer.status) {
        return Err(format!("its authorization server refused to register a client: {}", answer.status));
    }
    let registered: Registered = serde_json::from_slice(&answer.body)
        .map_err(|_| "its authorization server registered no client".to_owned())?;
    Ok((registered.client_id, registered.client_secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_the_resource_that_it_names_or_a_part_of_it() {
        let server = Url::parse("https://h.example/mcp").unwrap();
        for resource in
            ["https://h.example/mcp", "https://h.example/mcp/", "https://h.example", "https://h.example/"]
        {
            assert!(covers(resource, &server), "{resource}");
        }
        for resource in
            ["https://evil.example/mcp", "http://h.example/mcp", "https://h.example/mc", "h.example", ""]
        {
            assert!(!covers(resource, &server), "{resource}");
        }
    }

    #[test]
    fn parameters_of_a_challenge_are_found() {
        let challenge = "Bearer error=\"invalid_token\", resource_metadata=\"https://h/x\", scope=\"a b\"";
        assert_eq!(parameter(challenge, "resource_metadata").as_deref(), Some("https://h/x"));
        assert_eq!(parameter(challenge, "scope").as_deref(), Some("a b"));
        assert_eq!(parameter(challenge, "realm"), None);
    }
}
