//! URLs under which there is more: of the runtime itself, a model, a tool server.

use std::fmt;

use rap_protocol::EndpointUrl;
use url::Url;

/// An http or https URL without user, query, fragment and slash at its end, so that a path can be appended and
/// anyone may see it.
#[derive(Clone, PartialEq, Eq)]
pub struct BaseUrl(String);

impl BaseUrl {
    /// What a text has to be.
    pub(super) const EXPECTED: &str =
        "an http or https URL without user, query and fragment, such as \"http://127.0.0.1:7501\"";

    /// Takes a URL. None if it is something else.
    pub fn new(text: &str) -> Option<Self> {
        let url = EndpointUrl::new(text).ok()?.to_url();
        let bare = url.query().is_none() && url.fragment().is_none();
        let anonymous = url.username().is_empty() && url.password().is_none();
        (bare && anonymous).then(|| BaseUrl(text.trim_end_matches('/').to_owned()))
    }

    /// The URL as it was written, without slash at its end.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The parsed URL: two that lead to the same place are equal.
    pub fn to_url(&self) -> Url {
        Url::parse(&self.0).expect("bug: a URL was checked when it was made")
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
    fn a_slash_at_the_end_goes() {
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
    fn what_is_no_base_is_refused() {
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
