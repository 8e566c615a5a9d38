//! Destinations of requests: the expected configuration or error.

use super::*;

fn policy(text: &str) -> UrlPolicy {
    Setup::new(text).config().server.url_policy
}

#[test]
fn the_default_policy_depends_on_the_address() {
    assert_eq!(policy(""), UrlPolicy::Loopback);
    assert_eq!(policy("[server]\nlisten = \"[::1]:7420\""), UrlPolicy::Loopback);
    let open = "[server]\ntokens = [\"a-long-client-token\"]\npublic_url = \"https://h\"\nlisten = ";
    for listen in ["0.0.0.0:7420", "[::]:7420", "10.0.0.1:7420"] {
        assert_eq!(policy(&format!("{open}{listen:?}")), UrlPolicy::Private, "{listen}");
        assert_eq!(policy(&format!("{open}{listen:?}\nurl_policy = \"loopback\"")), UrlPolicy::Loopback);
    }
}

#[test]
fn the_policy_and_its_exceptions_are_read() {
    let setup = Setup::new(
        "[server]\nurl_policy = \"public\"\nallow_hosts = [\"tools.internal:8443\", \"[::1]:80\"]",
    );
    let server = setup.config().server;
    let hosts = ["tools.internal:8443", "localhost:80"].map(|host| HostPort::parse(host).unwrap());
    assert_eq!((server.url_policy, server.allow_hosts), (UrlPolicy::Public, hosts.to_vec()));
    let setup = Setup::new("").variable("RAP_SERVER_URL_POLICY", "private");
    let server = setup.variable("RAP_SERVER_ALLOW_HOSTS", "a:1, b:2").config().server;
    let hosts = ["a:1", "b:2"].map(|host| HostPort::parse(host).unwrap());
    assert_eq!((server.url_policy, server.allow_hosts), (UrlPolicy::Private, hosts.to_vec()));
}

#[test]
fn a_bad_policy_or_host_is_a_mistake() {
    mistakes(&[
        (
            "[server]\nurl_policy = \"open\"",
            "rap.toml:2: server.url_policy: expected \"public\", \"private\" or \"loopback\", found \"open\"",
        ),
        (
            "[server]\nallow_hosts = [\"tools.internal\"]",
            "rap.toml:2: server.allow_hosts: expected a host and its port such as \"tools.internal:8443\", found \
             \"tools.internal\"",
        ),
        (
            "[server]\nallow_hosts = \"tools.internal:1\"",
            "rap.toml:2: server.allow_hosts: expected an array of hosts with their ports such as \
             [\"tools.internal:8443\"], found a string",
        ),
    ]);
}

#[test]
fn plain_http_to_another_machine_is_found() {
    let text = "[server]\npublic_url = \"http://rap.example\"\n[model]\nprovider = \"openai\"\nname = \"m\"\n\
                base_url = \"http://10.0.0.1/v1\"\n[[tool_server]]\nurl = \"http://tools.example:81/x\"\n\
                [[tool_server]]\nurl = \"http://127.0.0.1:1\"\n[[tool_server]]\nurl = \"https://tools.example\"\n";
    let expected = [
        ("server.public_url", "http://rap.example/…"),
        ("model.base_url", "http://10.0.0.1/…"),
        ("tool_server.url", "http://tools.example:81/…"),
    ];
    let expected = expected.map(|(key, url)| (key, url.to_owned()));
    assert_eq!(Setup::new(text).config().plain_http(), expected);
    assert_eq!(Setup::new("").config().plain_http(), []);
}

#[test]
fn files_with_secrets_are_known() {
    let text = "[server]\ntokens = [\"file:token\", \"env:TOKEN\"]\n\
                [[tool_server]]\nurl = \"http://127.0.0.1:1\"\nbearer = \"literal\"";
    let setup = Setup::new(text).file("token", "a-long-client-token").variable("TOKEN", "another-long-token");
    assert_eq!(setup.config().secret_files, [setup.directory.path().join("token")]);
}
