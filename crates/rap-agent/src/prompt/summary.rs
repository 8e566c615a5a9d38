//! Prompts of long histories: the entries that a model sees, the request for a summary, and token estimates.

use std::collections::HashMap;

use rap_protocol::{Body, CallId, Content};
use serde_json::{Map, Value};

use super::MAX_BYTES_PER_RESULT;
use crate::{Arguments, Entry, Item, Seq, Speaker};

/// Message that asks the model for a summary.
pub const SUMMARY_INSTRUCTIONS: &str = "(The runtime asks, not the user: this conversation is about to become too long \
    for you. Summarise everything above for yourself; from now on you will see your summary instead of it. Keep what is \
    needed to continue: what the user wants and has decided, word for word where the wording matters; what was done and \
    found out, with names, numbers, ids and addresses; what was promised and is not done yet. Leave out what is settled \
    and will not matter again. Do not list open calls or subscriptions; they are added automatically. Do not call any \
    tool. Answer with the summary alone.)";

/// Maximum size of the text of one result in a request for a summary, in bytes.
const SUMMARY_RESULT_BYTES: usize = 8 * 1024;
/// Bytes per token. A low value, so that the number of tokens is not underestimated.
const TOKEN_BYTES: usize = 3;
/// Tokens of an image: about the cost of the largest image that providers do not scale down.
const IMAGE_TOKENS: usize = 1_600;
/// Overhead of an entry or a call, in bytes.
const OVERHEAD_BYTES: usize = 24;

/// Returns the entries that a model sees: the last summary, then every entry that it does not cover. If the summary covers
/// the original of a synthetic call, the arguments of the original are copied into the synthetic call.
pub fn visible_entries(mut history: Vec<(Seq, Entry)>) -> Vec<Entry> {
    let is_summary = |(_, entry): &(Seq, Entry)| matches!(entry.item, Item::Summary { .. });
    let Some(last) = history.iter().rposition(is_summary) else {
        return history.into_iter().map(|(_, entry)| entry).collect();
    };
    let (_, summary) = history.remove(last);
    let Item::Summary { covers, .. } = summary.item else { return Vec::new() };
    let (covered, rest): (Vec<_>, Vec<_>) = history.into_iter().partition(|(seq, _)| *seq <= covers);
    let originals: HashMap<CallId, Map<String, Value>> =
        covered.into_iter().flat_map(|(_, entry)| given(entry.item)).collect();
    let mut visible = vec![summary];
    for (_, mut entry) in rest.into_iter().filter(|entry| !is_summary(entry)) {
        if let Item::Assistant { calls, .. } = &mut entry.item {
            for call in calls {
                if let Arguments::Synthetic { of, arguments: arguments @ None, .. } = &mut call.arguments {
                    *arguments = originals.get(of).cloned();
                }
            }
        }
        visible.push(entry);
    }
    visible
}

fn given(item: Item) -> Vec<(CallId, Map<String, Value>)> {
    let Item::Assistant { calls, .. } = item else { return Vec::new() };
    let given = calls.into_iter().filter_map(|call| match call.arguments {
        Arguments::Given(arguments) => Some((call.id, arguments)),
        _ => None,
    });
    given.collect()
}

/// Returns the entries of a request for a summary: long results are truncated, images are omitted, and
/// [`SUMMARY_INSTRUCTIONS`] is added.
pub fn entries_to_summarise(mut entries: Vec<Entry>) -> Vec<Entry> {
    for entry in &mut entries {
        if let Item::Result { content, .. } = &mut entry.item {
            *content = Body::Text(shortened(content));
        }
        if let Item::User { content, .. } = &mut entry.item {
            for item in content {
                *item = Content::Text { text: plain(item).to_owned() };
            }
        }
    }
    let at = entries.last().map_or(rap_protocol::Timestamp(0), |entry| entry.at);
    entries.push(Entry { at, item: Item::message(SUMMARY_INSTRUCTIONS, Speaker::Runtime) });
    entries
}

fn shortened(content: &Body) -> String {
    let mut text = match content {
        Body::Text(text) => text.clone(),
        Body::Content(items) => items.iter().map(plain).collect::<Vec<_>>().join("\n"),
    };
    let (whole, end) = (text.len(), text.floor_char_boundary(SUMMARY_RESULT_BYTES));
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

/// Estimates the number of tokens of a text of this many bytes.
pub fn tokens_for_bytes(bytes: usize) -> u64 {
    (bytes / TOKEN_BYTES) as u64
}

/// Estimates the number of tokens of the entries in a prompt. The estimate is rather too high.
pub fn estimate_tokens(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| entry_tokens(&entry.item) as u64).sum()
}

fn entry_tokens(item: &Item) -> usize {
    let tokens = |text: &str| (text.len() + OVERHEAD_BYTES) / TOKEN_BYTES;
    match item {
        Item::User { text: message, content, .. } => {
            tokens(message) + content.iter().map(content_tokens).sum::<usize>()
        }
        Item::Summary { text: message, .. } => tokens(message),
        Item::Assistant { text: answer, calls, .. } => {
            let call = |arguments: &Arguments| match arguments {
                Arguments::Given(arguments) | Arguments::Synthetic { arguments: Some(arguments), .. } => {
                    arguments.iter().map(|(key, value)| key.len() + value.to_string().len() + 6).sum()
                }
                Arguments::Unusable(given) => given.len(),
                Arguments::Synthetic { .. } => OVERHEAD_BYTES,
            };
            let calls: usize =
                calls.iter().map(|made| made.name.len() + OVERHEAD_BYTES + call(&made.arguments)).sum();
            tokens(answer) + calls / TOKEN_BYTES
        }
        Item::Result { content: Body::Text(result), .. } => {
            (result.len().min(MAX_BYTES_PER_RESULT) + OVERHEAD_BYTES) / TOKEN_BYTES
        }
        Item::Result { content: Body::Content(items), .. } => {
            OVERHEAD_BYTES / TOKEN_BYTES + items.iter().map(content_tokens).sum::<usize>()
        }
        Item::Notice { .. } => 0,
    }
}

fn content_tokens(item: &Content) -> usize {
    match item {
        Content::Text { text } => text.len().min(MAX_BYTES_PER_RESULT) / TOKEN_BYTES,
        Content::Image(_) => IMAGE_TOKENS,
    }
}
