//! The files of `examples/fleet`. Nodes are started with the arguments, configuration and variables that they name; a
//! container engine is not needed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rap_testkit::postgres::Server;
use rap_testkit::{Client, Process, programs};
use yaml_rust2::{Yaml, YamlLoader};

use crate::support::Api;

/// Address of the nodes inside of their containers.
const LISTEN: &str = "0.0.0.0:7420";
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/fleet").join(name)
}

fn text(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap()
}

fn strings(list: &Yaml) -> Vec<String> {
    list.as_vec().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// A node as one of the files describes it.
struct Node {
    arguments: Vec<String>,
    variables: BTreeSet<String>,
    count: usize,
    /// Time in which a node has to end after SIGTERM.
    grace: Duration,
    probes: Vec<String>,
    port: u16,
}

fn of_compose() -> Node {
    let file = YamlLoader::load_from_str(&text("compose.yaml")).unwrap().remove(0);
    let node = &file["services"]["node"];
    let variables = node["environment"].as_hash().unwrap().keys().map(|name| name.as_str().unwrap().into());
    let grace = node["stop_grace_period"].as_str().unwrap().trim_end_matches('s').parse().unwrap();
    let mounted = strings(&node["volumes"]).remove(0);
    assert_eq!(mounted, "./rap.toml:/etc/rap/rap.toml:ro");
    // The load balancer leads to the port of the nodes.
    let balancer = text("balancer.conf");
    let target =
        balancer.lines().find_map(|line| line.trim().strip_prefix("set $nodes http://node:")).unwrap();
    Node {
        arguments: strings(&node["command"]),
        variables: variables.collect(),
        count: usize::try_from(node["deploy"]["replicas"].as_i64().unwrap()).unwrap(),
        grace: Duration::from_secs(grace),
        probes: vec!["/healthz".into()],
        port: target.trim_end_matches(';').parse().unwrap(),
    }
}

fn of_kubernetes() -> Node {
    let source = text("kubernetes.yaml");
    let documents = YamlLoader::load_from_str(&source).unwrap();
    let by_kind: BTreeMap<&str, &Yaml> =
        documents.iter().map(|document| (document["kind"].as_str().unwrap(), document)).collect();
    assert_eq!(by_kind["ConfigMap"]["data"]["rap.toml"].as_str().unwrap(), text("rap.toml"));
    let deployment = &by_kind["Deployment"]["spec"];
    let pod = &deployment["template"]["spec"];
    let container = &pod["containers"][0];
    let labels = &deployment["template"]["metadata"]["labels"];
    for selector in [
        &deployment["selector"]["matchLabels"],
        &by_kind["Service"]["spec"]["selector"],
        &by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ] {
        assert_eq!(selector, labels);
    }
    let port = &container["ports"][0];
    let probes = ["readinessProbe", "livenessProbe"].map(|probe| {
        let request = &container[probe]["httpGet"];
        assert_eq!(request["port"], port["name"]);
        request["path"].as_str().unwrap().to_owned()
    });
    assert_eq!(by_kind["Service"]["spec"]["ports"][0]["targetPort"], port["name"]);
    // The command in the comment makes the secret.
    let secret =
        source.split("--from-literal=").skip(1).map(|rest| rest.split('=').next().unwrap().to_owned());
    let set = container["env"].as_vec().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned());
    Node {
        arguments: strings(&container["args"]),
        variables: secret.chain(set).collect(),
        count: usize::try_from(deployment["replicas"].as_i64().unwrap()).unwrap(),
        grace: Duration::from_secs(pod["terminationGracePeriodSeconds"].as_i64().unwrap().unsigned_abs()),
        probes: probes.into(),
        port: u16::try_from(port["containerPort"].as_i64().unwrap()).unwrap(),
    }
}

async fn runs(node: &Node) {
    let configuration = text("rap.toml");
    assert!(configuration.contains(&format!("listen = {LISTEN:?}")));
    assert!(LISTEN.ends_with(&format!(":{}", node.port)));
    let used = configuration.split("\"env:").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned());
    for name in used.chain(["RAP_SERVER_PUBLIC_URL".to_owned()]) {
        assert!(node.variables.contains(&name), "{name} is not set");
    }
    let database = Server::shared().database();
    let values = BTreeMap::from([
        ("DATABASE_URL", database.url()),
        ("DATABASE_KEY", "7e".repeat(32)),
        ("RAP_TOKEN", TOKEN.to_owned()),
        ("RAP_SERVER_PUBLIC_URL", "https://rap.example.com".to_owned()),
    ]);
    let start = || {
        let file = path("rap.toml").display().to_string();
        let arguments: Vec<String> =
            node.arguments.iter().map(|argument| argument.replace("/etc/rap/rap.toml", &file)).collect();
        let mut command = programs::rap(&[]);
        command.args(arguments).envs(node.variables.iter().map(|name| (name, &values[name.as_str()])));
        // The only difference: tests listen on loopback.
        Process::start({
            command.env("RAP_SERVER_LISTEN", "127.0.0.1:0");
            command
        })
    };
    let mut nodes: Vec<Process> = (0..node.count).map(|_| start()).collect();
    let client = Client::new(&nodes[0].url, Some(TOKEN));
    rap_testkit::until("all nodes know each other", async || {
        let listed = client.get("/v1/nodes").await.body["nodes"].as_array().map(Vec::len);
        listed == Some(node.count)
    })
    .await;
    for (process, probe) in
        nodes.iter().flat_map(|process| node.probes.iter().map(move |probe| (process, probe)))
    {
        assert!(Api::at(&process.url).try_get(probe).await, "{probe}");
    }
    client.post("/v1/threads", &serde_json::json!({"id": "t", "message": "say hello"})).await.expect(201);
    Client::new(&nodes[node.count - 1].url, Some(TOKEN)).until_idle("t").await;
    for process in &mut nodes {
        let began = Instant::now();
        assert_eq!(process.terminate().code(), Some(0));
        assert!(began.elapsed() < node.grace, "{:?}", began.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_of_the_compose_file_run() {
    runs(&of_compose()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_of_the_kubernetes_example_run() {
    runs(&of_kubernetes()).await;
}

#[test]
fn the_image_is_built_with_the_compiler_of_the_workspace() {
    let manifest = fs::read_to_string(path("../../Cargo.toml")).unwrap();
    let version =
        manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).unwrap().trim_matches('"');
    assert!(text("Dockerfile").contains(&format!("FROM rust:{version}-")), "{version}");
}
