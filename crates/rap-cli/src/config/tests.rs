//! Tables of files, variables and flags with the expected configuration or error.

mod agents;
mod direction;
mod fuzz;
mod limits;
mod telemetry;
mod trust;

use std::collections::BTreeSet;
use std::time::Duration;

use rap_runtime::model::{anthropic, openai};
use tempfile::TempDir;
use url::Url;

use super::document::{Table, Value};
use super::*;
use crate::init;

/// A directory with files, and an environment and flags.
struct Setup {
    directory: TempDir,
    environment: Environment,
    flags: Vec<Flag>,
}

impl Setup {
    fn new(text: &str) -> Self {
        let setup = Setup {
            directory: tempfile::tempdir().unwrap(),
            environment: Environment::new(),
            flags: Vec::new(),
        };
        setup.file("rap.toml", text)
    }

    fn file(self, name: &str, content: impl AsRef<[u8]>) -> Self {
        std::fs::write(self.directory.path().join(name), content).unwrap();
        self
    }

    fn variable(mut self, name: &str, value: &str) -> Self {
        self.environment.insert(name.into(), value.into());
        self
    }

    fn flag(mut self, key: &'static str, value: &str, name: &'static str) -> Self {
        self.flags.push(Flag { key, value: value.into(), name });
        self
    }

    fn load(&self) -> Result<Config, Error> {
        Config::load(&Sources {
            file: File::Given(self.directory.path().join("rap.toml")),
            environment: self.environment.clone(),
            flags: self.flags.clone(),
        })
    }

    fn config(&self) -> Config {
        self.load().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the error without the path of the directory.
    fn error(&self) -> String {
        let error = self.load().expect_err("a mistake");
        let directory = format!("{}/", self.directory.path().display());
        assert!(!format!("{error:?}").contains("s3cr3t"), "{error:?}");
        error.to_string().replace(&directory, "")
    }
}

fn mistakes(table: &[(&str, &str)]) {
    for (text, expected) in table {
        assert_eq!(Setup::new(text).error(), *expected, "{text}");
    }
}

#[test]
fn an_empty_file_is_the_default() {
    assert_eq!(Setup::new("").variable("HOME", "/root").config().limits, Limits::default());
    let config = Setup::new("[server]\n[store]\n[model]\n[limits]\n").config();
    assert_eq!(config.server.listen.to_string(), "127.0.0.1:7420");
    assert_eq!(config.server.url_at(config.server.listen), "http://127.0.0.1:7420");
}

#[test]
fn a_file_given_by_name_must_exist() {
    let directory = tempfile::tempdir().unwrap();
    let load = |file| Config::load(&Sources { file, environment: Environment::new(), flags: Vec::new() });
    let path = directory.path().join("rap.toml");
    let error = load(File::Given(path.clone())).unwrap_err().to_string();
    assert_eq!(error, format!("cannot read {}: No such file or directory (os error 2)", path.display()));
    assert_eq!(load(File::IfPresent("there-is-none.toml".into())).unwrap(), Config::default());
    let error = load(File::IfPresent(directory.path().into())).unwrap_err();
    assert!(matches!(error, Error::Unreadable { .. }), "{error}");
}

#[test]
fn every_setting_is_read() {
    let config = Setup::new(
        r#"
        [server]
        listen = "0.0.0.0:80"
        public_url = "https://rap.example.com/"
        tokens = ["env:RAP_TOKEN", "file:token", "written-in-the-file"]
        [store]
        url = "sqlite:/var/lib/rap.db"
        [model]
        provider = "openai"
        name = "m"
        base_url = "http://127.0.0.1:11434/v1/"
        api_key = "env:KEY"
        images = false
        [[agent]]
        name = "cook"
        system = "You cook."
        tools = ["kitchen_*", "timer"]
        [[agent]]
        name = "waiter"
        [[tool_server]]
        url = "http://127.0.0.1:7501/"
        bearer = "env:KEY"
        [[tool_server]]
        url = "https://tools.example.com/a"
        call_timeout = "90s"
        [[tool_server]]
        url = "https://tools.example.com/b"
        call_timeout = "none"
        [limits]
        call_timeout = "2h"
        body = 4096
        view_bytes = "1KiB"
        depth = 0x10
        "#,
    )
    .variable("RAP_TOKEN", "from-the-environment")
    .variable("KEY", "key")
    .file("token", "from-another-file\n")
    .config();
    let tokens: Vec<&str> = config.server.tokens.iter().map(Secret::expose).collect();
    assert_eq!(tokens, ["from-the-environment", "from-another-file", "written-in-the-file"]);
    assert_eq!(config.server.url_at(config.server.listen), "https://rap.example.com");
    assert_eq!(config.store, Store::Sqlite("/var/lib/rap.db".into()));
    let base_url = Some(Url::parse("http://127.0.0.1:11434/v1").unwrap());
    let options =
        Options { name: "m".into(), base_url, api_key: Some(Secret::new("key")), ..Options::default() };
    let window = Window::default();
    assert_eq!(config.model, Model { provider: &openai::PROVIDER, options, images: false, window });
    assert_eq!(config.agents.len(), 2);
    assert_eq!(
        config.agents[0].tools.iter().map(ToolGlob::to_string).collect::<Vec<_>>(),
        ["kitchen_*", "timer"]
    );
    assert_eq!(config.agents[1], Agent { name: "waiter".into(), ..Agent::default() });
    assert_eq!(config.tool_servers[0].url().unwrap().as_str(), "http://127.0.0.1:7501");
    assert_eq!(config.tool_servers[0].credentials, Credentials::bearer(Secret::new("key")));
    assert!(config.tool_servers[1].credentials.is_empty());
    let timeouts: Vec<_> = config.tool_servers.iter().map(|server| server.call_timeout).collect();
    let own = LimitValue::Duration(Duration::from_secs(90));
    assert_eq!(timeouts, [None, Some(own), Some(LimitValue::None)]);
    let call_timeout = Some(Duration::from_hours(2));
    let thread = rap_agent::Limits { call_timeout, depth: 16, ..rap_agent::Limits::default() };
    let limits = Limits { thread, body: 4096, view_bytes: 1024, ..Limits::default() };
    assert_eq!(config.limits, limits);
}

#[test]
fn unknown_keys_are_named_with_their_line() {
    mistakes(&[
        (
            "\n[limits]\nhold_maxx = \"60s\"",
            "rap.toml:3: limits.hold_maxx: unknown key; did you mean hold_max?",
        ),
        ("[servr]\nlisten = \"x\"", "rap.toml:1: servr: unknown key; did you mean server?"),
        ("[[tool_servers]]", "rap.toml:1: tool_servers: unknown key; did you mean tool_server?"),
        ("[limits]\nturns = 5", "rap.toml:2: limits.turns: unknown key; did you mean turns_per_wake?"),
        ("[model]\n\"api-key\" = 5", "rap.toml:2: model.api-key: unknown key; did you mean api_key?"),
        ("colour = 1", "rap.toml:1: colour: unknown key; `rap init` writes a file with every key"),
        (
            "[[agent]]\nname = \"a\"\n[[agent]]\nname = \"b\"\ntool = []",
            "rap.toml:5: agent.tool: unknown key; did you mean tools?",
        ),
    ]);
}

#[test]
fn types_are_checked() {
    mistakes(&[
        ("server = 5", "rap.toml:1: server: expected a table, written [server], found an integer"),
        ("[agent]", "rap.toml:1: agent: expected an array of tables, written [[agent]], found a table"),
        (
            "agent = [1]",
            "rap.toml:1: agent: expected an array of tables, written [[agent]], found an integer",
        ),
        (
            "[server]\nlisten = 7420",
            "rap.toml:2: server.listen: expected an address and a port such as \"127.0.0.1:7420\", found 7420",
        ),
        (
            "[server]\ntokens = \"s3cr3t\"",
            "rap.toml:2: server.tokens: expected an array of strings such as [\"env:RAP_TOKEN\"], found a string",
        ),
        (
            "[server]\ntokens = [\n  \"a\",\n  5,\n]",
            "rap.toml:4: server.tokens: expected a secret of at most 4096 visible ASCII characters, or env:NAME, or \
             file:PATH, found an integer",
        ),
        ("[store]\nurl = true", "rap.toml:2: store.url: expected a string, found true"),
        ("[model]\nimages = \"false\"", "rap.toml:2: model.images: expected true or false, found \"false\""),
        (
            "[model]\nwindow = 10",
            "rap.toml:2: model.window: expected a whole number from 1000 to 10000000, found 10",
        ),
        (
            "[model]\nsummarise_at = \"0%\"",
            "rap.toml:2: model.summarise_at: expected a percentage from \"1%\" to \"100%\", found \"0%\"",
        ),
        (
            "[[agent]]\nname = \"a\"\nsystem = 1.5",
            "rap.toml:3: agent.system: expected a string, found a float",
        ),
        (
            "[limits]\ndepth = \"8\"",
            "rap.toml:2: limits.depth: expected a whole number from 0 to 64, found \"8\"",
        ),
        (
            "[limits]\nhold_max = 60",
            "rap.toml:2: limits.hold_max: expected a duration such as \"250ms\", \"60s\", \"10m\", \"2h\" or \"7d\", \
             found 60",
        ),
        (
            "[limits]\nbody = 2026-01-01",
            "rap.toml:2: limits.body: expected a size from \"1KiB\" to \"8MiB\", found a date",
        ),
    ]);
}

#[test]
fn values_have_bounds() {
    mistakes(&[
        (
            "[limits]\nmodel_attempts = 0",
            "rap.toml:2: limits.model_attempts: expected a whole number from 1 to 4294967295, found 0",
        ),
        ("[limits]\ndepth = 65", "rap.toml:2: limits.depth: expected a whole number from 0 to 64, found 65"),
        ("[limits]\ndepth = -1", "rap.toml:2: limits.depth: expected a whole number from 0 to 64, found -1"),
        (
            "[limits]\ndepth = 99999999999999999999",
            "rap.toml:2: limits.depth: expected a whole number from 0 to 64, found a larger integer",
        ),
        (
            "[limits]\nbody = \"8MB\"",
            "rap.toml:2: limits.body: expected a size from \"1KiB\" to \"8MiB\", found \"8MB\"",
        ),
        (
            "[limits]\nbody = \"9MiB\"",
            "rap.toml:2: limits.body: expected a size from \"1KiB\" to \"8MiB\", found \"9MiB\"",
        ),
        (
            "[limits]\ndiscovery_timeout = \"0s\"",
            "rap.toml:2: limits.discovery_timeout: expected a duration above zero such as \"250ms\", \"60s\", \
             \"10m\", \"2h\" or \"7d\", found \"0s\"",
        ),
        (
            "[[tool_server]]\nurl = \"http://h\"\ncall_timeout = \"0s\"",
            "rap.toml:3: tool_server.call_timeout: expected \"none\", or a duration above zero such as \"60s\", \"10m\" \
             or \"2h\", found \"0s\"",
        ),
        (
            "[limits]\ncall_timeout = \"never\"",
            "rap.toml:2: limits.call_timeout: expected \"none\", or a duration above zero such as \"60s\", \"10m\" \
             or \"2h\", found \"never\"",
        ),
        (
            "[[agent]]\nname = \"a b\"",
            "rap.toml:2: agent.name: expected 1 to 128 letters, digits, `_`, `-` and `.`, found \"a b\"",
        ),
        (
            "[[agent]]\nname = \"a\"\ntools = [\"b?\"]",
            "rap.toml:3: agent.tools: expected a tool name, in which * matches any characters, found \"b?\"",
        ),
    ]);
}

#[test]
fn missing_and_repeated_values_are_reported() {
    mistakes(&[
        ("\n[[agent]]\nsystem = \"\"", "rap.toml:2: agent.name: missing; every agent needs a name"),
        (
            "[[agent]]\nname = \"a\"\n[[agent]]\nname = \"a\"",
            "rap.toml:4: agent.name: already used at rap.toml:2",
        ),
        (
            "[[tool_server]]\nbearer = \"s3cr3t\"",
            "rap.toml:1: tool_server.url: missing; every tool server needs a URL, or command or run to start it",
        ),
        (
            "[[mcp_server]]\nname = \"x\"",
            "rap.toml:2: mcp_server.command: missing; every MCP server needs a command or a URL",
        ),
        (
            "[[mcp_server]]\nname = \"x\"\ncommand = [\"a\"]\nbearer = \"s3cr3t\"",
            "rap.toml:4: mcp_server.bearer: expected url: a command gets its secrets with env",
        ),
        (
            "[[mcp_server]]\nname = \"x\"\nurl = \"http://h\"\ntrust = \"none\"",
            "rap.toml:4: mcp_server.trust: expected \"normal\" or \"low\", found \"none\"",
        ),
        (
            "[[mcp_server]]\nname = \"x\"\nurl = \"http://h\"\n[[mcp_server]]\nname = \"x\"\nurl = \"http://i\"",
            "rap.toml:5: mcp_server.name: already used at rap.toml:2",
        ),
        (
            "[[tool_server]]\nurl = \"http://h/\"\n[[tool_server]]\nurl = \"HTTP://H:80\"",
            "rap.toml:4: tool_server.url: already used at rap.toml:2",
        ),
        (
            "[model]\nprovider = \"openai\"\nbase_url = \"http://h\"",
            "rap.toml:2: model.name: missing; name a model of the provider",
        ),
        (
            "[model]\nprovider = \"openai\"\nname = \"m\"",
            "rap.toml:2: model.api_key: missing; api.openai.com requires a key, such as \"env:OPENAI_API_KEY\"",
        ),
        (
            "[model]\nprovider = \"anthropic\"",
            "rap.toml:2: model.name: missing; name a model of the provider\n\
             rap.toml:2: model.api_key: missing; api.anthropic.com requires a key, such as \"env:ANTHROPIC_API_KEY\"",
        ),
    ]);
}

#[test]
fn a_postgres_store_needs_a_key_and_a_sqlite_store_has_none() {
    let needed =
        "a Postgres database needs store.key, the same on every node. Make one: openssl rand -hex 32";
    let invalid = "expected 64 hexadecimal digits or the base64 of 32 bytes, or env:NAME, or file:PATH; several keys are \
                   separated by commas, the oldest first, and each but the first has the time from which it is used: \
                   KEY@2026-12-01T00:00:00Z";
    let (missing, invalid) =
        (format!("rap.toml:2: store.key: missing; {needed}"), format!("rap.toml:3: store.key: {invalid}"));
    mistakes(&[
        ("[store]\nurl = \"postgres://u:s3cr3t@h/db\"", missing.as_str()),
        ("[store]\nurl = \"postgres://u:s3cr3t@h/db\"\nkey = \"s3cr3t\"", invalid.as_str()),
        (
            &format!("[store]\nurl = \"sqlite:rap.db\"\nkey = \"{}\"", "5e".repeat(32)),
            "rap.toml:3: store.key: expected no store.key, since the key of a SQLite database is in a file beside it",
        ),
    ]);
    let text = format!("[store]\nurl = \"postgres://u:s3cr3t@h/db\"\nkey = \"{}\"", "5e".repeat(32));
    let config = Setup::new(&text).config();
    let Store::Postgres { url, lease, listen_url: None, .. } = &config.store else {
        panic!("{:?}", config.store)
    };
    assert_eq!((url.expose(), *lease), ("postgres://u:s3cr3t@h/db", Duration::from_secs(15)));
    let fleet = format!("{text}\nlisten_url = \"postgres://u:s3cr3t@direct/db\"\nlease = \"30s\"");
    let Store::Postgres { lease, listen_url: Some(direct), .. } = Setup::new(&fleet).config().store else {
        panic!("{fleet}")
    };
    assert_eq!((direct.expose(), lease), ("postgres://u:s3cr3t@direct/db", Duration::from_secs(30)));
    mistakes(&[
        (
            &format!("{text}\nlease = \"500ms\""),
            "rap.toml:4: store.lease: expected a time from \"1s\" to \"10m\"",
        ),
        (
            &format!("{text}\nlisten_url = \"sqlite:rap.db\""),
            "rap.toml:4: store.listen_url: expected \"postgres://USER:PASSWORD@HOST/DATABASE\" without the pooler",
        ),
        (
            "[store]\nlease = \"30s\"",
            "rap.toml:2: store.lease: expected this setting only with a Postgres database",
        ),
    ]);
    // Neither is shown.
    assert!(!format!("{config:?}").contains("s3cr3t") && !format!("{config:?}").contains("5e5e"));
}

#[test]
fn urls_are_checked_and_do_not_appear_in_errors() {
    let expected =
        "expected an http or https URL without user, query and fragment, such as \"http://127.0.0.1:7501\"";
    for url in ["s3cr3t", "ftp://h", "http://u:s3cr3t@h", "http://h/?token=s3cr3t"] {
        let error = Setup::new(&format!("[[tool_server]]\nurl = \"{url}\"")).error();
        assert_eq!(error, format!("rap.toml:2: tool_server.url: {expected}"));
        let error = Setup::new(&format!("[server]\npublic_url = \"{url}\"")).error();
        assert_eq!(error, format!("rap.toml:2: server.public_url: {expected}"));
    }
    let path = "rap.toml:2: store.url: expected the path of a file after sqlite:, without parameters";
    let scheme = "rap.toml:2: store.url: expected \"sqlite:PATH\", such as \"sqlite:rap.db\", or \
                  \"postgres://USER:PASSWORD@HOST/DATABASE\"";
    mistakes(&[
        ("[store]\nurl = \"mysql://u:s3cr3t@h/db\"", scheme),
        ("[store]\nurl = \"sqlite:\"", scheme),
        ("[store]\nurl = \"sqlite::memory:\"", path),
        ("[store]\nurl = \"sqlite:rap.db?mode=rw\"", path),
    ]);
}

#[test]
fn a_relative_path_depends_on_where_it_was_written() {
    let setup = Setup::new("[store]\nurl = \"sqlite:data/rap.db\"\n[model]\nscript = \"scene.toml\"");
    let setup = setup.file("scene.toml", "");
    let here = setup.directory.path().to_owned();
    let config = setup.config();
    assert_eq!(config.store, Store::Sqlite(here.join("data/rap.db")));
    assert_eq!(config.model.provider, &scripted::PROVIDER);
    assert_eq!(config.model.options.script, Some(here.join("scene.toml")));
    let config = setup.flag("store.url", "sqlite://other.db", "--store").config();
    assert_eq!(config.store, Store::Sqlite("other.db".into()));
}

#[test]
fn a_script_must_be_readable_if_it_is_used() {
    let text = "[model]\nscript = \"scene.toml\"\nname = \"m\"\napi_key = \"k\"";
    assert_eq!(
        Setup::new(text).error(),
        "rap.toml:2: model.script: cannot read scene.toml: No such file or directory (os error 2)"
    );
    Setup::new(text).variable("RAP_MODEL_PROVIDER", "openai").config();
}

#[test]
fn secrets_are_found_outside_and_never_shown() {
    let text = "[server]\ntokens = [\"file:a\", \"file:b\", \"env:C\", \"file:d\"]";
    let setup = Setup::new(text).file("a", "s3cr3t-a\n").file("b", "s3cr3t-b").variable("C", "s3cr3t-c");
    let config = setup.file("d", "s3cr3t-d\r\n").config();
    let tokens: Vec<&str> = config.server.tokens.iter().map(Secret::expose).collect();
    assert_eq!(tokens, ["s3cr3t-a", "s3cr3t-b", "s3cr3t-c", "s3cr3t-d"]);
    assert!(!format!("{config:?}").contains("s3cr3t"), "{config:?}");
}

#[test]
fn a_missing_or_invalid_secret_is_a_mistake() {
    let secret = "expected a secret of at most 4096 visible ASCII characters, or env:NAME, or file:PATH";
    let table = [
        ("env:NONE", "the environment variable NONE is not set"),
        ("env:EMPTY", "the environment variable EMPTY is empty"),
        ("env:", "expected the name of an environment variable after env:"),
        ("env:s3cr3t-key", "expected the name of an environment variable after env:"),
        ("env:SPACE", secret),
        ("file:none", "cannot read none: No such file or directory (os error 2)"),
        ("file:two", secret),
        ("file:long", secret),
        ("file:nothing", secret),
        ("file:binary", "cannot read binary: stream did not contain valid UTF-8"),
        ("s3cr3t s3cr3t", secret),
        ("", secret),
    ];
    for (written, expected) in table {
        let setup = Setup::new(&format!("[[tool_server]]\nurl = \"http://h\"\nbearer = \"{written}\""))
            .variable("EMPTY", "")
            .variable("SPACE", "s3cr3t s3cr3t")
            .file("two", "s3cr3t s3cr3t\n")
            .file("long", "s3cr3t".repeat(1000))
            .file("nothing", "\n")
            .file("binary", b"s3cr3t\xff");
        assert_eq!(setup.error(), format!("rap.toml:3: tool_server.bearer: {expected}"), "{written}");
    }
}

#[test]
fn a_provider_that_is_not_selected_needs_no_key() {
    let text = "[model]\nprovider = \"openai\"\nname = \"m\"\napi_key = \"env:NONE\"";
    assert_eq!(
        Setup::new(text).error(),
        "rap.toml:4: model.api_key: the environment variable NONE is not set"
    );
    let config = Setup::new(text).variable("RAP_MODEL_PROVIDER", "scripted").config();
    assert_eq!(config.model, Config::default().model);
}

#[test]
fn all_mistakes_are_reported_at_once_in_order() {
    let text = "[limits]\nbody = 1\nx = 1\n[server]\nlisten = \"y\"\n";
    let setup = Setup::new(text).variable("RAP_LIMITS_DEPTH", "z").flag("store.url", "s3cr3t", "--store");
    assert_eq!(
        setup.error(),
        "rap.toml:2: limits.body: expected a size from \"1KiB\" to \"8MiB\", found 1\n\
         rap.toml:3: limits.x: unknown key; `rap init` writes a file with every key\n\
         rap.toml:5: server.listen: expected an address and a port such as \"127.0.0.1:7420\", found \"y\"\n\
         RAP_LIMITS_DEPTH: limits.depth: expected a whole number from 0 to 64, found \"z\"\n\
         --store: store.url: expected \"sqlite:PATH\", such as \"sqlite:rap.db\", or \
         \"postgres://USER:PASSWORD@HOST/DATABASE\""
    );
}

#[test]
fn a_syntax_error_is_reported_with_its_line() {
    for text in ["[server\n", "a = s3cr3t", "x = \"s3cr3t\n", "a = 1\na = 2"] {
        let setup = Setup::new(&format!("\n{text}"));
        let error = setup.error();
        assert!(
            error.starts_with("rap.toml:2: ") || error.starts_with("rap.toml:3: duplicate key"),
            "{error}"
        );
        assert!(!error.contains("s3cr3t") && !error.contains('\n'), "{error}");
    }
}

#[test]
fn variables_override_the_file_and_flags_override_both() {
    let text = "[server]\nlisten = \"wrong\"\n[limits]\ndepth = 1\nhold_max = \"1s\"";
    let setup = Setup::new(text)
        .variable("RAP_SERVER_LISTEN", "127.0.0.1:1")
        .variable("RAP_SERVER_TOKENS", "one, env:TWO")
        .variable("TWO", "two")
        .variable("RAP_LIMITS_DEPTH", "3")
        .variable("RAP_LIMITS_BODY", "4KiB")
        .variable("RAP_LIMITS_HOLD_MAX", "")
        .variable("RAP_MODEL_IMAGES", "false");
    let config = setup.config();
    assert_eq!(config.server.listen.port(), 1);
    assert_eq!(config.server.tokens, [Secret::new("one"), Secret::new("two")]);
    assert!(!config.model.images);
    let hold_max = Duration::from_secs(1);
    let thread = rap_agent::Limits { depth: 3, hold_max, ..rap_agent::Limits::default() };
    assert_eq!(config.limits, Limits { thread, body: 4096, ..Limits::default() });
    assert_eq!(setup.flag("server.listen", "localhost:2", "--listen").config().server.listen.port(), 2);
}

#[test]
fn variables_set_keys_of_every_section_that_is_one_table() {
    let setup = Setup::new("")
        .variable("RAP_SERVER_PUBLIC_URL", "https://h")
        .variable("RAP_STORE_URL", "sqlite:/a")
        .variable("RAP_MODEL_PROVIDER", "openai")
        .variable("RAP_MODEL_NAME", "m")
        .variable("RAP_MODEL_BASE_URL", "https://b")
        .variable("RAP_MODEL_API_KEY", "s3cr3t");
    let config = setup.config();
    assert_eq!(config.server.public_url, BaseUrl::new("https://h"));
    assert_eq!(config.store, Store::Sqlite("/a".into()));
    let (base_url, api_key) = (Url::parse("https://b").ok(), Some(Secret::new("s3cr3t")));
    assert_eq!(config.model.provider, &openai::PROVIDER);
    let expected = Options { name: "m".into(), base_url, api_key, ..Options::default() };
    assert_eq!(config.model.options, expected);
}

#[test]
fn a_misspelt_variable_is_reported_and_an_unrelated_one_ignored() {
    let setup = Setup::new("").variable("RAP_LIMITS_HOLD_MAXX", "60s");
    assert_eq!(setup.error(), "RAP_LIMITS_HOLD_MAXX: limits.hold_maxx: unknown key; did you mean hold_max?");
    for name in
        ["RAP_SERVER_PORT", "RAP_STORE_SERVICE_HOST", "RAP_TOKEN", "RAP_URL", "RAP_TOOL_BEARER", "RAP_"]
    {
        assert!(Setup::new("").variable(name, "x").load().is_ok(), "{name}");
    }
}

/// Long enough for a server that other machines can reach.
const LONG_TOKEN: &str = "0123456789abcdef";

#[test]
fn a_server_for_other_machines_needs_long_tokens() {
    let short = &LONG_TOKEN[1..];
    for (listen, token, accepted) in
        [("10.0.0.1:1", LONG_TOKEN, true), ("10.0.0.1:1", short, false), ("127.0.0.1:1", short, true)]
    {
        let setup =
            Setup::new(&format!("[server]\nlisten = \"{listen}\"\ntokens = [\"{LONG_TOKEN}\", \"{token}\"]"));
        if accepted {
            assert_eq!(setup.config().server.has_short_token(), token == short);
        } else {
            let error = setup.error();
            assert!(
                error.starts_with("rap.toml:3: server.tokens: a token is shorter than 16 characters"),
                "{error}"
            );
            assert!(!error.contains(token), "{error}");
        }
    }
}

#[test]
fn a_server_without_tokens_must_listen_on_loopback() {
    for local in ["127.0.0.1:0", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "localhost:1"] {
        Setup::new(&format!("[server]\nlisten = \"{local}\"")).config();
    }
    let problem = "is reachable from other machines, but server.tokens is empty: set server.tokens, or listen on 127.0.0.1";
    for tokens in ["", "tokens = []"] {
        let setup = Setup::new(&format!("[server]\nlisten = \"10.0.0.1:1\"\n{tokens}"));
        assert_eq!(setup.error(), format!("rap.toml:2: server.listen: 10.0.0.1:1 {problem}"));
    }
    let setup = Setup::new("").flag("server.listen", "[2001:db8::1]:1", "--listen");
    assert_eq!(setup.error(), format!("--listen: server.listen: [2001:db8::1]:1 {problem}"));
    Setup::new(&format!("[server]\nlisten = \"10.0.0.1:1\"\ntokens = [\"{LONG_TOKEN}\"]")).config();
    assert_eq!(
        Setup::new("[server]\nlisten = \"10.0.0.1:1\"\ntokens = [\"env:NONE\"]").error(),
        "rap.toml:3: server.tokens: the environment variable NONE is not set"
    );
}

#[test]
fn a_server_on_every_address_needs_a_public_url() {
    let text = format!("[server]\nlisten = \"0.0.0.0:7420\"\ntokens = [\"{LONG_TOKEN}\"]\n");
    assert_eq!(
        Setup::new(&text).error(),
        "rap.toml:2: server.listen: tool servers cannot call back to 0.0.0.0:7420: set server.public_url to a \
         URL that they can reach, such as \"http://rap.example.com:7420\""
    );
    Setup::new(&format!("{text}public_url = \"http://h\"")).config();
}

/// Uncomments the settings with a default in the text of `rap init`.
fn uncommented(text: &str) -> String {
    let line = |line: &str| match line.strip_prefix('#') {
        Some(setting) if setting.starts_with(|c: char| c == '[' || c.is_ascii_lowercase()) => {
            setting.to_owned()
        }
        _ => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

fn loaded_here(text: &str) -> Result<Config, Error> {
    let document = document::parse(text, FILE_NAME)?;
    Draft::from_document(document, &Resolver::new(&Environment::new(), Path::new(""))).into_result()
}

fn keys(document: &Table) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    for (section, setting) in document {
        let tables = match &setting.value {
            Value::Table(table) => vec![table],
            Value::List(items) => items.iter().filter_map(|item| as_table(&item.value)).collect(),
            _ => Vec::new(),
        };
        keys.insert(section.clone());
        keys.extend(tables.iter().flat_map(|table| table.keys()).map(|key| format!("{section}.{key}")));
    }
    keys
}

fn as_table(value: &Value) -> Option<&Table> {
    if let Value::Table(table) = value { Some(table) } else { None }
}

#[test]
fn the_file_of_rap_init_is_the_default_with_and_without_comments() {
    assert_eq!(loaded_here(&init::text()).unwrap(), Config::default());
    let text = uncommented(&init::text());
    assert!(text.contains("\n[[agent]]\n") && text.contains("\nhold_max = "), "{text}");
    assert_eq!(loaded_here(&text).unwrap(), Config::default());
}

#[test]
fn the_file_of_rap_init_lists_every_key() {
    let text = uncommented(&init::text()).replace("# Example: ", "");
    let document = document::parse(&text, FILE_NAME).unwrap_or_else(|error| panic!("{error}"));
    let listed = keys(&document);
    let draft = Draft::from_document(document, &Resolver::new(&Environment::new(), Path::new("")));
    assert_eq!(listed, draft.diagnostics.known);
    assert!(listed.contains("tool_server.bearer") && listed.contains("limits.depth"), "{listed:?}");
}

#[test]
fn the_examples_of_rap_init_are_valid() {
    let text = uncommented(&init::text()).replace("# Example: ", "");
    let text = text.replace("provider = \"scripted\"", "provider = \"openai\"");
    let text = text.replace("url = \"sqlite:rap.db\"", "url = \"postgres://u:p@h/db\"");
    // Only one way of authorization is possible.
    let other_ways = |line: &&str| line.starts_with("oauth = ") || line.starts_with("sigv4 = ");
    let text = text.lines().filter(|line| !other_ways(line)).collect::<Vec<_>>().join("\n");
    let setup = Setup::new(&text).variable("OPENAI_API_KEY", "k").variable("TOOLS_TOKEN", "t");
    let setup =
        setup.variable("GITHUB_SECRET", "s").variable("GITHUB_TOKEN", "t").variable("SEARCH_TOKEN", "t");
    let setup = setup.variable("DATABASE_DIRECT_URL", "postgres://u:p@direct/db");
    let setup = setup.variable("TOOLS_HMAC", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
    let setup = setup.variable("HOOK_SECRET", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
    let setup = setup.variable("OTLP_AUTHORIZATION", "Bearer t");
    let setup = setup.variable("TOOLS_MIGRATION_KEY", &"7e".repeat(32));
    let files = ["server.pem", "server.key", "client.pem", "client.key", "ca.pem"];
    let setup = files.into_iter().fold(setup, |setup, file| setup.file(file, ""));
    let config = setup.variable("DATABASE_KEY", &"7e".repeat(32)).config();
    assert!(matches!(config.store, Store::Postgres { .. }));
    assert_eq!((config.tool_servers.len(), config.mcp_servers.len()), (4, 2));
    assert_eq!(config.notify[0].on, rap_agent::Attention::ALL);
    assert!(config.server.public_url.is_some() && config.telemetry.is_some());
    assert!(config.agents[0].model.is_some() && config.agents[0].limits.is_some());
}

#[test]
fn mistakes_in_notify_are_named_without_the_url() {
    const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let table = [
        (format!("secret = \"{KEY}\""), "notify.url: missing"),
        ("url = \"https://h/x\"".to_owned(), "notify.secret: missing"),
        ("url = \"https://h/x\"\nsecret = \"short\"".to_owned(), "notify.secret: expected one to four keys"),
        (format!("url = \"ftp://h/T0KEN\"\nsecret = \"{KEY}\""), "notify.url: expected an http or https URL"),
        (
            format!("url = \"https://h/x\"\nsecret = \"{KEY}\"\non = [\"asleep\"]"),
            "notify.on: expected \"needs_you\", \"failed\" or \"closed\"",
        ),
    ];
    for (lines, expected) in table {
        let error = Setup::new(&format!("[[notify]]\n{lines}\n")).error();
        assert!(error.contains(expected), "{lines}: {error}");
        assert!(!error.contains("T0KEN"), "{error}");
    }
}
