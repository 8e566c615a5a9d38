//! Handshakes of real servers and clients on loopback.

use std::fs;
use std::future::pending;
use std::net::SocketAddr;
use std::time::Duration;

use axum::routing::post;
use axum::{Extension, Router};
use bytes::Bytes;
use rap_protocol::UrlPolicy;
use rap_testkit::certificates::Authority;
use rap_testkit::until;
use tokio::net::TcpListener;
use url::Url;

use super::*;
use crate::client::Error;
use crate::serve::{Peer, ServeLimits, serve_with_tls_until};

const LIMITS: ServeLimits =
    ServeLimits { connections: 64, head_within: Duration::from_secs(60), urgent_paths: &[] };

/// Serves `/names`, which answers with the names of the client's certificate.
async fn serve(tls: ServerTls) -> SocketAddr {
    let names = async |Extension(peer): Extension<Peer>| match peer.certificate {
        None => "none".to_owned(),
        Some(certificate) => certificate.names.join(" "),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = Acceptor::new(tls).unwrap();
    let router = Router::new().route("/names", post(names));
    tokio::spawn(serve_with_tls_until(listener, Some(acceptor), router, LIMITS, pending()));
    address
}

async fn ask(address: SocketAddr, tls: &ClientTls) -> Result<String, Error> {
    let client = tls.outgoing(UrlPolicy::Loopback.into(), ClientLimits::default()).unwrap();
    ask_with(&client, address).await
}

async fn ask_with(client: &Reloading<Client>, address: SocketAddr) -> Result<String, Error> {
    let url = Url::parse(&format!("https://{address}/names")).unwrap();
    let reply = client.get().post_json(&url, &[], Bytes::new()).await?;
    Ok(String::from_utf8(reply.body.to_vec()).unwrap())
}

fn server_tls(
    (cert, key): (PathBuf, PathBuf),
    client_ca: Option<&Authority>,
    clients: ClientCertificates,
) -> ServerTls {
    ServerTls { cert, key, client_ca: client_ca.map(|authority| authority.file.clone()), clients }
}

fn client_tls(identity: Option<(PathBuf, PathBuf)>, ca: &Authority) -> ClientTls {
    ClientTls { identity, ca: Some(ca.file.clone()) }
}

#[tokio::test]
async fn a_client_trusts_only_the_configured_authority_and_a_valid_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let [ours, other] = ["ours", "other"].map(|name| Authority::new(directory.path(), name));
    let good = ours.certify(directory.path(), "good", &["127.0.0.1"]);
    let address = serve(server_tls(good, None, ClientCertificates::Required)).await;
    assert_eq!(ask(address, &client_tls(None, &ours)).await.unwrap(), "none");
    let error = ask(address, &client_tls(None, &other)).await.unwrap_err().to_string();
    assert!(error.contains("UnknownIssuer"), "{error}");
    let expired = ours.certify_expired(directory.path(), "expired", &["127.0.0.1"]);
    let elsewhere = ours.certify(directory.path(), "elsewhere", &["127.0.0.2", "tools.example"]);
    for (identity, expected) in [(expired, "expired"), (elsewhere, "not valid for name")] {
        let address = serve(server_tls(identity, None, ClientCertificates::Required)).await;
        let error = ask(address, &client_tls(None, &ours)).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Proves: TR-19
#[tokio::test]
async fn a_client_certificate_has_to_be_valid_and_of_the_right_authority() {
    let directory = tempfile::tempdir().unwrap();
    let [ours, other] = ["ours", "other"].map(|name| Authority::new(directory.path(), name));
    let server = ours.certify(directory.path(), "server", &["127.0.0.1"]);
    let names = ["runtime.example", "spiffe://example/runtime"];
    let good = ours.certify(directory.path(), "good", &names);
    let nameless = ours.certify(directory.path(), "nameless", &[]);
    let bad = [
        ours.certify_expired(directory.path(), "expired", &names),
        other.certify(directory.path(), "foreign", &names),
    ];
    for clients in [ClientCertificates::Required, ClientCertificates::Optional] {
        let address = serve(server_tls(server.clone(), Some(&ours), clients)).await;
        let shown = ask(address, &client_tls(Some(good.clone()), &ours)).await.unwrap();
        assert_eq!(shown, "spiffe://example/runtime runtime.example");
        let shown = ask(address, &client_tls(Some(nameless.clone()), &ours)).await.unwrap();
        assert!(shown.starts_with("sha256:") && shown.len() == 71, "{shown}");
        for identity in &bad {
            let refused = ask(address, &client_tls(Some(identity.clone()), &ours)).await;
            assert!(refused.is_err(), "{identity:?}: {refused:?}");
        }
        let without = ask(address, &client_tls(None, &ours)).await;
        match clients {
            ClientCertificates::Required => assert!(without.is_err(), "{without:?}"),
            ClientCertificates::Optional => assert_eq!(without.unwrap(), "none"),
        }
    }
}

#[tokio::test]
async fn renewed_certificates_are_used_without_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "ours");
    let server = authority.certify(directory.path(), "server", &["127.0.0.1"]);
    let identity = authority.certify(directory.path(), "client", &["first.example"]);
    let address = serve(server_tls(server, Some(&authority), ClientCertificates::Required)).await;
    let tls = client_tls(Some(identity), &authority);
    let client = tls.outgoing(UrlPolicy::Loopback.into(), ClientLimits::default()).unwrap();
    assert_eq!(ask_with(&client, address).await.unwrap(), "first.example");
    // The client's certificate is replaced, then the server's, with one that the client must not accept.
    authority.certify(directory.path(), "client", &["second.example"]);
    until("it is in use", async || {
        ask_with(&client, address).await.is_ok_and(|names| names == "second.example")
    })
    .await;
    authority.certify(directory.path(), "server", &["tools.example"]);
    until("it is in use", async || ask(address, &tls).await.is_err()).await;
    authority.certify(directory.path(), "server", &["127.0.0.1"]);
    until("it is in use", async || ask(address, &tls).await.is_ok()).await;
}

#[test]
fn an_unusable_file_is_named_in_the_error_without_its_content() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "ours");
    let (cert, key) = authority.certify(directory.path(), "server", &["127.0.0.1"]);
    let (_, other_key) = authority.certify(directory.path(), "other", &["127.0.0.1"]);
    let broken = directory.path().join("broken");
    fs::write(&broken, "s3cret").unwrap();
    let missing = directory.path().join("missing");
    for (cert, key, client_ca, expected) in [
        (&missing, &key, None, "missing: entity not found"),
        (&broken, &key, None, "broken: expected a certificate in PEM format"),
        (&cert, &broken, None, "broken: expected a private key in PEM format"),
        (&cert, &cert, None, "server.crt: expected a private key in PEM format"),
        (&cert, &other_key, None, "server.crt: keys may not be consistent"),
        (&cert, &key, Some(&broken), "broken: expected a certificate in PEM format"),
    ] {
        let (cert, key, client_ca) = (cert.clone(), key.clone(), client_ca.cloned());
        let tls = ServerTls { cert, key, client_ca, clients: ClientCertificates::Required };
        let error = Acceptor::new(tls).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains("s3cret"), "{error}");
    }
}
