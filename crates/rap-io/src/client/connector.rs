//! Connects to the addresses that the rules permit.
//!
//! The name of a host is resolved once per connection. Each address is checked, and the connection goes to a checked
//! address, so that a name cannot change its addresses between check and use. Literal addresses are checked as well.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{future, io, vec};

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioIo;
use rap_protocol::{Forbidden, Origin, UrlRules};
use tokio::net::TcpStream;
use tower::Service;
use url::{Host, Url};

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Resolves a host name.
pub(super) type Lookup = Arc<dyn Fn(String) -> BoxFuture<io::Result<Vec<IpAddr>>> + Send + Sync>;

#[derive(Clone)]
pub(super) struct Connector {
    rules: Arc<UrlRules>,
    lookup: Lookup,
    timeout: Duration,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Forbidden(#[from] Forbidden),
    #[error("the name could not be resolved")]
    Unresolved(#[source] io::Error),
}

impl Connector {
    pub(super) fn new(rules: Arc<UrlRules>, lookup: Lookup, timeout: Duration) -> Self {
        Connector { rules, lookup, timeout }
    }

    /// Returns the permitted addresses of the URL's host.
    async fn addresses(&self, uri: &Uri) -> Result<Vec<SocketAddr>, Error> {
        // A client checks the URL before it connects.
        let url = Url::parse(&uri.to_string()).map_err(|_| Forbidden::NoHost)?;
        let (origin, port) = (Origin::of(&url)?, url.port_or_known_default().unwrap_or_default());
        let found = match url.host() {
            None => return Err(Forbidden::NoHost.into()),
            Some(Host::Ipv4(ip)) => vec![IpAddr::V4(ip)],
            Some(Host::Ipv6(ip)) => vec![IpAddr::V6(ip)],
            Some(Host::Domain(name)) => (self.lookup)(name.to_owned()).await.map_err(Error::Unresolved)?,
        };
        let found = permitted(&self.rules, &origin, found)?;
        Ok(found.into_iter().map(|ip| SocketAddr::new(ip, port)).collect())
    }

    async fn connect(self, uri: Uri) -> Result<TokioIo<TcpStream>, BoxError> {
        let pinned = Pinned(self.addresses(&uri).await?);
        let mut tcp = HttpConnector::new_with_resolver(pinned);
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(self.timeout));
        Ok(tcp.call(uri).await?)
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = BoxFuture<Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// Resolver that returns addresses that were checked before.
#[derive(Clone)]
struct Pinned(Vec<SocketAddr>);

impl Service<Name> for Pinned {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = future::Ready<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Name) -> Self::Future {
        future::ready(Ok(self.0.clone().into_iter()))
    }
}

/// Resolves names as the operating system does.
pub(super) fn system_lookup() -> Lookup {
    Arc::new(|name| {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name, 0)).await?;
            Ok(found.map(|address| address.ip()).collect())
        })
    })
}

/// Returns true if the address is assigned to this machine. Only such an address can be bound. Nothing is sent.
fn is_this_machine(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

fn permitted(rules: &UrlRules, origin: &Origin, found: Vec<IpAddr>) -> Result<Vec<IpAddr>, Error> {
    let mut refused = None;
    let mut good = found;
    good.retain(|ip| match rules.check_address(origin, *ip, is_this_machine) {
        Ok(()) => true,
        Err(forbidden) => {
            refused.get_or_insert(forbidden);
            false
        }
    });
    match (good.is_empty(), refused) {
        (false, _) => Ok(good),
        (true, Some(forbidden)) => Err(forbidden.into()),
        (true, None) => Err(Error::Unresolved(io::ErrorKind::NotFound.into())),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rap_protocol::UrlPolicy;

    use super::*;

    fn check(policy: UrlPolicy, found: &[&str]) -> String {
        let origin = Origin::of(&Url::parse("http://name.example/").unwrap()).unwrap();
        let found = found.iter().map(|ip| ip.parse().unwrap()).collect();
        match permitted(&policy.into(), &origin, found) {
            Ok(good) => good.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" "),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn only_permitted_addresses_of_a_name_are_returned() {
        let table: [(&[&str], &str); 4] = [
            (&["93.184.216.34", "2606:4700::1"], "93.184.216.34 2606:4700::1"),
            (&["10.0.0.1", "93.184.216.34", "::1"], "93.184.216.34"),
            (&["10.0.0.1", "169.254.169.254"], "the address 10.0.0.1 is not permitted by the URL policy"),
            (&[], "the name could not be resolved"),
        ];
        for (found, expected) in table {
            assert_eq!(check(UrlPolicy::Public, found), expected, "{found:?}");
        }
    }

    #[test]
    fn an_address_of_this_machine_is_recognised() {
        for ip in ["127.0.0.1", "127.0.0.2"] {
            assert!(is_this_machine(ip.parse().unwrap()), "{ip}");
        }
        for ip in ["203.0.113.7", "198.51.100.7", "2001:db8::7"] {
            assert!(!is_this_machine(ip.parse().unwrap()), "{ip}");
        }
    }

    /// A lookup that returns one address after the other, and the number of its calls.
    fn changing(addresses: &'static [&str]) -> (Lookup, Arc<AtomicUsize>) {
        let calls = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&calls);
        let lookup: Lookup = Arc::new(move |_| {
            let call = counter.fetch_add(1, Ordering::SeqCst);
            let ip = addresses[call.min(addresses.len() - 1)].parse().unwrap();
            Box::pin(async move { Ok(vec![ip]) })
        });
        (lookup, calls)
    }

    fn connector(rules: UrlRules, lookup: Lookup) -> Connector {
        Connector::new(Arc::new(rules), lookup, Duration::from_secs(5))
    }

    #[tokio::test]
    async fn a_name_is_resolved_once_and_the_connection_goes_to_the_judged_address() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // The second answer would be refused.
        let (lookup, calls) = changing(&["127.0.0.1", "169.254.169.254"]);
        let mut connector = connector(UrlPolicy::Loopback.into(), lookup);
        let uri: Uri = format!("http://rebinding.example:{port}/").parse().unwrap();
        let stream = connector.call(uri.clone()).await.unwrap();
        assert_eq!(stream.inner().peer_addr().unwrap(), listener.local_addr().unwrap());
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        let error = connector.call(uri).await.unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(Error::Forbidden(Forbidden::Address(_)))), "{error}");
    }

    #[tokio::test]
    async fn a_name_that_leads_to_our_own_listener_is_refused() {
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let rules = UrlRules::from(UrlPolicy::Loopback).listening_on(address);
        for ip in [&["127.0.0.1"], &["127.0.0.2"], &["::1"]] {
            let uri = format!("http://me.example:{}/", address.port()).parse().unwrap();
            let error = connector(rules.clone(), changing(ip).0).call(uri).await.unwrap_err();
            assert!(matches!(error.downcast_ref(), Some(Error::Forbidden(Forbidden::OwnServer))), "{error}");
        }
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
