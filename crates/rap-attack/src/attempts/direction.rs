//! URLs that lead a server to itself, to metadata services, or to addresses that it must not connect to.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rap_protocol::{Origin, UrlPolicy, UrlRules};
use rap_testkit::peer::Reply;
use rap_testkit::poll;
use rap_testkit::tools::{INVOKE, tool};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OnceCell;
use url::Url;

use crate::attempt::{Attempt, Tries, attempt};
use crate::isolation::FORBIDDEN;
use crate::stage::{Stage, TOOL};
use crate::wire;

const TOPIC: &str = "ssrf";

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(
            TOPIC,
            "endpoint that is our own listener",
            "the runtime operates its own API",
            own_endpoint
        ),
        attempt!(
            TOPIC,
            "response_url that is our own listener",
            "the runtime operates its own API",
            own_response_url
        ),
        attempt!(
            TOPIC,
            "own listener through a forwarded port",
            "the runtime operates its own API",
            forwarded
        ),
        attempt!(
            TOPIC,
            "callback URL of a tool server's own listener",
            "the tool server calls itself",
            own_callback
        ),
        attempt!(TOPIC, "metadata service", "a server connects to it", metadata),
        attempt!(TOPIC, "redirected invocation", "a redirect is followed", redirects),
        attempt!(TOPIC, "addresses of all reserved ranges", "the rules permit one", addresses),
        attempt!(TOPIC, "https to http", "the rules permit a downgrade", downgrade),
    ]
}

/// Other ways to write an address on loopback.
const SELF: [&str; 14] = [
    "127.0.0.1",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "[::1]",
    "127.0.0.2",
    "127.255.255.254",
    "2130706433",
    "0x7f.1",
    "0177.0.0.1",
    "127.1",
    "[::ffff:127.0.0.1]",
    "0.0.0.0",
    "[::]",
];

/// Names of this machine. The last one is known only inside of the network namespace.
pub(super) fn own_names(stage: &Stage) -> impl Iterator<Item = &'static str> {
    SELF.into_iter().chain(stage.isolation.isolated.then_some("self.attack.example"))
}

/// Makes the runtime without tokens call the tool `work` at an endpoint. Returns the history when the call has ended.
async fn call_at(stage: &Stage, endpoint: &str) -> String {
    let tools = &stage.local_hostile;
    tools.offer(json!({"name": "bench", "endpoint": endpoint, "tools": [tool("work")]}));
    let made = wire::post(&stage.local.at("/v1/threads"), None, &json!({"message": "call work {}"})).await;
    let thread =
        made.expect("a thread could not be created").body["id"].as_str().unwrap_or_default().to_owned();
    until(stage, &thread, "idle").await
}

/// Waits for a status of a thread. Returns its history, or nothing after a while.
async fn until(stage: &Stage, thread: &str, status: &str) -> String {
    let url = stage.local.at(&format!("/v1/threads/{thread}"));
    let has_status = async || wire::get(&url, None).await.is_some_and(|found| found.body["status"] == status);
    if poll(Duration::from_secs(5), has_status).await.is_none() {
        return String::new();
    }
    let history = wire::get(&format!("{url}/history"), None).await;
    history.map_or_else(String::new, |history| history.text)
}

/// Creates the thread that the attacker wants to close. Returns the path that closes it.
async fn victim(stage: &Stage, id: &str) -> String {
    wire::post(&stage.local.at("/v1/threads"), None, &json!({"id": id})).await;
    format!("/v1/threads/{id}/close")
}

async fn is_closed(stage: &Stage, id: &str) -> bool {
    let found = wire::get(&stage.local.at(&format!("/v1/threads/{id}")), None).await;
    found.is_none_or(|found| found.body["status"] != "idle")
}

async fn own_endpoint(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let close = victim(&stage, "endpoint").await;
    for name in own_names(&stage) {
        let history =
            call_at(&stage, &format!("http://{name}:{}{close}", wire::port(&stage.local.url))).await;
        tries.add(format!("{name} was not refused: {history}"), !history.contains("is not allowed"));
    }
    tries.add("the thread was closed", is_closed(&stage, "endpoint").await);
    tries
}

async fn own_response_url(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let close = victim(&stage, "response").await;
    for name in own_names(&stage) {
        let made =
            wire::post(&stage.local.at("/v1/threads"), None, &json!({"message": "call work {}"})).await;
        let thread =
            made.expect("a thread could not be created").body["id"].as_str().unwrap_or_default().to_owned();
        let call = stage.invocation(&stage.local_hostile, &thread).await;
        let question = call.question(&format!("http://{name}:{}{close}", wire::port(&stage.local.url)));
        let asked = wire::post(call.url(), None, &question).await.map_or(0, |answer| answer.status);
        if asked == 200 {
            let choice = format!("/v1/threads/{thread}/calls/{}/choice", call.id());
            wire::post(&stage.local.at(&choice), None, &json!({"selected": 0})).await;
            let history = until(&stage, &thread, "idle").await;
            tries.add(
                format!("{name} was not refused: {history}"),
                !history.contains("could not be delivered"),
            );
        } else {
            tries.add(format!("{name} was answered {asked}"), asked != 400);
            wire::post(call.url(), None, &call.result("done")).await;
        }
    }
    tries.add("the thread was closed", is_closed(&stage, "response").await);
    tries
}

/// Forwards a port of this machine to the runtime, as an operator may have done.
async fn forwarded(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let target = wire::authority(&stage.local.url).to_owned();
    let forwarding = tokio::spawn(async move {
        while let Ok((mut incoming, _)) = listener.accept().await {
            if let Ok(mut outgoing) = TcpStream::connect(&target).await {
                tokio::spawn(async move {
                    tokio::io::copy_bidirectional(&mut incoming, &mut outgoing).await.ok()
                });
            }
        }
    });
    let close = victim(&stage, "forwarded").await;
    call_at(&stage, &format!("http://127.0.0.1:{port}{close}")).await;
    tries.add("the thread was closed", is_closed(&stage, "forwarded").await);
    forwarding.abort();
    tries
}

fn invocation(id: &str, callback_url: &str) -> serde_json::Value {
    json!({"operation": "echo", "arguments": {"text": "x"}, "id": id, "group_id": "direction", "callback_url": callback_url})
}

async fn own_callback(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let port = wire::port(&stage.kitchen.url);
    let before = refused(&stage).await;
    for name in own_names(&stage) {
        let call = invocation(name, &format!("http://{name}:{port}/close_thread"));
        let status = wire::post(&stage.kitchen.at("/invoke"), Some(TOOL), &call)
            .await
            .map_or(0, |answer| answer.status);
        // A name is resolved when the callback is sent.
        let is_name = name.to_lowercase().starts_with("localhost") || name.ends_with(".example");
        tries.add(format!("{name} was answered {status}"), wire::is_success(status) && !is_name);
    }
    // A callback to itself would be refused, because it has no token.
    tokio::time::sleep(Duration::from_millis(500)).await;
    tries.add("it called itself", refused(&stage).await != before);
    tries
}

/// Line of the tool server's metrics with the number of refused callbacks.
async fn refused(stage: &Stage) -> String {
    let metrics =
        wire::get(&stage.kitchen.at("/metrics"), None).await.map_or_else(String::new, |answer| answer.text);
    metrics.lines().find(|line| line.starts_with("rap_tool_refused_total ")).unwrap_or_default().to_owned()
}

/// Listens at all forbidden addresses. Returns where connections arrived, of all attempts.
pub(super) async fn traps() -> &'static Mutex<Vec<String>> {
    static HITS: OnceCell<Arc<Mutex<Vec<String>>>> = OnceCell::const_new();
    HITS.get_or_init(listen).await
}

async fn listen() -> Arc<Mutex<Vec<String>>> {
    let hits = Arc::new(Mutex::new(Vec::new()));
    for address in FORBIDDEN {
        let ip: IpAddr = address.parse().unwrap();
        let listener = TcpListener::bind((ip, 80)).await.unwrap();
        let hits = Arc::clone(&hits);
        tokio::spawn(async move {
            while let Ok((_, from)) = listener.accept().await {
                hits.lock().unwrap().push(format!("{ip} from {from}"));
            }
        });
    }
    hits
}

/// Hosts of metadata services. Their names are known only inside of the network namespace.
pub(super) fn metadata_hosts(stage: &Stage) -> Vec<String> {
    let mut hosts: Vec<String> = FORBIDDEN.map(str::to_owned).into();
    hosts.iter_mut().filter(|host| host.contains(':')).for_each(|host| *host = format!("[{host}]"));
    hosts.extend(
        ["2852039166", "0xa9fea9fe", "169.254.43518", "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]"]
            .map(str::to_owned),
    );
    if stage.isolation.isolated {
        hosts.extend((1..=FORBIDDEN.len()).map(|number| format!("name{number}.attack.example")));
    }
    hosts
}

/// Counts the connections to metadata services.
pub(super) async fn add_hits(stage: &Stage, tries: &mut Tries) {
    if !stage.isolation.isolated {
        tries.note = Some("literal addresses only, since there is no network namespace".to_owned());
        return;
    }
    let hits = traps().await.lock().unwrap().clone();
    tries.add(format!("connections to {hits:?}"), !hits.is_empty());
}

async fn metadata(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let hosts = metadata_hosts(&stage);
    if stage.isolation.isolated {
        traps().await;
    }
    for (number, host) in hosts.iter().enumerate() {
        let url = format!("http://{host}/latest/meta-data");
        let history = call_at(&stage, &url).await;
        tries.add(
            format!("the endpoint {url} was not refused: {history}"),
            !history.contains("is not allowed"),
        );
        let call = invocation(&format!("metadata{number}"), &url);
        let status = wire::post(&stage.kitchen.at("/invoke"), Some(TOOL), &call)
            .await
            .map_or(0, |answer| answer.status);
        let is_name = host.ends_with(".example");
        tries.add(
            format!("the callback URL {url} was answered {status}"),
            wire::is_success(status) && !is_name,
        );
    }
    add_hits(&stage, &mut tries).await;
    tries
}

async fn redirects(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let close = victim(&stage, "redirected").await;
    for status in [301, 302, 303, 307, 308] {
        for to in [stage.local.at(&close), format!("{}/redirected", stage.elsewhere.url)] {
            stage.local_hostile.answer_next(INVOKE, Reply::Full(status, Some(("location", to)), "".into()));
            call_at(&stage, &format!("{}{INVOKE}", stage.local_hostile.url)).await;
            tries.add(format!("{status} was followed"), stage.elsewhere.count("/redirected") > 0);
        }
    }
    tries.add("the thread was closed", is_closed(&stage, "redirected").await);
    tries
}

/// Addresses that no policy permits.
#[rustfmt::skip]
const NEVER: [&str; 40] = [
    "0.0.0.0", "0.1.2.3", "169.254.0.1", "169.254.169.254", "169.254.170.2", "192.0.0.192", "192.0.0.1",
    "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1",
    "255.255.255.255", "100.100.100.200", "::", "::2", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2002:7f00:1::", "2002:a9fe:a9fe::", "fe80::1",
    "fe80::5efe:127.0.0.1", "2001:db8::5efe:169.254.169.254", "fec0::1", "ff02::1", "2001:db8::1", "100::1",
    "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "5f00::1", "2620:4f:8000::5efe:1.2.3.4",
];

/// Judges addresses without connecting to any.
async fn addresses(_: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let private =
        ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1", "100.64.0.1", "fd12:3456::1", "fc00::1"];
    let loopback = ["127.0.0.1", "127.1.2.3", "::1"];
    let judge = |policy: UrlPolicy, address: &str| {
        let ip: IpAddr = address.parse().unwrap();
        let literal =
            if ip.is_ipv6() { format!("http://[{address}]/") } else { format!("http://{address}/") };
        let rules = UrlRules::from(policy);
        let name = Url::parse("http://name.example/").unwrap();
        let resolved = rules.check_address(&Origin::of(&name).unwrap(), ip, |_| false);
        Url::parse(&literal).is_ok_and(|url| rules.check(&url).is_ok()) || resolved.is_ok()
    };
    for policy in [UrlPolicy::Public, UrlPolicy::Private, UrlPolicy::Loopback] {
        for address in NEVER {
            tries.add(format!("{policy:?} permits {address}"), judge(policy, address));
        }
        for address in private {
            tries.add(
                format!("{policy:?} permits {address}"),
                policy == UrlPolicy::Public && judge(policy, address),
            );
        }
        for address in loopback {
            tries.add(
                format!("{policy:?} permits {address}"),
                policy != UrlPolicy::Loopback && judge(policy, address),
            );
        }
    }
    tries
}

async fn downgrade(_: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let url = |text: &str| Url::parse(text).unwrap();
    let server = url("https://tools.example/");
    let rules = UrlRules::from(UrlPolicy::Loopback)
        .configured(&server)
        .allow_hosts(rap_protocol::HostPort::parse("tools.example:80"));
    for named in [
        "http://tools.example/",
        "http://tools.example:443/",
        "http://10.0.0.1/",
        "http://127.0.0.1:8080/",
        "HTTP://tools.example/",
    ] {
        tries.add(format!("{named} is permitted"), rules.check_named_by(&server, &url(named)).is_ok());
        tries.add(format!("{named} gets credentials"), rules.may_have_credentials(&server, &url(named)));
    }
    tries
}
