//! What is outside of the runtime and survives its crashes: tool servers, clients, and what they have under way.

use std::collections::{BTreeMap, BTreeSet};

use rap_agent::{Birth, Choice, Event, Message, Outcome};
use rap_protocol::{AuthUrl, Body, CallId, Content, EventId, ResponseUrl};
use serde_json::Value;

use super::disk::{Disk, Place, name};
use super::watch::arguments_of;

/// A word stands for one input, and is found nowhere else.
pub type Word = u64;

pub fn text_of(word: Word) -> String {
    format!("w{word}")
}

/// The word in a text that is, or begins with, one.
pub fn word_of(text: &str) -> Option<Word> {
    let digits = text.strip_prefix('w')?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

#[derive(Default)]
pub struct Outside {
    /// Callbacks that have no answer yet.
    pub mail: Vec<Callback>,
    /// Callbacks that were answered; the network may bring them again.
    pub sent: Vec<Callback>,
    /// Requests of clients that have no answer yet.
    pub requests: Vec<Request>,
    /// Invocations that a tool server has accepted, and how often it has sent a result.
    pub accepted: BTreeMap<(Place, CallId), u32>,
    /// Those that it does not know any more.
    pub forgotten: BTreeSet<(Place, CallId)>,
    words: Word,
}

/// A callback of a tool server.
#[derive(Debug, Clone)]
pub struct Callback {
    pub thread: Place,
    pub call: CallId,
    pub what: What,
}

#[derive(Debug, Clone)]
pub enum What {
    Result { word: Word, subscription: bool },
    Event { id: Option<u64>, word: Word, associative: bool, is_final: bool },
    SignIn(u64),
    Choice(u64),
    View(u64),
}

/// A request of a client, which it repeats with the same key until it is answered.
#[derive(Debug, Clone)]
pub struct Request {
    pub thread: Place,
    pub message: Message,
    pub key: u64,
    pub word: Option<Word>,
}

impl Outside {
    pub fn word(&mut self) -> Word {
        self.words += 1;
        self.words
    }
}

impl Callback {
    pub fn word(&self) -> Option<Word> {
        match self.what {
            What::Result { word, .. } | What::Event { word, .. } => Some(word),
            _ => None,
        }
    }

    /// The message that it is, with what the store knows of its call.
    pub fn message(&self, disk: &Disk) -> Message {
        let Callback { thread, call, what } = self.clone();
        let row = &disk.threads[thread];
        let past = row.past(&call);
        match what {
            What::Result { word, subscription } => {
                let content = body(word);
                Message::Returned {
                    call,
                    result: Outcome { content, display: Vec::new(), subscription },
                    past,
                }
            }
            What::Event { id, word, associative, is_final } => {
                let id = id.map(|id| EventId::new(format!("e{id}")).expect("a short id"));
                let seen = id.as_ref().is_some_and(|id| row.marks.contains(&(call.clone(), id.clone())));
                let child = name(disk.threads.len());
                let arguments = row
                    .entries
                    .iter()
                    .find_map(|entry| arguments_of(entry, &call))
                    .cloned()
                    .unwrap_or_default();
                let depth = disk.ancestors(thread) + 1;
                let birth = (!associative).then(|| Birth { parent: name(thread), depth, child, arguments });
                Message::Happened {
                    event: Event { id, text: text_of(word), associative, is_final },
                    call,
                    past,
                    seen,
                    birth,
                }
            }
            What::SignIn(no) => {
                let url = AuthUrl::new(format!("https://example.com/{no}")).expect("a URL");
                Message::WantsSignIn { call, url }
            }
            What::Choice(no) => Message::WantsChoice { call, choice: choice(no) },
            What::View(no) => {
                Message::Viewed { call, view_type: format!("v{}", no % 3), content: Value::from(no) }
            }
        }
    }
}

/// Some results are more than a text.
fn body(word: Word) -> Body {
    let text = text_of(word);
    if word.is_multiple_of(7) { Body::Content(vec![Content::Text { text }]) } else { Body::Text(text) }
}

/// The text that a body begins with.
pub fn text_in(body: &Body) -> &str {
    match body {
        Body::Text(text) => text,
        Body::Content(items) => match items.first() {
            Some(Content::Text { text }) => text,
            _ => "",
        },
    }
}

fn choice(digest: u64) -> Choice {
    Choice {
        prompt: "Which?".into(),
        choices: vec!["this".into(), "that".into()],
        default: 1,
        response_url: ResponseUrl::new(format!("https://example.com/answer/{digest}")).expect("a URL"),
        digest,
    }
}
