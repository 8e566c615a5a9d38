//! Files of the web interface, which are part of the binary. They are plain modules, served as they are in `web/`.

use rap_runtime::{WebAsset, WebAssets};

macro_rules! assets {
    ($($name:literal as $media_type:literal,)*) => {
        &[$(WebAsset {
            name: $name,
            media_type: $media_type,
            content: include_bytes!(concat!("../web/", $name)),
        }),*]
    };
}

/// Web interface that `rap serve` serves.
pub(crate) const ASSETS: WebAssets = WebAssets {
    document: include_bytes!("../web/index.html"),
    assets: assets! {
        "api.js" as "text/javascript; charset=utf-8",
        "app.js" as "text/javascript; charset=utf-8",
        "attachments.js" as "text/javascript; charset=utf-8",
        "charts.js" as "text/javascript; charset=utf-8",
        "conversation.js" as "text/javascript; charset=utf-8",
        "dom.js" as "text/javascript; charset=utf-8",
        "inbox.js" as "text/javascript; charset=utf-8",
        "lists.js" as "text/javascript; charset=utf-8",
        "live.js" as "text/javascript; charset=utf-8",
        "markdown.js" as "text/javascript; charset=utf-8",
        "overview.js" as "text/javascript; charset=utf-8",
        "status.js" as "text/javascript; charset=utf-8",
        "thread.js" as "text/javascript; charset=utf-8",
        "threads.js" as "text/javascript; charset=utf-8",
        "timeline.js" as "text/javascript; charset=utf-8",
        "titles.js" as "text/javascript; charset=utf-8",
        "icon.svg" as "image/svg+xml",
        "style.css" as "text/css; charset=utf-8",
    },
};
