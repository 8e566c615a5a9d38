//! Resolves host names for the connector, and returns only the addresses that the policy permits.
//!
//! The connector uses exactly these addresses and does not resolve the name again, so that the name cannot change its
//! addresses between check and use. It does not call the resolver for literal addresses; the client checks those.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::{io, vec};

use hyper_util::client::legacy::connect::dns::Name;
use rap_protocol::{Forbidden, UrlPolicy};
use tower::Service;

#[derive(Clone)]
pub(super) struct Resolver {
    policy: UrlPolicy,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Forbidden(Forbidden),
    #[error("the name could not be resolved")]
    Unresolved(#[source] io::Error),
}

impl Resolver {
    pub(super) fn new(policy: UrlPolicy) -> Self {
        Resolver { policy }
    }
}

impl Service<Name> for Resolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let policy = self.policy;
        Box::pin(async move {
            // The connector replaces port 0 by the port of the URL.
            let found = tokio::net::lookup_host((name.as_str(), 0)).await.map_err(Error::Unresolved)?;
            Ok(permitted(policy, found.collect())?.into_iter())
        })
    }
}

fn permitted(policy: UrlPolicy, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Error> {
    let (good, bad): (Vec<_>, Vec<_>) = found.into_iter().partition(|address| policy.permits(address.ip()));
    match (good.is_empty(), bad.first()) {
        (false, _) => Ok(good),
        (true, Some(address)) => Err(Error::Forbidden(Forbidden::Address(address.ip()))),
        (true, None) => Err(Error::Unresolved(io::ErrorKind::NotFound.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(policy: UrlPolicy, found: &[&str]) -> String {
        let found = found.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect();
        match permitted(policy, found) {
            Ok(good) => good.iter().map(|address| address.ip().to_string()).collect::<Vec<_>>().join(" "),
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
}
