//! An HTTP client that writes raw bytes, so that a test can also send invalid requests.

use std::io::{Error, ErrorKind};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::PATIENCE;

/// A response.
#[derive(Debug, Clone)]
pub struct Response {
    pub status: u16,
    /// Status line and header lines, in lower case.
    pub head: String,
    /// The same lines as they were sent.
    pub raw_head: String,
    pub text: String,
    /// Body as JSON, or as a string if it is not JSON.
    pub body: Value,
}

impl Response {
    /// Stable error code.
    pub fn code(&self) -> &str {
        self.body["error"]["code"].as_str().unwrap_or_else(|| panic!("no error: {self:?}"))
    }

    /// Error message.
    pub fn message(&self) -> &str {
        self.body["error"]["message"].as_str().unwrap_or_else(|| panic!("no error: {self:?}"))
    }

    /// Status and error code.
    pub fn refusal(&self) -> (u16, &str) {
        (self.status, self.code())
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    /// Value of a header with its capital letters.
    pub fn exact_header(&self, name: &str) -> Option<&str> {
        let mut lines = self.raw_head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// Value of `Retry-After`.
    pub fn retry_after(&self) -> Option<Duration> {
        self.header("retry-after").map(|seconds| Duration::from_secs(seconds.parse().unwrap()))
    }

    #[track_caller]
    pub fn expect_refusal(&self, status: u16) {
        assert_eq!(self.status, status, "{}", self.body);
        assert!(self.body["error"]["code"].is_string(), "{}", self.body);
    }

    #[track_caller]
    pub fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        self.body
    }
}

/// Sends a request and reads the response. `headers` override the default ones.
pub async fn send(method: &str, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    attempt(method, url, headers, body).await.unwrap_or_else(|error| panic!("{method} {url}: {error}"))
}

/// Like [`send`], but fails if nothing listens or the connection is closed without a response.
pub async fn attempt(
    method: &str,
    url: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Response, Error> {
    let rest = url.strip_prefix("http://").unwrap_or_else(|| panic!("not http: {url}"));
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let length = body.len().to_string();
    let own = [("host", host), ("connection", "close"), ("content-length", &length)];
    let given = |name: &str| headers.iter().any(|(key, _)| key.eq_ignore_ascii_case(name));
    let mut request = format!("{method} /{path} HTTP/1.1\r\n");
    for (key, value) in own.iter().filter(|(key, _)| !given(key)).chain(headers) {
        request.push_str(&format!("{key}: {value}\r\n"));
    }
    request.push_str("\r\n");
    let exchange = async {
        let mut stream = TcpStream::connect(host).await?;
        stream.write_all(request.as_bytes()).await?;
        // A server that responds early may not read the whole body and may reset the connection afterwards.
        stream.write_all(body).await.ok();
        read(&mut stream).await
    };
    let answer = tokio::time::timeout(PATIENCE, exchange).await;
    answer.unwrap_or_else(|_| panic!("{method} {host} was not answered"))
}

pub async fn connect(url: &str) -> TcpStream {
    TcpStream::connect(url.trim_start_matches("http://")).await.unwrap()
}

/// Sends raw bytes, and reads until the server closes the connection.
pub async fn exchange(url: &str, request: impl AsRef<[u8]>) -> Response {
    let mut stream = connect(url).await;
    // A server that answers early may not read all of the request.
    stream.write_all(request.as_ref()).await.ok();
    read_response(stream).await
}

/// Reads an answer until the server closes the connection.
pub async fn read_response(mut stream: TcpStream) -> Response {
    let answer = tokio::time::timeout(PATIENCE, read(&mut stream)).await;
    answer.expect("the connection was not closed").unwrap()
}

/// Formats a request with a JSON body and `connection: close`. Each header ends with a line break.
pub fn request(path: &str, headers: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
}

/// Reads until the connection ends. Fails if the header section is incomplete.
async fn read(stream: &mut TcpStream) -> Result<Response, Error> {
    let mut bytes = Vec::new();
    // The server may reset the connection after the answer.
    stream.read_to_end(&mut bytes).await.ok();
    let all = String::from_utf8_lossy(&bytes);
    let Some((head, text)) = all.split_once("\r\n\r\n") else {
        return Err(Error::new(ErrorKind::UnexpectedEof, format!("no answer: {all:?}")));
    };
    let body = serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let (head, raw_head) = (head.to_ascii_lowercase(), head.to_owned());
    Ok(Response { status, head, raw_head, text: text.to_owned(), body })
}

/// POSTs JSON.
pub async fn post(url: &str, body: &Value) -> Response {
    post_with(url, &[], body).await
}

/// POSTs JSON with more headers.
pub async fn post_with(url: &str, headers: &[(&str, &str)], body: &Value) -> Response {
    let mut all = headers.to_vec();
    all.push(("content-type", "application/json"));
    send("POST", url, &all, body.to_string().as_bytes()).await
}
