//! What rules do to a packet, as far as that can be said: yes, no, or perhaps.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

/// Chains may call each other so deep (the kernel allows 16).
const DEPTH: u32 = 16;

/// A family of addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    pub(super) fn of(address: IpAddr) -> Self {
        if address.is_ipv4() {
            Self::V4
        } else {
            Self::V6
        }
    }
}

/// The direction of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// The first packet of a connection, from the container to the world at large.
    Out,
    /// The answer.
    Back,
}

/// A packet of TCP, without a mark, that the node forwards between a container and the world.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet<'a> {
    pub(super) way: Way,
    pub(super) pod: IpAddr,
    /// The host's end of the container's pair.
    pub(super) device: &'a str,
    /// The devices to the world, one of which it takes.
    pub(super) uplinks: &'a [String],
}

impl Packet<'_> {
    pub(super) fn family(&self) -> Family {
        Family::of(self.pod)
    }
}

/// One of the two sides of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// It comes from there.
    From,
    /// It goes there.
    To,
}

impl Side {
    /// Tells whether the container is on this side.
    fn is_pod(self, way: Way) -> bool {
        (self == Self::From) == (way == Way::Out)
    }
}

/// Addresses from the first to the last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Range(pub(super) IpAddr, pub(super) IpAddr);

impl From<IpNet> for Range {
    fn from(net: IpNet) -> Self {
        Self(net.network(), net.broadcast())
    }
}

impl Range {
    fn contains(&self, address: IpAddr) -> bool {
        Family::of(self.0) == Family::of(address) && self.0 <= address && address <= self.1
    }

    /// Tells whether it is so much of a family that the world at large is in there: `2000::/3` is.
    fn is_the_world(&self, family: Family) -> bool {
        let (first, last, bits): (u128, u128, u32) = match (self.0, self.1) {
            (IpAddr::V4(first), IpAddr::V4(last)) => {
                (first.to_bits().into(), last.to_bits().into(), 32)
            }
            (IpAddr::V6(first), IpAddr::V6(last)) => (first.to_bits(), last.to_bits(), 128),
            _ => return false,
        };
        family == Family::of(self.0) && last.saturating_sub(first) >= (1 << (bits - 3)) - 1
    }
}

/// A condition of a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Test {
    /// The device has one of these names; one that ends in `*` stands for all that begin so.
    Device(Side, Vec<String>),
    /// The address is in one of these ranges.
    Address(Side, Vec<Range>),
    /// It is of this family.
    Family(Family),
    /// It is of one of these protocols.
    Protocol(Vec<String>),
    /// Connection tracking calls it one of these, in small letters.
    State(Vec<String>),
    /// Nothing that a container sends is like that.
    Never,
    /// Nobody can say.
    Unknown,
}

/// A condition, or its opposite.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Match {
    pub(super) test: Test,
    pub(super) negated: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Truth {
    No,
    Perhaps,
    Yes,
}

impl Truth {
    /// Some of these are so many of all.
    const fn of(some: usize, all: usize) -> Self {
        if all == 0 {
            Self::Perhaps
        } else if some == 0 {
            Self::No
        } else if some == all {
            Self::Yes
        } else {
            Self::Perhaps
        }
    }
}

impl Match {
    fn fits(&self, packet: &Packet<'_>) -> Truth {
        match (self.test.fits(packet), self.negated) {
            (Truth::Yes, true) => Truth::No,
            (Truth::No, true) => Truth::Yes,
            (truth, _) => truth,
        }
    }
}

impl From<Test> for Match {
    fn from(test: Test) -> Self {
        Self {
            test,
            negated: false,
        }
    }
}

impl Test {
    fn fits(&self, packet: &Packet<'_>) -> Truth {
        let sure = |is_so: bool| if is_so { Truth::Yes } else { Truth::No };
        match self {
            Self::Device(side, names) => {
                let fits = |device: &str| names.iter().any(|name| is_named(device, name));
                if side.is_pod(packet.way) {
                    sure(fits(packet.device))
                } else {
                    let uplinks = packet.uplinks;
                    let fitting = uplinks.iter().filter(|uplink| fits(uplink)).count();
                    Truth::of(fitting, uplinks.len())
                }
            }
            Self::Address(side, ranges) => sure(ranges.iter().any(|range| {
                if side.is_pod(packet.way) {
                    range.contains(packet.pod)
                } else {
                    range.is_the_world(packet.family())
                }
            })),
            Self::Family(family) => sure(*family == packet.family()),
            Self::Protocol(names) => {
                let is_tcp = |name: &String| matches!(name.as_str(), "tcp" | "6" | "all");
                sure(names.iter().any(is_tcp))
            }
            Self::State(names) => {
                let state = match packet.way {
                    Way::Out => "new",
                    Way::Back => "established",
                };
                sure(names.iter().any(|name| name == state))
            }
            Self::Never => Truth::No,
            Self::Unknown => Truth::Perhaps,
        }
    }
}

fn is_named(device: &str, name: &str) -> bool {
    name.strip_suffix('*')
        .map_or(device == name, |beginning| device.starts_with(beginning))
}

/// What a rule does with what it matches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Accept,
    Drop,
    /// The chain ends here.
    Return,
    /// Another chain decides, or this one goes on.
    Jump(String),
    /// Another chain decides, or who called this one goes on.
    Goto(String),
    /// The next rule decides.
    Continue,
    /// Something else decides, which may accept.
    Unknown,
}

/// A rule: all conditions must hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Rule {
    pub(super) matches: Vec<Match>,
    pub(super) verdict: Verdict,
}

impl Rule {
    fn fits(&self, packet: &Packet<'_>) -> Truth {
        let mut all = Truth::Yes;
        for part in &self.matches {
            match part.fits(packet) {
                Truth::No => return Truth::No,
                Truth::Perhaps => all = Truth::Perhaps,
                Truth::Yes => {}
            }
        }
        all
    }
}

/// What packets meet at the hook `forward` first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Base {
    /// The chain's key in [`Ruleset::chains`].
    pub(super) chain: String,
    /// None if it sees both.
    pub(super) family: Option<Family>,
    pub(super) drops_by_policy: bool,
    /// Its name for people.
    pub(super) title: String,
    /// Begins the command that puts a rule in front.
    pub(super) insert: String,
    /// True if the command is iptables', false if it is nft.
    pub(super) is_iptables: bool,
}

/// The rules that one command has told of.
#[derive(Clone, Default, Debug)]
pub(super) struct Ruleset {
    pub(super) bases: Vec<Base>,
    pub(super) chains: BTreeMap<String, Vec<Rule>>,
}

/// What a chain does with a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// It accepts it, or may do so.
    MayPass,
    Dropped,
    /// It leaves that to whoever called it, or the policy.
    Undecided,
}

impl Ruleset {
    /// Lists the chains that drop the packet, by their numbers.
    pub(super) fn droppers(&self, packet: &Packet<'_>) -> Vec<usize> {
        let drops = |base: &Base| {
            let is_seen = base.family.is_none_or(|family| family == packet.family());
            is_seen
                && match self.fate(&base.chain, packet, 0) {
                    Fate::MayPass => false,
                    Fate::Dropped => true,
                    Fate::Undecided => base.drops_by_policy,
                }
        };
        let bases = self.bases.iter().enumerate();
        bases
            .filter(|(_, base)| drops(base))
            .map(|(number, _)| number)
            .collect()
    }

    fn fate(&self, chain: &str, packet: &Packet<'_>, depth: u32) -> Fate {
        let Some(rules) = self.chains.get(chain).filter(|_| depth < DEPTH) else {
            return Fate::MayPass;
        };
        for rule in rules {
            let fits = rule.fits(packet);
            if fits == Truth::No {
                continue;
            }
            let is_sure = fits == Truth::Yes;
            match &rule.verdict {
                Verdict::Accept | Verdict::Unknown => return Fate::MayPass,
                Verdict::Drop if is_sure => return Fate::Dropped,
                Verdict::Return if is_sure => return Fate::Undecided,
                Verdict::Drop | Verdict::Return | Verdict::Continue => {}
                Verdict::Jump(called) => match self.fate(called, packet, depth + 1) {
                    Fate::MayPass => return Fate::MayPass,
                    Fate::Dropped if is_sure => return Fate::Dropped,
                    Fate::Dropped | Fate::Undecided => {}
                },
                Verdict::Goto(called) => match self.fate(called, packet, depth + 1) {
                    Fate::MayPass => return Fate::MayPass,
                    fate if is_sure => return fate,
                    Fate::Dropped | Fate::Undecided => {}
                },
            }
        }
        Fate::Undecided
    }

    /// Names a chain for people.
    pub(super) fn title(&self, chain: usize) -> &str {
        self.bases.get(chain).map_or("", |base| &base.title)
    }

    /// Gives the command that lets packets from or to a range pass.
    pub(super) fn exception(
        &self,
        chain: usize,
        family: Family,
        range: IpNet,
        is_source: bool,
    ) -> String {
        let Some(base) = self.bases.get(chain) else {
            return String::new();
        };
        let insert = &base.insert;
        if base.is_iptables {
            let side = if is_source { "-s" } else { "-d" };
            return format!("{insert} {side} {range} -j ACCEPT");
        }
        let family = match family {
            Family::V4 => "ip",
            Family::V6 => "ip6",
        };
        let side = if is_source { "saddr" } else { "daddr" };
        format!("{insert} {family} {side} {range} accept")
    }
}
