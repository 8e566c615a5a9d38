//! Images that a person sends.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rap_api::{IMAGE_BYTES, IMAGE_TYPES};
use serde_json::{Value, json};

/// Maximum size of a file, in bytes. Base64 adds a third.
const FILE_BYTES: u64 = (IMAGE_BYTES / 4 * 3) as u64;
const EXTENSIONS: [&str; 5] = ["png", "jpg", "jpeg", "gif", "webp"];

/// An image as an item of a message.
#[derive(Debug, Clone)]
pub(super) struct Attachment {
    pub(super) name: String,
    pub(super) item: Value,
}

/// Returns true if a line is nothing but the path of an image that exists.
pub(super) fn is_image_path(path: &str) -> bool {
    let path = Path::new(path);
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    EXTENSIONS.iter().any(|known| known.eq_ignore_ascii_case(extension)) && path.is_file()
}

/// Reads an image.
pub(super) fn read(path: &str) -> anyhow::Result<Attachment> {
    if path.is_empty() {
        bail!("which file? /image FILE");
    }
    let file = File::open(path).with_context(|| format!("cannot read {path}"))?;
    if !file.metadata().with_context(|| format!("cannot read {path}"))?.is_file() {
        bail!("{path} is not a file");
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("cannot read {path}"))?;
    if bytes.len() as u64 > FILE_BYTES {
        bail!("{path} is too large: an image may have {} MiB", FILE_BYTES as f64 / 1024.0 / 1024.0);
    }
    let Some(media_type) = media_type(&bytes) else {
        bail!("{path} is not an image of a type that models accept: {}", IMAGE_TYPES.join(", "));
    };
    let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let item = json!({"type": "image", "data": BASE64_STANDARD.encode(bytes), "mediaType": media_type});
    Ok(Attachment { name, item })
}

/// Returns the media type of an image by its first bytes.
fn media_type(bytes: &[u8]) -> Option<&'static str> {
    let [png, jpeg, gif, webp] = IMAGE_TYPES;
    match bytes {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(png),
        [0xff, 0xd8, 0xff, ..] => Some(jpeg),
        [b'G', b'I', b'F', b'8', ..] => Some(gif),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(webp),
        _ => None,
    }
}
