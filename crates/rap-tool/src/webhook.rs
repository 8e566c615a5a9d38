//! Signatures of webhooks. A tool that forwards webhooks has to verify that they come from their source.
//!
//! ```
//! use std::time::SystemTime;
//!
//! use axum::http::HeaderMap;
//! use rap_tool::webhook::Webhook;
//!
//! fn is_from_github(headers: &HeaderMap, body: &[u8]) -> bool {
//!     let webhook = Webhook::github("the secret of the webhook");
//!     webhook.verify(headers, body, SystemTime::now()).is_ok()
//! }
//! assert!(!is_from_github(&HeaderMap::new(), b"{}"));
//! ```

use std::fmt;
use std::time::{Duration, SystemTime};

use axum::http::HeaderMap;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use rap_protocol::Secret;
use sha2::Sha256;

/// Maximum difference between the time of a webhook and the clock. GitHub signs no time.
pub const TOLERANCE: Duration = Duration::from_secs(5 * 60);
/// Maximum number of signatures of a webhook that are tried.
const SIGNATURES: usize = 8;

/// A source of webhooks, with the secret that it shares with the receiver.
#[derive(Clone)]
pub struct Webhook {
    source: Source,
    key: Secret,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    GitHub,
    Stripe,
    Slack,
    Standard,
}

/// The secret has the wrong form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadSecret {
    /// The secret is empty.
    #[error("it is empty")]
    Empty,
    /// The secret of Standard Webhooks is not base64.
    #[error("expected whsec_ and the base64 of the key")]
    NotBase64,
}

/// Reason why a webhook is not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// A header is missing or malformed.
    #[error("the signature is missing or malformed")]
    NotSigned,
    /// Its time differs from the clock by more than [`TOLERANCE`].
    #[error("the signature is too old, or from the future: check the clock")]
    WrongTime,
    /// No signature was made with the secret for this content.
    #[error("the signature is wrong: check the secret")]
    WrongSignature,
}

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Webhook({:?})", self.source)
    }
}

impl Webhook {
    /// Webhooks of GitHub: `X-Hub-Signature-256`.
    pub fn github(secret: impl Into<String>) -> Self {
        Webhook { source: Source::GitHub, key: Secret::new(secret) }
    }

    /// Webhooks of Stripe: `Stripe-Signature`.
    pub fn stripe(secret: impl Into<String>) -> Self {
        Webhook { source: Source::Stripe, key: Secret::new(secret) }
    }

    /// Requests of Slack: `X-Slack-Signature`.
    pub fn slack(secret: impl Into<String>) -> Self {
        Webhook { source: Source::Slack, key: Secret::new(secret) }
    }

    /// Standard Webhooks: `webhook-signature`. The secret is `whsec_` and the base64 of the key.
    pub fn standard(secret: impl Into<String>) -> Result<Self, BadSecret> {
        let key = Secret::new(secret);
        standard_key(&key)?;
        Ok(Webhook { source: Source::Standard, key })
    }

    /// Creates a source by its name: `github`, `stripe`, `slack` or `standard`. `None` for any other name.
    pub fn named(source: &str, secret: impl Into<String>) -> Option<Result<Self, BadSecret>> {
        let secret: String = secret.into();
        if secret.is_empty() {
            return Some(Err(BadSecret::Empty));
        }
        Some(match source {
            "github" => Ok(Webhook::github(secret)),
            "stripe" => Ok(Webhook::stripe(secret)),
            "slack" => Ok(Webhook::slack(secret)),
            "standard" => Webhook::standard(secret),
            _ => return None,
        })
    }

    /// Verifies the signature of a webhook, in constant time. `body` is the body as it was received, byte for byte.
    pub fn verify(&self, headers: &HeaderMap, body: &[u8], now: SystemTime) -> Result<(), Rejected> {
        let header =
            |name| headers.get(name).and_then(|value| value.to_str().ok()).ok_or(Rejected::NotSigned);
        match self.source {
            Source::GitHub => {
                let signature = header("x-hub-signature-256")?.strip_prefix("sha256=");
                self.compare(&[body], [signature.and_then(hex)].into_iter().flatten())
            }
            Source::Slack => {
                let time = header("x-slack-request-timestamp")?;
                check_time(time, now)?;
                let signature = header("x-slack-signature")?.strip_prefix("v0=");
                let content: [&[u8]; 4] = [b"v0:", time.as_bytes(), b":", body];
                self.compare(&content, [signature.and_then(hex)].into_iter().flatten())
            }
            Source::Stripe => {
                let fields = || header("stripe-signature").map(|text| text.split(',').filter_map(pair));
                let time = fields()?.find(|(name, _)| *name == "t").ok_or(Rejected::NotSigned)?.1;
                check_time(time, now)?;
                let signatures =
                    fields()?.filter(|(name, _)| *name == "v1").filter_map(|(_, value)| hex(value));
                self.compare(&[time.as_bytes(), b".", body], signatures)
            }
            Source::Standard => {
                let (id, time) = (header("webhook-id")?, header("webhook-timestamp")?);
                check_time(time, now)?;
                let signatures = header("webhook-signature")?.split(' ');
                let signatures =
                    signatures.filter_map(|text| BASE64_STANDARD.decode(text.strip_prefix("v1,")?).ok());
                let content: [&[u8]; 5] = [id.as_bytes(), b".", time.as_bytes(), b".", body];
                self.compare(&content, signatures)
            }
        }
    }

    fn compare(&self, content: &[&[u8]], signatures: impl Iterator<Item = Vec<u8>>) -> Result<(), Rejected> {
        let key = match self.source {
            Source::Standard => standard_key(&self.key).map_err(|_| Rejected::WrongSignature)?,
            _ => self.key.expose().as_bytes().to_vec(),
        };
        let mut mac = Hmac::<Sha256>::new_from_slice(&key).expect("bug: HMAC takes keys of any length");
        content.iter().for_each(|part| mac.update(part));
        let mut valid = false;
        for signature in signatures.take(SIGNATURES) {
            valid |= mac.clone().verify_slice(&signature).is_ok();
        }
        if valid { Ok(()) } else { Err(Rejected::WrongSignature) }
    }
}

fn standard_key(secret: &Secret) -> Result<Vec<u8>, BadSecret> {
    let text = secret.expose();
    let key = BASE64_STANDARD.decode(text.strip_prefix("whsec_").unwrap_or(text));
    key.ok().filter(|key| !key.is_empty()).ok_or(BadSecret::NotBase64)
}

fn pair(field: &str) -> Option<(&str, &str)> {
    let (name, value) = field.split_once('=')?;
    Some((name.trim(), value.trim()))
}

fn check_time(seconds: &str, now: SystemTime) -> Result<(), Rejected> {
    let digits = (1..=12).contains(&seconds.len()) && seconds.bytes().all(|byte| byte.is_ascii_digit());
    let at: u64 = seconds.parse().ok().filter(|_| digits).ok_or(Rejected::NotSigned)?;
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    if at.abs_diff(now) <= TOLERANCE.as_secs() { Ok(()) } else { Err(Rejected::WrongTime) }
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some((digit(*pair.first()?)? * 16 + digit(*pair.get(1)?)?) as u8)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(&'static str, &str)]) -> HeaderMap {
        all.iter().map(|(name, value)| ((*name).parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn mac(key: &[u8], content: &str) -> Vec<u8> {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
        mac.update(content.as_bytes());
        mac.finalize().into_bytes().to_vec()
    }

    fn mac_hex(key: &str, content: &str) -> String {
        mac(key.as_bytes(), content).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The example in GitHub's documentation.
    ///
    /// Proves: SE-23
    #[test]
    fn the_documented_signature_of_github_is_accepted_and_any_other_is_not() {
        let webhook = Webhook::github("It's a Secret to Everybody");
        let signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
        let verify = |signature: &str, body: &[u8]| {
            webhook.verify(&headers(&[("x-hub-signature-256", signature)]), body, at(0))
        };
        assert_eq!(verify(signature, b"Hello, World!"), Ok(()));
        assert_eq!(verify(signature, b"Hello, World?"), Err(Rejected::WrongSignature));
        for bad in ["", "sha256=", "sha256=7571", &signature.replace('7', "8"), &signature[7..], "sha256=zz"]
        {
            assert_eq!(verify(bad, b"Hello, World!"), Err(Rejected::WrongSignature), "{bad}");
        }
        assert_eq!(webhook.verify(&HeaderMap::new(), b"", at(0)), Err(Rejected::NotSigned));
    }

    /// The example in Slack's documentation.
    ///
    /// Proves: SE-23
    #[test]
    fn the_documented_signature_of_slack_is_accepted_while_it_is_new() {
        let webhook = Webhook::slack("8f742231b10e8888abcd99yyyzzz85a5");
        let body = "token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&\
                    channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&\
                    response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F\
                    96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c";
        let signed = headers(&[
            ("x-slack-request-timestamp", "1531420618"),
            ("x-slack-signature", "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"),
        ]);
        assert_eq!(webhook.verify(&signed, body.as_bytes(), at(1_531_420_618)), Ok(()));
        assert_eq!(webhook.verify(&signed, body.as_bytes(), at(1_531_420_918)), Ok(()));
        for late in [1_531_420_919, 1_531_420_317] {
            assert_eq!(webhook.verify(&signed, body.as_bytes(), at(late)), Err(Rejected::WrongTime));
        }
        assert_eq!(webhook.verify(&signed, b"", at(1_531_420_618)), Err(Rejected::WrongSignature));
    }

    /// Proves: SE-23
    #[test]
    fn any_of_the_signatures_of_stripe_may_be_valid_but_only_of_the_current_version() {
        let webhook = Webhook::stripe("whsec_test");
        let good = mac_hex("whsec_test", "1000.{}");
        let verify = |text: &str| webhook.verify(&headers(&[("stripe-signature", text)]), b"{}", at(1100));
        assert_eq!(verify(&format!("t=1000,v1={good}")), Ok(()));
        assert_eq!(verify(&format!("t=1000,v1={},v1={good},v0=x", "0".repeat(64))), Ok(()));
        assert_eq!(verify(&format!("t=1000,v0={good}")), Err(Rejected::WrongSignature));
        assert_eq!(verify(&format!("t=1001,v1={good}")), Err(Rejected::WrongSignature));
        assert_eq!(verify(&format!("v1={good}")), Err(Rejected::NotSigned));
        assert_eq!(verify(&format!("t=500,v1={good}")), Err(Rejected::WrongTime));
        assert_eq!(verify(&format!("t=-1,v1={good}")), Err(Rejected::NotSigned));
    }

    /// Proves: SE-23
    #[test]
    fn standard_webhooks_sign_id_time_and_body() {
        let key = BASE64_STANDARD.encode([7; 24]);
        let webhook = Webhook::standard(format!("whsec_{key}")).unwrap();
        let good = format!("v1,{}", BASE64_STANDARD.encode(mac(&[7; 24], "m1.1000.{}")));
        let verify = |id: &str, time: &str, signature: &str| {
            let all = [("webhook-id", id), ("webhook-timestamp", time), ("webhook-signature", signature)];
            webhook.verify(&headers(&all), b"{}", at(1000))
        };
        assert_eq!(verify("m1", "1000", &good), Ok(()));
        assert_eq!(verify("m1", "1000", &format!("v1a,x v1,x {good}")), Ok(()));
        assert_eq!(verify("m2", "1000", &good), Err(Rejected::WrongSignature));
        assert_eq!(verify("m1", "1001", &good), Err(Rejected::WrongSignature));
        assert_eq!(verify("m1", "1301", &good), Err(Rejected::WrongTime));
        assert_eq!(Webhook::standard("whsec_!").unwrap_err(), BadSecret::NotBase64);
        assert_eq!(Webhook::named("github", "").unwrap().unwrap_err(), BadSecret::Empty);
        assert!(Webhook::named("gitlab", "s").is_none());
    }
}
