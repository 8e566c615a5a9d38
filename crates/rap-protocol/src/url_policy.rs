//! Policy for URLs that come from untrusted messages: callback, endpoint and response URLs.
//!
//! This module decides whether a URL or an IP address is permitted and does no IO. The HTTP client has to check every
//! address that a host name resolves to and to connect only to the checked addresses. Otherwise a name could resolve to
//! a different address between the check and the connection.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use url::{Host, Url};

/// Addresses that a URL from an untrusted message may point to. Cloud metadata services and link-local, multicast,
/// unspecified and reserved addresses are forbidden by every policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UrlPolicy {
    /// Loopback, private networks and the internet.
    #[default]
    Local,
    /// Private networks and the internet, but not loopback.
    Private,
    /// Only the internet.
    Public,
}

/// Reason why a URL is not permitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Forbidden {
    /// The scheme is neither http nor https.
    #[error("the scheme is not http or https")]
    Scheme,
    /// The URL has no host.
    #[error("the URL names no host")]
    NoHost,
    /// The policy does not permit this address.
    #[error("the address {0} is not permitted by the URL policy")]
    Address(IpAddr),
}

impl UrlPolicy {
    /// Checks the scheme and the host of a URL. An IP address is checked at once; a host name has to be resolved by the
    /// caller, who checks each address with [`UrlPolicy::permits`].
    pub fn check(&self, url: &Url) -> Result<(), Forbidden> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(Forbidden::Scheme);
        }
        let ip = match url.host() {
            None => return Err(Forbidden::NoHost),
            Some(Host::Domain("")) => return Err(Forbidden::NoHost),
            Some(Host::Domain(_)) => return Ok(()),
            Some(Host::Ipv4(ip)) => IpAddr::V4(ip),
            Some(Host::Ipv6(ip)) => IpAddr::V6(ip),
        };
        if self.permits(ip) { Ok(()) } else { Err(Forbidden::Address(ip)) }
    }

    /// Returns true if connections to this address are permitted.
    pub fn permits(&self, ip: IpAddr) -> bool {
        match zone(ip) {
            Zone::Never => false,
            Zone::Loopback => matches!(self, UrlPolicy::Local),
            Zone::Private => matches!(self, UrlPolicy::Local | UrlPolicy::Private),
            Zone::Public => true,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Zone {
    Never,
    Loopback,
    Private,
    Public,
}

/// Addresses of cloud metadata services that do not lie in the link-local range.
const METADATA_V4: [Ipv4Addr; 2] = [Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(100, 100, 100, 200)];
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

fn zone(ip: IpAddr) -> Zone {
    match ip {
        IpAddr::V4(ip) => zone_v4(ip),
        IpAddr::V6(ip) => match embedded_v4(ip) {
            Some(v4) => zone_v4(v4),
            None => zone_v6(ip),
        },
    }
}

/// IPv4 address that is embedded in an IPv6 address: mapped, compatible, NAT64 or 6to4. It is checked as an IPv4
/// address, because that is where the connection leads.
fn embedded_v4(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    const NAT64: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);
    const LOCAL_NAT64: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0), 48);
    const COMPATIBLE: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 96);
    const SIX_TO_FOUR: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16);
    if let Some(v4) = ip.to_ipv4_mapped() {
        return Some(v4);
    }
    if ip.is_loopback() || ip.is_unspecified() {
        return None;
    }
    let [_, _, e, f, g, h, .., a, b, c, d] = ip.octets();
    if SIX_TO_FOUR.contains(&ip) {
        return Some(Ipv4Addr::new(e, f, g, h));
    }
    let in_last_four_octets = [NAT64, LOCAL_NAT64, COMPATIBLE].iter().any(|net| net.contains(&ip));
    in_last_four_octets.then(|| Ipv4Addr::new(a, b, c, d))
}

fn zone_v4(ip: Ipv4Addr) -> Zone {
    const THIS_NETWORK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(0, 0, 0, 0), 8);
    const RESERVED: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(240, 0, 0, 0), 4);
    const CARRIER: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(100, 64, 0, 0), 10);
    const PROTOCOL: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(192, 0, 0, 0), 24);
    const BENCHMARK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(198, 18, 0, 0), 15);
    if ip.is_link_local() || ip.is_multicast() || THIS_NETWORK.contains(&ip) || RESERVED.contains(&ip) {
        return Zone::Never;
    }
    if METADATA_V4.contains(&ip) {
        return Zone::Never;
    }
    if ip.is_loopback() {
        return Zone::Loopback;
    }
    let private = ip.is_private() || [CARRIER, PROTOCOL, BENCHMARK].iter().any(|net| net.contains(&ip));
    if private { Zone::Private } else { Zone::Public }
}

fn zone_v6(ip: Ipv6Addr) -> Zone {
    if ip.is_unspecified() || ip.is_multicast() || ip.is_unicast_link_local() || ip == METADATA_V6 {
        return Zone::Never;
    }
    if ip.is_loopback() {
        return Zone::Loopback;
    }
    const SITE_LOCAL: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0), 10);
    if ip.is_unique_local() || SITE_LOCAL.contains(&ip) { Zone::Private } else { Zone::Public }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permitted_by(url: &str) -> [bool; 3] {
        let url = Url::parse(url).unwrap();
        [UrlPolicy::Local, UrlPolicy::Private, UrlPolicy::Public].map(|policy| policy.check(&url).is_ok())
    }

    #[test]
    fn each_policy_permits_its_address_ranges() {
        let table = [
            ("https://example.com/x", [true, true, true]),
            ("http://93.184.216.34/", [true, true, true]),
            ("http://[2606:2800:220:1::1]/", [true, true, true]),
            ("http://10.1.2.3/", [true, true, false]),
            ("http://192.168.0.1:8080/", [true, true, false]),
            ("http://172.31.0.1/", [true, true, false]),
            ("http://100.64.0.1/", [true, true, false]),
            ("http://[fd12::1]/", [true, true, false]),
            ("http://127.0.0.1:9/", [true, false, false]),
            ("http://[::1]/", [true, false, false]),
            ("http://[::ffff:127.0.0.1]/", [true, false, false]),
            ("http://[::ffff:10.0.0.1]/", [true, true, false]),
            ("http://[64:ff9b::7f00:1]/", [true, false, false]),
            ("http://[64:ff9b:1::7f00:1]/", [true, false, false]),
            ("http://[::127.0.0.1]/", [true, false, false]),
            ("http://[2002:7f00:1::]/", [true, false, false]),
            ("http://[2002:a00:1::]/", [true, true, false]),
            ("http://[fec0::1]/", [true, true, false]),
            ("http://2130706433/", [true, false, false]),
            ("http://0x7f.1/", [true, false, false]),
        ];
        for (url, expected) in table {
            assert_eq!(permitted_by(url), expected, "{url}");
        }
    }

    #[test]
    fn some_addresses_are_forbidden_by_every_policy() {
        let hosts = [
            "169.254.169.254",
            "[::ffff:169.254.169.254]",
            "[64:ff9b::a9fe:a9fe]",
            "[2002:a9fe:a9fe::]",
            "[::169.254.169.254]",
            "[fd00:ec2::254]",
            "168.63.129.16",
            "100.100.100.200",
            "0.0.0.0",
            "0.1.2.3",
            "255.255.255.255",
            "224.0.0.1",
            "[fe80::1]",
            "[ff02::1]",
            "[::]",
        ];
        for host in hosts {
            assert_eq!(permitted_by(&format!("http://{host}/")), [false; 3], "{host}");
        }
    }

    #[test]
    fn only_http_and_https_are_permitted() {
        for url in ["ftp://example.com/", "file:///etc/passwd", "gopher://127.0.0.1/", "data:text/plain,x"] {
            assert_eq!(UrlPolicy::Local.check(&Url::parse(url).unwrap()), Err(Forbidden::Scheme), "{url}");
        }
    }
}
