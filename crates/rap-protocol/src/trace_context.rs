//! The `traceparent` header of W3C Trace Context. Runtimes send it with invocations, and tools send it back with callbacks.

use std::fmt;

/// Name of the header.
pub const TRACEPARENT: &str = "traceparent";

/// Length of the header in version 00.
const LENGTH: usize = 55;

/// A span of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// Id of the trace. Not all zero.
    pub trace: [u8; 16],
    /// Id of the span. Not all zero.
    pub span: [u8; 8],
    /// True if the sender records the trace.
    pub sampled: bool,
}

impl TraceContext {
    /// Reads the value of a `traceparent` header. Returns `None` if it is not valid. Of versions after 00, what follows the
    /// fields of that version is ignored, as the specification asks.
    pub fn parse(text: &str) -> Option<TraceContext> {
        let [version, trace, span, flags] =
            [text.get(..2)?, text.get(3..35)?, text.get(36..52)?, text.get(53..55)?];
        let separated = [2, 35, 52].iter().all(|at| text.as_bytes()[*at] == b'-');
        let ends = match version {
            "ff" => false,
            "00" => text.len() == LENGTH,
            _ => text.len() == LENGTH || text.as_bytes()[LENGTH] == b'-',
        };
        hex::<1>(version)?;
        let (trace, span, [flags]) = (hex(trace)?, hex(span)?, hex(flags)?);
        let valid = separated && ends && trace != [0; 16] && span != [0; 8];
        valid.then_some(TraceContext { trace, span, sampled: flags & 1 == 1 })
    }
}

/// Writes the value of a `traceparent` header.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("00-")?;
        self.trace.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("-")?;
        self.span.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "-{:02x}", u8::from(self.sampled))
    }
}

/// Reads lowercase hexadecimal digits.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    if text.len() != 2 * N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_valid_header_is_read_and_written_unchanged() {
        let context = TraceContext::parse(VALID).unwrap();
        assert_eq!((context.span[1], context.sampled, context.to_string().as_str()), (0xf0, true, VALID));
        let unsampled = VALID.replace("-01", "-00");
        assert_eq!(TraceContext::parse(&unsampled).unwrap().to_string(), unsampled);
        let later = format!("01{}-more", &VALID[2..]);
        assert_eq!(TraceContext::parse(&later), Some(context));
    }

    #[test]
    fn a_malformed_header_is_ignored() {
        let zero_trace = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        let zero_span = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16));
        for text in [
            "",
            "00",
            &VALID[..54],
            &format!("{VALID}-"),
            &format!("01{}x", &VALID[2..]),
            &format!("ff{}", &VALID[2..]),
            &VALID.to_uppercase(),
            &VALID.replace('-', "_"),
            &zero_trace,
            &zero_span,
            &format!("{}ä{}", &VALID[..20], &VALID[22..]),
        ] {
            assert_eq!(TraceContext::parse(text), None, "{text}");
        }
    }
}
