//! Keys, from the bytes that a terminal sends.

/// The longest escape sequence that is waited for, in bytes.
const SEQUENCE: usize = 16;
/// The longest paste, in bytes; what is behind it is dropped.
const PASTE: usize = 256 * 1024;
const PASTE_BEGINS: &[u8] = b"\x1b[200~";
const PASTE_ENDS: &[u8] = b"\x1b[201~";

/// What somebody pressed.
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
    Leave,
    /// ^L
    Redraw,
    /// ^Z
    Suspend,
}

/// Reads keys from bytes, which may come in any pieces.
#[derive(Debug, Default)]
pub(super) struct Keys {
    bytes: Vec<u8>,
    pasting: bool,
}

impl Keys {
    /// The keys that are complete with these bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<Key> {
        self.bytes.extend_from_slice(bytes);
        let mut keys = Vec::new();
        while let Some((key, taken)) = self.first() {
            self.bytes.drain(..taken);
            keys.extend(key);
        }
        keys
    }

    /// The first key, or nothing where the bytes mean none, and how many bytes it has. Nothing at all where more have
    /// to come.
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
            // The last bytes may be the beginning of the end.
            let keep = PASTE_ENDS.len() - 1;
            if self.bytes.len() > PASTE + keep {
                self.bytes.drain(PASTE..self.bytes.len() - keep);
            }
            return None;
        };
        self.pasting = false;
        let text = String::from_utf8_lossy(&self.bytes[..end]).replace("\r\n", "\n").replace('\r', "\n");
        let text = crate::table::plain(&text);
        Some((Some(Key::Paste(text)), end + PASTE_ENDS.len()))
    }
}

fn control(byte: u8) -> Option<Key> {
    Some(match byte {
        b'\r' | b'\n' => Key::Enter,
        0x01 => Key::Home,
        0x02 => Key::Left,
        0x03 => Key::Interrupt,
        0x04 => Key::Leave,
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

/// `ESC [ … letter`, `ESC O letter`, or a letter with Alt.
fn escape(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    match *bytes.get(1)? {
        b'[' => {
            let is_final = |byte: &u8| (0x40..=0x7e).contains(byte);
            match bytes[2..].iter().position(is_final) {
                Some(at) => Some((sequence(&bytes[2..2 + at], bytes[2 + at]), at + 3)),
                None if bytes.len() > SEQUENCE => Some((None, bytes.len())),
                None => None,
            }
        }
        b'O' => Some((sequence(b"", *bytes.get(2)?), 3)),
        b'b' => Some((Some(Key::WordLeft), 2)),
        b'f' => Some((Some(Key::WordRight), 2)),
        0x7f | 0x08 => Some((Some(Key::CutWord), 2)),
        // A lone Escape does nothing; what follows it counts.
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

/// A character of UTF-8; a byte that begins none is dropped.
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
    fn keys_are_read_from_bytes_in_any_pieces() {
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
    fn what_is_no_key_is_passed_over_and_kept_nowhere() {
        let mut keys = Keys::default();
        let mut noise = b"\xff\xfe\x80\x1b\x1b[A\xc3(\x1b[".to_vec();
        noise.extend([b'1'; 40]);
        assert_eq!(keys.push(&noise), [Key::Up, Key::Char('(')]);
        assert!(keys.bytes.is_empty());
        keys.push(PASTE_BEGINS);
        for _ in 0..20 {
            keys.push(&[b'x'; 64 * 1024]);
        }
        assert!(keys.bytes.len() < PASTE + 64);
        let [Key::Paste(pasted)] = &keys.push(PASTE_ENDS)[..] else { panic!("a paste") };
        assert!(pasted.len() <= PASTE + PASTE_ENDS.len());
    }
}
