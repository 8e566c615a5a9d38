//! A runtime on a copy of the fixture, with fake servers.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use axum::http::{HeaderMap, Method};
use rusqlite::Connection;
use serde_json::{Value, json};

use rap_testkit::anthropic::AnthropicServer;
use rap_testkit::model::ModelServer;
use rap_testkit::peer::Request;
use rap_testkit::tools::{Call, Tools, tool, with};
use rap_testkit::{Rap, Setup};

/// `public_url` in the fixture, where nothing listens.
const PUBLIC_URL: &str = "http://127.0.0.1:9";
/// URL of the tool server in the fixture.
const TOOLS_URL: &str = "http://127.0.0.1:17501";
const FILES: [&str; 4] = ["rap.db", "rap.db.key", "watcher.toml", "loop.toml"];
/// Number of queued answers, more than any test needs.
const ANSWERS: usize = 16;

pub struct Fixture {
    pub rap: Rap,
    pub tools: Tools,
    pub model: ModelServer,
    pub thinker: AnthropicServer,
    /// API answers recorded with the first release.
    pub recorded: Value,
    urls: Vec<Value>,
}

impl Fixture {
    /// Copies the database and starts a runtime on it. The model answers `Hello again.` to everything.
    pub async fn start() -> Fixture {
        let (tools, model, thinker) =
            (Tools::start().await, ModelServer::start().await, AnthropicServer::start().await);
        let wipe = with(tool("wipe"), json!({"annotations": {"destructive": true}}));
        tools.offer(tools.document("bench", "1", vec![tool("work"), tool("watch"), wipe]));
        (0..ANSWERS).for_each(|_| model.says("Hello again."));
        let directory = tempfile::tempdir().unwrap();
        for file in FILES {
            fs::copy(source(file), directory.path().join(file)).unwrap();
        }
        // A git checkout does not keep these permissions.
        fs::set_permissions(directory.path().join("rap.db.key"), fs::Permissions::from_mode(0o600)).unwrap();
        adapt(&directory.path().join("rap.db"), &tools.url);
        let recorded = read("recorded.json", &tools.url);
        let urls = read("callback_urls.json", &tools.url).as_array().unwrap().clone();
        let rap = setup(&tools, &model, &thinker).start_in(directory);
        Fixture { rap, tools, model, thinker, recorded, urls }
    }

    /// Restarts the runtime after kill -9.
    pub fn restarted(self) -> Fixture {
        Fixture { rap: self.rap.restarted(), ..self }
    }

    fn sent(&self, thread: &str, tool: &str) -> &Value {
        let same = |sent: &&Value| sent["thread"] == *thread && sent["tool"] == *tool;
        self.urls.iter().find(same).unwrap_or_else(|| panic!("{tool} of {thread} was not recorded"))
    }

    /// Callback URL that the first release sent to the tool server.
    pub fn url_of(&self, thread: &str, tool: &str) -> String {
        self.sent(thread, tool)["callback_url"].as_str().unwrap().to_owned()
    }

    /// A call of the first release. Its callbacks go to the recorded path at the runtime's new address.
    pub fn call(&self, thread: &str, tool: &str) -> Call {
        let sent = self.sent(thread, tool);
        let body = json!({"id": sent["call"], "group_id": thread, "callback_url": sent["callback_url"]});
        let request = Request {
            method: Method::POST,
            path: String::new(),
            headers: HeaderMap::new(),
            raw: body.to_string().into(),
            body,
            at: Instant::now(),
        };
        self.here(&Call { request })
    }

    /// Returns the call with the runtime's new address in its callback URL.
    pub fn here(&self, call: &Call) -> Call {
        let mut call = call.clone();
        let path = call.url().strip_prefix(PUBLIC_URL).unwrap_or_else(|| panic!("elsewhere: {}", call.url()));
        let url = format!("{}{path}", self.rap.url);
        call.request.body["callback_url"] = json!(url);
        call
    }
}

fn source(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/first-release").join(file)
}

/// Reads a file of the fixture, with the current address of the tool server.
fn read(file: &str, tools: &str) -> Value {
    let text = fs::read_to_string(source(file)).unwrap().replace(TOOLS_URL, tools);
    serde_json::from_str(&text).unwrap()
}

fn setup(tools: &Tools, model: &ModelServer, thinker: &AnthropicServer) -> Setup {
    let remote =
        format!("provider = \"openai\", name = \"m\", base_url = \"{}/v1\", window = 100000", model.url);
    let thinks =
        format!("provider = \"anthropic\", name = \"m\", base_url = \"{}\", thinking = 1024", thinker.url);
    let script = |file: &str| format!("model = {{ provider = \"scripted\", script = \"{file}\" }}");
    Setup::new()
        .server(&format!("public_url = \"{PUBLIC_URL}\""))
        .agent("name = \"default\"")
        .agent(&format!("name = \"remote\"\nmodel = {{ {remote} }}"))
        .agent(&format!("name = \"thinker\"\nmodel = {{ {thinks} }}"))
        .agent(&format!("name = \"watcher\"\n{}", script("watcher.toml")))
        .agent("name = \"frugal\"\nlimits = { turns_in_total = 2 }")
        .agent(&format!("name = \"loop\"\n{}\nlimits = {{ turns_per_wake = 3 }}", script("loop.toml")))
        .tools(tools)
        .limit("hold_max = \"3650d\"")
        .limit("approval_within = \"3650d\"")
        .limit("event_children_per_subscription = 1")
}

/// Replaces the address of the tool server in the database, and updates the timestamps of rows that expire after days.
fn adapt(database: &Path, tools: &str) {
    let conn = Connection::open(database).unwrap();
    let columns: Vec<(String, String)> = conn
        .prepare(
            "SELECT t.name, c.name FROM sqlite_schema t JOIN pragma_table_info(t.name) c \
             WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%' AND c.type IN ('TEXT', 'BLOB')",
        )
        .unwrap()
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap()
        .collect::<rusqlite::Result<_>>()
        .unwrap();
    let mut replaced = 0;
    for (table, column) in columns {
        let text = format!("replace(CAST({column} AS TEXT), ?1, ?2)");
        let sql = format!(
            "UPDATE {table} SET {column} = \
             CASE typeof({column}) WHEN 'blob' THEN CAST({text} AS BLOB) ELSE {text} END \
             WHERE instr({column}, CAST(?1 AS BLOB)) OR instr({column}, ?1)"
        );
        replaced += conn.execute(&sql, [TOOLS_URL, tools]).unwrap();
    }
    assert!(replaced > 20, "the address was replaced only {replaced} times");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as i64;
    for sql in ["UPDATE seen SET at = ?1", "UPDATE repeats SET at = ?1", "UPDATE deliveries SET last_at = ?1"]
    {
        assert!(conn.execute(sql, [now]).unwrap() > 0, "{sql}");
    }
    conn.close().unwrap();
}

/// Checks that all recorded values are present. Fields that a later version adds are ignored.
#[track_caller]
pub fn includes(place: &str, shown: &Value, recorded: &Value) {
    match (shown, recorded) {
        (Value::Object(shown), Value::Object(recorded)) => {
            for (key, value) in recorded {
                let found = shown.get(key).unwrap_or_else(|| panic!("{place}: no {key} in {shown:?}"));
                includes(&format!("{place}.{key}"), found, value);
            }
        }
        (Value::Array(shown), Value::Array(recorded)) => {
            assert_eq!(shown.len(), recorded.len(), "{place}: {shown:?} was {recorded:?}");
            for (at, (shown, recorded)) in shown.iter().zip(recorded).enumerate() {
                includes(&format!("{place}[{at}]"), shown, recorded);
            }
        }
        _ => assert_eq!(shown, recorded, "{place}"),
    }
}
