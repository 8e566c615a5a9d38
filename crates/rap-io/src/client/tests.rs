//! Requests to real servers on loopback. Each server reports the requests that it receives. No test depends on time,
//! except for the timeouts that it tests.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use rap_protocol::UrlPolicy;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::*;

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
/// Used in all parts of a URL that must not appear in errors.
const SECRET: &str = "s3cr3t";

struct Server {
    port: u16,
    connections: Arc<AtomicUsize>,
    /// Head and body of each request.
    requests: mpsc::Receiver<String>,
}

impl Server {
    /// Calls `answer` after each request, until it fails or the client disconnects.
    fn start(answer: impl Fn(&mut TcpStream) -> io::Result<()> + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicUsize::new(0));
        let (saw, requests) = mpsc::channel();
        let (answer, count) = (Arc::new(answer), Arc::clone(&connections));
        thread::spawn(move || {
            for stream in listener.incoming() {
                count.fetch_add(1, Ordering::SeqCst);
                let (answer, saw) = (Arc::clone(&answer), saw.clone());
                thread::spawn(move || serve(stream.unwrap(), saw, answer.as_ref()));
            }
        });
        Server { port, connections, requests }
    }

    fn answering(text: &'static str) -> Server {
        Server::start(move |stream| stream.write_all(text.as_bytes()))
    }

    fn url(&self) -> Url {
        self.at("127.0.0.1")
    }

    fn at(&self, host: &str) -> Url {
        Url::parse(&format!("http://{host}:{}/{SECRET}?q={SECRET}", self.port)).unwrap()
    }
}

fn serve(
    mut stream: TcpStream,
    saw: mpsc::Sender<String>,
    answer: &dyn Fn(&mut TcpStream) -> io::Result<()>,
) {
    stream.set_nodelay(true).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Ok(request) = read_request(&mut reader) {
        // The test may have ended.
        saw.send(request).ok();
        if answer(&mut stream).is_err() {
            return;
        }
    }
}

fn read_request(reader: &mut impl BufRead) -> io::Result<String> {
    let mut request = String::new();
    while !request.ends_with("\r\n\r\n") {
        if reader.read_line(&mut request)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let length = request.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
    let mut body = vec![0; length.parse().unwrap()];
    reader.read_exact(&mut body)?;
    request.push_str(std::str::from_utf8(&body).unwrap());
    Ok(request)
}

fn client() -> Client {
    Client::new(UrlPolicy::Loopback, ClientLimits::default())
}

fn client_with_short_timeout() -> Client {
    Client::new(
        UrlPolicy::Loopback,
        ClientLimits { total: Duration::from_millis(500), ..ClientLimits::default() },
    )
}

async fn post(client: &Client, url: &Url) -> Result<Reply, Error> {
    client.post_json(url, &[], Bytes::from_static(b"{}")).await
}

/// Returns the error of a request, and checks that it does not contain the secret.
async fn error(client: &Client, url: &Url) -> Error {
    let error = post(client, url).await.unwrap_err();
    let mut shown = format!("{error} {error:?}");
    let mut cause = std::error::Error::source(&error);
    while let Some(deeper) = cause {
        shown += &format!(" {deeper} {deeper:?}");
        cause = deeper.source();
    }
    assert!(!shown.contains(SECRET), "{shown}");
    error
}

#[tokio::test]
async fn a_post_is_sent_with_its_headers_and_returns_the_answer() {
    let server = Server::answering(OK);
    let headers = [(HeaderName::from_static("x-one"), HeaderValue::from_static("1"))];
    let reply = client().post_json(&server.url(), &headers, Bytes::from_static(b"{\"a\":1}")).await.unwrap();
    assert_eq!(reply, Reply { status: 200, retry_after: None, body: Bytes::from_static(b"ok") });
    let request = server.requests.recv().unwrap();
    assert!(request.starts_with(&format!("POST /{SECRET}?q={SECRET} HTTP/1.1\r\n")), "{request}");
    assert!(request.contains("\r\ncontent-type: application/json\r\n"), "{request}");
    assert!(request.contains("\r\nx-one: 1\r\n"), "{request}");
    assert!(request.contains(&format!("\r\nhost: 127.0.0.1:{}\r\n", server.port)), "{request}");
    assert!(request.ends_with("\r\n\r\n{\"a\":1}"), "{request}");
}

#[tokio::test]
async fn an_outgoing_request_is_recognised_by_its_user_agent() {
    let server = Server::answering(OK);
    for (client, expected) in
        [(client(), false), (Client::outgoing(UrlPolicy::Loopback, ClientLimits::default()), true)]
    {
        post(&client, &server.url()).await.unwrap();
        let request = server.requests.recv().unwrap();
        let agent = request.lines().find_map(|line| line.strip_prefix("user-agent: "));
        let headers = agent.map(|agent| (USER_AGENT, HeaderValue::from_str(agent).unwrap()));
        assert_eq!(is_outgoing(&HeaderMap::from_iter(headers)), expected, "{request}");
    }
}

#[tokio::test]
async fn a_name_is_resolved_and_connected_to() {
    let server = Server::answering(OK);
    assert_eq!(post(&client(), &server.at("localhost")).await.unwrap().status, 200);
}

#[tokio::test]
async fn user_and_password_become_a_header() {
    let server = Server::answering(OK);
    let url = server.at("us%20er:p%40ss%@127.0.0.1");
    post(&client(), &url).await.unwrap();
    let request = server.requests.recv().unwrap();
    let expected = format!("\r\nauthorization: Basic {}\r\n", BASE64_STANDARD.encode("us er:p@ss%"));
    assert!(request.contains(&expected), "{request}");
    assert!(!request.contains("us%20er") && !request.contains("p%40ss"), "{request}");
    // A header of the caller takes precedence over the URL.
    let own = [(AUTHORIZATION, HeaderValue::from_static("Bearer own"))];
    client().post_json(&url, &own, Bytes::from_static(b"{}")).await.unwrap();
    let request = server.requests.recv().unwrap();
    assert!(request.contains("\r\nauthorization: Bearer own\r\n") && !request.contains("Basic"), "{request}");
}

#[tokio::test]
async fn consecutive_requests_share_a_connection() {
    let server = Server::answering(OK);
    let client = client();
    for _ in 0..20 {
        assert_eq!(post(&client, &server.url()).await.unwrap().status, 200);
    }
    // A separate task returns a connection to the pool, and the next request may come before that.
    let connections = server.connections.load(Ordering::SeqCst);
    assert!(connections <= 3, "20 calls took {connections} connections");
}

#[tokio::test]
async fn retry_after_is_read_in_every_form_and_bounded() {
    let server = Server::answering("HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n");
    let reply = post(&client(), &server.url()).await.unwrap();
    assert_eq!((reply.status, reply.retry_after), (503, Some(Duration::from_secs(7))));
    let table = [
        ("0", Some(0)),
        (" 120 ", Some(120_000)),
        ("86401", Some(86_400_000)),
        ("99999999999999999999999", Some(86_400_000)),
        ("1.5", Some(1_500)),
        ("Fri, 31 Dec 1999 23:59:59 GMT", Some(0)),
        ("Fri, 31 Dec 9999 23:59:59 GMT", Some(86_400_000)),
        ("", None),
        ("-1", None),
        ("+1", None),
        ("1e3", None),
        ("inf", None),
        ("soon", None),
    ];
    for (text, expected) in table {
        let headers = HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_static(text))]);
        assert_eq!(retry_after(&headers), expected.map(Duration::from_millis), "{text:?}");
    }
    // A date counts from the server's own clock, and milliseconds are more exact than seconds.
    let mut headers = HeaderMap::new();
    headers.insert(DATE, HeaderValue::from_static("Sun, 06 Nov 1994 08:49:30 GMT"));
    headers.insert(RETRY_AFTER, HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT"));
    assert_eq!(retry_after(&headers), Some(Duration::from_secs(7)));
    headers.insert(RETRY_AFTER_MS, HeaderValue::from_static("250"));
    assert_eq!(retry_after(&headers), Some(Duration::from_millis(250)));
    for (text, expected) in [("true", Some(true)), ("False", Some(false)), ("", None), ("1", None)] {
        let headers =
            HeaderMap::from_iter([(HeaderName::from_static(SHOULD_RETRY), HeaderValue::from_static(text))]);
        assert_eq!(should_retry(&headers), expected, "{text:?}");
    }
}

#[tokio::test]
async fn a_redirect_is_returned_and_not_followed() {
    let target = Server::answering(OK);
    let port = target.port;
    let server = Server::start(move |stream| {
        let head = "HTTP/1.1 302 Found\r\ncontent-length: 0\r\nlocation: http://127.0.0.1:";
        write!(stream, "{head}{port}/\r\n\r\n")
    });
    assert_eq!(post(&client(), &server.url()).await.unwrap().status, 302);
    assert_eq!(target.connections.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_server_that_never_answers_is_a_time_out() {
    let server = Server::answering("");
    assert!(matches!(error(&client_with_short_timeout(), &server.url()).await, Error::TimedOut));
}

#[tokio::test]
async fn a_body_that_does_not_end_in_time_does_not_hide_the_status() {
    let server = Server::answering("HTTP/1.1 202 Accepted\r\ncontent-length: 10\r\n\r\nhalf");
    let reply = post(&client_with_short_timeout(), &server.url()).await.unwrap();
    assert_eq!((reply.status, &reply.body[..]), (202, &b"half"[..]));
}

#[tokio::test]
async fn a_truncated_body_does_not_hide_the_status() {
    let server = Server::start(|stream| {
        stream.write_all(b"HTTP/1.1 500 Oops\r\ncontent-length: 10\r\n\r\nhalf")?;
        Err(io::ErrorKind::Other.into())
    });
    let reply = post(&client(), &server.url()).await.unwrap();
    assert_eq!((reply.status, &reply.body[..]), (500, &b"half"[..]));
}

#[tokio::test]
async fn the_connection_of_an_endless_body_is_closed() {
    let (cut, was_cut) = mpsc::channel();
    let server = Server::start(move |stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
        while stream.write_all(b"4\r\nabcd\r\n").is_ok() {}
        cut.send(()).map_err(io::Error::other)?;
        Err(io::ErrorKind::BrokenPipe.into())
    });
    let (client, began) = (client(), Instant::now());
    let reply = post(&client, &server.url()).await.unwrap();
    assert_eq!((reply.status, reply.body.len()), (200, 16 * 1024));
    assert!(began.elapsed() < client.limits.total, "ended by its length, not by time");
    // A separate task closes the connection, and runs while this one waits.
    tokio::task::spawn_blocking(move || was_cut.recv().unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_body_of_exactly_the_limit_is_complete() {
    let server = Server::answering("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n12345");
    for (drain_bytes, expected) in [(5, "12345"), (4, "1234"), (0, "")] {
        let client =
            Client::new(UrlPolicy::Loopback, ClientLimits { drain_bytes, ..ClientLimits::default() });
        assert_eq!(post(&client, &server.url()).await.unwrap().body, expected);
    }
}

#[tokio::test]
async fn a_refused_connection_is_unreachable() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = Url::parse(&format!("http://{SECRET}:{SECRET}@127.0.0.1:{free}/{SECRET}")).unwrap();
    let error = error(&client(), &url).await;
    assert!(matches!(&error, Error::Unreachable(why) if why == "connection refused"), "{error:?}");
}

#[tokio::test]
async fn a_name_that_does_not_exist_is_unreachable() {
    // A label of this length is rejected without a DNS query.
    let url = Url::parse(&format!("http://{}.invalid/{SECRET}", "x".repeat(64))).unwrap();
    let error = error(&client(), &url).await;
    assert!(matches!(&error, Error::Unreachable(why) if why.contains("resolved")), "{error:?}");
}

#[tokio::test]
async fn an_answer_that_is_not_http_is_a_protocol_error() {
    let server = Server::answering("SSH-2.0-OpenSSH_9.2\r\n\r\n");
    assert!(matches!(error(&client(), &server.url()).await, Error::Protocol(_)));
    let server = Server::start(|_| Err(io::ErrorKind::Other.into()));
    assert!(matches!(error(&client(), &server.url()).await, Error::Protocol(_)));
}

#[tokio::test]
async fn forbidden_addresses_are_never_connected_to() {
    for host in ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]"] {
        let url = Url::parse(&format!("http://{host}/{SECRET}")).unwrap();
        assert!(matches!(error(&client(), &url).await, Error::Forbidden(_)), "{host}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    for policy in [UrlPolicy::Private, UrlPolicy::Public] {
        let client = Client::new(policy, ClientLimits::default());
        for host in ["localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "2130706433"] {
            let url = Url::parse(&format!("http://{host}:{port}/{SECRET}")).unwrap();
            assert!(matches!(error(&client, &url).await, Error::Forbidden(_)), "{host}");
        }
    }
    assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let ftp = Url::parse(&format!("ftp://127.0.0.1/{SECRET}")).unwrap();
    assert!(matches!(error(&client(), &ftp).await, Error::Forbidden(_)));
}

#[tokio::test]
async fn without_certificates_http_works_and_https_fails_with_a_helpful_error() {
    let server = Server::answering(OK);
    let client = Client::with_tls(UrlPolicy::Loopback.into(), ClientLimits::default(), None, system_lookup());
    assert_eq!(post(&client, &server.url()).await.unwrap().status, 200);
    let mut url = server.url();
    url.set_scheme("https").unwrap();
    let error = error(&client, &url).await;
    assert!(matches!(error, Error::NoCertificates));
    assert!(error.to_string().contains("ca-certificates"), "{error}");
}

/// A client that trusts only these certificates.
fn trusting(certificates: &[&'static [u8]]) -> Client {
    let mut roots = RootCertStore::empty();
    for certificate in certificates {
        roots.add((*certificate).into()).unwrap();
    }
    let tls = tls_builder().with_root_certificates(roots).with_no_client_auth();
    Client::with_tls(UrlPolicy::Loopback.into(), ClientLimits::default(), Some(tls), system_lookup())
}

/// Valid for 127.0.0.1 only, until the year 2126: `openssl req -x509 … -addext subjectAltName=IP:127.0.0.1`.
const CERTIFICATE: &[u8] = include_bytes!("testdata/loopback.cert.der");
const CERTIFICATE_KEY: &[u8] = include_bytes!("testdata/loopback.key.der");

/// Answers one request over TLS.
fn tls_server() -> u16 {
    let key = PrivatePkcs8KeyDer::from(CERTIFICATE_KEY).into();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![CERTIFICATE.into()], key)
        .unwrap();
    let session = ServerConnection::new(Arc::new(config)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(StreamOwned::new(session, stream));
        // A client that does not trust the certificate disconnects before it sends a request.
        if read_request(&mut reader).is_ok() {
            reader.get_mut().write_all(OK.as_bytes()).unwrap();
        }
    });
    port
}

#[tokio::test]
async fn https_works_only_with_trusted_servers() {
    let table = [
        ("127.0.0.1", &[CERTIFICATE][..], None),
        ("127.0.0.1", &[], Some("UnknownIssuer")),
        ("localhost", &[CERTIFICATE], Some("not valid for")),
    ];
    for (host, certificates, expected) in table {
        let url = Url::parse(&format!("https://{host}:{}/{SECRET}", tls_server())).unwrap();
        let client = trusting(certificates);
        let Some(expected) = expected else {
            assert_eq!(post(&client, &url).await.unwrap().status, 200);
            continue;
        };
        let error = error(&client, &url).await;
        let Error::Unreachable(why) = error else { panic!("{error:?}") };
        assert!(why.starts_with("TLS: ") && why.contains(expected), "{why}");
    }
}

#[tokio::test]
async fn a_server_without_tls_is_unreachable_by_https() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        // Keeps the connection open until the client closes it.
        io::copy(&mut stream, &mut io::sink()).ok();
    });
    let url = Url::parse(&format!("https://127.0.0.1:{port}/{SECRET}")).unwrap();
    let error = error(&trusting(&[]), &url).await;
    assert!(matches!(&error, Error::Unreachable(why) if why.starts_with("TLS: ")), "{error:?}");
}

fn server_that(says: &'static str, then: io::ErrorKind) -> Server {
    Server::start(move |stream| {
        stream.write_all(says.as_bytes())?;
        Err(then.into())
    })
}

#[tokio::test]
async fn a_document_is_read_to_its_end() {
    let server = Server::answering("HTTP/1.1 404 Gone\r\nretry-after: 3\r\ncontent-length: 5\r\n\r\n12345");
    let headers = [(HeaderName::from_static("x-one"), HeaderValue::from_static("1"))];
    let fetched = client().get(&server.url(), &headers, 5).await.unwrap();
    let retry_after = Some(Duration::from_secs(3));
    assert_eq!(fetched, Fetched { status: 404, retry_after, body: Bytes::from_static(b"12345") });
    let request = server.requests.recv().unwrap();
    assert!(request.starts_with(&format!("GET /{SECRET}?q={SECRET} HTTP/1.1\r\n")), "{request}");
    assert!(request.contains("\r\naccept: application/json\r\n"), "{request}");
    assert!(request.contains("\r\nx-one: 1\r\n") && !request.contains("content-type"), "{request}");
}

#[tokio::test]
async fn an_incomplete_document_is_an_error() {
    let half = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n123";
    let table = [
        (Server::answering("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n12345"), "more than 4 bytes"),
        (Server::answering(half), "no answer in time"),
        (server_that(half, io::ErrorKind::Other), "no valid answer"),
        (Server::answering(""), "no answer in time"),
    ];
    for (server, expected) in table {
        let error = client_with_short_timeout().get(&server.url(), &[], 4).await.unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains(SECRET), "{error}");
    }
    let metadata = Url::parse(&format!("http://169.254.169.254/{SECRET}")).unwrap();
    assert!(matches!(client().get(&metadata, &[], 4).await, Err(Error::Forbidden(_))));
}

const STREAM: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n";

fn stream_client() -> Client {
    let limits = ClientLimits {
        total: Duration::ZERO,
        stream_head: Duration::from_millis(300),
        stream_idle: Duration::from_millis(300),
        ..ClientLimits::default()
    };
    Client::new(UrlPolicy::Loopback, limits)
}

async fn listen(server: &Server) -> Result<Streaming, Error> {
    stream_client().post_stream(&server.url(), &[], Bytes::from_static(b"{}")).await
}

#[tokio::test]
async fn a_stream_is_read_chunk_by_chunk() {
    let (go, wait) = mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let server = Server::start(move |stream| {
        stream.write_all(STREAM.as_bytes())?;
        wait.lock().unwrap().recv().map_err(io::Error::other)?;
        stream.write_all(b"3\r\ntwo\r\n0\r\n\r\n")
    });
    let mut stream = listen(&server).await.unwrap();
    assert_eq!((stream.status, stream.retry_after), (200, None));
    assert_eq!(stream.content_type.as_deref(), Some("text/plain"));
    assert_eq!(stream.chunk().await.unwrap().unwrap(), "one");
    go.send(()).unwrap();
    assert_eq!(stream.chunk().await.unwrap().unwrap(), "two");
    assert_eq!(stream.chunk().await.unwrap(), None);
    assert!(server.requests.recv().unwrap().ends_with("\r\n\r\n{}"));
}

#[tokio::test]
async fn a_truncated_or_silent_stream_is_an_error() {
    let mut broken = listen(&server_that(STREAM, io::ErrorKind::Other)).await.unwrap();
    assert_eq!(broken.chunk().await.unwrap().unwrap(), "one");
    assert!(matches!(broken.chunk().await, Err(Error::Protocol(_))));
    let server = Server::answering(STREAM);
    let mut silent = listen(&server).await.unwrap();
    assert_eq!(silent.chunk().await.unwrap().unwrap(), "one");
    assert!(matches!(silent.chunk().await, Err(Error::TimedOut)));
    assert!(matches!(listen(&Server::answering("")).await, Err(Error::TimedOut)));
}

#[tokio::test]
async fn the_time_out_of_a_stream_continues_when_the_future_is_dropped() {
    let server = Server::answering(STREAM);
    let mut silent = listen(&server).await.unwrap();
    assert_eq!(silent.chunk().await.unwrap().unwrap(), "one");
    for _ in 0..100 {
        // Each wait is shorter than the timeout of a chunk.
        let turn = tokio::time::timeout(Duration::from_millis(50), silent.chunk());
        if let Ok(chunk) = turn.await {
            assert!(matches!(chunk, Err(Error::TimedOut)));
            return;
        }
    }
    panic!("the timeout of a chunk starts again with each call");
}
