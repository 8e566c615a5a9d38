//! The normal form of a history: what all providers have in common, before the words of one of them.
//!
//! Invariants, whatever the entries are:
//! - The first turn is the user's, and the last one is the user's or has calls.
//! - Neither the user nor an assistant without calls speaks twice in a row.
//! - Each call has its result, of at least one part; no text is blank.
//! - A turn of the assistant ends with a text or a call, never with a thought.

use std::borrow::Cow;
use std::collections::HashMap;

use rap_protocol::{Body, CallId, Content, Image};
use serde_json::{Map, Value};

use super::{IMAGE_BYTES, IMAGES, IMAGES_BYTES, Prompt, Thinking};
use crate::words::{NOT_THE_USER, STILL_RUNNING, with_kind};
use crate::{Arguments, CallEntry, Entry, Item, Speaker, Thought, ThoughtKind, Thoughts};

/// Said for the user where a history begins with the assistant.
const OPENING: &str = "(The conversation begins with what follows.)";
/// Said for the user where there is nothing new for the model.
pub(super) const CLOSING: &str = "(Go on.)";
/// What stands before the words of the parent thread.
const FROM_PARENT: &str = "(A message of the parent thread follows.)";
const EMPTY_RESULT: &str = "(empty)";
const MEDIA_TYPES: [&str; 4] = ["image/png", "image/jpeg", "image/gif", "image/webp"];

pub(super) enum Turn<'a> {
    User(Vec<Cow<'a, str>>),
    Assistant { said: Vec<Said<'a>>, calls: Vec<Call<'a>> },
}

pub(super) enum Said<'a> {
    Text(Cow<'a, str>),
    Thought(&'a Thought),
}

pub(super) struct Call<'a> {
    pub id: &'a str,
    pub name: &'a str,
    pub arguments: Cow<'a, Map<String, Value>>,
    /// Whether the runtime made it.
    pub synthetic: bool,
    pub result: Vec<Part<'a>>,
}

pub(super) enum Part<'a> {
    Text(Cow<'a, str>),
    Image(&'a Image),
}

pub(super) fn turns<'a>(prompt: &Prompt<'a>) -> Vec<Turn<'a>> {
    let mut builder = Builder::new(prompt);
    for entry in prompt.entries {
        builder.take(&entry.item);
    }
    builder.finish()
}

/// The texts as one.
pub(super) fn joined(texts: &[Cow<'_, str>]) -> String {
    texts.join("\n\n")
}

/// What was said, as one text.
pub(super) fn told(said: &[Said<'_>]) -> String {
    let texts = said.iter().filter_map(|said| match said {
        Said::Text(text) => Some(text.clone()),
        Said::Thought(_) => None,
    });
    joined(&texts.collect::<Vec<_>>())
}

/// The tool and the arguments that a call stands for, without `kind`.
type Original<'a> = (&'a str, Option<&'a Map<String, Value>>);

struct Builder<'a> {
    turns: Vec<Turn<'a>>,
    originals: HashMap<&'a CallId, Original<'a>>,
    /// Calls without a result: the turn, and the call's place in it.
    open: HashMap<&'a CallId, (usize, usize)>,
    result_bytes: usize,
    /// How many images are still passed over, since only the newest are shown.
    images_to_skip: usize,
    images: bool,
    /// The model whose thoughts are told.
    thinker: Option<&'a str>,
}

impl<'a> Builder<'a> {
    fn new(prompt: &Prompt<'a>) -> Self {
        Builder {
            turns: Vec::new(),
            originals: HashMap::new(),
            open: HashMap::new(),
            result_bytes: prompt.result_bytes,
            images_to_skip: images_to_skip(prompt.entries),
            images: prompt.images,
            thinker: match prompt.thinking {
                Thinking::Off => None,
                Thinking::Free { model } | Thinking::First { model } => Some(model),
            },
        }
    }

    fn take(&mut self, item: &'a Item) {
        match item {
            Item::User { text, from } => {
                if *from == Speaker::Parent {
                    self.user(FROM_PARENT);
                }
                self.user(text);
            }
            Item::Assistant { text, calls, thoughts } => self.assistant(text, calls, thoughts.as_ref()),
            Item::Result { call_id, content, .. } => self.result(call_id, content),
            Item::Notice { .. } => {}
        }
    }

    fn user(&mut self, text: &'a str) {
        let Some(text) = spoken(text) else { return };
        match self.turns.last_mut() {
            Some(Turn::User(texts)) => texts.push(text),
            _ => self.turns.push(Turn::User(vec![text])),
        }
    }

    fn assistant(&mut self, text: &'a str, calls: &'a [CallEntry], thoughts: Option<&'a Thoughts>) {
        if text.trim().is_empty() && calls.is_empty() {
            return;
        }
        let merges = matches!(self.turns.last(), Some(Turn::Assistant { calls, .. }) if calls.is_empty());
        if !merges {
            self.turns.push(Turn::Assistant { said: Vec::new(), calls: Vec::new() });
        }
        // What another answer ends with is no place for thoughts.
        let thoughts = thoughts.filter(|thoughts| !merges && self.thinker == Some(&thoughts.model));
        let mut pieces = said(text, thoughts.map_or(&[], |thoughts| &thoughts.parts));
        if calls.is_empty() {
            let end = pieces.iter().rposition(|piece| matches!(piece, Said::Text(_))).map_or(0, |at| at + 1);
            pieces.truncate(end);
        }
        let turn = self.turns.len() - 1;
        let calls: Vec<_> = calls
            .iter()
            .enumerate()
            .map(|(index, call)| {
                self.open.insert(&call.id, (turn, index));
                self.call(call)
            })
            .collect();
        if let Some(Turn::Assistant { said, calls: made }) = self.turns.last_mut() {
            said.extend(pieces);
            made.extend(calls);
        }
    }

    fn call(&mut self, call: &'a CallEntry) -> Call<'a> {
        let (name, given) = self.original(call);
        self.originals.insert(&call.id, (name, given));
        let mut arguments = given.map_or_else(|| Cow::Owned(Map::new()), Cow::Borrowed);
        if let Arguments::Echo { kind, .. } = &call.arguments {
            arguments = Cow::Owned(with_kind(arguments.into_owned(), kind.to_owned()));
        }
        let synthetic = call.arguments.is_synthetic();
        Call { id: call.id.as_str(), name, arguments, synthetic, result: Vec::new() }
    }

    fn original(&self, call: &'a CallEntry) -> Original<'a> {
        match &call.arguments {
            Arguments::Given(arguments) => (&call.name, Some(arguments)),
            Arguments::Unusable(_) => (&call.name, None),
            Arguments::Echo { of, arguments, .. } => {
                let (name, found) = self.originals.get(of).copied().unwrap_or((&call.name, None));
                (name, arguments.as_ref().or(found))
            }
        }
    }

    fn result(&mut self, id: &'a CallId, body: &'a Body) {
        let parts = self.parts(body);
        let Some((turn, index)) = self.open.remove(id) else { return };
        if let Some(Turn::Assistant { calls, .. }) = self.turns.get_mut(turn) {
            let call = &mut calls[index];
            if call.synthetic {
                // Nobody asked for it just now, and a model should not take it for the user's words.
                call.result.push(Part::Text(NOT_THE_USER.into()));
            }
            call.result.extend(parts);
        }
    }

    fn parts(&mut self, body: &'a Body) -> Vec<Part<'a>> {
        let mut room = self.result_bytes;
        let mut parts = Vec::new();
        match body {
            Body::Text(text) => parts.extend(shown(text, &mut room)),
            Body::Content(items) => {
                for item in items {
                    match item {
                        Content::Text { text } => parts.extend(shown(text, &mut room)),
                        Content::Image(image) => parts.push(self.image(image)),
                    }
                }
            }
        }
        if parts.is_empty() {
            parts.push(Part::Text(EMPTY_RESULT.into()));
        }
        parts
    }

    fn image(&mut self, image: &'a Image) -> Part<'a> {
        if !is_usable(image) {
            return missing(image, "it is too large or not of a type that models take");
        }
        if self.images_to_skip > 0 {
            self.images_to_skip -= 1;
            return missing(image, "there are too many newer ones");
        }
        if self.images { Part::Image(image) } else { missing(image, "the model takes no images") }
    }

    fn finish(mut self) -> Vec<Turn<'a>> {
        for turn in &mut self.turns {
            let Turn::Assistant { calls, .. } = turn else { continue };
            for call in calls.iter_mut().filter(|call| call.result.is_empty()) {
                call.result.push(Part::Text(STILL_RUNNING.into()));
            }
        }
        if matches!(self.turns.first(), Some(Turn::Assistant { .. })) {
            self.turns.insert(0, Turn::User(vec![OPENING.into()]));
        }
        let answered = match self.turns.last() {
            None => true,
            Some(Turn::User(_)) => false,
            Some(Turn::Assistant { calls, .. }) => calls.is_empty(),
        };
        if answered {
            self.turns.push(Turn::User(vec![CLOSING.into()]));
        }
        self.turns
    }
}

/// A text with the thoughts between its pieces.
fn said<'a>(text: &'a str, thoughts: &'a [Thought]) -> Vec<Said<'a>> {
    let mut pieces = Vec::new();
    let mut begin = 0;
    for thought in thoughts.iter().filter(|thought| is_whole(thought)) {
        let end = text.floor_char_boundary(thought.at).max(begin);
        pieces.extend(spoken(&text[begin..end]).map(Said::Text));
        pieces.push(Said::Thought(thought));
        begin = end;
    }
    pieces.extend(spoken(&text[begin..]).map(Said::Text));
    pieces
}

/// Whether it can be sent back as it came.
fn is_whole(thought: &Thought) -> bool {
    let plain = |text: &str| !text.is_empty() && !text.contains('\0');
    match &thought.kind {
        ThoughtKind::Open { text, signature } => plain(signature) && !text.contains('\0'),
        ThoughtKind::Sealed { data } => plain(data),
    }
}

/// A text that is not blank. Some servers choke on a NUL.
pub(super) fn spoken(text: &str) -> Option<Cow<'_, str>> {
    if text.trim().is_empty() {
        return None;
    }
    Some(if text.contains('\0') { text.replace('\0', "\u{fffd}").into() } else { text.into() })
}

/// As much of a result's text as there is room for, with a note of what is missing.
fn shown<'a>(text: &'a str, room: &mut usize) -> Option<Part<'a>> {
    let end = text.floor_char_boundary(*room);
    *room -= end;
    if end == text.len() {
        return spoken(text).map(Part::Text);
    }
    let whole = text.len();
    let kept = spoken(&text[..end]).unwrap_or_default();
    Some(Part::Text(format!("{kept}\n[cut: {end} of {whole} bytes are shown]").into()))
}

fn missing<'a>(image: &Image, why: &str) -> Part<'a> {
    let media_type: String = image.media_type.chars().filter(char::is_ascii_graphic).take(64).collect();
    Part::Text(format!("[an image ({media_type}) is not shown: {why}]").into())
}

fn is_usable(image: &Image) -> bool {
    let payload = image.data.trim_end_matches('=');
    let alphabet = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    MEDIA_TYPES.contains(&image.media_type.as_str())
        && (1..=IMAGE_BYTES).contains(&image.data.len())
        && image.data.len().is_multiple_of(4)
        && image.data.len() - payload.len() <= 2
        && payload.bytes().all(alphabet)
}

/// How many of the usable images do not fit, counted from the oldest.
fn images_to_skip(entries: &[Entry]) -> usize {
    let sizes: Vec<_> = entries.iter().flat_map(|entry| image_sizes(&entry.item)).collect();
    let mut room = IMAGES_BYTES;
    let newest = sizes.iter().rev().take(IMAGES);
    let fit = newest.take_while(|size| room.checked_sub(**size).map(|rest| room = rest).is_some()).count();
    sizes.len() - fit
}

fn image_sizes(item: &Item) -> impl Iterator<Item = usize> {
    let items = match item {
        Item::Result { content: Body::Content(items), .. } => items.as_slice(),
        _ => &[],
    };
    items.iter().filter_map(|item| match item {
        Content::Image(image) if is_usable(image) => Some(image.data.len()),
        _ => None,
    })
}
