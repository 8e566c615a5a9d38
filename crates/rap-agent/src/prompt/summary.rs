//! What a model sees of a long history: the last summary, then what it does not cover; and how much that is.

use std::collections::HashMap;

use rap_protocol::{Body, CallId, Content};
use serde_json::{Map, Value};

use super::RESULT_BYTES;
use crate::{Arguments, Entry, Item, Seq, Speaker};

/// What a model is told that is to make a summary.
pub const SUMMARISE: &str = "(The runtime asks, not the user: this conversation is about to become too long for you. \
    Summarise everything above for yourself; from now on you will see your summary instead of it. Keep what is needed \
    to go on: what the user wants and has decided, word for word where the words matter; what was done and found out, \
    with names, numbers, ids and addresses; what was promised and is not done yet. Leave out what is settled and will \
    not matter again. Do not list open calls or subscriptions, that is added by itself. Do not call any tool. Answer \
    with the summary alone.)";

/// How much of a result's text whoever makes a summary sees, in bytes.
const RESULT_BYTES_TO_SUMMARISE: usize = 8 * 1024;
/// How many bytes a token has, cautiously.
const TOKEN_BYTES: usize = 3;
/// What an image costs, in tokens: about as much as the largest that providers do not scale down.
const IMAGE_TOKENS: usize = 1_600;
/// What an entry or a call costs besides its text, in bytes.
const FRAME_BYTES: usize = 24;

/// What a model sees of a history: the last summary, then every entry that it does not cover. A synthetic call whose
/// original is covered keeps the original's arguments.
pub fn seen(mut history: Vec<(Seq, Entry)>) -> Vec<Entry> {
    let is_summary = |(_, entry): &(Seq, Entry)| matches!(entry.item, Item::Summary { .. });
    let Some(last) = history.iter().rposition(is_summary) else {
        return history.into_iter().map(|(_, entry)| entry).collect();
    };
    let (_, summary) = history.remove(last);
    let Item::Summary { covers, .. } = summary.item else { return Vec::new() };
    let (covered, rest): (Vec<_>, Vec<_>) = history.into_iter().partition(|(seq, _)| *seq <= covers);
    let originals: HashMap<CallId, Map<String, Value>> =
        covered.into_iter().flat_map(|(_, entry)| given(entry.item)).collect();
    let mut seen = vec![summary];
    for (_, mut entry) in rest.into_iter().filter(|entry| !is_summary(entry)) {
        if let Item::Assistant { calls, .. } = &mut entry.item {
            for call in calls {
                if let Arguments::Echo { of, arguments: arguments @ None, .. } = &mut call.arguments {
                    *arguments = originals.get(of).cloned();
                }
            }
        }
        seen.push(entry);
    }
    seen
}

fn given(item: Item) -> Vec<(CallId, Map<String, Value>)> {
    let Item::Assistant { calls, .. } = item else { return Vec::new() };
    let given = calls.into_iter().filter_map(|call| match call.arguments {
        Arguments::Given(arguments) => Some((call.id, arguments)),
        _ => None,
    });
    given.collect()
}

/// What a model is shown that is to make a summary of these entries: long results are cut, images are left out.
pub fn to_summarise(mut entries: Vec<Entry>) -> Vec<Entry> {
    for entry in &mut entries {
        if let Item::Result { content, .. } = &mut entry.item {
            *content = Body::Text(shortened(content));
        }
    }
    let at = entries.last().map_or(rap_protocol::Timestamp(0), |entry| entry.at);
    entries.push(Entry { at, item: Item::User { text: SUMMARISE.into(), from: Speaker::Runtime } });
    entries
}

fn shortened(content: &Body) -> String {
    let mut text = match content {
        Body::Text(text) => text.clone(),
        Body::Content(items) => items.iter().map(plain).collect::<Vec<_>>().join("\n"),
    };
    let (whole, end) = (text.len(), text.floor_char_boundary(RESULT_BYTES_TO_SUMMARISE));
    if end < whole {
        text.truncate(end);
        text.push_str(&format!("\n[cut: {end} of {whole} bytes are shown]"));
    }
    text
}

fn plain(content: &Content) -> &str {
    match content {
        Content::Text { text } => text,
        Content::Image(_) => "[an image]",
    }
}

/// About how many tokens that much text is for a model.
pub fn bytes_as_tokens(bytes: usize) -> u64 {
    (bytes / TOKEN_BYTES) as u64
}

/// About how many tokens the entries are for a model. It errs on the side of too many.
pub fn tokens(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| entry_tokens(&entry.item) as u64).sum()
}

fn entry_tokens(item: &Item) -> usize {
    let text = |text: &str| (text.len() + FRAME_BYTES) / TOKEN_BYTES;
    match item {
        Item::User { text: said, .. } | Item::Summary { text: said, .. } => text(said),
        Item::Assistant { text: said, calls, .. } => {
            let call = |arguments: &Arguments| match arguments {
                Arguments::Given(arguments) | Arguments::Echo { arguments: Some(arguments), .. } => {
                    arguments.iter().map(|(key, value)| key.len() + value.to_string().len() + 6).sum()
                }
                Arguments::Unusable(given) => given.len(),
                Arguments::Echo { .. } => FRAME_BYTES,
            };
            let calls: usize =
                calls.iter().map(|made| made.name.len() + FRAME_BYTES + call(&made.arguments)).sum();
            text(said) + calls / TOKEN_BYTES
        }
        Item::Result { content: Body::Text(result), .. } => {
            (result.len().min(RESULT_BYTES) + FRAME_BYTES) / TOKEN_BYTES
        }
        Item::Result { content: Body::Content(items), .. } => {
            let part = |item: &Content| match item {
                Content::Text { text } => text.len().min(RESULT_BYTES) / TOKEN_BYTES,
                Content::Image(_) => IMAGE_TOKENS,
            };
            FRAME_BYTES + items.iter().map(part).sum::<usize>()
        }
        Item::Notice { .. } => 0,
    }
}
