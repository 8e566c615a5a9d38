//! Lines of a file: each is a JSON array of a checksum and a record. A checksum covers its line and all lines before it, so
//! that the first line that was changed, lost or moved is found.

use sha2::{Digest, Sha256};

use super::RECORD_BYTES;

/// Length of a checksum, in hexadecimal digits.
const SUM_CHARS: usize = 16;
/// Length of a line without its record.
const FRAME_BYTES: usize = SUM_CHARS + 5;

/// The checksum of the lines so far.
#[derive(Default)]
struct Chain([u8; 32]);

impl Chain {
    fn add(&mut self, record: &str) -> String {
        let digest = Sha256::new().chain_update(self.0).chain_update(record).finalize();
        self.0 = digest.into();
        self.0[..SUM_CHARS / 2].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Turns records into lines.
#[derive(Default)]
pub(crate) struct LineWriter(Chain);

impl LineWriter {
    /// Returns the next line, with its line break.
    pub(crate) fn line(&mut self, record: &str) -> String {
        format!("[\"{}\",{record}]\n", self.0.add(record))
    }
}

/// Turns lines into records.
#[derive(Default)]
pub(crate) struct LineReader {
    chain: Chain,
    /// Number of the last line, from 1.
    pub(crate) line: u64,
}

/// Maximum length of a line with its line break.
pub(crate) const LINE_BYTES: usize = RECORD_BYTES + FRAME_BYTES;

impl LineReader {
    /// Returns the record of the next line. The line ends with a line break, unless the text was cut off.
    pub(crate) fn record<'a>(&mut self, line: &'a [u8]) -> Result<&'a str, String> {
        self.line += 1;
        if line.len() > LINE_BYTES {
            return Err(format!("it is longer than {LINE_BYTES} bytes"));
        }
        let Some(line) = line.strip_suffix(b"\n") else {
            return Err("it is cut off: the file is not complete".into());
        };
        let line = std::str::from_utf8(line).map_err(|_| "it is not UTF-8".to_owned())?;
        let frame = line.strip_prefix("[\"").and_then(|rest| rest.split_once("\","));
        let Some((sum, record)) = frame.and_then(|(sum, rest)| Some((sum, rest.strip_suffix(']')?))) else {
            return Err("it is not a line of an export".into());
        };
        if self.chain.add(record) != sum {
            return Err("its checksum is wrong: this line was changed, or lines before it are missing".into());
        }
        Ok(record)
    }
}
