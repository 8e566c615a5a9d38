//! Encryption of stored secrets: one key, from which an encryption key and a MAC key are derived.
//!
//! An encrypted secret is bound to a context, such as its database row, so that it cannot be copied to another place.
//! Layout: one version byte, a random nonce of 24 bytes, then XChaCha20-Poly1305 ciphertext and tag.
//!
//! No key, and no text that was passed in as a key, may appear in an error, in `Debug` or in a log.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use zeroize::Zeroizing;

use crate::exposure::is_exposed;

const KEY_BYTES: usize = 32;
const NONCE_BYTES: usize = 24;
const TAG_BYTES: usize = 16;
const VERSION: u8 = 1;
/// Maximum number of bytes to read from a key file. A key with its white space is much shorter.
const KEY_FILE_BYTES: u64 = 1024;

type Secret = Zeroizing<[u8; KEY_BYTES]>;

/// A key of 32 bytes. Clones share it, and its memory is wiped when the last one is dropped.
#[derive(Clone)]
pub struct Key {
    own: Arc<Subkeys>,
    /// Keys that decrypt and verify, too.
    others: Arc<[Arc<Subkeys>]>,
}

/// The keys that are derived from the key, which itself is not kept.
struct Subkeys {
    seal: Secret,
    mac: Secret,
}

/// Errors of keys and of decryption.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is not a valid key.
    #[error("expected a key of 64 hexadecimal digits or the base64 of 32 bytes")]
    NotAKey,
    /// The file does not contain a valid key.
    #[error("{} does not contain a key: expected 64 hexadecimal digits or the base64 of 32 bytes", .0.display())]
    NotAKeyFile(PathBuf),
    /// Users other than the owner can read the key file.
    #[error(
        "other users can read the key in {path}; if it has not been exposed, run: chmod 600 {path}",
        path = .0.display()
    )]
    Exposed(PathBuf),
    /// The file could not be read or created.
    #[error("cannot use the key file {}: {source}", path.display())]
    Io {
        /// Path of the key file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The data was changed, or was encrypted with another key or for another context.
    #[error(
        "a stored secret could not be decrypted: it was changed, or encrypted with another key or for another context"
    )]
    NotOpened,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

impl Key {
    /// Parses a key: 64 hexadecimal digits, or the base64 (either alphabet, padded or not) of 32 bytes. Ignores
    /// surrounding white space.
    pub fn parse(text: &str) -> Result<Key, Error> {
        let text = text.trim().as_bytes();
        let bytes = from_hex(text).or_else(|| from_base64(text)).ok_or(Error::NotAKey)?;
        Ok(Key::derive(&bytes))
    }

    /// Returns a new key, which is lost with this value.
    pub fn random() -> Key {
        Key::derive(&Zeroizing::new(random()))
    }

    /// Reads the key from a file. If the file is missing, creates it with a new key, readable by its owner only. If
    /// several processes do this at the same time, all get the same key.
    pub fn from_file(path: &Path) -> Result<Key, Error> {
        Key::parse(&key_file(path)?).map_err(|_| Error::NotAKeyFile(path.into()))
    }

    /// Returns this key, which then also decrypts and verifies what was made with the others.
    #[must_use]
    pub fn with_others<'a>(&self, others: impl Iterator<Item = &'a Key>) -> Key {
        Key { own: Arc::clone(&self.own), others: others.map(|key| Arc::clone(&key.own)).collect() }
    }

    fn derive(key: &Secret) -> Key {
        let subkey = |label: &str| Zeroizing::new(hmac_of(key, &[label.as_bytes()]));
        let own = Subkeys { seal: subkey("rap secret box: seal"), mac: subkey("rap secret box: mac") };
        Key { own: Arc::new(own), others: Arc::new([]) }
    }

    fn all(&self) -> impl Iterator<Item = &Subkeys> {
        [&self.own].into_iter().chain(self.others.iter()).map(Arc::as_ref)
    }

    /// Encrypts `plain`. Only this key with the same `context` can decrypt it.
    pub fn seal(&self, plain: &[u8], context: &[u8]) -> Vec<u8> {
        let nonce: [u8; NONCE_BYTES] = random();
        let payload = Payload { msg: plain, aad: context };
        let encrypted = self
            .own
            .cipher()
            .encrypt(&XNonce::from(nonce), payload)
            .expect("bug: a secret is shorter than the limit of 256 GB");
        [&[VERSION], nonce.as_slice(), &encrypted].concat()
    }

    /// Decrypts data that was encrypted with this key and this `context`.
    pub fn open(&self, sealed: &[u8], context: &[u8]) -> Result<Vec<u8>, Error> {
        let (version, rest) = sealed.split_first().ok_or(Error::NotOpened)?;
        let (nonce, encrypted) = rest.split_first_chunk::<NONCE_BYTES>().ok_or(Error::NotOpened)?;
        if *version != VERSION || encrypted.len() < TAG_BYTES {
            return Err(Error::NotOpened);
        }
        let open = |key: &Subkeys| {
            let payload = Payload { msg: encrypted, aad: context };
            key.cipher().decrypt(&XNonce::from(*nonce), payload).ok()
        };
        self.all().find_map(open).ok_or(Error::NotOpened)
    }

    /// Returns the HMAC-SHA256 of the parts, each prefixed with its length. Compare it with [`Key::verify_mac`] or in
    /// constant time.
    pub fn mac(&self, parts: &[&[u8]]) -> [u8; 32] {
        hmac_of(&self.own.mac, parts)
    }

    /// Checks the MAC of the parts in constant time.
    pub fn verify_mac(&self, parts: &[&[u8]], mac: &[u8]) -> bool {
        self.all().fold(false, |valid, key| valid | hmac_state(&key.mac, parts).verify_slice(mac).is_ok())
    }
}

impl Subkeys {
    fn cipher(&self) -> XChaCha20Poly1305 {
        XChaCha20Poly1305::new((&*self.seal).into())
    }
}

/// Returns the text of a key file. If the file is missing, creates it with a new key, readable by its owner only. If
/// several processes do this at the same time, all get the same key.
pub fn key_file(path: &Path) -> Result<Zeroizing<String>, Error> {
    let failed = |source| Error::Io { path: path.into(), source };
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create_key_file(path).and_then(|()| File::open(path)).map_err(failed)?
        }
        opened => opened.map_err(failed)?,
    };
    if is_exposed(&file.metadata().map_err(failed)?) {
        return Err(Error::Exposed(path.into()));
    }
    let mut text = Zeroizing::new(String::with_capacity(KEY_FILE_BYTES as usize));
    match file.take(KEY_FILE_BYTES).read_to_string(&mut text) {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(Error::NotAKeyFile(path.into()));
        }
        read => read.map_err(failed)?,
    };
    Ok(text)
}

fn hmac_of(key: &Secret, parts: &[&[u8]]) -> [u8; 32] {
    hmac_state(key, parts).finalize().into_bytes().into()
}

fn hmac_state(key: &Secret, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut hmac =
        Hmac::<Sha256>::new_from_slice(key.as_slice()).expect("bug: HMAC takes keys of any length");
    for part in parts {
        hmac.update(&(part.len() as u64).to_be_bytes());
        hmac.update(part);
    }
    hmac
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("bug: the operating system provides no random numbers");
    bytes
}

fn from_hex(text: &[u8]) -> Option<Secret> {
    let mut bytes = Secret::default();
    if text.len() != 2 * KEY_BYTES {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.chunks(2)) {
        *byte = hex_digit(digits[0])? << 4 | hex_digit(digits[1])?;
    }
    Some(bytes)
}

fn hex_digit(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

fn from_base64(text: &[u8]) -> Option<Secret> {
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    [alphabet::STANDARD, alphabet::URL_SAFE].iter().find_map(|alphabet| {
        let decoded = Zeroizing::new(GeneralPurpose::new(alphabet, config).decode(text).ok()?);
        let bytes: &[u8; KEY_BYTES] = decoded.as_slice().try_into().ok()?;
        Some(Zeroizing::new(*bytes))
    })
}

fn to_hex(bytes: &Secret) -> Zeroizing<String> {
    let digit =
        |value: u8| char::from_digit(value.into(), 16).expect("bug: four bits are one hexadecimal digit");
    let mut text = Zeroizing::new(String::with_capacity(2 * KEY_BYTES + 1));
    text.extend(bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]));
    text
}

/// Creates the file with a new key, unless it exists by now. The file appears atomically with its content, so that
/// neither a concurrent reader nor a crash can leave half a key.
fn create_key_file(path: &Path) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut draft_name = name.to_os_string();
    draft_name.push(format!(".{:016x}.draft", u64::from_ne_bytes(random())));
    let draft = parent.join(draft_name);
    let linked = write_draft(&draft).and_then(|()| link_if_missing(&draft, path));
    let removed = fs::remove_file(&draft);
    linked?;
    removed?;
    sync_directory(parent)
}

fn write_draft(draft: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(draft)?;
    let mut text = to_hex(&Zeroizing::new(random()));
    text.push('\n');
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// Links instead of renaming, because a link never replaces a key that may already be in use.
fn link_if_missing(draft: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(draft, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    }
}

#[cfg(unix)]
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(not(unix))]
fn sync_directory(_path: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::thread;

    use super::*;

    const HEX: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1F";

    fn key() -> Key {
        Key::parse(HEX).unwrap()
    }

    fn same(a: &Key, b: &Key) -> bool {
        a.mac(&[b"x"]) == b.mac(&[b"x"]) && a.own.seal == b.own.seal
    }

    #[test]
    fn a_key_is_hexadecimal_or_base64() {
        let base64 = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8";
        for text in [HEX.to_uppercase(), base64.into(), format!("{base64}="), format!(" {HEX}\n")] {
            assert!(same(&Key::parse(&text).unwrap(), &key()), "{text}");
        }
        let [standard, url_safe] = ["+/", "-_"].map(|pair| Key::parse(&format!("{}A==", pair.repeat(21))));
        assert!(standard.is_err() && url_safe.is_err(), "31 bytes are not a key");
        let [standard, url_safe] =
            ["+/", "-_"].map(|pair| Key::parse(&format!("{}8", pair.repeat(21))).unwrap());
        assert!(same(&standard, &url_safe));
    }

    #[test]
    fn the_error_for_an_invalid_key_does_not_contain_it() {
        let long = "a".repeat(65);
        for text in ["", "hunter2hunter2", &HEX[1..], &long, &HEX.replace('F', "g"), "ключ"] {
            let error = Key::parse(text).unwrap_err();
            assert!(error.to_string().contains("64 hexadecimal digits"), "{error}");
            assert!(text.is_empty() || !format!("{error} {error:?}").contains(text));
        }
        assert_eq!(format!("{:?}", key()), "Key(…)");
    }

    #[test]
    fn encrypted_data_can_be_decrypted() {
        for plain in [&b""[..], b"x", &[7; 10_000]] {
            let sealed = key().seal(plain, b"row 1");
            assert_eq!(sealed.len(), 1 + NONCE_BYTES + plain.len() + TAG_BYTES);
            assert_eq!(key().open(&sealed, b"row 1").unwrap(), plain);
        }
    }

    #[test]
    fn a_change_of_any_byte_is_detected() {
        let sealed = key().seal(b"a secret", b"row 1");
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(matches!(key().open(&changed, b"row 1"), Err(Error::NotOpened)), "byte {at}");
            assert!(matches!(key().open(&sealed[..at], b"row 1"), Err(Error::NotOpened)), "cut at {at}");
        }
        assert!(key().open(&[sealed, vec![0]].concat(), b"row 1").is_err());
    }

    #[test]
    fn another_context_or_key_cannot_decrypt() {
        let sealed = key().seal(b"a secret", b"row 1");
        assert!(matches!(key().open(&sealed, b"row 2"), Err(Error::NotOpened)));
        let other = Key::parse(&HEX.replace('F', "e")).unwrap();
        assert!(matches!(other.open(&sealed, b"row 1"), Err(Error::NotOpened)));
    }

    #[test]
    fn every_encryption_uses_a_new_nonce() {
        let [a, b] = [(); 2].map(|()| key().seal(b"a secret", b""));
        assert_ne!(a[1..=NONCE_BYTES], b[1..=NONCE_BYTES]);
    }

    #[test]
    fn a_mac_depends_on_the_boundaries_of_its_parts() {
        let mac = |parts: &[&[u8]]| key().mac(parts);
        let all = [
            mac(&[]),
            mac(&[b""]),
            mac(&[b"abc"]),
            mac(&[b"ab", b"c"]),
            mac(&[b"a", b"bc"]),
            mac(&[b"abc", b""]),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "mac {at}");
        }
        assert!(key().verify_mac(&[b"ab", b"c"], &all[3]));
        assert!(!key().verify_mac(&[b"a", b"bc"], &all[3]));
        assert!(!key().verify_mac(&[b"ab", b"c"], &all[3][..31]));
    }

    /// The expected value comes from Python's hmac module. Stored MACs must stay valid in later versions.
    #[test]
    fn the_mac_format_is_stable() {
        let hex: String = key().mac(&[b"ab", b"c"]).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "9c7258976979cf449da17a5e18bcd43589f4c85d7ba75084b79807642cf4e3bb");
    }

    /// The data was encrypted by an independent implementation of XChaCha20-Poly1305 in Python.
    #[test]
    fn the_encryption_format_is_stable() {
        let sealed = from_hex_vec(
            "016465666768696a6b6c6d6e6f707172737475767778797a7bee49cb9cdc7d4ead12a21079e9c5f6a6c092f8f50a07294f",
        );
        assert_eq!(key().open(&sealed, b"row 1").unwrap(), b"a secret");
    }

    fn from_hex_vec(text: &str) -> Vec<u8> {
        let digit = |byte| hex_digit(byte).unwrap();
        text.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_key_file_is_created_once_and_readable_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let created = Key::from_file(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert!(same(&created, &Key::from_file(&path).unwrap()));
        assert!(same(&created, &Key::parse(&fs::read_to_string(&path).unwrap()).unwrap()));
        let files = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(files, 1, "no draft is left");
    }

    #[test]
    fn concurrent_creators_of_a_key_file_get_the_same_key() {
        for _ in 0..20 {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("key");
            let keys: Vec<Key> = thread::scope(|scope| {
                let all: Vec<_> = (0..8).map(|_| scope.spawn(|| Key::from_file(&path).unwrap())).collect();
                all.into_iter().map(|one| one.join().unwrap()).collect()
            });
            assert!(keys.iter().all(|key| same(key, &keys[0])));
        }
    }

    #[test]
    fn a_key_file_that_other_users_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        Key::from_file(&path).unwrap();
        for exposed in [0o640, 0o604, 0o660] {
            fs::set_permissions(&path, fs::Permissions::from_mode(exposed)).unwrap();
            let error = Key::from_file(&path).unwrap_err();
            assert!(error.to_string().ends_with(&format!("chmod 600 {}", path.display())), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        Key::from_file(&path).unwrap();
    }

    #[test]
    fn a_key_file_without_a_key_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in [("empty", &b""[..]), ("text", b"hunter2"), ("binary", &[0xff; 40])] {
            let path = dir.path().join(name);
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            let error = Key::from_file(&path).unwrap_err();
            assert!(matches!(&error, Error::NotAKeyFile(named) if *named == path), "{error:?}");
            assert!(!error.to_string().contains("hunter2"));
            assert_eq!(fs::read(&path).unwrap(), content);
        }
        let missing = Key::from_file(&dir.path().join("no/such/key")).unwrap_err();
        assert!(missing.to_string().contains("no/such/key"), "{missing}");
    }
}
