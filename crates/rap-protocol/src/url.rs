//! URLs that arrive in messages.
//!
//! Each type keeps the exact text of its URL, because a callback URL is opaque (TR-16). `Display` and `Debug` leave out
//! user, path and query, because anyone who knows a callback URL can post into the conversation (LC-34).

use std::fmt;

use serde::Serialize;
use url::{Host, Url};

use crate::{limits, redact};

/// Reason why a text is not a usable URL. No error message repeats the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Longer than [`limits::URL_BYTES`].
    #[error("the URL is longer than {} bytes", limits::URL_BYTES)]
    TooLong,
    /// Not an absolute URL with a host.
    #[error("not an absolute URL with a host")]
    NotAbsolute,
    /// The scheme is neither http nor https.
    #[error("the scheme is neither http nor https")]
    Scheme,
    /// The URL is http and not on loopback, where https is required.
    #[error("http is permitted only on loopback")]
    NotEncrypted,
}

impl Error {
    pub(crate) fn expected(self) -> String {
        match self {
            Error::TooLong => format!("a URL of at most {} bytes", limits::URL_BYTES),
            Error::NotAbsolute => "an absolute http or https URL".into(),
            Error::Scheme => "an http or https URL".into(),
            Error::NotEncrypted => "an https URL, or http on loopback".into(),
        }
    }

    /// The `found` text of an [`crate::Invalid`], which continues the sentence that `expected` begins.
    pub(crate) fn found(self) -> &'static str {
        match self {
            Error::TooLong => "a longer one",
            Error::NotAbsolute => "something else",
            Error::Scheme => "another scheme",
            Error::NotEncrypted => "http to another machine",
        }
    }
}

fn parse_http(text: &str) -> Result<Url, Error> {
    if text.len() > limits::URL_BYTES {
        return Err(Error::TooLong);
    }
    // The URL parser removes white space, so the text would not be equal to the parsed URL.
    if text.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(Error::NotAbsolute);
    }
    let url = Url::parse(text).map_err(|_| Error::NotAbsolute)?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(Error::Scheme);
    }
    if url.host_str().is_none_or(str::is_empty) { Err(Error::NotAbsolute) } else { Ok(url) }
}

fn parse_https_or_loopback(text: &str) -> Result<Url, Error> {
    let url = parse_http(text)?;
    let loopback = match url.host() {
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => false,
    };
    if url.scheme() == "https" || loopback { Ok(url) } else { Err(Error::NotEncrypted) }
}

macro_rules! http_url {
    ($(#[$doc:meta])* $name:ident, $check:path) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(Box<str>);

        impl $name {
            /// Validates the text and keeps it unchanged.
            pub fn new(text: impl Into<String>) -> Result<Self, Error> {
                let text = text.into();
                $check(&text)?;
                Ok($name(text.into()))
            }

            /// Returns the exact text. The caller has to keep it out of logs and error messages.
            pub fn expose(&self) -> &str {
                &self.0
            }

            /// Returns the parsed URL, which is as secret as the text.
            pub fn to_url(&self) -> Url {
                $check(&self.0).expect("bug: a URL is validated by `new`")
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(text: String) -> Result<Self, Error> {
                $name::new(text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&redact::url(&self.to_url()))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }
    };
}

http_url! {
    /// URL to which a tool posts the callbacks of one call.
    CallbackUrl, parse_http
}
http_url! {
    /// URL that a user opens to authorize a tool: https, or http on loopback.
    AuthUrl, parse_https_or_loopback
}
http_url! {
    /// URL to which the user's choice is posted.
    ResponseUrl, parse_http
}
http_url! {
    /// URL of a tool server: its invocation endpoint, or the destination of a migration.
    EndpointUrl, parse_http
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "https://user:pass@agent.example.com:8443/callback/s3cr3t?token=t0k3n#frag";

    /// Proves: LC-34
    #[test]
    fn display_and_debug_omit_user_path_and_query() {
        let url = CallbackUrl::new(SECRET).unwrap();
        assert_eq!(url.to_string(), "https://agent.example.com:8443/…");
        assert_eq!(format!("{url:?}"), "CallbackUrl(https://agent.example.com:8443/…)");
        assert_eq!(url.expose(), SECRET);
    }

    /// Proves: TR-16
    #[test]
    fn a_callback_url_keeps_its_exact_bytes() {
        for text in ["http://h", "HTTP://H:80/a/../b?x=%41&y", "https://h/?q#f", SECRET] {
            let url = CallbackUrl::new(text).unwrap();
            assert_eq!(serde_json::to_value(&url).unwrap(), text);
        }
    }

    #[test]
    fn only_absolute_http_urls_are_accepted() {
        let table = [
            ("", Error::NotAbsolute),
            ("/relative", Error::NotAbsolute),
            ("http://", Error::NotAbsolute),
            (" http://h/", Error::NotAbsolute),
            ("http://h/a\nb", Error::NotAbsolute),
            ("ftp://host/", Error::Scheme),
            ("file:///etc/passwd", Error::Scheme),
            ("javascript:alert(1)", Error::Scheme),
        ];
        for (text, expected) in table {
            assert_eq!(CallbackUrl::new(text), Err(expected), "{text}");
        }
        let long = format!("http://h/{}", "x".repeat(limits::URL_BYTES));
        assert_eq!(CallbackUrl::new(long), Err(Error::TooLong));
    }

    #[test]
    fn an_auth_url_is_https_or_on_loopback() {
        for good in ["https://id.example.com/a", "http://127.0.0.1:1/a", "http://[::1]/", "http://localhost/"]
        {
            assert!(AuthUrl::new(good).is_ok(), "{good}");
        }
        for bad in ["http://id.example.com/a", "http://10.0.0.1/", "http://localhost.evil.com/"] {
            assert_eq!(AuthUrl::new(bad), Err(Error::NotEncrypted), "{bad}");
        }
    }
}
