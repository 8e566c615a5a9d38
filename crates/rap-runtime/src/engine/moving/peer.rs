//! Requests to the runtime that a session moves to.

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue};
use rap_api::{ArrivedSession, Destination, ErrorBody};
use rap_io::client::{Client, Reply};
use rap_protocol::{ThreadId, visible};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use url::Url;

use super::{MoveFailed, START_PAUSE};

/// Number of times that a request to the destination is tried before the move is given up.
const TRIES: u32 = 3;
/// Maximum length of a reason of the destination that is remembered, in characters.
const REASON_CHARS: usize = 500;
/// Maximum length of an answer of the destination, in bytes.
pub(super) const ANSWER_BYTES: usize = 1024 * 1024;

/// The destination of a session, as it is stored with its parcel.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Peer {
    /// Base URL of the other runtime.
    pub(super) to: String,
    pub(super) token: String,
    pub(super) end_calls: bool,
    /// Base URLs of the tool servers that have moved their state, which are told when the session has moved.
    pub(super) servers: Vec<String>,
    /// Id of the node that moves the session. `None` if no other node uses the database.
    #[serde(default)]
    pub(super) node: Option<String>,
}

/// Answer of the destination to the request to start a session.
pub(super) enum StartAnswer {
    InUse,
    /// The destination does not have the session.
    Unknown,
}

/// Requests to the destination.
pub(super) struct PeerClient {
    pub(super) http: Client,
    pub(super) to: Url,
    pub(super) peer: Peer,
}

impl PeerClient {
    fn url(&self, session: Option<(&ThreadId, &str)>) -> Url {
        let mut url = self.to.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(["v1", "imports"]);
            if let Some((session, action)) = session {
                path.extend([session.as_str(), action]);
            }
        }
        url
    }

    fn headers(&self) -> Vec<(HeaderName, HeaderValue)> {
        let token = HeaderValue::try_from(format!("Bearer {}", self.peer.token));
        let sensitive = |mut token: HeaderValue| {
            token.set_sensitive(true);
            token
        };
        token.into_iter().map(|token| (AUTHORIZATION, sensitive(token))).collect()
    }

    fn read<T: DeserializeOwned>(&self, status: u16, body: &[u8]) -> Result<T, MoveFailed> {
        if status == 200 || status == 202 {
            let parsed = serde_json::from_slice(body);
            return parsed.map_err(|_| MoveFailed("the destination is not a runtime of rap".into()));
        }
        Err(refusal(status, body))
    }

    pub(super) async fn destination(&self) -> Result<Destination, MoveFailed> {
        let answer = self.http.get(&self.url(None), &self.headers(), ANSWER_BYTES).await;
        let answer =
            answer.map_err(|error| MoveFailed(format!("the destination does not answer: {error}")))?;
        self.read(answer.status, &answer.body)
    }

    /// Returns true if the destination has a thread with this id. One that is on its way does not count: it may be left
    /// from an earlier attempt to move the session. Asks again if there is no answer or the destination is overloaded.
    pub(super) async fn has_thread(&self, thread: &ThreadId) -> Result<bool, MoveFailed> {
        let mut url = self.to.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(["v1", "threads", thread.as_str()]);
        }
        let mut tries = 0;
        loop {
            tries += 1;
            let failed = match self.http.get(&url, &self.headers(), ANSWER_BYTES).await {
                Ok(answer) => match answer.status {
                    200 => return Ok(true),
                    404 => return Ok(false),
                    503 if error_code(&answer.body).as_deref() == Some("moving") => return Ok(false),
                    status if status < 500 || tries >= TRIES => return Err(refusal(status, &answer.body)),
                    status => format!("it answered {status}"),
                },
                Err(error) => error.to_string(),
            };
            if tries >= TRIES {
                return Err(MoveFailed(format!("the destination does not answer: {failed}")));
            }
            tokio::time::sleep(START_PAUSE.0).await;
        }
    }

    /// Has the destination put the session into use.
    pub(super) async fn start(&self, session: &ThreadId, body: Bytes) -> Result<StartAnswer, MoveFailed> {
        let reply = self.send(session, "start", None, body).await?;
        if reply.status == 404 && error_code(&reply.body).as_deref() == Some("no_such_thread") {
            return Ok(StartAnswer::Unknown);
        }
        self.read::<ArrivedSession>(reply.status, &reply.body).map(|_| StartAnswer::InUse)
    }

    pub(super) async fn post<T: DeserializeOwned>(
        &self,
        session: &ThreadId,
        action: &str,
        query: Option<&str>,
        body: Bytes,
    ) -> Result<T, MoveFailed> {
        let reply = self.send(session, action, query, body).await?;
        self.read(reply.status, &reply.body)
    }

    /// Sends a request, and again if there is no answer or the destination is overloaded.
    async fn send(
        &self,
        session: &ThreadId,
        action: &str,
        query: Option<&str>,
        body: Bytes,
    ) -> Result<Reply, MoveFailed> {
        let mut url = self.url(Some((session, action)));
        url.set_query(query);
        let mut tries = 0;
        loop {
            tries += 1;
            let failed = match self.http.post_json(&url, &self.headers(), body.clone()).await {
                Ok(reply) if reply.status < 500 || tries >= TRIES => return Ok(reply),
                Ok(reply) => format!("it answered {}", reply.status),
                Err(error) => error.to_string(),
            };
            if tries >= TRIES {
                return Err(MoveFailed(format!("the destination does not answer: {failed}")));
            }
            tokio::time::sleep(START_PAUSE.0).await;
        }
    }

    /// Sends a page of records. Returns their number.
    pub(super) async fn send_page(
        &self,
        session: &ThreadId,
        from: u64,
        page: Vec<String>,
    ) -> Result<u64, MoveFailed> {
        let (count, query) = (page.len() as u64, format!("from={from}"));
        let body = Bytes::from(page.join("\n"));
        self.post::<serde_json::Value>(session, "records", Some(&query), body).await?;
        Ok(count)
    }
}

fn refusal(status: u16, body: &[u8]) -> MoveFailed {
    MoveFailed(format!("the destination refused the session ({status}): {}", reason(body)))
}

/// Returns the reason in the body of a refusal.
pub(super) fn reason(body: &[u8]) -> String {
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(ErrorBody { error }) => {
            visible::text(&error.message.chars().take(REASON_CHARS).collect::<String>()).into_owned()
        }
        Err(_) => "it gave no reason".into(),
    }
}

fn error_code(body: &[u8]) -> Option<String> {
    serde_json::from_slice::<ErrorBody>(body).ok().map(|ErrorBody { error }| error.code)
}
