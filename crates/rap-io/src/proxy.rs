//! Identities of clients that a trusted proxy has verified and passes on in a header.

use std::fmt;

use http::{HeaderMap, HeaderName};
use ipnet::IpNet;

use crate::serve::Peer;

/// Maximum length of an identity, in bytes.
const IDENTITY_BYTES: usize = 512;

/// Proxies that verify client certificates, and the header in which they pass the name in the certificate on.
#[derive(Clone, PartialEq, Eq)]
pub struct TrustedProxies {
    header: HeaderName,
    networks: Vec<IpNet>,
}

/// The header or an address is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected the name of a header, and addresses or networks of proxies such as 10.0.0.7 or 10.0.0.0/24"
)]
pub struct BadProxies;

impl fmt::Debug for TrustedProxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TrustedProxies({} {:?})", self.header, self.networks)
    }
}

impl TrustedProxies {
    /// Parses the name of the header, and the addresses or networks of the proxies.
    pub fn parse<S: AsRef<str>>(header: &str, proxies: &[S]) -> Result<TrustedProxies, BadProxies> {
        let network = |text: &S| {
            let text = text.as_ref();
            text.parse().ok().or_else(|| Some(IpNet::from(text.parse::<std::net::IpAddr>().ok()?)))
        };
        let networks: Option<Vec<IpNet>> = proxies.iter().map(network).collect();
        let networks = networks.filter(|networks| !networks.is_empty()).ok_or(BadProxies)?;
        let header = header.to_ascii_lowercase().parse().map_err(|_| BadProxies)?;
        Ok(TrustedProxies { header, networks })
    }

    /// Returns the identity of a client behind a proxy. `None` if the connection does not come from a trusted proxy, or if
    /// the header is missing, empty or repeated.
    pub fn identity<'a>(&self, peer: &Peer, headers: &'a HeaderMap) -> Option<&'a str> {
        let ip = peer.address.ip().to_canonical();
        if !self.networks.iter().any(|network| network.contains(&ip)) {
            return None;
        }
        let mut values = headers.get_all(&self.header).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return None };
        let identity = value.to_str().ok()?.trim();
        (1..=IDENTITY_BYTES).contains(&identity.len()).then_some(identity)
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn identity(from: &str, values: &[&'static str]) -> Option<String> {
        let proxies = TrustedProxies::parse("X-Client", &["10.0.0.0/24", "127.0.0.1", "fd00::7"]).unwrap();
        let peer = Peer { address: from.parse().unwrap(), certificate: None };
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("x-client", HeaderValue::from_static(value));
        }
        proxies.identity(&peer, &headers).map(str::to_owned)
    }

    #[test]
    fn only_a_trusted_proxy_can_name_a_client() {
        for from in ["10.0.0.9:1", "127.0.0.1:1", "[::ffff:10.0.0.9]:1", "[fd00::7]:1"] {
            assert_eq!(identity(from, &["tools.example"]).as_deref(), Some("tools.example"), "{from}");
        }
        for from in ["10.0.1.9:1", "127.0.0.2:1", "192.0.2.1:1", "[fd00::8]:1", "[::1]:1"] {
            assert_eq!(identity(from, &["tools.example"]), None, "{from}");
        }
    }

    #[test]
    fn a_header_that_is_missing_empty_or_repeated_names_nobody() {
        let long = "x".repeat(IDENTITY_BYTES + 1).leak();
        for values in [&[][..], &[""], &[" "], &["a", "b"], &[long]] {
            assert_eq!(identity("10.0.0.9:1", values), None, "{values:?}");
        }
    }

    #[test]
    fn invalid_headers_and_networks_are_refused() {
        for (header, proxies) in [
            ("", &["10.0.0.1"][..]),
            ("a b", &["10.0.0.1"]),
            ("x", &["10.0.0.1/33"]),
            ("x", &["proxy"]),
            ("x", &[]),
        ] {
            assert_eq!(TrustedProxies::parse(header, proxies), Err(BadProxies), "{header} {proxies:?}");
        }
    }
}
