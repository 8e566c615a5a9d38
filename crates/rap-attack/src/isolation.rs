//! A network namespace without any other machine, and the number of files that may be open.

use std::fmt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Set in the process inside of the namespace.
const INSIDE: &str = "RAP_ATTACK_ISOLATED";
/// Addresses that no server may connect to. Inside of the namespace they are addresses of this machine.
pub(crate) const FORBIDDEN: [&str; 7] = [
    "169.254.169.254",
    "169.254.170.2",
    "100.100.100.200",
    "192.0.0.192",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd20:ce::254",
];
/// Prepares the namespace, then runs the rest of the command line. Each forbidden address also has a name, and so has
/// loopback.
const PREPARE: &str = r#"
set -e
ip link set lo up
hosts=$(mktemp)
echo "127.0.0.1 localhost self.attack.example" > "$hosts"
echo "::1 localhost self.attack.example" >> "$hosts"
number=0
for address in $FORBIDDEN; do
    number=$((number + 1))
    ip address add "$address" dev lo
    echo "$address name$number.attack.example" >> "$hosts"
done
mount --bind "$hosts" /etc/hosts
rm "$hosts"
exec "$@"
"#;

/// Abilities of this process on this machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Isolation {
    /// It runs in a network namespace of its own.
    pub(crate) isolated: bool,
    /// Number of connections that it can open at the same time.
    pub(crate) connections: usize,
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.isolated {
            true => write!(f, "in a network namespace without other machines")?,
            false => write!(
                f,
                "not in a network namespace (`unshare --net` and `ip` are needed); addresses of other machines are only \
                 judged, and nothing is sent to them"
            )?,
        }
        write!(f, "; up to {} connections", self.connections)
    }
}

/// Starts this program again in a network namespace of its own, if the system permits it.
pub(crate) fn enter() -> Isolation {
    let isolated = std::env::var_os(INSIDE).is_some();
    if !isolated
        && inside("true".as_ref()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    {
        let program = std::env::current_exe().unwrap();
        let error = inside(program.as_os_str()).args(std::env::args_os().skip(1)).env(INSIDE, "1").exec();
        eprintln!("the namespace could not be entered: {error}");
    }
    Isolation { isolated, connections: raise_file_limit() }
}

fn inside(program: &std::ffi::OsStr) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "--mount", "sh", "-c", PREPARE, "sh"]).arg(program);
    command.env("FORBIDDEN", FORBIDDEN.join(" "));
    command
}

fn raise_file_limit() -> usize {
    /// Files that this process needs besides connections.
    const OTHERS: u64 = 500;
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let files = if setrlimit(Resource::Nofile, raised).is_ok() { limit.maximum } else { limit.current };
    usize::try_from(files.unwrap_or(u64::MAX).saturating_sub(OTHERS)).unwrap_or(usize::MAX)
}
