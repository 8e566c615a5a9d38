//! URLs that arrive in messages.
//!
//! Each type keeps the exact text of its URL, because a callback URL is opaque (TR-16). Only [`AuthUrl`], which people
//! read, is normalised if its host could be mistaken for another one. `Display` and `Debug` leave out user, path and
//! query, because anyone who knows a callback URL can post into the conversation (LC-34).

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
    /// The URL has a user before its host, which people take for the host.
    #[error("a user before the host is not permitted")]
    UserInfo,
}

impl Error {
    pub(crate) fn expected(self) -> String {
        match self {
            Error::TooLong => format!("a URL of at most {} bytes", limits::URL_BYTES),
            Error::NotAbsolute => "an absolute http or https URL".into(),
            Error::Scheme => "an http or https URL".into(),
            Error::NotEncrypted => "an https URL, or http on loopback".into(),
            Error::UserInfo => "a URL without a user".into(),
        }
    }

    /// The `found` text of an [`crate::Invalid`], which continues the sentence that `expected` begins.
    pub(crate) fn found(self) -> &'static str {
        match self {
            Error::TooLong => "a longer one",
            Error::NotAbsolute => "something else",
            Error::Scheme => "another scheme",
            Error::NotEncrypted => "http to another machine",
            Error::UserInfo => "@ before the host",
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

/// Returns true if a URL names this machine by a loopback address, `localhost` or a name below it.
pub fn is_on_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => false,
    }
}

/// Returns the authority as it is written: user, host and port. The parser skips any number of slashes and
/// backslashes before it.
fn authority(text: &str) -> &str {
    let (_, rest) = text.split_once(':').unwrap_or(("", text));
    let rest = rest.trim_start_matches(['/', '\\']);
    rest.split(['/', '\\', '?', '#']).next().unwrap_or("")
}

fn parse_auth(text: &str) -> Result<Url, Error> {
    let url = parse_http(text)?;
    // The parser drops an empty user, so the text decides.
    if authority(text).contains('@') {
        return Err(Error::UserInfo);
    }
    if url.scheme() == "https" || is_on_loopback(&url) { Ok(url) } else { Err(Error::NotEncrypted) }
}

fn keep(text: String, _: &Url) -> String {
    text
}

/// Returns the text with its host in punycode, so that a letter of another script cannot pass for a Latin one.
fn with_ascii_host(text: String, url: &Url) -> String {
    let written = authority(&text);
    let port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let host = written.rsplit_once(':').filter(|(_, end)| port(end)).map_or(written, |(host, _)| host);
    if url.host_str().is_some_and(|ascii| ascii.eq_ignore_ascii_case(host)) { text } else { url.to_string() }
}

macro_rules! http_url {
    ($(#[$doc:meta])* $name:ident, $check:path, $normalise:path) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(Box<str>);

        impl $name {
            /// Validates the text.
            pub fn new(text: impl Into<String>) -> Result<Self, Error> {
                let text = text.into();
                let url = $check(&text)?;
                Ok($name($normalise(text, &url).into()))
            }

            /// Returns the text. The caller has to keep it out of logs and error messages.
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
    CallbackUrl, parse_http, keep
}
http_url! {
    /// URL that a user opens to authorize a tool: https, or http on loopback. It has no user, and its host is ASCII.
    AuthUrl, parse_auth, with_ascii_host
}
http_url! {
    /// URL to which the user's choice is posted.
    ResponseUrl, parse_http, keep
}
http_url! {
    /// URL of a tool server: its invocation endpoint, or the destination of a migration.
    EndpointUrl, parse_http, keep
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

    #[test]
    fn an_auth_url_has_no_user_before_its_host() {
        let bad = [
            "https://accounts.example.com@evil.example/",
            "https://user:pass@evil.example/",
            "https://@evil.example/",
            "https://:@evil.example/",
            "https:///@evil.example/",
            "https:@evil.example/",
            "https:\\\\user@evil.example/",
            "https:/\\@evil.example?x",
            "https://a@b@evil.example#x",
            "http://@127.0.0.1/",
        ];
        for bad in bad {
            assert_eq!(AuthUrl::new(bad), Err(Error::UserInfo), "{bad}");
        }
        for good in
            ["https://id.example.com/@user", "https://id.example.com?a=x@y", "https://id.example.com#@"]
        {
            assert_eq!(AuthUrl::new(good).unwrap().expose(), good);
        }
        assert!(CallbackUrl::new("https://user@agent.example.com/").is_ok());
    }

    #[test]
    fn the_host_of_an_auth_url_is_in_punycode() {
        let table = [
            ("https://аpple.com/x?y#z", "https://xn--pple-43d.com/x?y#z"),
            ("https://%D0%B0pple.com:444/", "https://xn--pple-43d.com:444/"),
            ("https://ａpple.com/", "https://apple.com/"),
            ("https://id.example.com", "https://id.example.com"),
            ("HTTPS://ID.example.com:443/a/../b", "HTTPS://ID.example.com:443/a/../b"),
            ("http://[::1]:80/", "http://[::1]:80/"),
            ("http://0x7f.1/", "http://127.0.0.1/"),
        ];
        for (text, expected) in table {
            assert_eq!(AuthUrl::new(text).unwrap().expose(), expected);
        }
    }
}
