//! What the node's own network stack asks of the bypass, and what that means.

use std::io;

use anstyle::Style;
use serde::Serialize;
use underpass_abi::node::Feed;
use underpass_dataplane::policy::{Ipsec, Rules, Stack, Tracking, milliseconds};

use super::{BAD, FAINT, GOOD, HEADING};

/// When what is found now becomes what the programs go by.
const TAKEN_UP: &str = "the next ADD, GC, `underpass apply` or `underpass load`";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NetworkStack {
    pub(super) tcp_tracking: TcpTracking,
    /// None if the kernel does not say.
    pub(super) ipsec_policies: Option<bool>,
    /// After how long a packet of a direction goes through the stack again.
    pub(super) feed_ms: FeedMs,
    /// Whether the programs go by this; none if nothing is loaded, or not all of this is known.
    pub(super) in_force: Option<bool>,
}

/// See [`Tracking`].
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum TcpTracking {
    Absent,
    Strict,
    Liberal,
}

/// By protocol, in milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct FeedMs {
    /// None where TCP does not come back from the bypass.
    pub(super) tcp: Option<u64>,
    pub(super) udp: u64,
    pub(super) icmp: u64,
    pub(super) sctp: u64,
}

/// Looks at it. `rules` are what the programs go by.
pub(super) fn collect(rules: Option<Rules>) -> NetworkStack {
    let stack = Stack::look();
    let wanted = Rules::for_stack(&stack);
    let ipsec_policies = match stack.ipsec {
        Ipsec::Absent => Some(false),
        Ipsec::Present => Some(true),
        Ipsec::Unknown(_) => None,
    };
    let Feed {
        tcp,
        udp,
        icmp,
        sctp,
    } = wanted.feed;
    NetworkStack {
        tcp_tracking: match stack.tracking {
            Tracking::Absent => TcpTracking::Absent,
            Tracking::Strict => TcpTracking::Strict,
            Tracking::Liberal => TcpTracking::Liberal,
        },
        ipsec_policies,
        feed_ms: FeedMs {
            tcp: (stack.tracking == Tracking::Liberal).then(|| milliseconds(tcp)),
            udp: milliseconds(udp),
            icmp: milliseconds(icmp),
            sctp: milliseconds(sctp),
        },
        in_force: rules
            .filter(|_| ipsec_policies.is_some())
            .map(|rules| rules == wanted),
    }
}

/// One thing that was found.
struct Row {
    name: &'static str,
    style: Style,
    found: String,
    /// What it means.
    lines: &'static [&'static str],
}

impl NetworkStack {
    /// Prints the section.
    pub(super) fn print(&self, out: &mut impl io::Write) -> io::Result<()> {
        writeln!(out, "\n{HEADING}Network stack{HEADING:#}")?;
        for row in [self.ipsec(), self.tracking(), self.feed()] {
            let Row {
                name,
                style,
                found,
                lines,
            } = row;
            write!(out, "  {name:<20} {style}{found}{style:#}")?;
            for line in lines {
                write!(out, "\n    {FAINT}{line}{FAINT:#}")?;
            }
            writeln!(out)?;
        }
        if self.in_force == Some(false) {
            writeln!(
                out,
                "  {BAD}The programs go by what was found earlier{BAD:#}: {TAKEN_UP} changes that."
            )?;
        }
        Ok(())
    }

    fn ipsec(&self) -> Row {
        let (style, found, lines): (_, _, &[_]) = match self.ipsec_policies {
            Some(false) => (GOOD, "none", &[]),
            Some(true) => {
                let lines = &[
                    "Nothing takes the bypass while there are policies: only the stack can ask them. `ip xfrm policy` lists them.",
                ];
                (BAD, "there", lines)
            }
            None => {
                let lines = &[
                    "The kernel tells of them only those who have CAP_NET_ADMIN in the user namespace of the node.",
                ];
                (BAD, "unknown", lines)
            }
        };
        Row {
            name: "IPsec policies",
            style,
            found: found.to_owned(),
            lines,
        }
    }

    fn tracking(&self) -> Row {
        let (style, found, lines): (_, _, &[_]) = match self.tcp_tracking {
            TcpTracking::Absent => {
                let lines = &[
                    "The kernel has no connection tracking now. TCP is carried as if it were strict, which it is by default.",
                ];
                (GOOD, "absent", lines)
            }
            TcpTracking::Liberal => {
                let lines = &[
                    "net.netfilter.nf_conntrack_tcp_be_liberal is 1: TCP comes back from the bypass whenever it has to.",
                ];
                (GOOD, "liberal", lines)
            }
            TcpTracking::Strict => {
                let lines = &[
                    "net.netfilter.nf_conntrack_tcp_be_liberal is 0: TCP that took the bypass ends on it, because connection",
                    "tracking would call what comes back to it invalid. A connection can still stall if its route changes to an",
                    "uplink without Ethernet headers, to a device that is no uplink or to nowhere; if its packets arrive by another",
                    "uplink with rp_filter 1, have IP options or are fragments; if its packets have to shrink and a rule in PREROUTING",
                    "or OUTPUT drops what is invalid; and if policies of IPsec come. The counter `came_back` has such packets.",
                    "`sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1` and then `underpass load` let connections that begin",
                    "after that come back, and connections to Services take the bypass, which stay in the stack now.",
                ];
                (FAINT, "strict", lines)
            }
        };
        Row {
            name: "TCP tracking",
            style,
            found: found.to_owned(),
            lines,
        }
    }

    fn feed(&self) -> Row {
        Row {
            name: "Fed every",
            style: Style::new(),
            found: self.feed_ms.text(),
            lines: &[
                "So often a packet of each direction goes through the stack: connection tracking keeps the flow, and the",
                "firewall is asked again. It is a third of the shortest net.netfilter.nf_conntrack_*_timeout* that applies,",
                "and at most 10 s.",
            ],
        }
    }
}

impl FeedMs {
    fn text(self) -> String {
        let Self {
            tcp,
            udp,
            icmp,
            sctp,
        } = self;
        let parts: Vec<_> = [
            ("TCP", tcp),
            ("UDP", Some(udp)),
            ("ICMP", Some(icmp)),
            ("SCTP", Some(sctp)),
        ]
        .into_iter()
        .filter_map(|(protocol, ms)| Some(format!("{protocol} {}", seconds(ms?))))
        .collect();
        parts.join(", ")
    }
}

fn seconds(ms: u64) -> String {
    format!("{}.{} s", ms / 1000, ms % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(stack: &NetworkStack) -> String {
        let mut out = Vec::new();
        stack
            .print(&mut anstream::StripStream::new(&mut out))
            .expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    const USUAL: NetworkStack = NetworkStack {
        tcp_tracking: TcpTracking::Strict,
        ipsec_policies: Some(false),
        feed_ms: FeedMs {
            tcp: None,
            udp: 9_216,
            icmp: 9_216,
            sctp: 9_216,
        },
        in_force: Some(true),
    };

    #[test]
    fn a_usual_node_reads_well() {
        insta::assert_snapshot!(printed(&USUAL), @r"

        Network stack
          IPsec policies       none
          TCP tracking         strict
            net.netfilter.nf_conntrack_tcp_be_liberal is 0: TCP that took the bypass ends on it, because connection
            tracking would call what comes back to it invalid. A connection can still stall if its route changes to an
            uplink without Ethernet headers, to a device that is no uplink or to nowhere; if its packets arrive by another
            uplink with rp_filter 1, have IP options or are fragments; if its packets have to shrink and a rule in PREROUTING
            or OUTPUT drops what is invalid; and if policies of IPsec come. The counter `came_back` has such packets.
            `sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1` and then `underpass load` let connections that begin
            after that come back, and connections to Services take the bypass, which stay in the stack now.
          Fed every            UDP 9.2 s, ICMP 9.2 s, SCTP 9.2 s
            So often a packet of each direction goes through the stack: connection tracking keeps the flow, and the
            firewall is asked again. It is a third of the shortest net.netfilter.nf_conntrack_*_timeout* that applies,
            and at most 10 s.
        ");
    }

    #[test]
    fn an_unusual_node_reads_well() {
        let stack = NetworkStack {
            tcp_tracking: TcpTracking::Liberal,
            ipsec_policies: Some(true),
            feed_ms: FeedMs {
                tcp: Some(9_216),
                udp: 2_048,
                ..USUAL.feed_ms
            },
            in_force: Some(false),
        };
        insta::assert_snapshot!(printed(&stack), @r"

        Network stack
          IPsec policies       there
            Nothing takes the bypass while there are policies: only the stack can ask them. `ip xfrm policy` lists them.
          TCP tracking         liberal
            net.netfilter.nf_conntrack_tcp_be_liberal is 1: TCP comes back from the bypass whenever it has to.
          Fed every            TCP 9.2 s, UDP 2.0 s, ICMP 9.2 s, SCTP 9.2 s
            So often a packet of each direction goes through the stack: connection tracking keeps the flow, and the
            firewall is asked again. It is a third of the shortest net.netfilter.nf_conntrack_*_timeout* that applies,
            and at most 10 s.
          The programs go by what was found earlier: the next ADD, GC, `underpass apply` or `underpass load` changes that.
        ");
    }

    #[test]
    fn scripts_find_every_field() {
        let json = serde_json::to_value(USUAL).expect("plain data");
        assert_eq!(json["tcpTracking"], "strict");
        assert_eq!(json["ipsecPolicies"], false);
        assert_eq!(json["feedMs"]["icmp"], 9_216);
        assert!(json["feedMs"]["tcp"].is_null());
        assert_eq!(json["inForce"], true);
    }

    #[test]
    fn what_the_kernel_does_not_tell_is_unknown() {
        let stack = NetworkStack {
            ipsec_policies: None,
            in_force: None,
            ..USUAL
        };
        assert!(printed(&stack).contains("IPsec policies       unknown\n"));
        let json = serde_json::to_value(stack).expect("plain data");
        assert!(json["ipsecPolicies"].is_null() && json["inForce"].is_null());
    }
}
