//! The web page for people, as a value. This crate has no files of its own to serve: the program that starts the runtime
//! passes them in.

/// Files of the web page.
///
/// The document is served at every address of the page, and loads the assets from `/assets/NAME`. No file may rely on
/// inline scripts, inline styles or other servers: the content security policy forbids them.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// The HTML document.
    pub document: &'static [u8],
    /// Files that the document loads.
    pub assets: &'static [PageAsset],
}

/// A file that the document of the page loads.
#[derive(Debug, Clone, Copy)]
pub struct PageAsset {
    /// Name in the path: `/assets/NAME`.
    pub name: &'static str,
    /// Value of `Content-Type`.
    pub media_type: &'static str,
    /// The file itself.
    pub content: &'static [u8],
}
