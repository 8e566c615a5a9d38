//! Credentials of tool servers, TLS, trusted proxies, and lists of keys.

use rap_io::credentials::Authorization;
use rap_io::reloading::SecretSource;
use rap_io::tls::ClientTls;

use super::*;

const HMAC: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn server(lines: &str) -> Setup {
    Setup::new(&format!("[[tool_server]]\nurl = \"https://h\"\n{lines}"))
}

fn credentials(setup: Setup) -> Credentials {
    setup.config().tool_servers.remove(0).credentials
}

#[test]
fn a_token_or_key_in_a_file_is_read_again_when_it_changes() {
    let setup = server("bearer = \"file:token\"\nhmac = [\"file:keys\", \"env:HMAC\"]");
    let setup = setup.file("token", "new\nold\n").file("keys", HMAC).variable("HMAC", HMAC);
    let directory = setup.directory.path().to_owned();
    let config = setup.config();
    let found = &config.tool_servers[0].credentials;
    let [token, keys] = ["token", "keys"].map(|name| directory.join(name));
    assert_eq!(found.authorization, Some(Authorization::Bearer(SecretSource::File(token.clone()))));
    assert_eq!(found.hmac, [SecretSource::File(keys.clone()), SecretSource::Given(Secret::new(HMAC))]);
    assert_eq!(config.secret_files, [keys, token]);
}

#[test]
fn a_client_certificate_and_an_authority_are_files() {
    let setup = server("tls = { cert = \"file:c.pem\", key = \"c.key\", ca = \"file:ca.pem\" }");
    let setup = ["c.pem", "c.key", "ca.pem"].into_iter().fold(setup, |setup, file| setup.file(file, ""));
    let [cert, key, ca] = ["c.pem", "c.key", "ca.pem"].map(|name| setup.directory.path().join(name));
    let config = setup.config();
    let expected = ClientTls { identity: Some((cert, key.clone())), ca: Some(ca) };
    assert_eq!(config.tool_servers[0].credentials.tls, Some(expected));
    assert_eq!(config.secret_files, [key]);
}

#[test]
fn an_access_key_may_come_from_the_environment() {
    let setup = server("sigv4 = { region = \"eu-west-1\", service = \"lambda\" }");
    let setup = setup.variable("AWS_ACCESS_KEY_ID", "AKID").variable("AWS_SECRET_ACCESS_KEY", "s3cr3t");
    let Some(Authorization::Sigv4(key)) = credentials(setup).authorization else { panic!("no access key") };
    assert_eq!((key.id.as_str(), key.region.as_str(), key.service.as_str()), ("AKID", "eu-west-1", "lambda"));
    assert_eq!((key.secret, key.session), (Secret::new("s3cr3t"), None));
}

#[test]
fn a_client_of_an_authorization_server_has_its_url_name_and_secret() {
    let text = "oauth = { token_url = \"https://login/token\", client_id = \"rap\", client_secret = \"s3cr3t\", scope = \"a b\" }";
    let Some(Authorization::Oauth(client)) = credentials(server(text)).authorization else {
        panic!("no client")
    };
    assert_eq!((client.token_url.as_str(), client.client_id.as_str()), ("https://login/token", "rap"));
    assert_eq!((client.scope.as_deref(), client.audience), (Some("a b"), None));
}

#[test]
fn mistakes_in_credentials_are_reported_without_secrets() {
    let table = [
        ("tls = 5", "tool_server.tls: expected a table, written [tls], found an integer"),
        ("tls = { cert = \"here\" }", "tool_server.tls.cert: missing; cert and key belong together"),
        ("tls = { ca = \"file:none\" }", "tool_server.tls.ca: cannot read"),
        ("tls = { certificate = \"x\" }", "tool_server.tls.certificate: unknown key"),
        (
            "oauth = { token_url = \"https://h/t\" }",
            "tool_server.oauth.client_id: missing; this key is required",
        ),
        (
            "sigv4 = { region = \"r\", service = \"s\" }",
            "tool_server.sigv4.access_key_id: missing; an access key is needed",
        ),
        (
            "bearer = \"s3cr3t\"\nsigv4 = { region = \"r\", service = \"s\", access_key_id = \"s3cr3t\", secret_access_key = \"s3cr3t\" }",
            "tool_server.bearer: expected only one of bearer, oauth and sigv4",
        ),
        ("hmac = [\"whsec_s3cr3t\"]", "tool_server.hmac: expected one to four keys"),
        ("callback_auth = \"bearer\"", "tool_server.callback_auth: expected \"hmac\" or \"tls\""),
        ("callback_auth = \"hmac\"", "tool_server.hmac: missing; callback_auth = \"hmac\" needs a key"),
        ("mtls = {}", "tool_server.mtls: unknown key; did you mean tls?"),
    ];
    for (lines, expected) in table {
        let error = server(lines).file("here", "").error();
        assert!(error.contains(expected) && !error.contains("s3cr3t"), "{lines}: {error}");
    }
}

#[test]
fn the_listener_can_have_tls_and_then_its_url_is_https() {
    let setup = Setup::new("[server]\ntls = { cert = \"file:s.pem\", key = \"file:s.key\" }");
    let config = setup.file("s.pem", "").file("s.key", "").config();
    assert!(config.server.tls.as_ref().is_some_and(|tls| tls.client_ca.is_none()));
    assert_eq!(config.server.url_at(config.server.listen), "https://127.0.0.1:7420");
    let error = Setup::new("[server]\ntls = { cert = \"file:s.pem\" }").file("s.pem", "").error();
    assert!(error.contains("server.tls.key: missing; TLS needs cert and key"), "{error}");
}

#[test]
fn trusted_proxies_and_their_header_belong_together() {
    let both = "[server]\ntrusted_proxies = [\"10.0.0.0/8\", \"::1\"]\nidentity_header = \"X-Client\"";
    assert!(Setup::new(both).config().server.proxies.is_some());
    for (text, expected) in [
        ("trusted_proxies = [\"10.0.0.1\"]", "server.identity_header: missing"),
        ("identity_header = \"x\"", "server.trusted_proxies: missing"),
        (
            "trusted_proxies = [\"proxy\"]\nidentity_header = \"x\"",
            "server.trusted_proxies: expected an array of addresses",
        ),
        (
            "trusted_proxies = [\"::1\"]\nidentity_header = \"a b\"",
            "server.identity_header: expected the name of a header",
        ),
    ] {
        let error = Setup::new(&format!("[server]\n{text}")).error();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn the_key_of_a_database_may_be_a_list_with_times() {
    let [old, new] = ["7e", "8f"].map(|pair| pair.repeat(32));
    let text = |key: &str| format!("[store]\nurl = \"postgres://u@h/d\"\nkey = \"{key}\"");
    let list = format!("{old},{new}@2026-12-01T00:00:00Z");
    let Store::Postgres { key, .. } = Setup::new(&text(&list)).config().store else { panic!("not Postgres") };
    assert_eq!(key.expose(), list);
    let error = Setup::new(&text(&format!("{old},{new}"))).error();
    assert!(error.contains("the time from which it is used") && !error.contains(&old), "{error}");
}
