//! A reader of server-sent events, fed with bytes as they come.
//!
//! It gives the same events however the bytes are cut, takes time in proportion to them, and keeps no more than
//! one event of bounded size. An event that is not closed by an empty line is none.

use std::mem;

/// The largest event that is read unless another bound is given, in bytes.
pub const EVENT_BYTES: usize = 4 * 1024 * 1024;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Event {
    /// What `event` says; empty for a plain message.
    pub name: String,
    /// The lines of `data`.
    pub data: String,
    /// The last `id` up to here; empty if there was none.
    pub id: String,
}

/// Why a stream can not be read on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An event is larger than its bound.
    #[error("an event has more than {limit} bytes")]
    TooLong {
        /// The bound.
        limit: usize,
    },
}

/// The reader of one stream.
#[derive(Debug)]
pub struct Parser {
    limit: usize,
    /// The line that is not complete yet.
    line: Vec<u8>,
    /// The event that is not complete yet.
    name: String,
    data: String,
    has_data: bool,
    last_id: String,
    /// The last byte was a CR, so that a LF would belong to it.
    after_cr: bool,
    first_line: bool,
}

impl Default for Parser {
    fn default() -> Self {
        Parser::new(EVENT_BYTES)
    }
}

impl Parser {
    /// A reader for events of up to `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Parser {
            limit,
            line: Vec::new(),
            name: String::new(),
            data: String::new(),
            has_data: false,
            last_id: String::new(),
            after_cr: false,
            first_line: true,
        }
    }

    /// Takes the next bytes and gives the events that they complete. After an error there is nothing to come.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<Event>, Error> {
        let mut events = Vec::new();
        let mut rest = bytes;
        while let Some((first, after)) = rest.split_first() {
            if mem::take(&mut self.after_cr) && *first == b'\n' {
                rest = after;
                continue;
            }
            let end = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n'));
            self.extend_line(&rest[..end.unwrap_or(rest.len())])?;
            let Some(end) = end else { break };
            self.after_cr = rest[end] == b'\r';
            rest = &rest[end + 1..];
            events.extend(self.end_line());
        }
        Ok(events)
    }

    fn extend_line(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let kept = self.line.len() + self.data.len() + self.name.len();
        if bytes.len() > self.limit.saturating_sub(kept) {
            return Err(Error::TooLong { limit: self.limit });
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self) -> Option<Event> {
        let mut line = mem::take(&mut self.line);
        let start = if mem::take(&mut self.first_line) && line.starts_with(BOM) { BOM.len() } else { 0 };
        let event = self.take_line(&String::from_utf8_lossy(&line[start..]));
        // Its memory serves the next line.
        line.clear();
        self.line = line;
        event
    }

    fn take_line(&mut self, line: &str) -> Option<Event> {
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
            "id" if !value.contains('\0') => self.last_id = value.into(),
            // A comment, `retry`, or something unknown.
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

    fn event(name: &str, data: &str, id: &str) -> Event {
        Event { name: name.into(), data: data.into(), id: id.into() }
    }

    /// Reads the stream whole, byte by byte, and cut in two at every place.
    fn check(stream: &[u8], expected: &[Event]) {
        assert_eq!(Parser::default().push(stream).unwrap(), expected);
        for cut in 0..=stream.len() {
            let mut parser = Parser::default();
            let mut events = parser.push(&stream[..cut]).unwrap();
            events.extend(parser.push(&stream[cut..]).unwrap());
            assert_eq!(events, expected, "cut at {cut}");
        }
        let mut parser = Parser::default();
        let single: Vec<_> = stream.chunks(1).flat_map(|byte| parser.push(byte).unwrap()).collect();
        assert_eq!(single, expected, "byte by byte");
    }

    #[test]
    fn events_are_the_same_however_the_stream_is_cut() {
        for end in ["\n", "\r", "\r\n"] {
            let lines =
                "data: a\n\n: a comment\nevent: x\nid: 7\ndata:  b\ndata\ndata:c:d\nretry: 5\n\ndata: ü☃\n\n";
            let expected = [event("", "a", ""), event("x", " b\n\nc:d", "7"), event("", "ü☃", "7")];
            check(lines.replace('\n', end).as_bytes(), &expected);
        }
    }

    #[test]
    fn odd_streams_are_read_as_the_standard_says() {
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
    fn an_event_has_a_bound() {
        let too_long = Err(Error::TooLong { limit: 10 });
        assert_eq!(Parser::new(10).push(b"data: 1234\n\n").unwrap().len(), 1);
        assert_eq!(Parser::new(10).push(b"data: 12345\n\n"), too_long);
        assert_eq!(Parser::new(10).push(b"data:1234\ndata:12\n\n"), too_long);
        assert_eq!(Parser::new(10).push(b": 12345678901\n"), too_long);
        let mut parser = Parser::new(10);
        for _ in 0..100 {
            assert_eq!(parser.push(b"data:12\n\n: no more\n").unwrap().len(), 1);
        }
    }

    #[test]
    fn a_long_stream_takes_time_in_proportion() {
        let mut parser = Parser::default();
        let mut lengths = 0;
        for _ in 0..EVENT_BYTES / 2 {
            assert!(parser.push(b"d").unwrap().is_empty());
            lengths += 1;
        }
        assert_eq!(parser.line.len(), lengths);
    }
}
