//! Parses keys from the bytes that a terminal sends.

/// Maximum length of an escape sequence, in bytes.
const SEQUENCE_BYTES: usize = 16;
/// Maximum length of a paste, in bytes. The rest is dropped.
const PASTE_BYTES: usize = 256 * 1024;
const PASTE_BEGINS: &[u8] = b"\x1b[200~";
const PASTE_ENDS: &[u8] = b"\x1b[201~";

/// A key press or a paste.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Paste(String),
    Enter,
    Backspace,
    Delete,
    Left,
    Right,
    WordLeft,
    WordRight,
    Home,
    End,
    Up,
    Down,
    /// ^K
    CutToEnd,
    /// ^U
    CutToHome,
    /// ^W
    CutWord,
    /// ^C
    Interrupt,
    /// ^D
    EndOfInput,
    /// ^L
    Redraw,
    /// ^Z
    Suspend,
}

/// Incremental parser: the bytes may arrive in pieces of any size.
#[derive(Debug, Default)]
pub(super) struct Keys {
    bytes: Vec<u8>,
    pasting: bool,
}

impl Keys {
    /// Adds bytes and returns the keys that are complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<Key> {
        self.bytes.extend_from_slice(bytes);
        let mut keys = Vec::new();
        while let Some((key, taken)) = self.first() {
            self.bytes.drain(..taken);
            keys.extend(key);
        }
        keys
    }

    /// Returns the first key and its length in bytes. The key is `None` if the bytes are not a key. Returns `None` if more
    /// bytes are needed.
    fn first(&mut self) -> Option<(Option<Key>, usize)> {
        if self.pasting {
            return self.paste();
        }
        if self.bytes.starts_with(PASTE_BEGINS) {
            self.pasting = true;
            return Some((None, PASTE_BEGINS.len()));
        }
        match *self.bytes.first()? {
            b'\x1b' => escape(&self.bytes),
            byte @ (0..32 | 127) => Some((control(byte), 1)),
            _ => character(&self.bytes),
        }
    }

    fn paste(&mut self) -> Option<(Option<Key>, usize)> {
        let ends = self.bytes.windows(PASTE_ENDS.len()).position(|window| window == PASTE_ENDS);
        let Some(end) = ends else {
            // The last bytes may be the beginning of the end marker.
            let keep = PASTE_ENDS.len() - 1;
            if self.bytes.len() > PASTE_BYTES + keep {
                self.bytes.drain(PASTE_BYTES..self.bytes.len() - keep);
            }
            return None;
        };
        self.pasting = false;
        let text = String::from_utf8_lossy(&self.bytes[..end]).replace("\r\n", "\n").replace('\r', "\n");
        let text = text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect();
        Some((Some(Key::Paste(text)), end + PASTE_ENDS.len()))
    }
}

fn control(byte: u8) -> Option<Key> {
    Some(match byte {
        b'\r' | b'\n' => Key::Enter,
        0x01 => Key::Home,
        0x02 => Key::Left,
        0x03 => Key::Interrupt,
        0x04 => Key::EndOfInput,
        0x05 => Key::End,
        0x06 => Key::Right,
        0x08 | 0x7f => Key::Backspace,
        b'\t' => Key::Char(' '),
        0x0b => Key::CutToEnd,
        0x0c => Key::Redraw,
        0x0e => Key::Down,
        0x10 => Key::Up,
        0x15 => Key::CutToHome,
        0x17 => Key::CutWord,
        0x1a => Key::Suspend,
        _ => return None,
    })
}

/// Parses `ESC [ … letter`, `ESC O letter`, or Alt and a letter.
fn escape(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    match *bytes.get(1)? {
        b'[' => {
            let is_final = |byte: &u8| (0x40..=0x7e).contains(byte);
            match bytes[2..].iter().position(is_final) {
                Some(at) => Some((sequence(&bytes[2..2 + at], bytes[2 + at]), at + 3)),
                None if bytes.len() > SEQUENCE_BYTES => Some((None, bytes.len())),
                None => None,
            }
        }
        b'O' => Some((sequence(b"", *bytes.get(2)?), 3)),
        b'b' => Some((Some(Key::WordLeft), 2)),
        b'f' => Some((Some(Key::WordRight), 2)),
        0x7f | 0x08 => Some((Some(Key::CutWord), 2)),
        // A single Escape is ignored; the next one begins a sequence.
        b'\x1b' => Some((None, 1)),
        _ => Some((None, 2)),
    }
}

fn sequence(parameters: &[u8], last: u8) -> Option<Key> {
    let by_word = parameters.ends_with(b";5") || parameters.ends_with(b";3");
    Some(match (last, parameters) {
        (b'A', _) => Key::Up,
        (b'B', _) => Key::Down,
        (b'C', _) if by_word => Key::WordRight,
        (b'D', _) if by_word => Key::WordLeft,
        (b'C', _) => Key::Right,
        (b'D', _) => Key::Left,
        (b'H', _) | (b'~', b"1" | b"7") => Key::Home,
        (b'F', _) | (b'~', b"4" | b"8") => Key::End,
        (b'~', b"3") => Key::Delete,
        _ => return None,
    })
}

/// Parses a UTF-8 character. An invalid byte is dropped.
fn character(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    let length = match bytes[0] {
        0xc2..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xf4 => 4,
        _ => 1,
    };
    let here = &bytes[..length.min(bytes.len())];
    match std::str::from_utf8(here) {
        Ok(text) => Some((text.chars().next().filter(|c| !c.is_control()).map(Key::Char), length)),
        Err(error) if error.error_len().is_none() => None,
        Err(_) => Some((None, 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_parsed_from_pieces_of_any_size() {
        let bytes = "aé日\x1b[A\x1b[1;5D\x1bOH\x1b[3~\x1b[99~\x1bb\r\x03\x1b[200~one\r\ntwo\x1b[2J\x1b[201~z";
        let expected = [
            Key::Char('a'),
            Key::Char('é'),
            Key::Char('日'),
            Key::Up,
            Key::WordLeft,
            Key::Home,
            Key::Delete,
            Key::WordLeft,
            Key::Enter,
            Key::Interrupt,
            Key::Paste("one\ntwo[2J".into()),
            Key::Char('z'),
        ];
        assert_eq!(Keys::default().push(bytes.as_bytes()), expected);
        let mut keys = Keys::default();
        let singly: Vec<Key> = bytes.as_bytes().iter().flat_map(|byte| keys.push(&[*byte])).collect();
        assert_eq!(singly, expected);
    }

    #[test]
    fn invalid_bytes_are_dropped_and_not_buffered() {
        let mut keys = Keys::default();
        let mut noise = b"\xff\xfe\x80\x1b\x1b[A\xc3(\x1b[".to_vec();
        noise.extend([b'1'; 40]);
        assert_eq!(keys.push(&noise), [Key::Up, Key::Char('(')]);
        assert!(keys.bytes.is_empty());
        keys.push(PASTE_BEGINS);
        for _ in 0..20 {
            keys.push(&[b'x'; 64 * 1024]);
        }
        assert!(keys.bytes.len() < PASTE_BYTES + 64);
        let [Key::Paste(pasted)] = &keys.push(PASTE_ENDS)[..] else { panic!("a paste") };
        assert!(pasted.len() <= PASTE_BYTES + PASTE_ENDS.len());
    }
}
