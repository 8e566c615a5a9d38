//! A port for a server that is started later or restarted.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::TcpSocket;

/// A free port on loopback, reserved until it is dropped.
///
/// The system chooses the port. On Linux, a socket stays bound to it without listening: servers can bind the port too,
/// since they set `SO_REUSEADDR`, but the system gives it to nobody else, even while its server restarts. Without a
/// server, connections are refused.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _reservation: Option<TcpSocket>,
}

impl Port {
    pub fn reserve() -> Port {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let number = socket.local_addr().unwrap().port();
        // Other systems refuse a second socket on the same port.
        Port { number, _reservation: cfg!(target_os = "linux").then_some(socket) }
    }

    pub fn number(&self) -> u16 {
        self.number
    }

    /// Address for the configuration of a server.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.number)
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_reserved_port_refuses_connections_until_a_server_listens_and_again_when_it_is_gone() {
        let port = Port::reserve();
        for _ in 0..2 {
            assert_eq!(TcpStream::connect(port.address()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
            let _server = TcpListener::bind(port.address()).unwrap();
            TcpStream::connect(port.address()).unwrap();
            assert_eq!(TcpListener::bind(port.address()).unwrap_err().kind(), ErrorKind::AddrInUse);
        }
    }
}
