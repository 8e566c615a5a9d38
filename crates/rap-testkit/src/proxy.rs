//! A proxy between a node and its database, which can cut connections.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// What the proxy does with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Fault {
    None,
    /// The next commit does not reach the database, and its connection is cut.
    LoseCommit,
    /// The next commit is carried out, but its connection is cut before the answer.
    LoseAnswer,
    /// New connections are refused.
    Away,
}

const FAULTS: [Fault; 4] = [Fault::None, Fault::LoseCommit, Fault::LoseAnswer, Fault::Away];
/// The command as it is sent: its text ends with a zero byte.
const COMMIT: &[u8] = b"COMMIT\0";

pub struct Proxy {
    pub port: u16,
    state: Arc<State>,
    accepting: AbortHandle,
}

struct State {
    fault: AtomicU8,
    /// Number of connections that were cut.
    cut: AtomicUsize,
    connections: Mutex<Vec<AbortHandle>>,
}

impl Proxy {
    /// Starts a proxy to a port of this machine.
    pub async fn start(to: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            fault: AtomicU8::new(0),
            cut: AtomicUsize::new(0),
            connections: Mutex::default(),
        });
        let shared = Arc::clone(&state);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if shared.fault() == Fault::Away {
                    continue;
                }
                let connection = tokio::spawn(relay(client, to, Arc::clone(&shared)));
                shared.connections.lock().unwrap().push(connection.abort_handle());
            }
        });
        Proxy { port, state, accepting: accepting.abort_handle() }
    }

    /// Sets the fault. `Away` also cuts all connections.
    pub fn set(&self, fault: Fault) {
        self.state.fault.store(fault as u8, Ordering::SeqCst);
        if fault == Fault::Away {
            self.state.connections.lock().unwrap().drain(..).for_each(|connection| connection.abort());
        }
    }

    /// Number of commits that were cut.
    pub fn cut(&self) -> usize {
        self.state.cut.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.set(Fault::Away);
        self.accepting.abort();
    }
}

impl State {
    fn fault(&self) -> Fault {
        FAULTS[usize::from(self.fault.load(Ordering::SeqCst))]
    }

    /// Takes a fault that affects one commit.
    fn take(&self, fault: Fault) -> bool {
        let taken = self.fault.compare_exchange(fault as u8, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if taken {
            self.cut.fetch_add(1, Ordering::SeqCst);
        }
        taken
    }
}

async fn relay(mut client: TcpStream, to: u16, state: Arc<State>) {
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", to)).await else { return };
    let (mut sent, mut answered) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    loop {
        tokio::select! {
            read = client.read(&mut sent) => {
                let Ok(bytes @ 1..) = read else { return };
                let sent = &sent[..bytes];
                let commits = contains_commit(sent);
                if commits && state.take(Fault::LoseCommit) {
                    return;
                }
                if server.write_all(sent).await.is_err() {
                    return;
                }
                if commits && state.take(Fault::LoseAnswer) {
                    // The answer repeats the command when it was carried out.
                    let mut answer = Vec::new();
                    while let Ok(bytes @ 1..) = server.read(&mut answered).await {
                        answer.extend_from_slice(&answered[..bytes]);
                        if contains_commit(&answer) {
                            break;
                        }
                    }
                    return;
                }
            }
            read = server.read(&mut answered) => {
                let Ok(bytes @ 1..) = read else { return };
                if client.write_all(&answered[..bytes]).await.is_err() {
                    return;
                }
            }
        }
    }
}

fn contains_commit(bytes: &[u8]) -> bool {
    bytes.windows(COMMIT.len()).any(|window| window == COMMIT)
}
