//! `fetch`: HTTP requests of the model, to addresses that the rules permit.

use std::collections::BTreeMap;
use std::time::Duration;

use ::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, COOKIE, LOCATION};
use ::http::{HeaderMap, HeaderName, HeaderValue, Method};
use bytes::Bytes;
use rap_io::client::{Answer, Client, ClientLimits};
use rap_tool::prelude::*;
use serde_json::{Value, json};
use url::Url;

use crate::Options;
use crate::cut::Cut;

/// Maximum number of redirects that are followed.
const REDIRECTS: usize = 5;
/// Maximum number of bytes that are read of an answer. The rest is not read.
const READ_BYTES: usize = 8 * 1024 * 1024;
/// Largest page that is converted from HTML to text, in bytes. A larger one is cut first.
const HTML_BYTES: usize = 1024 * 1024;
/// Width of converted text, in characters.
const WIDTH: usize = 120;
/// Time for a whole request.
const WITHIN: Duration = Duration::from_secs(60);
/// Maximum size of a result as JSON, in bytes.
const RESULT_BYTES: usize = 1_500_000;
/// Headers that the client itself sets.
const OWN_HEADERS: [&str; 6] =
    ["host", "content-length", "transfer-encoding", "connection", "user-agent", "upgrade"];
const METHODS: [Method; 6] =
    [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];

/// Sends an HTTP request and returns a JSON object with the status, the headers and the body of the answer. HTML is
/// converted to text. A long body is cut in the middle.
#[derive(Deserialize, JsonSchema)]
struct Fetch {
    /// http or https URL.
    #[schemars(length(max = 8192))]
    url: String,
    /// GET, HEAD, POST, PUT, PATCH or DELETE; GET by default.
    method: Option<String>,
    /// Headers of the request.
    headers: Option<BTreeMap<String, String>>,
    /// Body of the request.
    body: Option<String>,
}

pub(crate) fn server(options: Options) -> ToolServer {
    let limits = ClientLimits { total: WITHIN, ..ClientLimits::default() };
    let client = Client::outgoing(options.rules, limits);
    let fetch = move |args: Fetch, _: Call| {
        let client = client.clone();
        async move { fetch(&client, args).await }
    };
    let tool = Tool::new("fetch", fetch).display_script("args.url").without_scrubbing();
    ToolServer::new("http").description("Fetches pages and calls web APIs.").offer(tool)
}

async fn fetch(client: &Client, args: Fetch) -> Result<String> {
    let mut url =
        Url::parse(&args.url).map_err(|error| Error::new(format!("the URL is not valid: {error}")))?;
    let name = args.method.unwrap_or_else(|| "GET".into()).to_ascii_uppercase();
    let method = METHODS.into_iter().find(|method| method.as_str() == name);
    let method =
        method.ok_or_else(|| Error::new("the method must be GET, HEAD, POST, PUT, PATCH or DELETE"))?;
    let mut headers = request_headers(args.headers.unwrap_or_default())?;
    let body = Bytes::from(args.body.unwrap_or_default());
    for _ in 0..=REDIRECTS {
        let answer = client.request(method.clone(), &url, &headers, body.clone(), READ_BYTES).await;
        let answer = answer.map_err(|error| Error::new(error.to_string()))?;
        match redirect(&method, &url, &answer) {
            Some(next) => {
                if next.origin() != url.origin() {
                    headers.retain(|(name, _)| *name != AUTHORIZATION && *name != COOKIE);
                }
                url = next;
            }
            None => return result(answer).await,
        }
    }
    Err(Error::new(format!("there are more than {REDIRECTS} redirects")))
}

fn request_headers(given: BTreeMap<String, String>) -> Result<Vec<(HeaderName, HeaderValue)>> {
    let mut headers = vec![(ACCEPT, HeaderValue::from_static("*/*"))];
    for (name, value) in given {
        if OWN_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
            return Err(Error::new(format!("the header {name} cannot be set")));
        }
        let wrong = || Error::new(format!("the header {name:?} is not valid"));
        let header = HeaderName::try_from(name.as_str()).map_err(|_| wrong())?;
        headers.push((header, HeaderValue::try_from(value).map_err(|_| wrong())?));
    }
    Ok(headers)
}

/// Returns the target of a redirect. Only requests without side effects follow it.
fn redirect(method: &Method, url: &Url, answer: &Answer) -> Option<Url> {
    let is_redirect = matches!(answer.status, 301 | 302 | 303 | 307 | 308);
    if !is_redirect || *method != Method::GET && *method != Method::HEAD {
        return None;
    }
    let next = url.join(answer.headers.get(LOCATION)?.to_str().ok()?).ok()?;
    // A redirect must not lead from https to http.
    (url.scheme() != "https" || next.scheme() == "https").then_some(next)
}

/// Returns the result as JSON text.
async fn result(answer: Answer) -> Result<String> {
    let kind = answer.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let (headers, was_cut) = (described(&answer.headers), answer.truncated);
    let mut body = Cut::default();
    let mut html_was_cut = false;
    if kind == "text/html" || kind == "application/xhtml+xml" {
        html_was_cut = answer.body.len() > HTML_BYTES;
        let page = answer.body.slice(..answer.body.len().min(HTML_BYTES));
        let text = tokio::task::spawn_blocking(move || html2text::from_read(&page[..], WIDTH)).await;
        body.push(text.map_err(std::io::Error::other)??.as_bytes());
    } else if is_text(&kind, &answer.body) {
        body.push(&answer.body);
    } else {
        body.push(format!("[{} bytes of {kind}]", answer.body.len()).as_bytes());
    }
    loop {
        let truncated = was_cut || html_was_cut || body.is_cut();
        let result =
            json!({"status": answer.status, "headers": headers, "body": body.text(), "truncated": truncated});
        let text = result.to_string();
        if text.len() <= RESULT_BYTES {
            return Ok(text);
        }
        body.halve();
    }
}

/// Returns the headers as JSON. Values of one name are joined.
fn described(headers: &HeaderMap) -> Value {
    let values = |name: &HeaderName| {
        let all =
            headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        all.collect::<Vec<_>>().join(", ")
    };
    headers.keys().map(|name| (name.as_str().to_owned(), Value::String(values(name)))).collect()
}

fn is_text(kind: &str, body: &[u8]) -> bool {
    let named = kind.starts_with("text/") || kind.contains("json") || kind.contains("xml") || kind.is_empty();
    named || std::str::from_utf8(body).is_ok()
}
