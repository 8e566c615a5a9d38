//! Results of MCP as results of a tool. What a model cannot be shown is named.

use rap_tool::{Content, Error, Image, Output};
use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};

/// Maximum number of content items of a result. The rest is counted.
const ITEMS: usize = 200;
/// Text of a result without content.
const NOTHING: &str = "(no content)";

/// Converts the result of a tool. An error of the tool becomes an error.
pub(super) fn result(result: CallToolResult) -> Result<Output, Error> {
    let mut items = bounded(result.content.into_iter().map(item));
    if let (true, Some(structured)) = (items.is_empty(), result.structured_content) {
        items.push(text(structured.to_string()));
    }
    if result.is_error == Some(true) {
        let said = joined(items);
        return Err(Error::new(if said.is_empty() {
            "the tool failed without an error message".into()
        } else {
            said
        }));
    }
    Ok(output(items))
}

/// Returns the first items, and the number of the others.
fn bounded(mut items: impl Iterator<Item = Content>) -> Vec<Content> {
    let mut shown: Vec<Content> = items.by_ref().take(ITEMS).collect();
    let left_out = items.count();
    if left_out > 0 {
        shown.push(text(format!("[{left_out} more items, not shown]")));
    }
    shown
}

/// Returns the output with these items, or the first of them.
pub(super) fn bounded_output(items: impl Iterator<Item = Content>) -> Output {
    output(bounded(items))
}

fn output(items: Vec<Content>) -> Output {
    let is_text = |item: &Content| matches!(item, Content::Text { .. });
    if !items.iter().all(is_text) {
        return Output::content(items);
    }
    let text = joined(items);
    Output::text(if text.is_empty() { NOTHING.into() } else { text })
}

/// Joins the texts. Images are named.
fn joined(items: Vec<Content>) -> String {
    let text = |item| match item {
        Content::Text { text } => text,
        Content::Image(image) => format!("[image of type {}, not shown]", image.media_type),
    };
    items.into_iter().map(text).collect::<Vec<_>>().join("\n")
}

fn text(text: impl Into<String>) -> Content {
    Content::Text { text: text.into() }
}

pub(super) fn item(block: ContentBlock) -> Content {
    match block {
        ContentBlock::Text(content) => text(content.text),
        ContentBlock::Image(image) => media(image.mime_type, image.data, "image"),
        ContentBlock::Audio(audio) => media(audio.mime_type, audio.data, "audio"),
        ContentBlock::Resource(embedded) => resource(embedded.resource),
        ContentBlock::ResourceLink(link) => {
            let about = link.description.map(|about| format!(": {about}")).unwrap_or_default();
            text(format!("[resource {} ({}){about}]", link.uri, link.name))
        }
        _ => text("[content of an unknown kind, not shown]"),
    }
}

/// Converts the contents of a resource.
pub(super) fn resource(contents: ResourceContents) -> Content {
    match contents {
        ResourceContents::TextResourceContents { uri, text: content, .. } => {
            text(format!("[resource {uri}]\n{content}"))
        }
        ResourceContents::BlobResourceContents { uri, mime_type, blob, .. } => {
            let kind = mime_type.unwrap_or_else(|| "application/octet-stream".into());
            media(kind, blob, &format!("resource {uri}"))
        }
        _ => text("[a resource of an unknown kind, not shown]"),
    }
}

/// Returns an image, or the description of anything else that is not text.
fn media(media_type: String, data: String, what: &str) -> Content {
    let kinds = ["image/png", "image/jpeg", "image/gif", "image/webp"];
    if kinds.contains(&media_type.as_str()) && is_base64(&data) {
        return Content::Image(Image { data, media_type });
    }
    let bytes = data.trim_end_matches('=').len() * 3 / 4;
    text(format!("[{what} of type {media_type}, {bytes} bytes, not shown]"))
}

fn is_base64(data: &str) -> bool {
    let payload = data.trim_end_matches('=');
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    data.len().is_multiple_of(4) && data.len() - payload.len() <= 2 && payload.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use rmcp::model::Resource;

    use super::*;

    fn shown(blocks: Vec<ContentBlock>) -> Output {
        result(CallToolResult::success(blocks)).unwrap()
    }

    #[test]
    fn texts_are_joined_and_what_cannot_be_shown_is_named() {
        let blocks = vec![
            ContentBlock::text("a"),
            ContentBlock::audio("AAAA", "audio/wav"),
            ContentBlock::embedded_text("file:///x", "inside"),
            ContentBlock::resource(ResourceContents::blob("AAAAAAAA", "file:///y")),
            ContentBlock::resource_link(Resource::new("file:///z", "z")),
        ];
        let expected = "a\n[audio of type audio/wav, 3 bytes, not shown]\n[resource file:///x]\ninside\n\
                        [resource file:///y of type application/octet-stream, 6 bytes, not shown]\n\
                        [resource file:///z (z)]";
        assert_eq!(shown(blocks), Output::text(expected));
        assert_eq!(shown(Vec::new()), Output::text(NOTHING));
        let many = bounded_output((0..ITEMS + 7).map(|_| text("x")));
        let expected = format!("{}[7 more items, not shown]", "x\n".repeat(ITEMS));
        assert_eq!(many, Output::text(expected));
    }

    #[test]
    fn images_are_passed_on_unless_they_are_damaged() {
        let image = Image { data: "AAAA".into(), media_type: "image/png".into() };
        let both = vec![ContentBlock::text("see"), ContentBlock::image("AAAA", "image/png")];
        assert_eq!(shown(both), Output::content(vec![text("see"), Content::Image(image)]));
        let damaged = shown(vec![ContentBlock::image("AA!", "image/png")]);
        assert_eq!(damaged, Output::text("[image of type image/png, 2 bytes, not shown]"));
    }

    #[test]
    fn an_error_of_the_tool_is_an_error() {
        let error = result(CallToolResult::error(vec![ContentBlock::text("no such file")])).unwrap_err();
        assert_eq!(error.to_string(), "no such file");
        assert!(result(CallToolResult::error(Vec::new())).unwrap_err().to_string().contains("without"));
    }
}
