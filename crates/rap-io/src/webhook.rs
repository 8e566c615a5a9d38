//! Signatures of requests in the form of Standard Webhooks: HMAC-SHA256 over id, time and body. No IO.
//!
//! Both sides have the same list of keys. A sender signs with each of them, and a receiver accepts the signature of any,
//! so that a key can be replaced on one side after the other.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, HeaderName, HeaderValue};
use rap_protocol::{Secret, Timestamp};
use sha2::Sha256;
use zeroize::Zeroizing;

/// Header with the id of a message. It is the same in every attempt to send that message.
pub const ID: HeaderName = HeaderName::from_static("webhook-id");
/// Header with the time of the attempt, in seconds since 1970.
pub const TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
/// Header with the signatures, separated by spaces.
pub const SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// Maximum difference between the time of a request and the receiver's clock.
pub const TOLERANCE: Duration = Duration::from_secs(5 * 60);
/// Beginning of a key.
const KEY_PREFIX: &str = "whsec_";
/// Beginning of a signature.
const VERSION: &str = "v1,";
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;
/// Maximum number of keys.
const KEYS: usize = 4;
/// Maximum number of signatures of a request. Further ones are not read.
const SIGNATURES: usize = 8;
/// Maximum length of a message id, in bytes.
const ID_BYTES: usize = 128;
/// Maximum number of remembered messages.
const REMEMBERED: usize = 65_536;

/// One to four keys.
#[derive(Clone)]
pub struct SigningKeys(Vec<Zeroizing<Vec<u8>>>);

/// The texts are not keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected one to four keys, each whsec_ and the base64 of 24 to 64 bytes; make one: \
     echo whsec_$(openssl rand -base64 32)"
)]
pub struct BadKeys;

/// Reason why a signed request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A header is missing.
    #[error(
        "the request is not signed: it needs the headers webhook-id, webhook-timestamp and webhook-signature"
    )]
    NotSigned,
    /// A header has a form that no sender makes.
    #[error("webhook-id or webhook-timestamp is not valid")]
    Malformed,
    /// The request is too old or from the future.
    #[error(
        "webhook-timestamp is {0} seconds away from this server's clock, more than 300: check both clocks"
    )]
    WrongTime(u64),
    /// No signature belongs to a known key and this content.
    #[error("no signature of the request is valid: check the keys on both sides")]
    WrongSignature,
}

impl fmt::Debug for SigningKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKeys({})", self.0.len())
    }
}

impl SigningKeys {
    /// Parses keys.
    pub fn parse(keys: &[Secret]) -> Result<SigningKeys, BadKeys> {
        let key = |key: &Secret| {
            let bytes = BASE64_STANDARD.decode(key.expose().strip_prefix(KEY_PREFIX)?).ok()?;
            KEY_BYTES.contains(&bytes.len()).then(|| Zeroizing::new(bytes))
        };
        let keys: Option<Vec<_>> = keys.iter().map(key).collect();
        let keys = keys.filter(|keys| (1..=KEYS).contains(&keys.len()));
        keys.map(SigningKeys).ok_or(BadKeys)
    }

    /// Returns the headers of a signed request. `id` consists of letters, digits, `_` and `-`.
    pub fn sign(&self, id: &str, at: Timestamp, body: &[u8]) -> [(HeaderName, HeaderValue); 3] {
        let seconds = at.0.div_euclid(1000).to_string();
        let signature = |key: &Zeroizing<Vec<u8>>| {
            let mac = state(key, id, &seconds, body).finalize().into_bytes();
            format!("{VERSION}{}", BASE64_STANDARD.encode(mac))
        };
        let signatures: Vec<String> = self.0.iter().map(signature).collect();
        let value = |text: &str| HeaderValue::try_from(text).expect("bug: these headers are visible ASCII");
        [(ID, value(id)), (TIMESTAMP, value(&seconds)), (SIGNATURE, value(&signatures.join(" ")))]
    }

    /// Checks the signature of a request in constant time. Returns the id of the message.
    pub fn verify<'a>(
        &self,
        headers: &'a HeaderMap,
        body: &[u8],
        now: Timestamp,
    ) -> Result<&'a str, Refused> {
        let (id, seconds) = check_time(headers, now)?;
        let signatures = text(headers, &SIGNATURE).ok_or(Refused::NotSigned)?;
        let mac = |signature: &str| BASE64_STANDARD.decode(signature.strip_prefix(VERSION)?).ok();
        let macs: Vec<Vec<u8>> = signatures.split(' ').take(SIGNATURES).filter_map(mac).collect();
        if macs.is_empty() {
            return Err(Refused::WrongSignature);
        }
        let mut valid = false;
        for key in &self.0 {
            // The body is hashed once for each key, however many signatures there are.
            let state = state(key, id, seconds, body);
            for mac in &macs {
                valid |= state.clone().verify_slice(mac).is_ok();
            }
        }
        if valid { Ok(id) } else { Err(Refused::WrongSignature) }
    }
}

/// Returns true if a request claims to be signed.
pub fn is_signed(headers: &HeaderMap) -> bool {
    headers.contains_key(SIGNATURE)
}

/// Checks everything about a signed request that needs neither its body nor a key. Returns its id and its time.
pub fn check_time(headers: &HeaderMap, now: Timestamp) -> Result<(&str, &str), Refused> {
    let (Some(id), Some(seconds)) = (text(headers, &ID), text(headers, &TIMESTAMP)) else {
        return Err(Refused::NotSigned);
    };
    // A full stop separates the id from the time in the signed content.
    let is_id = (1..=ID_BYTES).contains(&id.len()) && !id.contains('.');
    let is_time = !seconds.is_empty() && seconds.bytes().all(|byte| byte.is_ascii_digit());
    let at: i64 = seconds.parse().ok().filter(|_| is_id && is_time).ok_or(Refused::Malformed)?;
    let distance = at.abs_diff(now.0.div_euclid(1000));
    if distance > TOLERANCE.as_secs() {
        return Err(Refused::WrongTime(distance));
    }
    Ok((id, seconds))
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn state(key: &[u8], id: &str, seconds: &str, body: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("bug: HMAC takes keys of any length");
    for part in [id.as_bytes(), b".", seconds.as_bytes(), b".", body] {
        mac.update(part);
    }
    mac
}

/// Memory of the signed messages that were accepted while their time stamps are valid, so that none has an effect twice.
/// Beyond its bound, the oldest ones are forgotten.
#[derive(Debug, Default)]
pub struct AcceptedMessages(Mutex<HashMap<String, Timestamp>>);

impl AcceptedMessages {
    /// Returns true if the message was accepted before.
    pub fn contains(&self, id: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(id)
    }

    /// Remembers a message that was accepted.
    pub fn insert(&self, id: String, now: Timestamp) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED {
            // A time stamp from the future is valid for twice the tolerance.
            known.retain(|_, at| at.plus(2 * TOLERANCE) >= now);
        }
        if known.len() >= REMEMBERED {
            let mut times: Vec<Timestamp> = known.values().copied().collect();
            let (_, median, _) = times.select_nth_unstable(REMEMBERED / 2);
            let median = *median;
            known.retain(|_, at| *at > median);
        }
        known.insert(id, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const OTHER: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const AT: Timestamp = Timestamp(1_614_265_330_000);

    fn keys(keys: &[&str]) -> SigningKeys {
        SigningKeys::parse(&keys.iter().map(|key| Secret::new(*key)).collect::<Vec<_>>()).unwrap()
    }

    fn signed(by: &[&str], at: Timestamp) -> HeaderMap {
        keys(by).sign("msg_p5jXN8AQM9LWM0D4loKWxJek", at, BODY).into_iter().collect()
    }

    /// Key, message and signature are the example of the reference libraries of Standard Webhooks.
    #[test]
    fn the_signature_is_that_of_the_reference_libraries() {
        let headers = signed(&[KEY], AT);
        assert_eq!(headers[SIGNATURE], "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert_eq!(headers[TIMESTAMP], "1614265330");
        assert_eq!(keys(&[KEY]).verify(&headers, BODY, AT), Ok("msg_p5jXN8AQM9LWM0D4loKWxJek"));
    }

    #[test]
    fn keys_can_be_replaced_on_one_side_after_the_other() {
        for (sender, receiver) in [
            (&[KEY][..], &[KEY, OTHER][..]),
            (&[KEY, OTHER], &[KEY]),
            (&[KEY, OTHER], &[OTHER]),
            (&[OTHER, KEY], &[KEY, OTHER]),
        ] {
            assert!(keys(receiver).verify(&signed(sender, AT), BODY, AT).is_ok(), "{sender:?} {receiver:?}");
        }
        let headers = signed(&[KEY], AT);
        let swapped = keys(&[OTHER]).verify(&headers, BODY, AT);
        assert_eq!(swapped, Err(Refused::WrongSignature));
    }

    #[test]
    fn clocks_may_differ_by_five_minutes() {
        let at = |seconds: i64| Timestamp(AT.0 + seconds * 1000);
        for seconds in [-300, -1, 0, 299, 300] {
            assert!(keys(&[KEY]).verify(&signed(&[KEY], at(seconds)), BODY, AT).is_ok(), "{seconds}");
        }
        for seconds in [-301, 301, 86_400] {
            let headers = signed(&[KEY], at(seconds));
            let refused = keys(&[KEY]).verify(&headers, BODY, AT);
            assert_eq!(refused, Err(Refused::WrongTime(seconds.unsigned_abs())), "{seconds}");
        }
    }

    #[test]
    fn every_change_of_a_signed_request_is_detected() {
        let check = |headers: &HeaderMap, body: &[u8]| keys(&[KEY]).verify(headers, body, AT).map(drop);
        assert_eq!(check(&signed(&[KEY], AT), b"{}"), Err(Refused::WrongSignature));
        for (name, value, expected) in [
            (ID, "msg_other", Refused::WrongSignature),
            (TIMESTAMP, "1614265331", Refused::WrongSignature),
            (SIGNATURE, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OF=", Refused::WrongSignature),
            (SIGNATURE, "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=", Refused::WrongSignature),
            (SIGNATURE, "v1a,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=", Refused::WrongSignature),
            (SIGNATURE, "v1,", Refused::WrongSignature),
            (SIGNATURE, "", Refused::WrongSignature),
            (TIMESTAMP, "-1614265330", Refused::Malformed),
            (TIMESTAMP, "+1614265330", Refused::Malformed),
            (TIMESTAMP, "99999999999999999999", Refused::Malformed),
            (TIMESTAMP, "", Refused::Malformed),
            (ID, "", Refused::Malformed),
            (ID, "msg.1", Refused::Malformed),
        ] {
            let mut headers = signed(&[KEY], AT);
            headers.insert(name, HeaderValue::from_static(value));
            assert_eq!(check(&headers, BODY), Err(expected), "{value}");
        }
        for name in [ID, TIMESTAMP, SIGNATURE] {
            let mut headers = signed(&[KEY], AT);
            headers.remove(name);
            assert_eq!(check(&headers, BODY), Err(Refused::NotSigned));
        }
    }

    #[test]
    fn only_a_bounded_number_of_signatures_is_read() {
        let mut headers = signed(&[KEY], AT);
        let valid = headers[SIGNATURE].to_str().unwrap().to_owned();
        let many = format!("{}{valid}", "v1,AAAA ".repeat(SIGNATURES));
        headers.insert(SIGNATURE, many.parse().unwrap());
        assert_eq!(keys(&[KEY]).verify(&headers, BODY, AT), Err(Refused::WrongSignature));
    }

    #[test]
    fn a_key_has_its_prefix_and_enough_bytes_and_is_never_printed() {
        for bad in ["", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_", "whsec_c2hvcnQ=", "whsec_not base64"] {
            assert_eq!(SigningKeys::parse(&[Secret::new(bad)]).unwrap_err(), BadKeys, "{bad}");
        }
        assert!(SigningKeys::parse(&[]).is_err());
        assert!(SigningKeys::parse(&vec![Secret::new(KEY); KEYS + 1]).is_err());
        assert_eq!(format!("{:?}", keys(&[KEY, OTHER])), "SigningKeys(2)");
    }

    #[test]
    fn the_memory_of_messages_is_bounded_and_forgets_the_oldest() {
        let memory = AcceptedMessages::default();
        for number in 0..REMEMBERED as i64 + 1 {
            memory.insert(number.to_string(), Timestamp(number));
        }
        assert!(!memory.contains("0"));
        assert!(memory.contains(&REMEMBERED.to_string()));
        let late = Timestamp(0).plus(3 * TOLERANCE);
        for number in 0..REMEMBERED as i64 {
            memory.insert(format!("late {number}"), late);
        }
        assert!(!memory.contains(&REMEMBERED.to_string()));
        assert!(memory.contains("late 0"));
    }
}
