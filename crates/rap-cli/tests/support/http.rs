//! An HTTP client that writes raw bytes, so that a test can also send invalid requests.

use std::io::{Error, ErrorKind};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::PATIENCE;

/// A response.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    /// Header lines in lower case.
    pub head: String,
    /// Body as JSON, or as a string if it is not JSON.
    pub body: Value,
}

impl Answer {
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
pub async fn send(method: &str, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    attempt(method, url, headers, body).await.unwrap_or_else(|error| panic!("{method} {url}: {error}"))
}

/// Like [`send`], but fails if nothing listens or the connection is closed without a response.
pub async fn attempt(
    method: &str,
    url: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Answer, Error> {
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
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok();
        read(&answer).ok_or_else(|| {
            let text = String::from_utf8_lossy(&answer);
            Error::new(ErrorKind::UnexpectedEof, format!("no answer: {text:?}"))
        })
    };
    let answer = tokio::time::timeout(PATIENCE, exchange).await;
    answer.unwrap_or_else(|_| panic!("{method} {host} was not answered"))
}

/// Parses a response. `None` if its header section is incomplete.
fn read(bytes: &[u8]) -> Option<Answer> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let body = serde_json::from_str(body).unwrap_or_else(|_| Value::String(body.to_owned()));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Some(Answer { status, head: head.to_ascii_lowercase(), body })
}

/// POSTs JSON.
pub async fn post(url: &str, body: &Value) -> Answer {
    post_with(url, &[], body).await
}

/// POSTs JSON with more headers.
pub async fn post_with(url: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
    let mut all = headers.to_vec();
    all.push(("content-type", "application/json"));
    send("POST", url, &all, body.to_string().as_bytes()).await
}
