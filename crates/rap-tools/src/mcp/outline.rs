//! Outline of a message that is too long to be kept: enough to answer the request that it belongs to.

use rmcp::RoleClient;
use rmcp::model::{ErrorData, RequestId, ServerJsonRpcMessage};
use rmcp::service::RxJsonRpcMessage;

/// Maximum length of a name or an id on the first level of a message, in bytes.
const KEPT_BYTES: usize = 256;
const TOO_LONG: &str = "the answer of the server is too long";

/// Reads the fields on the first level of a message, without keeping the rest.
#[derive(Default)]
pub(super) struct Outline {
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Beginning of the current name or value on the first level.
    part: Vec<u8>,
    name: Vec<u8>,
    id: Option<Vec<u8>>,
    is_request: bool,
}

impl Outline {
    /// Reads the next bytes.
    pub(super) fn read(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.byte(*byte);
        }
    }

    fn byte(&mut self, byte: u8) {
        if self.in_string {
            self.in_string = self.escaped || byte != b'"';
            self.escaped = byte == b'\\' && !self.escaped;
            return self.keep(byte);
        }
        match byte {
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                if self.depth == 1 {
                    self.end_field();
                }
                self.depth = self.depth.saturating_sub(1);
            }
            b':' if self.depth == 1 => self.name = std::mem::take(&mut self.part),
            b',' if self.depth == 1 => self.end_field(),
            b' ' | b'\t' | b'\r' => {}
            _ => {
                self.in_string = byte == b'"';
                self.keep(byte);
            }
        }
    }

    fn keep(&mut self, byte: u8) {
        if self.depth == 1 && self.part.len() < KEPT_BYTES {
            self.part.push(byte);
        }
    }

    fn end_field(&mut self) {
        let value = std::mem::take(&mut self.part);
        match self.name.as_slice() {
            b"\"id\"" => self.id = Some(value),
            b"\"method\"" => self.is_request = true,
            _ => {}
        }
        self.name.clear();
    }

    /// Returns an error in place of the message, if it is the answer to a request.
    pub(super) fn as_error(&self) -> Option<RxJsonRpcMessage<RoleClient>> {
        if self.is_request {
            return None;
        }
        let id: RequestId = serde_json::from_slice(self.id.as_ref()?).ok()?;
        Some(ServerJsonRpcMessage::error(ErrorData::internal_error(TOO_LONG, None), Some(id)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outline(message: &str) -> Outline {
        let mut outline = Outline::default();
        message.as_bytes().chunks(3).for_each(|chunk| outline.read(chunk));
        outline
    }

    #[test]
    fn the_id_of_an_answer_is_found_wherever_it_is() {
        let content = r#"{"id": 9, "text": "\"id\": 8, } \\", "list": [{"id": 7}, "x"]}"#;
        for message in [
            format!(r#"{{"jsonrpc": "2.0", "id": 3, "result": {content}}}"#),
            format!(r#"{{"result":{content},"jsonrpc":"2.0","id":3}}"#),
        ] {
            let error = serde_json::to_value(outline(&message).as_error().unwrap()).unwrap();
            assert_eq!(
                (&error["id"], &error["error"]["message"]),
                (&3.into(), &TOO_LONG.into()),
                "{message}"
            );
        }
        let named = serde_json::to_value(outline(r#"{"id":"a, b","result":1}"#).as_error().unwrap()).unwrap();
        assert_eq!(named["id"], "a, b");
    }

    #[test]
    fn requests_notifications_and_nonsense_have_no_answer() {
        for message in [
            r#"{"id":3,"method":"ping"}"#,
            r#"{"method":"notifications/message","params":{"id":3}}"#,
            r#"{"id":{"a":1},"result":1}"#,
            "]]}}{\"id\"",
            "",
        ] {
            assert!(outline(message).as_error().is_none(), "{message}");
        }
        let long = format!(r#"{{"id":"{}","result":1}}"#, "x".repeat(KEPT_BYTES));
        assert!(outline(&long).as_error().is_none());
    }
}
