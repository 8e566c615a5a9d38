//! The files of the web interface, as a value. This crate has no files of its own to serve: the program that starts the
//! runtime passes them in.

/// Files of the web interface.
///
/// The document is served at every address of the interface, and loads the assets from `/assets/NAME`. No file may rely on
/// inline scripts, inline styles or other servers: the content security policy forbids them.
#[derive(Debug, Clone, Copy)]
pub struct WebAssets {
    /// The HTML document.
    pub document: &'static [u8],
    /// Files that the document loads.
    pub assets: &'static [WebAsset],
}

/// A file that the document of the web interface loads.
#[derive(Debug, Clone, Copy)]
pub struct WebAsset {
    /// Name in the path: `/assets/NAME`.
    pub name: &'static str,
    /// Value of `Content-Type`.
    pub media_type: &'static str,
    /// The file itself.
    pub content: &'static [u8],
}
