//! Policy for URLs that come from untrusted messages: callback, endpoint and response URLs.
//!
//! This module decides whether a URL or an IP address is permitted and does no IO. The HTTP client has to check every
//! address that a host name resolves to and to connect only to the checked addresses. Otherwise a name could resolve to
//! a different address between the check and the connection.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use url::Url;

use crate::url_rules::UrlRules;

/// Addresses that a URL from an untrusted message may point to. Cloud metadata services, link-local, multicast,
/// unspecified and reserved addresses, and IPv6 addresses that contain an IPv4 address, are forbidden by every policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UrlPolicy {
    /// This machine, private networks and the internet.
    Loopback,
    /// Private networks and the internet, but not this machine.
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
    /// The URL leads to the server that would send the request.
    #[error("the URL leads back to this server")]
    OwnServer,
    /// The URL is http and was named by a server that is configured with https.
    #[error("the URL is http, but its server is configured with https")]
    Downgrade,
}

impl UrlPolicy {
    /// Returns the default policy of a server that listens on this address: only a server on loopback may send to
    /// loopback.
    pub fn of_listener(ip: IpAddr) -> UrlPolicy {
        if ip.to_canonical().is_loopback() { UrlPolicy::Loopback } else { UrlPolicy::Private }
    }

    /// Parses the name of a policy in a configuration: `public`, `private` or `loopback`.
    pub fn from_name(name: &str) -> Option<UrlPolicy> {
        match name {
            "loopback" => Some(UrlPolicy::Loopback),
            "private" => Some(UrlPolicy::Private),
            "public" => Some(UrlPolicy::Public),
            _ => None,
        }
    }

    /// Returns the name of the policy in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            UrlPolicy::Loopback => "loopback",
            UrlPolicy::Private => "private",
            UrlPolicy::Public => "public",
        }
    }

    /// Checks the scheme and the host of a URL. An IP address is checked at once; a host name has to be resolved by the
    /// caller, who checks each address with [`UrlPolicy::permits`].
    pub fn check(&self, url: &Url) -> Result<(), Forbidden> {
        UrlRules::from(*self).check(url)
    }

    /// Returns true if connections to this address are permitted.
    pub fn permits(&self, ip: IpAddr) -> bool {
        match zone(ip) {
            Zone::Never => false,
            Zone::Loopback => matches!(self, UrlPolicy::Loopback),
            Zone::Private => matches!(self, UrlPolicy::Loopback | UrlPolicy::Private),
            Zone::Public => true,
        }
    }
}

/// Returns true for addresses that every policy forbids.
pub(crate) fn is_never_permitted(ip: IpAddr) -> bool {
    zone(ip) == Zone::Never
}

#[derive(Debug, PartialEq, Eq)]
enum Zone {
    Never,
    Loopback,
    Private,
    Public,
}

fn zone(ip: IpAddr) -> Zone {
    match ip {
        IpAddr::V4(ip) => zone_v4(ip),
        IpAddr::V6(ip) => zone_v6(ip),
    }
}

const fn net_v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn net_v6(a: u16, b: u16, prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, 0, 0, 0, 0, 0, 0), prefix)
}

/// IPv4 networks that are not for use between machines, and metadata services outside of the link-local range.
const NEVER_V4: [Ipv4Net; 12] = [
    net_v4(0, 0, 0, 0, 8),
    // Metadata of Alibaba Cloud.
    net_v4(100, 100, 100, 200, 32),
    // Platform services of Azure.
    net_v4(168, 63, 129, 16, 32),
    net_v4(169, 254, 0, 0, 16),
    // Protocol assignments; 192.0.0.192 is the metadata service of Oracle Cloud.
    net_v4(192, 0, 0, 0, 24),
    net_v4(192, 0, 2, 0, 24),
    // Relays of 6to4.
    net_v4(192, 88, 99, 0, 24),
    net_v4(198, 18, 0, 0, 15),
    net_v4(198, 51, 100, 0, 24),
    net_v4(203, 0, 113, 0, 24),
    // Multicast.
    net_v4(224, 0, 0, 0, 4),
    net_v4(240, 0, 0, 0, 4),
];

fn zone_v4(ip: Ipv4Addr) -> Zone {
    const CARRIER: Ipv4Net = net_v4(100, 64, 0, 0, 10);
    if NEVER_V4.iter().any(|net| net.contains(&ip)) {
        return Zone::Never;
    }
    if ip.is_loopback() {
        return Zone::Loopback;
    }
    if ip.is_private() || CARRIER.contains(&ip) { Zone::Private } else { Zone::Public }
}

/// Metadata services in the range of unique local addresses: AWS, Google Cloud, Scaleway.
const METADATA_V6: [Ipv6Net; 3] =
    [net_v6(0xfd00, 0xec2, 32), net_v6(0xfd20, 0xce, 32), net_v6(0xfd00, 0x42, 32)];

/// Parts of the global unicast range that are reserved, or that lead to an embedded IPv4 address.
const NEVER_V6: [Ipv6Net; 4] = [
    // Protocol assignments, with Teredo.
    net_v6(0x2001, 0, 23),
    // Documentation.
    net_v6(0x2001, 0xdb8, 32),
    net_v6(0x3fff, 0, 20),
    // 6to4.
    net_v6(0x2002, 0, 16),
];

/// Permits only ::1, unique local and global unicast addresses. That excludes IPv4-mapped and IPv4-compatible addresses
/// and NAT64, whose connections lead to an IPv4 address.
fn zone_v6(ip: Ipv6Addr) -> Zone {
    const GLOBAL: Ipv6Net = net_v6(0x2000, 0, 3);
    if ip.is_loopback() {
        return Zone::Loopback;
    }
    if is_isatap(ip) {
        return Zone::Never;
    }
    if ip.is_unique_local() {
        let metadata = METADATA_V6.iter().any(|net| net.contains(&ip));
        return if metadata { Zone::Never } else { Zone::Private };
    }
    let reserved = NEVER_V6.iter().any(|net| net.contains(&ip));
    if GLOBAL.contains(&ip) && !reserved { Zone::Public } else { Zone::Never }
}

/// Returns true if the interface identifier contains an IPv4 address as ISATAP does (RFC 5214). Any network can have
/// one.
fn is_isatap(ip: Ipv6Addr) -> bool {
    const FLAGS: u16 = 0x0300;
    let [.., scope, marker, _, _] = ip.segments();
    scope & !FLAGS == 0 && marker == 0x5efe
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permitted_by(url: &str) -> [bool; 3] {
        let url = Url::parse(url).unwrap();
        [UrlPolicy::Loopback, UrlPolicy::Private, UrlPolicy::Public].map(|policy| policy.check(&url).is_ok())
    }

    #[test]
    fn each_policy_permits_its_address_ranges() {
        let table = [
            ("https://example.com/x", [true, true, true]),
            ("http://93.184.216.34/", [true, true, true]),
            ("http://[2606:2800:220:1::1]/", [true, true, true]),
            ("http://[2001:200::1]/", [true, true, true]),
            ("http://10.1.2.3/", [true, true, false]),
            ("http://192.168.0.1:8080/", [true, true, false]),
            ("http://172.31.0.1/", [true, true, false]),
            ("http://172.32.0.1/", [true, true, true]),
            ("http://100.64.0.1/", [true, true, false]),
            ("http://[fd12::1]/", [true, true, false]),
            ("http://[fc00::1]/", [true, true, false]),
            ("http://127.0.0.1:9/", [true, false, false]),
            ("http://127.0.0.2/", [true, false, false]),
            ("http://[::1]/", [true, false, false]),
            ("http://2130706433/", [true, false, false]),
            ("http://0x7f.1/", [true, false, false]),
            ("http://017700000001/", [true, false, false]),
        ];
        for (url, expected) in table {
            assert_eq!(permitted_by(url), expected, "{url}");
        }
    }

    #[test]
    fn some_addresses_are_forbidden_by_every_policy() {
        let hosts = [
            // Metadata services.
            "169.254.169.254",
            "2852039166",
            "0xa9fea9fe",
            "0251.0376.0251.0376",
            "168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "[fd00:ec2::254]",
            "[fd00:ec2::23]",
            "[fd00:ec2:ffff:1::1]",
            "[fd20:ce::254]",
            "[fd00:42::42]",
            // Link-local, multicast, unspecified, reserved.
            "169.254.0.1",
            "0.0.0.0",
            "0.1.2.3",
            "192.0.2.1",
            "192.88.99.1",
            "198.18.0.1",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "[::]",
            "[fe80::1]",
            "[febf::1]",
            "[fec0::1]",
            "[ff02::1]",
            "[100::1]",
            "[5f00::1]",
            "[2001:db8::1]",
            "[3fff::1]",
            // IPv4-mapped and IPv4-compatible.
            "[::ffff:127.0.0.1]",
            "[::ffff:10.0.0.1]",
            "[::ffff:93.184.216.34]",
            "[::ffff:169.254.169.254]",
            "[::ffff:0:7f00:1]",
            "[::127.0.0.1]",
            "[::169.254.169.254]",
            // NAT64.
            "[64:ff9b::7f00:1]",
            "[64:ff9b::a9fe:a9fe]",
            "[64:ff9b::5db8:d822]",
            "[64:ff9b:1::7f00:1]",
            // 6to4.
            "[2002:7f00:1::]",
            "[2002:a9fe:a9fe::]",
            // Teredo.
            "[2001::1]",
            "[2001:0:4136:e378:8000:63bf:80ff:fffe]",
            // ISATAP.
            "[2606:2800:220:1:0:5efe:7f00:1]",
            "[2606:2800:220:1:200:5efe:a9fe:a9fe]",
            "[fd12::5efe:10.0.0.1]",
            "[fe80::5efe:10.0.0.1]",
        ];
        for host in hosts {
            assert_eq!(permitted_by(&format!("http://{host}/")), [false; 3], "{host}");
        }
    }

    #[test]
    fn only_http_and_https_are_permitted() {
        for url in ["ftp://example.com/", "file:///etc/passwd", "gopher://127.0.0.1/", "data:text/plain,x"] {
            assert_eq!(UrlPolicy::Loopback.check(&Url::parse(url).unwrap()), Err(Forbidden::Scheme), "{url}");
        }
    }

    #[test]
    fn only_a_server_on_loopback_sends_to_loopback_by_default() {
        let table = [
            ("127.0.0.1", UrlPolicy::Loopback),
            ("127.0.0.2", UrlPolicy::Loopback),
            ("::1", UrlPolicy::Loopback),
            ("::ffff:127.0.0.1", UrlPolicy::Loopback),
            ("0.0.0.0", UrlPolicy::Private),
            ("::", UrlPolicy::Private),
            ("10.0.0.1", UrlPolicy::Private),
        ];
        for (ip, expected) in table {
            assert_eq!(UrlPolicy::of_listener(ip.parse().unwrap()), expected, "{ip}");
        }
    }

    #[test]
    fn a_policy_has_the_name_of_the_configuration() {
        for (name, policy) in [
            ("loopback", UrlPolicy::Loopback),
            ("private", UrlPolicy::Private),
            ("public", UrlPolicy::Public),
        ] {
            assert_eq!(UrlPolicy::from_name(name), Some(policy));
        }
        assert_eq!(UrlPolicy::from_name("Public"), None);
        assert_eq!(UrlPolicy::from_name(""), None);
    }
}
