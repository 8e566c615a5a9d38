//! Serves the files of the web interface. They contain no data: the interface reads everything through the client API.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use crate::WebAssets;
use crate::engine::Engine;

/// Addresses of the web interface. Each survives a reload, because the document is served at all of them.
const ADDRESSES: &[&str] = &[
    "/",
    "/threads",
    "/threads/{id}",
    "/inbox",
    "/subscriptions",
    "/timers",
    "/deliveries",
    "/tools",
    "/nodes",
];

/// Forbids inline scripts and styles, other servers, plugins and frames. Images may be part of a conversation (`data:`). A
/// script cannot turn text into HTML.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
     require-trusted-types-for 'script'; trusted-types 'none'";

const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    // A browser asks again before it uses a stored copy, so that an update of the runtime is seen at once.
    (header::CACHE_CONTROL, "no-cache"),
];

/// Returns the routes of the web interface.
pub(super) fn router(page: WebAssets) -> Router<Arc<Engine>> {
    let document = File::new("text/html; charset=utf-8", page.document);
    let router = ADDRESSES.iter().fold(Router::new(), |router, address| {
        let document = document.clone();
        router.route(address, get(async move |headers: HeaderMap| document.respond(&headers)))
    });
    page.assets.iter().fold(router, |router, asset| {
        let file = File::new(asset.media_type, asset.content);
        let path = format!("/assets/{}", asset.name);
        router.route(&path, get(async move |headers: HeaderMap| file.respond(&headers)))
    })
}

#[derive(Clone)]
struct File {
    media_type: HeaderValue,
    content: Bytes,
    /// Digest of the content.
    tag: HeaderValue,
}

impl File {
    fn new(media_type: &'static str, content: &'static [u8]) -> File {
        let digest = Sha256::digest(content);
        let tag = format!("\"{}\"", BASE64_URL_SAFE_NO_PAD.encode(&digest[..16]));
        File {
            media_type: HeaderValue::from_static(media_type),
            content: Bytes::from_static(content),
            tag: HeaderValue::from_str(&tag).expect("bug: base64 is valid in a header"),
        }
    }

    /// Answers with the file, or with 304 if the browser has it.
    fn respond(&self, request: &HeaderMap) -> Response {
        let known = request.get(header::IF_NONE_MATCH) == Some(&self.tag);
        let mut response = if known {
            StatusCode::NOT_MODIFIED.into_response()
        } else {
            self.content.clone().into_response()
        };
        let headers = response.headers_mut();
        for (name, value) in HEADERS {
            headers.insert(name, HeaderValue::from_static(value));
        }
        headers.insert(header::CONTENT_TYPE, self.media_type.clone());
        headers.insert(header::ETAG, self.tag.clone());
        response
    }
}
