//! Parts of a result: content items for the model and display segments for users.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::invalid::{Invalid, Path, describe, quote};
use crate::limits;
use crate::read::Object;

/// One item of a result's `content`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Content {
    /// Text.
    Text {
        /// The text itself.
        text: String,
    },
    /// Image.
    Image(Image),
}

/// Image data in base64.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Image bytes in base64: standard alphabet, with padding.
    pub data: String,
    /// Media type, such as `image/png`.
    #[serde(rename = "mediaType")]
    pub media_type: String,
}

/// One representation of a result for users. A client shows the first one that it supports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", content = "content", rename_all = "snake_case")]
pub enum Segment {
    /// Text.
    Text(String),
    /// Change of a file.
    Diff {
        /// Path of the file.
        path: String,
        /// Unified diff.
        patch: String,
    },
    /// Image.
    Image(Image),
}

/// Parses content items that do not belong to a callback, such as those of a user's message. The paths of errors begin at
/// `$.content`.
pub fn parse_content(items: Vec<Value>) -> Result<Vec<Content>, Invalid> {
    let mut fields = serde_json::Map::new();
    fields.insert("content".into(), Value::Array(items));
    contents(&mut Object::new(Value::Object(fields), Path::Root)?)
}

/// Parses `content`. An item of an unknown type is an error.
pub(crate) fn contents(object: &mut Object<'_>) -> Result<Vec<Content>, Invalid> {
    let items = object.array("content", limits::CONTENT_ITEMS)?;
    let path = object.path().field("content");
    let content = |(index, item)| {
        let path = path.item(index);
        let mut item = Object::new(item, path)?;
        match item.string("type", limits::BODY_BYTES)?.as_str() {
            "text" => Ok(Content::Text { text: item.string("text", limits::BODY_BYTES)? }),
            "image" => Ok(Content::Image(image(&mut item)?)),
            other => Err(item.value("type", "text or image", quote(other))),
        }
    };
    items.into_iter().enumerate().map(content).collect()
}

/// Parses `display_as`. A segment of an unknown type is skipped, because segments never reach the model.
pub(crate) fn segments(object: &mut Object<'_>) -> Result<Vec<Segment>, Invalid> {
    let items = object.optional_array("display_as", limits::DISPLAY_SEGMENTS)?;
    let path = object.path().field("display_as");
    let mut segments = Vec::new();
    for (index, item) in items.into_iter().enumerate() {
        let path = path.item(index);
        let mut item = Object::new(item, path)?;
        let kind = item.string("type", limits::BODY_BYTES)?;
        segments.extend(segment(&kind, &mut item)?);
    }
    Ok(segments)
}

fn segment(kind: &str, item: &mut Object<'_>) -> Result<Option<Segment>, Invalid> {
    if kind == "text" {
        return item.string("content", limits::BODY_BYTES).map(Segment::Text).map(Some);
    }
    if !matches!(kind, "diff" | "image") {
        return Ok(None);
    }
    let content = Value::Object(item.object("content")?);
    let path = item.path().field("content");
    let mut content = Object::new(content, path)?;
    if kind == "image" {
        return image(&mut content).map(Segment::Image).map(Some);
    }
    Ok(Some(Segment::Diff {
        path: content.string("path", limits::URL_BYTES)?,
        patch: content.string("patch", limits::BODY_BYTES)?,
    }))
}

fn image(object: &mut Object<'_>) -> Result<Image, Invalid> {
    let data = object.string("data", limits::BODY_BYTES)?;
    if !is_base64(&data) {
        return Err(object.value("data", "base64", describe(&Value::String(data))));
    }
    let media_type = object.string("mediaType", limits::NAME_CHARS)?;
    if !is_media_type(&media_type) {
        return Err(object.value("mediaType", "a media type such as image/png", quote(&media_type)));
    }
    Ok(Image { data, media_type })
}

/// Accepts the standard alphabet, padded to groups of four.
fn is_base64(text: &str) -> bool {
    let payload = text.trim_end_matches('=');
    let in_alphabet = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    text.len().is_multiple_of(4) && text.len() - payload.len() <= 2 && payload.bytes().all(in_alphabet)
}

fn is_media_type(text: &str) -> bool {
    let is_token = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$&-^_.+".contains(&byte))
    };
    text.split_once('/').is_some_and(|(kind, subtype)| is_token(kind) && is_token(subtype))
}
