//! AWS Signature Version 4: signing of requests, and verifying them with a shared key. No IO.
//!
//! This is the form with the headers `Authorization` and `X-Amz-Date`, for all services but S3, whose paths are encoded
//! differently.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use rap_protocol::{Secret, Timestamp};
use sha2::{Digest, Sha256};
use url::{Position, Url};

use crate::webhook::TOLERANCE;

const ALGORITHM: &str = "AWS4-HMAC-SHA256";
const DATE: HeaderName = HeaderName::from_static("x-amz-date");
const CONTENT: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const SESSION: HeaderName = HeaderName::from_static("x-amz-security-token");
const DATE_FORMAT: &str = "%Y%m%dT%H%M%SZ";
/// Length of the day at the beginning of a date.
const DAY: usize = 8;
/// Maximum number of headers that a signature may cover.
const SIGNED_HEADERS: usize = 32;

/// An access key and the service that it is used for.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessKey {
    /// Public name of the key.
    pub id: String,
    /// The key itself.
    pub secret: Secret,
    /// Session token of temporary credentials.
    pub session: Option<Secret>,
    /// Region such as `eu-west-1`.
    pub region: String,
    /// Service such as `lambda` or `execute-api`.
    pub service: String,
}

impl fmt::Debug for AccessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AccessKey({} {} {})", self.id, self.region, self.service)
    }
}

/// Reason why a signed request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The `Authorization` header is missing or has another form.
    #[error("the request has no signature of AWS4-HMAC-SHA256 that covers host and x-amz-date")]
    NotSigned,
    /// The request is too old or from the future.
    #[error("x-amz-date is {0} seconds away from this server's clock, more than 300: check both clocks")]
    WrongTime(u64),
    /// The signature is for another region, service or day.
    #[error("the request is signed for another region, service or day")]
    WrongScope,
    /// The signature does not belong to the access key and this content.
    #[error("the signature of the request is not valid: check the access key on both sides")]
    WrongSignature,
}

/// A request as it is signed.
struct Content<'a> {
    method: &'a str,
    path: &'a str,
    query: &'a str,
    /// Names in lower case and values, sorted by name.
    headers: Vec<(&'a str, String)>,
    /// SHA-256 of the body.
    digest: String,
}

impl Content<'_> {
    fn signed_headers(&self) -> String {
        let names: Vec<&str> = self.headers.iter().map(|(name, _)| *name).collect();
        names.join(";")
    }

    /// Returns the text whose digest is signed.
    fn canonical(&self) -> String {
        let mut query: Vec<(String, String)> =
            self.query.split('&').filter(|pair| !pair.is_empty()).map(pair).collect();
        query.sort();
        let query: Vec<String> = query.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        let headers: String =
            self.headers.iter().map(|(name, value)| format!("{name}:{}\n", single_spaced(value))).collect();
        let (method, path, query, names) =
            (self.method, encoded(self.path, b"/"), query.join("&"), self.signed_headers());
        let path = if path.is_empty() { "/".into() } else { path };
        format!("{method}\n{path}\n{query}\n{headers}\n{names}\n{}", self.digest)
    }
}

fn pair(text: &str) -> (String, String) {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    let normal = |text: &str| encoded(&percent_decoded(text), b"");
    (normal(name), normal(value))
}

fn percent_decoded(text: &str) -> String {
    let bytes: Vec<u8> = crate::client::percent_decoded(text);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Encodes all bytes but unreserved ones and those of `kept`.
fn encoded(text: &str, kept: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || kept.contains(&byte) {
            out.push(byte.into());
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

fn single_spaced(value: &str) -> String {
    value.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn hmac(key: &[u8], text: &str) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("bug: HMAC takes keys of any length");
    mac.update(text.as_bytes());
    mac
}

impl AccessKey {
    fn scope(&self, day: &str) -> String {
        format!("{day}/{}/{}/aws4_request", self.region, self.service)
    }

    /// Returns the state of the signature of a request. `date` is that of `X-Amz-Date`.
    fn signature(&self, content: &Content<'_>, date: &str) -> Hmac<Sha256> {
        let day = &date[..DAY];
        let mut key = format!("AWS4{}", self.secret.expose()).into_bytes();
        for part in [day, &self.region, &self.service, "aws4_request"] {
            key = hmac(&key, part).finalize().into_bytes().to_vec();
        }
        let digest = hex(&Sha256::digest(content.canonical()));
        hmac(&key, &format!("{ALGORITHM}\n{date}\n{}\n{digest}", self.scope(day)))
    }

    /// Returns the headers of a signed request.
    pub fn sign(
        &self,
        method: &str,
        url: &Url,
        body: &[u8],
        now: Timestamp,
    ) -> Vec<(HeaderName, HeaderValue)> {
        let date =
            jiff::Timestamp::from_millisecond(now.0).unwrap_or_default().strftime(DATE_FORMAT).to_string();
        let digest = hex(&Sha256::digest(body));
        let mut headers = vec![(CONTENT, digest.clone()), (DATE, date.clone())];
        headers.extend(self.session.iter().map(|session| (SESSION, session.expose().to_owned())));
        let host = url[Position::BeforeHost..Position::AfterPort].to_owned();
        let mut signed: Vec<(&str, String)> = headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.clone()))
            .chain([("host", host)])
            .collect();
        signed.sort();
        let (path, query) = (url.path(), url.query().unwrap_or_default());
        let content = Content { method, path, query, headers: signed, digest };
        let signature = hex(&self.signature(&content, &date).finalize().into_bytes());
        let (id, scope, names) = (&self.id, self.scope(&date[..DAY]), content.signed_headers());
        let authorization =
            format!("{ALGORITHM} Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}");
        headers.push((header::AUTHORIZATION, authorization));
        let value = |(name, text): (HeaderName, String)| {
            let mut value = HeaderValue::try_from(text).ok()?;
            value.set_sensitive(name != DATE && name != CONTENT);
            Some((name, value))
        };
        headers.into_iter().filter_map(value).collect()
    }

    /// Checks the signature of a request in constant time. `target` is the path and the query of the request.
    pub fn verify(
        &self,
        method: &str,
        target: &str,
        headers: &HeaderMap,
        body: &[u8],
        now: Timestamp,
    ) -> Result<(), Refused> {
        let claim = SignatureClaim::of(headers).ok_or(Refused::NotSigned)?;
        let distance = claim.at.0.abs_diff(now.0) / 1000;
        if distance > TOLERANCE.as_secs() {
            return Err(Refused::WrongTime(distance));
        }
        if claim.credential != format!("{}/{}", self.id, self.scope(&claim.date[..DAY])) {
            return Err(Refused::WrongScope);
        }
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let digest = hex(&Sha256::digest(body));
        let content = Content { method, path, query, headers: claim.headers, digest };
        let mac = self.signature(&content, claim.date);
        mac.verify_slice(&claim.signature).map_err(|_| Refused::WrongSignature)
    }
}

/// Signature of a request, and the key and the headers that the request names for it. Not verified yet.
struct SignatureClaim<'a> {
    credential: &'a str,
    headers: Vec<(&'a str, String)>,
    signature: Vec<u8>,
    date: &'a str,
    at: Timestamp,
}

/// Returns the id of the access key that a request claims to be signed with.
pub fn claimed_key(headers: &HeaderMap) -> Option<&str> {
    Some(SignatureClaim::of(headers)?.credential.split('/').next().unwrap_or_default())
}

impl<'a> SignatureClaim<'a> {
    fn of(headers: &'a HeaderMap) -> Option<SignatureClaim<'a>> {
        let text = |name: &HeaderName| headers.get(name)?.to_str().ok();
        let (algorithm, rest) = text(&header::AUTHORIZATION)?.split_once(' ')?;
        let parts: Vec<&str> = rest.split(',').map(str::trim).collect();
        let part = |name: &str| parts.iter().find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
        let names: Vec<&str> = part("SignedHeaders")?.split(';').take(SIGNED_HEADERS + 1).collect();
        let covered = ["host", "x-amz-date"].iter().all(|name| names.contains(name));
        if algorithm != ALGORITHM || names.len() > SIGNED_HEADERS || !covered || !names.is_sorted() {
            return None;
        }
        let value = |name: &'a str| {
            let all: Option<Vec<&str>> =
                headers.get_all(name).iter().map(|value| value.to_str().ok()).collect();
            Some((name, all?.join(",")))
        };
        let date = text(&DATE)?;
        let at = DateTime::strptime(DATE_FORMAT, date).ok()?.to_zoned(TimeZone::UTC).ok()?;
        Some(SignatureClaim {
            credential: part("Credential")?,
            headers: names.into_iter().map(value).collect::<Option<_>>()?,
            signature: from_hex(part("Signature")?)?,
            date,
            at: Timestamp(at.timestamp().as_millisecond()),
        })
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATE_OF_SUITE: &str = "20150830T123600Z";
    const NOW: Timestamp = Timestamp(1_440_938_160_000);

    fn key() -> AccessKey {
        AccessKey {
            id: "AKIDEXAMPLE".into(),
            secret: Secret::new("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"),
            session: None,
            region: "us-east-1".into(),
            service: "service".into(),
        }
    }

    /// Requests and signatures of the test suite that AWS publishes.
    #[test]
    fn signatures_are_those_of_the_published_test_suite() {
        let host = ("host", "example.amazonaws.com".to_owned());
        let date = ("x-amz-date", DATE_OF_SUITE.to_owned());
        let form = ("content-type", "application/x-www-form-urlencoded".to_owned());
        let plain = vec![host.clone(), date.clone()];
        let table = [
            (
                "GET",
                "/",
                "",
                plain.clone(),
                "",
                "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
            ),
            (
                "POST",
                "/",
                "",
                plain.clone(),
                "",
                "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
            ),
            (
                "GET",
                "/",
                "Param2=value2&Param1=value1",
                plain.clone(),
                "",
                "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
            ),
            (
                "GET",
                "/\u{1234}",
                "",
                plain,
                "",
                "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85",
            ),
            (
                "POST",
                "/",
                "",
                vec![form, host, date],
                "Param1=value1",
                "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
            ),
        ];
        for (method, path, query, headers, body, expected) in table {
            let digest = hex(&Sha256::digest(body));
            let content = Content { method, path, query, headers, digest };
            let signature = hex(&key().signature(&content, DATE_OF_SUITE).finalize().into_bytes());
            assert_eq!(signature, expected, "{method} {path}?{query}");
        }
    }

    const URL: &str = "https://tools.example:8443/base/invoke?b=2&a=x%20y";
    const TARGET: &str = "/base/invoke?b=2&a=x%20y";

    /// A signed request as a server receives it.
    fn signed(key: &AccessKey, now: Timestamp) -> HeaderMap {
        let url = Url::parse(URL).unwrap();
        let mut headers: HeaderMap = key.sign("POST", &url, b"{}", now).into_iter().collect();
        headers.insert(header::HOST, HeaderValue::from_static("tools.example:8443"));
        headers
    }

    #[test]
    fn a_signed_request_is_verified_and_every_change_is_detected() {
        let session = AccessKey { session: Some(Secret::new("session")), ..key() };
        for key in [key(), session] {
            let headers = signed(&key, NOW);
            assert_eq!(claimed_key(&headers), Some("AKIDEXAMPLE"));
            assert_eq!(key.verify("POST", TARGET, &headers, b"{}", NOW), Ok(()));
            for (method, target, body) in [
                ("GET", TARGET, "{}"),
                ("POST", "/base/close_thread?b=2&a=x%20y", "{}"),
                ("POST", "/base/invoke?b=2&a=x", "{}"),
                ("POST", TARGET, "{ }"),
            ] {
                let refused = key.verify(method, target, &headers, body.as_bytes(), NOW);
                assert_eq!(refused, Err(Refused::WrongSignature), "{method} {target} {body}");
            }
            let mut elsewhere = headers.clone();
            elsewhere.insert(header::HOST, HeaderValue::from_static("other.example"));
            assert_eq!(key.verify("POST", TARGET, &elsewhere, b"{}", NOW), Err(Refused::WrongSignature));
        }
    }

    #[test]
    fn clocks_may_differ_by_five_minutes() {
        let headers = signed(&key(), NOW);
        for (seconds, expected) in [
            (0, Ok(())),
            (300, Ok(())),
            (-300, Ok(())),
            (301, Err(Refused::WrongTime(301))),
            (-301, Err(Refused::WrongTime(301))),
        ] {
            let now = Timestamp(NOW.0 + seconds * 1000);
            assert_eq!(key().verify("POST", TARGET, &headers, b"{}", now), expected, "{seconds}");
        }
    }

    #[test]
    fn another_key_region_or_service_is_refused() {
        let headers = signed(&key(), NOW);
        let other_secret = AccessKey { secret: Secret::new("other"), ..key() };
        assert_eq!(other_secret.verify("POST", TARGET, &headers, b"{}", NOW), Err(Refused::WrongSignature));
        for other in [
            AccessKey { id: "AKIDOTHER".into(), ..key() },
            AccessKey { region: "eu-west-1".into(), ..key() },
            AccessKey { service: "lambda".into(), ..key() },
        ] {
            assert_eq!(
                other.verify("POST", TARGET, &headers, b"{}", NOW),
                Err(Refused::WrongScope),
                "{other:?}"
            );
        }
    }

    #[test]
    fn a_signature_that_covers_too_little_or_is_malformed_is_no_signature() {
        let valid = signed(&key(), NOW)[header::AUTHORIZATION].to_str().unwrap().to_owned();
        let many = vec!["x"; SIGNED_HEADERS + 1].join(";");
        for bad in [
            valid.replace("host;", ""),
            valid.replace(";x-amz-date", ""),
            valid.replace("AWS4-HMAC-SHA256", "AWS4-HMAC-SHA1"),
            valid.replace("host;x-amz-content-sha256", "x-amz-content-sha256;host"),
            valid.replace("host;", &format!("host;{many};")),
            valid.replace("Signature=", "Signature=x"),
            valid.replace("Credential=", "Credentials="),
            "AWS4-HMAC-SHA256".into(),
            String::new(),
        ] {
            let mut headers = signed(&key(), NOW);
            headers.insert(header::AUTHORIZATION, bad.parse().unwrap());
            assert_eq!(key().verify("POST", TARGET, &headers, b"{}", NOW), Err(Refused::NotSigned), "{bad}");
        }
    }

    #[test]
    fn the_secret_key_is_not_printed() {
        assert_eq!(format!("{:?}", key()), "AccessKey(AKIDEXAMPLE us-east-1 service)");
    }
}
