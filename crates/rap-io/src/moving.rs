//! Proof that the sender of a session's state knows the migration key, in a header of its request.
//!
//! It is checked before the body is read, because the body is large and only its end shows whether it was encrypted with
//! the key. The proof says nothing about the body, and can be repeated while it is valid.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use http::{HeaderMap, HeaderName, HeaderValue};
use rap_protocol::Timestamp;

use crate::secret_box::Key;

/// Header with the proof: a time in milliseconds, a dot and a MAC.
pub const PROOF: HeaderName = HeaderName::from_static("rap-migration-proof");
/// Time for which a proof and the state of a session are valid, and maximum difference of clocks.
pub const VALID_FOR: Duration = Duration::from_secs(5 * 60);

/// Returns the proof for a request to a path, such as `/import_calls`.
pub fn proof(key: &Key, path: &str, now: Timestamp) -> HeaderValue {
    let mac = BASE64_URL_SAFE_NO_PAD.encode(key.mac(&parts(path, &now.0.to_be_bytes())));
    HeaderValue::try_from(format!("{}.{mac}", now.0)).expect("bug: digits and base64 are valid in a header")
}

/// Returns true if the headers of a request to a path contain a proof that is valid now.
pub fn is_proven(key: &Key, path: &str, headers: &HeaderMap, now: Timestamp) -> bool {
    let mut values = headers.get_all(PROOF).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return false };
    let read = || {
        let (at, mac) = value.to_str().ok()?.split_once('.')?;
        Some((Timestamp(at.parse().ok()?), BASE64_URL_SAFE_NO_PAD.decode(mac).ok()?))
    };
    let Some((at, mac)) = read() else { return false };
    is_recent(at, now) && key.verify_mac(&parts(path, &at.0.to_be_bytes()), &mac)
}

/// Returns true if what was sent at a time is valid now.
pub fn is_recent(at: Timestamp, now: Timestamp) -> bool {
    now.since(at).max(at.since(now)) <= VALID_FOR
}

fn parts<'a>(path: &'a str, at: &'a [u8]) -> [&'a [u8]; 3] {
    [b"rap: sender of a session that moves", path.as_bytes(), at]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_valid_for_its_path_and_key_and_for_five_minutes() {
        let (key, now) = (Key::random(), Timestamp(1_800_000_000_000));
        let headers = |value: HeaderValue| HeaderMap::from_iter([(PROOF, value)]);
        let good = headers(proof(&key, "/a", now));
        let minutes = |count: u64| Duration::from_secs(60 * count);
        for (at, expected) in [
            (now, true),
            (now.plus(minutes(5)), true),
            (now.minus(minutes(5)), true),
            (now.plus(minutes(6)), false),
            (now.minus(minutes(6)), false),
        ] {
            assert_eq!(is_proven(&key, "/a", &good, at), expected, "{at:?}");
        }
        assert!(!is_proven(&key, "/b", &good, now));
        assert!(!is_proven(&Key::random(), "/a", &good, now));
        assert!(!is_proven(&key, "/a", &HeaderMap::new(), now));
        let mut twice = good.clone();
        twice.append(PROOF, proof(&key, "/a", now));
        assert!(!is_proven(&key, "/a", &twice, now), "two proofs");
        let text = good[PROOF].to_str().unwrap();
        let later = text.replacen(&now.0.to_string(), &now.plus(minutes(1)).0.to_string(), 1);
        for wrong in [later.as_str(), "", ".", "1.", "x.y", &text[1..], &text[..text.len() - 1]] {
            let wrong = headers(HeaderValue::from_str(wrong).unwrap());
            assert!(!is_proven(&key, "/a", &wrong, now), "{wrong:?}");
        }
    }
}
