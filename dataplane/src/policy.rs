//! What the node's own network stack asks of the bypass: how strict its connection tracking is and how
//! soon it forgets, and whether it has policies of IPsec. It is looked at when the programs are loaded, at
//! every ADD and GC, and when somebody runs `underpass load`; the programs go by what was seen last.

use std::{fs, io, path::Path};

use tracing::warn;
use underpass_abi::node::{Feed, State, policy, tick_shift};
use underpass_netlink::{sysctl::Tree, xfrm};

use crate::{Changed, Error, Maps, kernel::release, lock::Lock, object::jiffies_per_second};

/// Timers that run down between two packets of a TCP connection in its middle. Its opening and its end
/// have others, but go through the stack.
const TCP: &[&str] = &[
    "nf_conntrack_tcp_timeout_established",
    "nf_conntrack_tcp_timeout_unacknowledged",
    "nf_conntrack_tcp_timeout_max_retrans",
];
const UDP: &[&str] = &[
    "nf_conntrack_udp_timeout",
    "nf_conntrack_udp_timeout_stream",
];
const ICMP: &[&str] = &["nf_conntrack_icmp_timeout", "nf_conntrack_icmpv6_timeout"];
const SCTP: &[&str] = &[
    "nf_conntrack_sctp_timeout_established",
    "nf_conntrack_sctp_timeout_heartbeat_sent",
    // Until Linux 6.0.
    "nf_conntrack_sctp_timeout_heartbeat_acked",
];
/// A direction has so many tries to be heard of before a timer has run down.
const TRIES: u64 = 3;

/// The part of the kernel that takes policies of IPsec, where it is a module.
const XFRM_MODULE: &str = "xfrm_user";

/// How connection tracking takes TCP of which it did not see all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tracking {
    /// The kernel has no connection tracking. If it comes, it is strict unless somebody says otherwise.
    Absent,
    /// It calls such packets invalid, which is what the kernel does by default.
    Strict,
    /// It takes such packets as any other.
    Liberal,
}

/// Policies of IPsec, which only the stack can ask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ipsec {
    /// The node has none.
    Absent,
    /// It has some.
    Present,
    /// The kernel does not say, by this error number.
    Unknown(i32),
}

/// The shortest timer of each protocol, in seconds; none where the kernel does not tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Timers {
    tcp: Option<u32>,
    udp: Option<u32>,
    icmp: Option<u32>,
    sctp: Option<u32>,
}

/// What matters of the node's own network stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stack {
    /// How it takes TCP of which it did not see all.
    pub tracking: Tracking,
    /// Whether it has policies of IPsec.
    pub ipsec: Ipsec,
    bridges: Bridges,
    timers: Timers,
}

/// Whether connection tracking looks at what bridges carry, where it comes to a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Bridges {
    v4: bool,
    v6: bool,
}

/// What the programs go by: a part of the node's [`State`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Bits of [`policy`].
    pub policy: u32,
    /// How often connection tracking must see a packet.
    pub feed: Feed,
    /// As in [`State`].
    tcp_forgotten: u32,
}

impl Stack {
    /// Looks at the stack of the network namespace of the calling thread, which is the node's.
    #[must_use]
    pub fn look() -> Self {
        let tree = Tree::of_this_thread();
        let number = |name: &str| tree.number(Path::new("netfilter").join(name));
        let shortest = |names: &[&str]| names.iter().copied().filter_map(number).min();
        // They are there once the module is (`br_netfilter`), in each namespace since Linux 5.3.
        let is_on = |name: &str| tree.number(name).is_some_and(|value| value != 0);
        Self {
            tracking: match number("nf_conntrack_tcp_be_liberal") {
                None => Tracking::Absent,
                Some(0) => Tracking::Strict,
                Some(_) => Tracking::Liberal,
            },
            ipsec: ipsec(),
            bridges: Bridges {
                v4: is_on("bridge/bridge-nf-call-iptables"),
                v6: is_on("bridge/bridge-nf-call-ip6tables"),
            },
            timers: Timers {
                tcp: shortest(TCP),
                udp: shortest(UDP),
                icmp: shortest(ICMP),
                sctp: shortest(SCTP),
            },
        }
    }

    /// Says what follows, on a kernel with `hz` jiffies per second.
    fn rules(&self, hz: u32) -> Rules {
        let mut bits = 0;
        if self.tracking == Tracking::Liberal {
            bits |= policy::LIBERAL;
        }
        // Traffic that should be encrypted must not leave in the clear.
        if self.ipsec != Ipsec::Absent {
            bits |= policy::XFRM;
        }
        if self.bridges.v4 {
            bits |= policy::BRIDGES4;
        }
        if self.bridges.v6 {
            bits |= policy::BRIDGES6;
        }
        let Timers {
            tcp,
            udp,
            icmp,
            sctp,
        } = self.timers;
        Rules {
            policy: bits,
            feed: Feed {
                tcp: interval(tcp, hz),
                udp: interval(udp, hz),
                icmp: interval(icmp, hz),
                sctp: interval(sctp, hz),
            },
            tcp_forgotten: forgotten(tcp, hz),
        }
    }

    /// Says one sentence to whoever asks whether the node is well, if there is something to say.
    #[must_use]
    pub fn remark(&self) -> Option<&'static str> {
        match self.ipsec {
            Ipsec::Absent => {}
            Ipsec::Present => {
                return Some(
                    "the node has policies of IPsec: nothing takes the bypass while they are there",
                );
            }
            Ipsec::Unknown(_) => {
                return Some(
                    "the kernel does not say here whether the node has policies of IPsec: nothing takes the bypass after an ADD that does not know; give the runtime CAP_NET_ADMIN",
                );
            }
        }
        match self.tracking {
            Tracking::Strict => Some(
                "TCP that took the bypass can't come back to connection tracking, because net.netfilter.nf_conntrack_tcp_be_liberal is 0: `underpass status` says what that means",
            ),
            Tracking::Absent | Tracking::Liberal => None,
        }
    }
}

impl Rules {
    /// Takes what the stack asks for now. Where the kernel does not tell of IPsec nothing takes the bypass, and that is said.
    #[must_use]
    pub fn wanted() -> Self {
        let stack = Stack::look();
        if let Ipsec::Unknown(errno) = stack.ipsec {
            warn!(
                "nothing takes the bypass, as if there were policies of IPsec: {}",
                Error::IpsecUnknown(errno)
            );
        }
        Self::for_stack(&stack)
    }

    /// Takes what the stack asks for now, for who would rather leave what is in force than guess.
    pub fn known() -> Result<Self, Error> {
        let stack = Stack::look();
        match stack.ipsec {
            Ipsec::Unknown(errno) => Err(Error::IpsecUnknown(errno)),
            Ipsec::Absent | Ipsec::Present => Ok(Self::for_stack(&stack)),
        }
    }

    /// Takes what a stack like that asks for.
    #[must_use]
    pub fn for_stack(stack: &Stack) -> Self {
        stack.rules(jiffies_per_second())
    }

    /// Takes what the programs go by.
    #[must_use]
    pub const fn in_force(state: &State) -> Self {
        Self {
            policy: state.policy,
            feed: state.feed,
            tcp_forgotten: state.tcp_forgotten,
        }
    }

    pub(crate) const fn put(self, state: &mut State) {
        let Self {
            policy,
            feed,
            tcp_forgotten,
        } = self;
        state.policy = policy;
        state.feed = feed;
        state.tcp_forgotten = tcp_forgotten;
    }
}

/// Has the programs go by these rules. The caller raises the epoch, if anything changed, after everything
/// else that it changes.
pub fn set(_lock: &Lock, maps: &Maps, rules: Rules) -> Result<Changed, Error> {
    maps.update_state(|state| rules.put(state))
}

/// Has the programs go by the rules that `find` finds: under the lock, so that nothing older takes the place of what another call has found meanwhile. Raises
/// the epoch if anything changed.
pub fn refresh(maps: &Maps, find: impl FnOnce() -> Result<Rules, Error>) -> Result<Changed, Error> {
    let lock = Lock::acquire(maps.pins().root())?;
    let changed = set(&lock, maps, find()?)?;
    if changed == Changed::Yes {
        maps.raise_epoch()?;
    }
    Ok(changed)
}

/// Ticks between two packets that connection tracking sees of one direction, where it forgets a flow after
/// so many seconds. A kernel that does not tell has its defaults, of which none is short enough to count.
fn interval(timer: Option<u32>, hz: u32) -> u32 {
    let jiffies = |seconds: u32| u64::from(seconds) * u64::from(hz);
    let longest = jiffies(Feed::LONGEST);
    let share = timer.map_or(longest, |seconds| jiffies(seconds) / TRIES);
    let ticks = share.min(longest) >> tick_shift(hz);
    u32::try_from(ticks).unwrap_or(1).max(1)
}

/// Ticks of silence after which a TCP connection may be forgotten; the kernel's default where it does not
/// tell.
fn forgotten(timer: Option<u32>, hz: u32) -> u32 {
    const UNACKNOWLEDGED: u32 = 300;
    let jiffies = u64::from(timer.unwrap_or(UNACKNOWLEDGED)) * u64::from(hz);
    u32::try_from(jiffies >> tick_shift(hz))
        .unwrap_or(u32::MAX)
        .max(1)
}

/// Turns an interval, in ticks, into milliseconds.
#[must_use]
pub fn milliseconds(ticks: u32) -> u64 {
    let hz = jiffies_per_second();
    (u64::from(ticks) << tick_shift(hz)) * 1000 / u64::from(hz)
}

/// Looks for policies of IPsec.
fn ipsec() -> Ipsec {
    if !may_have_ipsec() {
        return Ipsec::Absent;
    }
    match xfrm::has_policies() {
        Ok(false) => Ipsec::Absent,
        Ok(true) => Ipsec::Present,
        Err(error) => Ipsec::Unknown(error.errno().unwrap_or(libc::EIO)),
    }
}

/// Where the module that policies are made by is not loaded, nobody has made any. To ask would load it.
fn may_have_ipsec() -> bool {
    Path::new("/sys/module").join(XFRM_MODULE).exists()
        // The older way to make them, which goes without that module.
        || Path::new("/proc/self/net/pfkey").exists()
        || !is_module()
}

/// Tells whether it is a module: if not, it is built in, or this kernel goes without.
fn is_module() -> bool {
    let folder = format!("/lib/modules/{}/kernel/net/xfrm", release());
    has_module(fs::read_dir(folder))
}

/// Modules may be compressed.
fn has_module(files: io::Result<fs::ReadDir>) -> bool {
    files.into_iter().flatten().flatten().any(|file| {
        let name = file.file_name();
        let ending = name
            .to_str()
            .and_then(|name| name.strip_prefix(XFRM_MODULE));
        ending.is_some_and(|ending| ending.starts_with(".ko"))
    })
}

#[cfg(test)]
mod tests;
