//! Proxies in front of a server, such as a database: one that can cut or stall connections, and one that delays them.

use std::io::{Read, Write};
use std::net;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// Behaviour of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Fault {
    None,
    /// The next commit does not reach the database, and its connection is cut.
    LoseCommit,
    /// The next commit is carried out, but its connection is cut before the answer.
    LoseAnswer,
    /// Like `LoseCommit` and `LoseAnswer`; from then on, the database is away.
    LoseCommitAndLeave,
    LoseAnswerAndLeave,
    /// New connections are refused.
    Away,
    /// Nothing is passed on, in either direction, until the fault ends. Connections stay open.
    Stall,
}

const FAULTS: [Fault; 7] = [
    Fault::None,
    Fault::LoseCommit,
    Fault::LoseAnswer,
    Fault::LoseCommitAndLeave,
    Fault::LoseAnswerAndLeave,
    Fault::Away,
    Fault::Stall,
];
/// Interval at which a stalled connection checks whether the fault is over.
const STALL_POLL: Duration = Duration::from_millis(10);
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
        Proxy::balance(&[to]).await
    }

    /// Starts a proxy that passes each connection on to the next of these ports at which a server listens.
    pub async fn balance(to: &[u16]) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            fault: AtomicU8::new(0),
            cut: AtomicUsize::new(0),
            connections: Mutex::default(),
        });
        let (shared, mut targets) = (Arc::clone(&state), to.to_vec());
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if shared.fault() == Fault::Away {
                    continue;
                }
                targets.rotate_left(1);
                let connection = tokio::spawn(relay(client, targets.clone(), Arc::clone(&shared)));
                shared.connections.lock().unwrap().push(connection.abort_handle());
            }
        });
        Proxy { port, state, accepting: accepting.abort_handle() }
    }

    /// Sets the fault. `Away` also cuts all connections.
    pub fn set(&self, fault: Fault) {
        self.state.fault.store(fault as u8, Ordering::SeqCst);
        self.state.cut_if_away();
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

    /// Cuts all connections if the database is away.
    fn cut_if_away(&self) {
        if self.fault() == Fault::Away {
            self.connections.lock().unwrap().drain(..).for_each(|connection| connection.abort());
        }
    }

    /// Waits while connections stall.
    async fn pass(&self) {
        while self.fault() == Fault::Stall {
            tokio::time::sleep(STALL_POLL).await;
        }
    }

    /// Takes a fault that affects one commit.
    fn take(&self, fault: Fault, and_leave: Fault) -> bool {
        let then = |from: Fault, to: Fault| {
            self.fault.compare_exchange(from as u8, to as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        let taken = then(fault, Fault::None) || then(and_leave, Fault::Away);
        if taken {
            self.cut.fetch_add(1, Ordering::SeqCst);
        }
        taken
    }
}

async fn relay(mut client: TcpStream, targets: Vec<u16>, state: Arc<State>) {
    let Some(mut server) = connect(&targets).await else { return };
    let (mut sent, mut answered) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    loop {
        tokio::select! {
            read = client.read(&mut sent) => {
                let Ok(bytes @ 1..) = read else { return };
                let sent = &sent[..bytes];
                state.pass().await;
                let commits = contains_commit(sent);
                if commits && state.take(Fault::LoseCommit, Fault::LoseCommitAndLeave) {
                    return state.cut_if_away();
                }
                if server.write_all(sent).await.is_err() {
                    return;
                }
                if commits && state.take(Fault::LoseAnswer, Fault::LoseAnswerAndLeave) {
                    // The answer repeats the command when it was carried out.
                    let mut answer = Vec::new();
                    while let Ok(bytes @ 1..) = server.read(&mut answered).await {
                        answer.extend_from_slice(&answered[..bytes]);
                        if contains_commit(&answer) {
                            break;
                        }
                    }
                    return state.cut_if_away();
                }
            }
            read = server.read(&mut answered) => {
                let Ok(bytes @ 1..) = read else { return };
                state.pass().await;
                if client.write_all(&answered[..bytes]).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Connects to the first port at which a server listens.
async fn connect(targets: &[u16]) -> Option<TcpStream> {
    for port in targets {
        if let Ok(server) = TcpStream::connect(("127.0.0.1", *port)).await {
            return Some(server);
        }
    }
    None
}

fn contains_commit(bytes: &[u8]) -> bool {
    bytes.windows(COMMIT.len()).any(|window| window == COMMIT)
}

/// A proxy that delays everything, like a network between two machines. Timers of an async runtime are too coarse for
/// that, so it uses threads.
pub struct Delay {
    pub port: u16,
}

impl Delay {
    /// Starts a proxy to a port of this machine that adds `round_trip` to each round trip. It ends with the process.
    pub fn start(to: u16, round_trip: Duration) -> Delay {
        let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let one_way = round_trip / 2;
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = net::TcpStream::connect(("127.0.0.1", to)) else { continue };
                let (Ok(from_client), Ok(from_server)) = (client.try_clone(), server.try_clone()) else {
                    continue;
                };
                std::thread::spawn(move || pass_on(from_client, server, one_way));
                std::thread::spawn(move || pass_on(from_server, client, one_way));
            }
        });
        Delay { port }
    }
}

/// Passes bytes on until one of the sides closes its connection.
fn pass_on(mut from: net::TcpStream, mut to: net::TcpStream, delay: Duration) {
    // Without it the delay is longer, and a benchmark shows how long a round trip is.
    to.set_nodelay(true).ok();
    let mut buffer = vec![0; 256 * 1024];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        std::thread::sleep(delay);
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    // The other side may have closed it.
    to.shutdown(net::Shutdown::Both).ok();
}
