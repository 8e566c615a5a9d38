//! An incremental parser for server-sent events.
//!
//! The events do not depend on how the bytes are split into chunks, and the time is linear in the number of bytes.
//! The parser keeps at most one event of bounded size, and frees the memory of a large event after it. An event that
//! exceeds the limit is reported and skipped, and the parser continues after it. An event that is not terminated by
//! an empty line is discarded, unless the caller asks for it with [`Parser::finish`].

use std::mem;
use std::time::Duration;

/// Byte order mark, which may precede a stream of events.
pub const BOM: &[u8] = b"\xef\xbb\xbf";
/// A longer id is ignored: the id is copied into every event that follows it.
const ID_BYTES: usize = 1024;
/// Capacity of the line buffer that is kept after a long line.
const KEPT_BYTES: usize = 64 * 1024;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Event {
    /// Value of the `event` field; empty if there is none.
    pub name: String,
    /// The `data` lines, joined by newlines.
    pub data: String,
    /// The last `id` up to this event; empty if there was none.
    pub id: String,
}

/// An event that was skipped because it exceeds the limit of the parser.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an event has more than {limit} bytes")]
pub struct TooLong {
    /// The limit, in bytes.
    pub limit: usize,
    /// Value of the `event` field before the limit was reached; empty if there was none.
    pub name: String,
    /// The last `id` before the limit was reached; empty if there was none.
    pub id: String,
}

/// The parser of one stream.
#[derive(Debug)]
pub struct Parser {
    limit: usize,
    /// The incomplete line.
    line: Vec<u8>,
    /// The incomplete event.
    name: String,
    data: String,
    has_data: bool,
    last_id: String,
    retry: Option<Duration>,
    /// The last byte was a CR, so a following LF belongs to the same line end.
    after_cr: bool,
    first_line: bool,
    skipping: Option<Skipping>,
}

/// Position in an event that is being skipped. It ends at the next empty line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Skipping {
    AtLineStart,
    InLine,
}

impl Parser {
    /// Creates a parser for events of up to `limit` bytes. Memory is allocated only as needed.
    pub fn new(limit: usize) -> Self {
        Parser {
            limit,
            line: Vec::new(),
            name: String::new(),
            data: String::new(),
            has_data: false,
            last_id: String::new(),
            retry: None,
            after_cr: false,
            first_line: true,
            skipping: None,
        }
    }

    /// Parses the next bytes. Returns the events that they complete, and an error for each event that exceeds the
    /// limit. The rest of such an event is skipped, so that the caller may ignore the error and continue.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<Result<Event, TooLong>> {
        let mut events = Vec::new();
        let mut rest = bytes;
        while let Some((first, after)) = rest.split_first() {
            if mem::take(&mut self.after_cr) && *first == b'\n' {
                rest = after;
                continue;
            }
            let end = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n'));
            events.extend(self.extend_line(&rest[..end.unwrap_or(rest.len())]).map(Err));
            let Some(end) = end else { break };
            self.after_cr = rest[end] == b'\r';
            rest = &rest[end + 1..];
            events.extend(self.end_line().map(Ok));
        }
        events
    }

    /// Returns the time after which the server wants the stream to be opened again, if it has named one.
    pub fn retry(&self) -> Option<Duration> {
        self.retry
    }

    /// Returns the size of the incomplete event that is kept, in bytes.
    pub fn buffered(&self) -> usize {
        self.line.len() + self.name.len() + self.data.len()
    }

    /// Ends the stream. Returns an event whose empty line is missing, which the standard would discard. It may be
    /// incomplete, so the caller has to check its data.
    pub fn finish(mut self) -> Option<Event> {
        if self.skipping.is_some() {
            return None;
        }
        let last = self.take_line();
        last.or_else(|| self.end_event())
    }

    fn extend_line(&mut self, bytes: &[u8]) -> Option<TooLong> {
        if bytes.is_empty() {
            return None;
        }
        if self.skipping.is_some() {
            self.skipping = Some(Skipping::InLine);
            return None;
        }
        let kept = self.line.len() + self.data.len() + self.name.len();
        if bytes.len() <= self.limit.saturating_sub(kept) {
            self.line.extend_from_slice(bytes);
            return None;
        }
        self.skipping = Some(Skipping::InLine);
        (self.line, self.data, self.has_data) = (Vec::new(), String::new(), false);
        self.first_line = false;
        Some(TooLong { limit: self.limit, name: mem::take(&mut self.name), id: self.last_id.clone() })
    }

    fn end_line(&mut self) -> Option<Event> {
        match self.skipping {
            Some(Skipping::InLine) => self.skipping = Some(Skipping::AtLineStart),
            Some(Skipping::AtLineStart) => self.skipping = None,
            None => return self.take_line(),
        }
        None
    }

    fn take_line(&mut self) -> Option<Event> {
        let mut line = mem::take(&mut self.line);
        let start = if mem::take(&mut self.first_line) && line.starts_with(BOM) { BOM.len() } else { 0 };
        let event = self.take_field(&String::from_utf8_lossy(&line[start..]));
        // Reuse the memory for the next line.
        line.clear();
        line.shrink_to(KEPT_BYTES);
        self.line = line;
        event
    }

    fn take_field(&mut self, line: &str) -> Option<Event> {
        if line.is_empty() {
            return self.end_event();
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => {
                if mem::replace(&mut self.has_data, true) {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            "event" => self.name = value.into(),
            "id" if !value.contains('\0') && value.len() <= ID_BYTES => self.last_id = value.into(),
            "retry" if value.bytes().all(|byte| byte.is_ascii_digit()) => {
                self.retry = value.parse().ok().map(Duration::from_millis).or(self.retry);
            }
            // A comment or an unknown field.
            _ => {}
        }
        None
    }

    fn end_event(&mut self) -> Option<Event> {
        let (name, data) = (mem::take(&mut self.name), mem::take(&mut self.data));
        mem::take(&mut self.has_data).then(|| Event { name, data, id: self.last_id.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 64 * 1024;

    fn event(name: &str, data: &str, id: &str) -> Event {
        Event { name: name.into(), data: data.into(), id: id.into() }
    }

    /// Parses the stream as a whole, byte by byte, and split in two at every position.
    fn check_within(limit: usize, stream: &[u8], expected: &[Result<Event, TooLong>]) {
        assert_eq!(Parser::new(limit).push(stream), expected);
        for cut in 0..=stream.len() {
            let mut parser = Parser::new(limit);
            let mut events = parser.push(&stream[..cut]);
            events.extend(parser.push(&stream[cut..]));
            assert_eq!(events, expected, "cut at {cut}");
        }
        let mut parser = Parser::new(limit);
        let single: Vec<_> = stream.chunks(1).flat_map(|byte| parser.push(byte)).collect();
        assert_eq!(single, expected, "byte by byte");
    }

    fn check(stream: &[u8], expected: &[Event]) {
        let expected: Vec<_> = expected.iter().cloned().map(Ok).collect();
        check_within(LIMIT, stream, &expected);
    }

    #[test]
    fn events_do_not_depend_on_how_the_stream_is_split() {
        for end in ["\n", "\r", "\r\n"] {
            let lines =
                "data: a\n\n: a comment\nevent: x\nid: 7\ndata:  b\ndata\ndata:c:d\nretry: 5\n\ndata: ü☃\n\n";
            let expected = [event("", "a", ""), event("x", " b\n\nc:d", "7"), event("", "ü☃", "7")];
            check(lines.replace('\n', end).as_bytes(), &expected);
        }
    }

    #[test]
    fn the_time_to_open_the_stream_again_is_known() {
        let mut parser = Parser::new(LIMIT);
        parser.push(b"data: x\n\n");
        assert_eq!(parser.retry(), None);
        parser.push(b"retry: 500\nretry: soon\nretry: -1\nretry\nretry: 99999999999999999999999\n");
        assert_eq!(parser.retry(), Some(Duration::from_millis(500)));
    }

    #[test]
    fn a_last_event_without_an_empty_line_can_be_read() {
        let last = |stream: &[u8]| {
            let mut parser = Parser::new(LIMIT);
            parser.push(stream);
            parser.finish()
        };
        for stream in
            ["data: a\n\nid: 7\ndata: b", "id: 7\ndata: b\n", "id: 7\ndata: b\r\n", "id: 7\rdata: b\r"]
        {
            assert_eq!(last(stream.as_bytes()), Some(event("", "b", "7")), "{stream:?}");
        }
        assert_eq!(last(b"data: one\ndata: two"), Some(event("", "one\ntwo", "")));
        for stream in ["", "data: a\n\n", "event: x\n", ": comment"] {
            assert_eq!(last(stream.as_bytes()), None, "{stream:?}");
        }
        let mut parser = Parser::new(4);
        assert!(parser.push(b"data: too long").iter().all(Result::is_err));
        assert_eq!(parser.finish(), None);
    }

    #[test]
    fn unusual_streams_are_parsed_as_the_standard_says() {
        check(b"", &[]);
        check(b"\n\r\n\r\n\n", &[]);
        check("\u{feff}data: after a BOM\n\n".as_bytes(), &[event("", "after a BOM", "")]);
        check("data: x\n\n\u{feff}data: no field\n\n".as_bytes(), &[event("", "x", "")]);
        check(b"data\n\n", &[event("", "", "")]);
        check(b"data:\ndata:\n\n", &[event("", "\n", "")]);
        check(b"event: without data\n\ndata: x\n\n", &[event("", "x", "")]);
        check(b"data: never closed\n", &[]);
        check(b"data : no field\nunknown: y\n\n", &[]);
        check(b"id: 1\ndata: a\n\nid: \0\nid\ndata: b\n\n", &[event("", "a", "1"), event("", "b", "")]);
        check(b"data: \xff\n\n", &[event("", "\u{fffd}", "")]);
        check(
            b"data: a\r\rdata: b\r\n\ndata: c\n\r\n",
            &[event("", "a", ""), event("", "b", ""), event("", "c", "")],
        );
    }

    #[test]
    fn the_size_of_an_event_is_limited() {
        let too_long = || Err(TooLong { limit: 10, name: String::new(), id: String::new() });
        let fits = |data: &str| Ok(event("", data, ""));
        check_within(10, b"data: 1234\n\n", &[fits("1234")]);
        check_within(10, b"data: 12345\n\n", &[too_long()]);
        check_within(10, b"data:1234\ndata:12\n\n", &[too_long()]);
        check_within(10, b": 12345678901\n", &[too_long()]);
        let mut parser = Parser::new(10);
        for _ in 0..100 {
            assert_eq!(parser.push(b"data:12\n\n: no more\n"), [fits("12")]);
        }
    }

    #[test]
    fn an_event_that_is_too_long_is_reported_once_and_the_parser_continues_after_it() {
        for end in ["\n", "\r", "\r\n"] {
            let lines = "id: 1\nevent: a\ndata: 1\n\n\
                         id: 2\nevent: b\ndata: 34567890123\ndata: 45678901234567890\nid: 9\n\n\
                         event: c\ndata: 5\n\n\
                         id: 3\ndata: 1234567890123456\n\n\n\n\
                         id: 4\ndata: 6\n\n";
            let too_long =
                |name: &str, id: &str| Err(TooLong { limit: 16, name: name.into(), id: id.into() });
            let expected = [
                Ok(event("a", "1", "1")),
                too_long("b", "2"),
                Ok(event("c", "5", "2")),
                too_long("", "3"),
                Ok(event("", "6", "4")),
            ];
            check_within(16, lines.replace('\n', end).as_bytes(), &expected);
        }
    }

    #[test]
    fn a_long_id_is_ignored() {
        let long = "9".repeat(ID_BYTES + 1);
        check(format!("id: 1\nid: {long}\ndata: a\n\n").as_bytes(), &[event("", "a", "1")]);
    }

    /// Every byte is scanned once. Scanning a long line again for each chunk would take minutes.
    #[test]
    fn a_long_event_in_small_chunks_takes_linear_time() {
        const BYTES: usize = 16 * 1024 * 1024;
        let mut parser = Parser::new(BYTES);
        assert!(parser.push(b"data:").is_empty());
        for _ in 0..BYTES / 8 - 1 {
            assert!(parser.push(b"12345678").is_empty());
        }
        let events = parser.push(b"\n\n");
        assert_eq!(events[0].as_ref().unwrap().data.len(), BYTES - 8);
    }

    #[test]
    fn memory_is_allocated_as_needed_and_freed_after_a_long_event() {
        let mut parser = Parser::new(usize::MAX);
        assert_eq!(parser.line.capacity(), 0);
        let long = format!("data: {}\n\n", "x".repeat(4 * KEPT_BYTES));
        assert_eq!(parser.push(long.as_bytes()).len(), 1);
        assert!(parser.line.capacity() <= 2 * KEPT_BYTES, "{}", parser.line.capacity());
        assert_eq!(parser.data.capacity(), 0);
    }
}
