//! URLs that arrive in messages. Each keeps its exact text, since a callback URL is opaque (TR-16), and prints
//! without path, query and user: whoever knows a callback URL can speak in a conversation (LC-34).

use std::fmt;

use serde::Serialize;
use url::{Host, Url};

use crate::{limits, redact};

/// Why a text is not a usable URL. None of these repeats it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Longer than [`limits::URL_BYTES`].
    #[error("a longer one")]
    TooLong,
    /// Not an absolute URL with a host.
    #[error("something else")]
    NotAbsolute,
    /// Neither http nor https.
    #[error("another scheme")]
    Scheme,
    /// http, where only https or this machine will do.
    #[error("http to another machine")]
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
}

fn web(text: &str) -> Result<Url, Error> {
    if text.len() > limits::URL_BYTES {
        return Err(Error::TooLong);
    }
    // The parser would forgive white space; then the text and the URL would not be the same.
    if text.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(Error::NotAbsolute);
    }
    let url = Url::parse(text).map_err(|_| Error::NotAbsolute)?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(Error::Scheme);
    }
    if url.host_str().is_none_or(str::is_empty) { Err(Error::NotAbsolute) } else { Ok(url) }
}

fn encrypted(text: &str) -> Result<Url, Error> {
    let url = web(text)?;
    let loopback = match url.host() {
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => false,
    };
    if url.scheme() == "https" || loopback { Ok(url) } else { Err(Error::NotEncrypted) }
}

macro_rules! web_url {
    ($(#[$doc:meta])* $name:ident, $check:path) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(Box<str>);

        impl $name {
            /// Checks the text and takes it.
            pub fn new(text: impl Into<String>) -> Result<Self, Error> {
                let text = text.into();
                $check(&text)?;
                Ok($name(text.into()))
            }

            /// The exact text. Whoever calls this answers for where it goes.
            pub fn expose(&self) -> &str {
                &self.0
            }

            /// The parsed URL, as secret as the text.
            pub fn to_url(&self) -> Url {
                $check(&self.0).expect("bug: a URL was checked when it was made")
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

web_url! {
    /// Where a tool sends what it has to say about one call.
    CallbackUrl, web
}
web_url! {
    /// Where a user goes to authorise a tool: https, or http on this machine.
    AuthUrl, encrypted
}
web_url! {
    /// Where the answer to a user's choice goes.
    ResponseUrl, web
}
web_url! {
    /// Where a tool server is reached: its invocation endpoint, or the destination of a migration.
    EndpointUrl, web
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "https://user:pass@agent.example.com:8443/callback/s3cr3t?token=t0k3n#frag";

    /// Proves: LC-34
    #[test]
    fn urls_print_without_what_makes_them_a_capability() {
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
    fn only_absolute_http_urls_are_taken() {
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
    fn an_auth_url_is_https_or_on_this_machine() {
        for good in ["https://id.example.com/a", "http://127.0.0.1:1/a", "http://[::1]/", "http://localhost/"]
        {
            assert!(AuthUrl::new(good).is_ok(), "{good}");
        }
        for bad in ["http://id.example.com/a", "http://10.0.0.1/", "http://localhost.evil.com/"] {
            assert_eq!(AuthUrl::new(bad), Err(Error::NotEncrypted), "{bad}");
        }
    }
}
