//! Text of which the head and the tail are kept, and the middle is counted.

use std::collections::VecDeque;

/// Maximum number of bytes that are kept of the head, and of the tail.
pub(crate) const KEPT: usize = 64 * 1024;

/// Collected output.
#[derive(Default)]
pub(crate) struct Cut {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    left_out: usize,
}

impl Cut {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        // The head is complete as soon as something follows it.
        let room = if self.tail.is_empty() && self.left_out == 0 { KEPT - self.head.len() } else { 0 };
        let (head, rest) = bytes.split_at(bytes.len().min(room));
        self.head.extend(head);
        let skipped = rest.len().saturating_sub(KEPT);
        if skipped > 0 {
            self.left_out += self.tail.len();
            self.tail.clear();
        }
        self.tail.extend(&rest[skipped..]);
        let excess = self.tail.len().saturating_sub(KEPT);
        self.tail.drain(..excess);
        self.left_out += skipped + excess;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.left_out > 0
    }

    /// Returns the text. Bytes that are not UTF-8 are replaced.
    pub(crate) fn text(&self) -> String {
        let (first, second) = self.tail.as_slices();
        if self.left_out == 0 {
            return String::from_utf8_lossy(&[&self.head, first, second].concat()).into_owned();
        }
        let (head, tail) = (String::from_utf8_lossy(&self.head), [first, second].concat());
        format!("{head}\n[… {} bytes left out …]\n{}", self.left_out, String::from_utf8_lossy(&tail))
    }

    /// Leaves out half of what is kept.
    pub(crate) fn halve(&mut self) {
        let before = self.head.len() + self.tail.len();
        self.head.truncate(self.head.len() / 2);
        let excess = self.tail.len().div_ceil(2);
        self.tail.drain(..excess);
        self.left_out += before - self.head.len() - self.tail.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_and_the_tail_are_kept_and_the_middle_is_counted() {
        let all: String = (0..100_000).map(|number| format!("{number}\n")).collect();
        for size in [1, 1000, all.len()] {
            let mut cut = Cut::default();
            all.as_bytes().chunks(size).for_each(|chunk| cut.push(chunk));
            let text = cut.text();
            assert!(text.starts_with("0\n1\n") && text.ends_with("99998\n99999\n"));
            assert!(text.contains(&format!("[… {} bytes left out …]", all.len() - 2 * KEPT)), "{size}");
            assert!(cut.is_cut());
        }
    }

    #[test]
    fn short_text_is_whole() {
        let mut cut = Cut::default();
        cut.push(&vec![b'x'; 2 * KEPT]);
        assert_eq!((cut.text().len(), cut.is_cut()), (2 * KEPT, false));
        cut.halve();
        assert!(cut.is_cut() && cut.text().contains("[… 65536 bytes left out …]"));
        let mut cut = Cut::default();
        cut.push(b"caf\xe9");
        assert_eq!(cut.text(), "caf\u{fffd}");
    }
}
