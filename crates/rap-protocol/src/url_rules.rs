//! Rules for the URLs that a client may send to: a [`UrlPolicy`], and what the operator of the server configured.
//!
//! The rules do no IO. [`UrlRules::check`] judges a URL by its text. The HTTP client resolves its host once, judges each
//! address with [`UrlRules::check_address`] and connects to the checked addresses only.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use url::{Host, Url};

use crate::url_policy::{Forbidden, UrlPolicy, is_never_permitted};

/// A host and a port. `localhost`, `127.0.0.1` and `[::1]` are one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    host: Host<String>,
    port: u16,
}

impl HostPort {
    /// Parses `host:port`. Both parts are required, and an IPv6 address is in brackets.
    pub fn parse(text: &str) -> Option<HostPort> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse().ok())??;
        Some(HostPort::new(Host::parse(host).ok()?, port))
    }

    /// Returns the host and port of an http or https URL.
    pub fn of(url: &Url) -> Option<HostPort> {
        Some(HostPort::new(url.host()?.to_owned(), url.port_or_known_default()?))
    }

    fn new(host: Host<String>, port: u16) -> HostPort {
        let host = match host {
            Host::Domain(name) => Host::Domain(name.strip_suffix('.').unwrap_or(&name).to_owned()),
            address => address,
        };
        let loopback = match &host {
            Host::Domain(name) => name == "localhost",
            Host::Ipv4(ip) => *ip == Ipv4Addr::LOCALHOST,
            Host::Ipv6(ip) => ip.is_loopback(),
        };
        HostPort { host: if loopback { Host::Ipv4(Ipv4Addr::LOCALHOST) } else { host }, port }
    }

    /// Returns true if both name the same server. The default ports of http and https belong together.
    fn is_server_of(&self, other: &HostPort) -> bool {
        let usual = |port| port == 80 || port == 443;
        self.host == other.host && (self.port == other.port || usual(self.port) && usual(other.port))
    }
}

/// Writes `host:port`.
impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Scheme, host and port of an http or https URL. `localhost`, `127.0.0.1` and `[::1]` are one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    scheme: String,
    at: HostPort,
}

impl Origin {
    /// Returns the origin of a URL.
    pub fn of(url: &Url) -> Result<Origin, Forbidden> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(Forbidden::Scheme);
        }
        let at = HostPort::of(url).filter(|at| at.host != Host::Domain(String::new()));
        Ok(Origin { scheme: url.scheme().to_owned(), at: at.ok_or(Forbidden::NoHost)? })
    }
}

/// Ports on loopback of the servers that the operator has this program start. They change while the program runs.
#[derive(Clone)]
struct LocalPorts(Arc<dyn Fn(u16) -> bool + Send + Sync>);

impl fmt::Debug for LocalPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LocalPorts")
    }
}

/// Rules for the URLs that a client may send to.
///
/// Origins that the operator configured are always permitted. Any other URL must not lead to the server itself, and its
/// addresses are checked by the policy.
#[derive(Debug, Clone, Default)]
pub struct UrlRules {
    /// `None` permits every address.
    policy: Option<UrlPolicy>,
    configured: Vec<Origin>,
    started: Option<LocalPorts>,
    allow_hosts: Vec<HostPort>,
    listen: Option<SocketAddr>,
    public: Option<HostPort>,
}

impl From<UrlPolicy> for UrlRules {
    fn from(policy: UrlPolicy) -> Self {
        UrlRules { policy: Some(policy), ..UrlRules::default() }
    }
}

impl UrlRules {
    /// Permits every address: for a client that sends only to URLs of its own operator.
    pub fn unrestricted() -> Self {
        UrlRules::default()
    }

    /// Adds an origin that the operator configured. It is always permitted, even if it is the server itself.
    #[must_use]
    pub fn configured(mut self, url: &Url) -> Self {
        self.configured.extend(Origin::of(url));
        self
    }

    /// Sets which ports on loopback belong to servers that the operator has this program start. Like configured origins,
    /// they are always permitted, by http.
    #[must_use]
    pub fn started(mut self, is_port: impl Fn(u16) -> bool + Send + Sync + 'static) -> Self {
        self.started = Some(LocalPorts(Arc::new(is_port)));
        self
    }

    fn is_configured(&self, origin: &Origin) -> bool {
        let is_local =
            || origin.scheme == "http" && matches!(origin.at.host, Host::Ipv4(Ipv4Addr::LOCALHOST));
        self.configured.contains(origin)
            || self.started.as_ref().is_some_and(|LocalPorts(is_port)| is_local() && is_port(origin.at.port))
    }

    /// Adds hosts that may have addresses on this machine and in private networks.
    #[must_use]
    pub fn allow_hosts(mut self, hosts: impl IntoIterator<Item = HostPort>) -> Self {
        self.allow_hosts.extend(hosts);
        self
    }

    /// Sets the address that the server listens on.
    #[must_use]
    pub fn listening_on(mut self, address: SocketAddr) -> Self {
        self.listen = Some(address);
        self
    }

    /// Sets the URL under which others reach the server.
    #[must_use]
    pub fn public_url(mut self, url: &Url) -> Self {
        self.public = HostPort::of(url);
        self
    }

    /// Judges a URL by its text. A host name has to be resolved by the caller, who checks each address with
    /// [`UrlRules::check_address`].
    pub fn check(&self, url: &Url) -> Result<(), Forbidden> {
        let origin = Origin::of(url)?;
        if self.is_configured(&origin) {
            return Ok(());
        }
        if self.public.as_ref().is_some_and(|public| public.is_server_of(&origin.at)) {
            return Err(Forbidden::OwnServer);
        }
        let ip = match url.host() {
            Some(Host::Ipv4(ip)) => IpAddr::V4(ip),
            Some(Host::Ipv6(ip)) => IpAddr::V6(ip),
            _ => return Ok(()),
        };
        self.check_address(&origin, ip, |_| false)
    }

    /// Judges a URL that the server with the base URL `server` named, by its text: like [`UrlRules::check`], and a
    /// server that is configured with https must not name an http URL.
    pub fn check_named_by(&self, server: &Url, url: &Url) -> Result<(), Forbidden> {
        self.check(url)?;
        if server.scheme() == "https" && url.scheme() == "http" { Err(Forbidden::Downgrade) } else { Ok(()) }
    }

    /// Judges an address of the host of a URL. `is_this_machine` says whether an address belongs to this machine; it
    /// is asked only if the server listens on all addresses.
    pub fn check_address(
        &self,
        origin: &Origin,
        ip: IpAddr,
        is_this_machine: impl FnOnce(IpAddr) -> bool,
    ) -> Result<(), Forbidden> {
        let Some(policy) = self.policy else { return Ok(()) };
        if self.is_configured(origin) {
            return Ok(());
        }
        if self.is_own_address(ip.to_canonical(), origin.at.port, is_this_machine) {
            return Err(Forbidden::OwnServer);
        }
        let excepted = self.allow_hosts.contains(&origin.at) && !is_never_permitted(ip);
        if excepted || policy.permits(ip) { Ok(()) } else { Err(Forbidden::Address(ip)) }
    }

    /// All loopback addresses count as one, because the kernel may forward between them.
    fn is_own_address(&self, ip: IpAddr, port: u16, is_this_machine: impl FnOnce(IpAddr) -> bool) -> bool {
        let Some(listen) = self.listen.filter(|listen| listen.port() == port) else { return false };
        let own = listen.ip().to_canonical();
        if own.is_unspecified() {
            return ip.is_loopback() || ip.is_unspecified() || is_this_machine(ip);
        }
        ip == own || ip.is_loopback() && own.is_loopback()
    }

    /// Returns true if the credentials for the server with the base URL `server` may be sent to `url`: to the server's
    /// own origin and to hosts that the operator allowed.
    pub fn may_have_credentials(&self, server: &Url, url: &Url) -> bool {
        let (Ok(server), Ok(origin)) = (Origin::of(server), Origin::of(url)) else { return false };
        origin == server
            || self.allow_hosts.contains(&origin.at) && (origin.scheme == "https" || server.scheme == "http")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    /// The rules of a runtime that listens on `listen`, on a machine with the addresses 192.168.7.7 and fd12::7.
    fn rules(listen: &str) -> UrlRules {
        UrlRules::from(UrlPolicy::Loopback).listening_on(listen.parse().unwrap())
    }

    fn judge(rules: &UrlRules, text: &str, ip: &str) -> Result<(), Forbidden> {
        let mine: [IpAddr; 2] = ["192.168.7.7", "fd12::7"].map(|ip| ip.parse().unwrap());
        let url = url(text);
        rules.check(&url)?;
        rules.check_address(&Origin::of(&url).unwrap(), ip.parse().unwrap(), |ip| mine.contains(&ip))
    }

    /// Judges the URL of a literal address.
    fn judge_literal(rules: &UrlRules, ip: &str, port: u16) -> Result<(), Forbidden> {
        let ip: IpAddr = ip.parse().unwrap();
        judge(rules, &format!("http://{}/", SocketAddr::new(ip, port)), &ip.to_string())
    }

    #[test]
    fn our_own_listener_is_refused_under_every_address() {
        let table: [(&str, &[&str], &[&str]); 5] = [
            ("127.0.0.1:7420", &["127.0.0.1", "127.0.0.2", "::1"], &["192.168.7.7", "10.0.0.1"]),
            ("[::1]:7420", &["127.0.0.1", "::1"], &["192.168.7.7"]),
            ("0.0.0.0:7420", &["127.0.0.1", "127.9.9.9", "::1", "192.168.7.7", "fd12::7"], &["192.168.7.8"]),
            ("[::]:7420", &["127.0.0.1", "::1", "192.168.7.7", "fd12::7"], &["192.168.7.8", "fd12::8"]),
            ("192.168.7.7:7420", &["192.168.7.7"], &["127.0.0.1", "192.168.7.8"]),
        ];
        for (listen, own, others) in table {
            let rules = rules(listen);
            for ip in own {
                assert_eq!(judge_literal(&rules, ip, 7420), Err(Forbidden::OwnServer), "{listen} {ip}");
                assert_eq!(judge(&rules, "http://evil.example:7420/", ip), Err(Forbidden::OwnServer), "{ip}");
                assert_eq!(judge_literal(&rules, ip, 7421), Ok(()), "{listen} {ip}");
            }
            for ip in others {
                assert_eq!(judge_literal(&rules, ip, 7420), Ok(()), "{listen} {ip}");
            }
        }
        for host in ["[::ffff:127.0.0.1]", "0.0.0.0", "[::]"] {
            let url = url(&format!("http://{host}:7420/"));
            assert!(rules("0.0.0.0:7420").check(&url).is_err(), "{host}");
        }
        for host in ["2130706433", "0x7f.1", "0177.0.0.1", "127.1", "127.0.0.1."] {
            let own = judge(&rules("127.0.0.1:7420"), &format!("http://{host}:7420/"), "127.0.0.1");
            assert_eq!(own, Err(Forbidden::OwnServer), "{host}");
        }
    }

    #[test]
    fn the_public_url_is_our_own_listener_too() {
        let rules = rules("0.0.0.0:7420").public_url(&url("https://rap.example.com/agents"));
        for own in ["https://rap.example.com/x", "https://RAP.example.com.:443/", "http://rap.example.com/"] {
            assert_eq!(rules.check(&url(own)), Err(Forbidden::OwnServer), "{own}");
        }
        for other in ["https://rap.example.com:8443/", "https://tools.example.com/"] {
            assert_eq!(rules.check(&url(other)), Ok(()), "{other}");
        }
    }

    #[test]
    fn a_configured_origin_is_always_permitted() {
        let rules = UrlRules::from(UrlPolicy::Public)
            .listening_on("0.0.0.0:7420".parse().unwrap())
            .public_url(&url("https://rap.example.com"))
            .configured(&url("http://localhost:7501/tools"))
            .configured(&url("http://tools.internal:80"))
            .configured(&url("https://rap.example.com/tools"));
        let permitted = [
            ("http://127.0.0.1:7501/invoke", "127.0.0.1"),
            ("http://[::1]:7501/invoke", "::1"),
            ("http://localhost:7501/", "::1"),
            ("http://tools.internal/x", "169.254.1.1"),
            ("https://rap.example.com/tools/invoke", "192.168.7.7"),
        ];
        for (text, ip) in permitted {
            assert_eq!(judge(&rules, text, ip), Ok(()), "{text}");
        }
        let refused = [
            ("https://127.0.0.1:7501/", "127.0.0.1"),
            ("http://127.0.0.1:7502/", "127.0.0.1"),
            ("http://127.0.0.2:7501/", "127.0.0.2"),
            ("https://tools.internal/", "10.0.0.1"),
            ("http://localhost.evil.example:7501/", "127.0.0.1"),
        ];
        for (text, ip) in refused {
            assert_eq!(judge(&rules, text, ip), Err(Forbidden::Address(ip.parse().unwrap())), "{text}");
        }
    }

    #[test]
    fn the_port_of_a_started_server_is_permitted_while_it_has_it() {
        let port = Arc::new(std::sync::atomic::AtomicU16::new(7501));
        let now = Arc::clone(&port);
        let rules = UrlRules::from(UrlPolicy::Public)
            .listening_on("0.0.0.0:7420".parse().unwrap())
            .started(move |port| port == now.load(std::sync::atomic::Ordering::Relaxed));
        for text in ["http://127.0.0.1:7501/invoke", "http://localhost:7501/"] {
            assert_eq!(judge(&rules, text, "127.0.0.1"), Ok(()), "{text}");
        }
        let address = Err(Forbidden::Address("127.0.0.1".parse().unwrap()));
        for text in ["https://127.0.0.1:7501/", "http://127.0.0.1:7502/", "http://evil.example:7501/"] {
            assert_eq!(judge(&rules, text, "127.0.0.1"), address, "{text}");
        }
        port.store(7502, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(judge(&rules, "http://127.0.0.1:7501/", "127.0.0.1"), address);
        assert_eq!(judge(&rules, "http://127.0.0.1:7502/", "127.0.0.1"), Ok(()));
    }

    #[test]
    fn an_allowed_host_is_an_exception_for_its_port_from_the_policy_but_not_from_the_rest() {
        let hosts =
            ["tools.internal:8443", "127.0.0.1:7420", "localhost:9000", "[fd12::1]:80", "169.254.1.1:80"];
        let rules = UrlRules::from(UrlPolicy::Public)
            .listening_on("127.0.0.1:7420".parse().unwrap())
            .allow_hosts(hosts.map(|host| HostPort::parse(host).unwrap()));
        for (text, ip) in [
            ("https://tools.internal:8443/", "10.0.0.1"),
            ("http://tools.internal:8443/", "127.0.0.1"),
            ("http://127.0.0.1:9000/", "127.0.0.1"),
            ("http://[fd12::1]/", "fd12::1"),
        ] {
            assert_eq!(judge(&rules, text, ip), Ok(()), "{text}");
        }
        for (text, ip) in [
            ("https://tools.internal/", "10.0.0.1"),
            ("https://tools.internal:8443/", "169.254.169.254"),
            ("https://x.tools.internal:8443/", "10.0.0.1"),
            ("http://169.254.1.1/", "169.254.1.1"),
        ] {
            assert_eq!(judge(&rules, text, ip), Err(Forbidden::Address(ip.parse().unwrap())), "{text}");
        }
        assert_eq!(judge(&rules, "http://127.0.0.1:7420/", "127.0.0.1"), Err(Forbidden::OwnServer));
    }

    #[test]
    fn an_https_server_names_no_http_url() {
        let rules = rules("127.0.0.1:7420")
            .configured(&url("https://tools.example"))
            .configured(&url("http://127.0.0.1:7501"));
        let (https, http) = (url("https://tools.example"), url("http://127.0.0.1:7501"));
        for named in ["http://tools.example/invoke", "http://other.example/", "http://127.0.0.1:7501/"] {
            assert_eq!(rules.check_named_by(&https, &url(named)), Err(Forbidden::Downgrade), "{named}");
            assert_eq!(rules.check_named_by(&http, &url(named)), Ok(()), "{named}");
        }
        assert_eq!(rules.check_named_by(&https, &url("https://other.example/")), Ok(()));
        assert_eq!(rules.check_named_by(&http, &url("https://other.example/")), Ok(()));
    }

    #[test]
    fn credentials_are_sent_to_the_configured_origin_and_to_allowed_hosts_only() {
        let rules = UrlRules::from(UrlPolicy::Loopback)
            .configured(&url("http://127.0.0.1:7501"))
            .configured(&url("http://127.0.0.1:7502"))
            .allow_hosts([HostPort::parse("invoke.internal:8443").unwrap()]);
        let local = url("http://127.0.0.1:7501/tools");
        let table = [
            ("http://127.0.0.1:7501/invoke", true),
            ("http://localhost:7501/invoke", true),
            ("http://LOCALHOST.:7501/invoke", true),
            ("http://[::1]:7501/invoke", true),
            ("https://invoke.internal:8443/", true),
            ("http://invoke.internal:8443/", true),
            ("http://127.0.0.2:7501/", false),
            ("https://127.0.0.1:7501/", false),
            ("http://127.0.0.1:7502/", false),
            ("http://127.0.0.1/", false),
            ("https://invoke.internal/", false),
            ("http://localhost.evil.example:7501/", false),
            ("http://127.0.0.1:7501@evil.example/", false),
        ];
        for (text, expected) in table {
            assert_eq!(rules.may_have_credentials(&local, &url(text)), expected, "{text}");
        }
        let https = url("https://tools.example");
        assert!(rules.may_have_credentials(&https, &url("https://TOOLS.example:443/x")));
        assert!(rules.may_have_credentials(&https, &url("https://invoke.internal:8443/")));
        assert!(!rules.may_have_credentials(&https, &url("http://invoke.internal:8443/")));
        assert!(!rules.may_have_credentials(&https, &url("http://tools.example:443/")));
    }

    #[test]
    fn an_allowed_host_has_a_host_and_a_port() {
        for good in ["tools.internal:8443", "localhost:1", "[::1]:80", "10.0.0.1:65535", "bücher.example:443"]
        {
            assert!(HostPort::parse(good).is_some(), "{good}");
        }
        for bad in [
            "",
            "tools.internal",
            "tools.internal:",
            ":80",
            "h:99999",
            "h:+80",
            "::1:80x",
            "http://h:80",
            "h:80/x",
        ] {
            assert_eq!(HostPort::parse(bad), None, "{bad}");
        }
        assert_eq!(HostPort::parse("[::1]:80"), HostPort::parse("localhost:80"));
        assert_eq!(HostPort::parse("BÜCHER.example:80"), HostPort::parse("xn--bcher-kva.example:80"));
    }
}
