//! A model server whose answers the test sends in pieces, while the runtime reads them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;

use serde_json::{Value, json};

use crate::PATIENCE;

pub struct ManualModel {
    address: String,
    requests: mpsc::Receiver<TcpStream>,
}

/// An answer in progress.
pub struct Answer(TcpStream);

impl ManualModel {
    pub fn start() -> ManualModel {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sender, requests) = mpsc::channel();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if sender.send(read_request(stream.unwrap())).is_err() {
                    return;
                }
            }
        });
        ManualModel { address, requests }
    }

    /// Lines for `[model]` in the configuration.
    pub fn lines(&self) -> String {
        format!("provider = \"openai\"\nname = \"m\"\nbase_url = \"http://{}/v1\"\n", self.address)
    }

    /// The answer to the next model request.
    pub fn next_answer(&self) -> Answer {
        let mut stream = self.requests.recv_timeout(PATIENCE).expect("the model is asked");
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        Answer(stream)
    }
}

/// Reads a model request to its end.
fn read_request(stream: TcpStream) -> TcpStream {
    let mut reader = BufReader::new(&stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    reader.read_exact(&mut vec![0; length]).unwrap();
    stream
}

impl Answer {
    pub fn say(&mut self, text: &str) {
        self.send(&json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]}));
    }

    pub fn end(mut self) {
        self.send(&json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}));
        self.0.write_all(b"data: [DONE]\n\n").unwrap();
    }

    /// The connection ends in the middle of it.
    pub fn break_off(self) {}

    fn send(&mut self, chunk: &Value) {
        self.0.write_all(format!("data: {chunk}\n\n").as_bytes()).unwrap();
        self.0.flush().unwrap();
    }
}
