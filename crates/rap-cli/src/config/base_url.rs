//! Base URLs of the runtime, of a model and of tool servers.

use std::fmt;

use rap_protocol::EndpointUrl;
use url::Url;

/// An http or https URL without user, query, fragment and trailing slash. A path can be appended to it, and it contains
/// no secret.
#[derive(Clone, PartialEq, Eq)]
pub struct BaseUrl(String);

impl BaseUrl {
    /// Description of a valid URL, for errors.
    pub(super) const EXPECTED: &str =
        "an http or https URL without user, query and fragment, such as \"http://127.0.0.1:7501\"";

    /// Parses a URL. Returns `None` if it is not a valid base URL.
    pub fn new(text: &str) -> Option<Self> {
        let url = EndpointUrl::new(text).ok()?.to_url();
        let bare = url.query().is_none() && url.fragment().is_none();
        let anonymous = url.username().is_empty() && url.password().is_none();
        (bare && anonymous).then(|| BaseUrl(text.trim_end_matches('/').to_owned()))
    }

    /// Returns the URL as written, without a trailing slash.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the parsed and normalised URL.
    pub fn to_url(&self) -> Url {
        Url::parse(&self.0).expect("bug: the URL was validated when it was created")
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BaseUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailing_slashes_are_removed() {
        for (text, expected) in [
            ("http://127.0.0.1:7501", "http://127.0.0.1:7501"),
            ("http://127.0.0.1:7501/", "http://127.0.0.1:7501"),
            ("https://h/tools//", "https://h/tools"),
            ("HTTPS://H:443/a", "HTTPS://H:443/a"),
        ] {
            let url = BaseUrl::new(text).unwrap();
            assert_eq!(url.as_str(), expected);
            assert!(url.to_url().host_str().is_some());
        }
        assert_eq!(
            BaseUrl::new("HTTP://H:80/").unwrap().to_url(),
            BaseUrl::new("http://h").unwrap().to_url()
        );
    }

    #[test]
    fn other_urls_are_refused() {
        for bad in [
            "",
            "/tools",
            "h:80",
            "ftp://h",
            "http://h?x=1",
            "http://h/#top",
            "http://u@h",
            "http://:p@h",
            "http:// h",
        ] {
            assert_eq!(BaseUrl::new(bad), None, "{bad}");
        }
    }
}
