//! `underpass flows`: what the bypass remembers.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use serde::Serialize;
use underpass_abi::{
    addr::Family,
    flow::{Flow, Half, Key, action, protocol, rewrite, state},
};
use underpass_dataplane::{Error as DataplaneError, Maps, Pins};
use underpass_netlink::Netlink;

use super::{FAINT, Failure, Format, HEADING};
use crate::error::Error;

/// One entry of a flow table.
#[derive(Serialize)]
struct Line {
    protocol: String,
    /// The two ends, in the order of the map's key.
    ends: [String; 2],
    /// From the first end to the second, and back.
    directions: [Direction; 2],
    state: Vec<&'static str>,
}

/// What becomes of the packets of one direction.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Direction {
    action: &'static str,
    device: Option<String>,
    /// Packets that took the bypass.
    packets: u64,
    /// Source that packets leave with, where it is replaced.
    source: Option<String>,
    /// The same for the destination.
    destination: Option<String>,
}

pub(super) fn run(root: &Path, format: Format, out: &mut impl io::Write) -> Result<(), Failure> {
    let lines = collect(root)?;
    match format {
        Format::Json => {
            serde_json::to_writer_pretty(&mut *out, &lines).map_err(io::Error::from)?;
            writeln!(out)?;
        }
        Format::Human => lines.iter().try_for_each(|line| line.print(out))?,
    }
    Ok(())
}

fn collect(root: &Path) -> Result<Vec<Line>, Error> {
    let maps = Maps::open_existing(&Pins::at(root))?;
    let maps = maps.ok_or_else(|| DataplaneError::NotLoaded(root.to_owned()))?;
    let names: HashMap<u32, String> = Netlink::open()?
        .links()?
        .into_iter()
        .map(|link| (link.index, link.name))
        .collect();
    let mut lines = Vec::new();
    for (key, flow) in maps.flows4()? {
        lines.push(Line::new(&key, &flow, &names));
    }
    for (key, flow) in maps.flows6()? {
        lines.push(Line::new(&key, &flow, &names));
    }
    Ok(lines)
}

impl Line {
    fn new<A: Family>(key: &Key<A>, flow: &Flow<A>, names: &HashMap<u32, String>) -> Self {
        let Key(tuple) = key;
        Self {
            protocol: protocol_name(tuple.protocol),
            ends: [end(tuple.src, tuple.sport), end(tuple.dst, tuple.dport)],
            directions: flow
                .halves
                .each_ref()
                .map(|half| Direction::new(half, flow.state, names)),
            state: state_names(flow.state),
        }
    }

    /// Says what the stack makes of the packets of one direction: `client → service ⇒ backend`, or for the answers
    /// `backend → client ⇒ service → client`.
    fn translation(&self) -> Option<String> {
        if !self.state.contains(&BY_STACK) {
            return None;
        }
        let [a, b] = &self.ends;
        let [there, back] = &self.directions;
        let ways = [(a, b, there), (b, a, back)];
        let (from, to, way) = ways
            .into_iter()
            .find(|(_, _, way)| way.source.is_some() || way.destination.is_some())?;
        let behind = way.destination.as_ref().unwrap_or(to);
        Some(match &way.source {
            Some(source) => format!("{from} → {to} ⇒ {source} → {behind}"),
            None => format!("{from} → {to} ⇒ {behind}"),
        })
    }

    fn print(&self, out: &mut impl io::Write) -> io::Result<()> {
        let Self {
            protocol,
            ends: [a, b],
            directions,
            state,
        } = self;
        write!(out, "{HEADING}{protocol}{HEADING:#} ")?;
        match self.translation() {
            Some(translation) => write!(out, "{translation}")?,
            None => write!(out, "{a} <-> {b}")?,
        }
        writeln!(out, " {FAINT}{}{FAINT:#}", state.join(" "))?;
        for (arrow, direction) in ["->", "<-"].into_iter().zip(directions) {
            let Direction {
                action,
                device,
                packets,
                source,
                destination,
            } = direction;
            write!(out, "  {arrow} {action}")?;
            for (label, value) in [
                ("by", device),
                ("source", source),
                ("destination", destination),
            ] {
                if let Some(value) = value {
                    write!(out, ", {label} {value}")?;
                }
            }
            writeln!(out, ", {packets} packets past the stack")?;
        }
        Ok(())
    }
}

impl Direction {
    fn new<A: Family>(half: &Half<A>, bits: u32, names: &HashMap<u32, String>) -> Self {
        let (action, bypassed) = describe(half.action, bits);
        let name = |index: u32| {
            names
                .get(&index)
                .cloned()
                .unwrap_or_else(|| format!("(gone: {index})"))
        };
        Self {
            action,
            device: bypassed.then(|| name(half.out_ifindex)),
            packets: half.packets,
            source: (half.rewrite & rewrite::SRC != 0).then(|| end(half.src, half.sport)),
            destination: (half.rewrite & rewrite::DST != 0).then(|| end(half.dst, half.dport)),
        }
    }
}

fn end<A: Family>(addr: A, port: u16) -> String {
    SocketAddr::new(IpAddr::from(addr.wide()), u16::from_be(port)).to_string()
}

fn protocol_name(number: u8) -> String {
    match number {
        protocol::ICMP => "icmp".to_owned(),
        protocol::TCP => "tcp".to_owned(),
        protocol::UDP => "udp".to_owned(),
        protocol::ICMPV6 => "icmpv6".to_owned(),
        protocol::SCTP => "sctp".to_owned(),
        other => other.to_string(),
    }
}

/// What becomes of a direction's packets, and whether they go past the stack: a way is only used while
/// the other direction has one, too.
const fn describe(action: u8, bits: u32) -> (&'static str, bool) {
    let bypassed = bits & state::BYPASS != 0;
    match action {
        action::PEER if bypassed => ("into the pod", true),
        action::WIRE if bypassed => ("onto the wire", true),
        action::PEER | action::WIRE | action::STACK => ("to the stack", false),
        action::NONE => ("not learned", false),
        action::TAKEN => ("taken", false),
        action::HOST => ("by loopback", false),
        action::OTHERS => ("the host's own stack translates it", false),
        _ => ("unknown", false),
    }
}

/// The stack translates the flow.
const BY_STACK: &str = "stack-nat";

fn state_names(bits: u32) -> Vec<&'static str> {
    [
        (state::ANSWERED, "answered"),
        (state::ASSURED, "assured"),
        (state::BYPASS, "bypass"),
        (state::STICKY, "sticky"),
        (state::FIN_A, "fin->"),
        (state::FIN_B, "<-fin"),
        (state::RST, "reset"),
        (state::OUTER, "outer"),
        (state::BY_STACK, BY_STACK),
    ]
    .into_iter()
    .filter(|(bit, _)| bits & bit == *bit)
    .map(|(_, name)| name)
    .collect()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use underpass_abi::{addr::Addr4, flow::Tuple};

    use super::*;

    const POD: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
    const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const WORLD: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);

    fn printed(flow: &Flow<Addr4>) -> String {
        let ports = [40_000_u16, 443].map(u16::to_be);
        let (key, _) = Tuple::new(
            protocol::TCP,
            POD.into(),
            ports[0],
            Addr4::from(WORLD),
            ports[1],
        )
        .key();
        let names = HashMap::from([(2, "eth0".to_owned()), (3, "veth0".to_owned())]);
        let mut out = Vec::new();
        Line::new(&key, flow, &names)
            .print(&mut anstream::StripStream::new(&mut out))
            .expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    /// A way out, and one back.
    fn ways() -> [Half<Addr4>; 2] {
        let there = Half {
            action: action::WIRE,
            out_ifindex: 2,
            packets: 12,
            ..Half::default()
        };
        let back = Half {
            action: action::PEER,
            out_ifindex: 3,
            ..Half::default()
        };
        [there, back]
    }

    #[test]
    fn a_flow_to_a_service_reads_well() {
        let [_, there] = ways();
        let there = Half {
            dst: NODE.into(),
            dport: 8_080_u16.to_be(),
            rewrite: rewrite::DST,
            ..there
        };
        let flow = Flow {
            state: state::ANSWERED | state::BYPASS | state::BY_STACK,
            halves: [there, Half::default()],
            ..Flow::default()
        };
        let said = printed(&flow);
        let expected =
            "tcp 10.0.0.2:40000 → 198.51.100.7:443 ⇒ 192.0.2.1:8080 answered bypass stack-nat\n";
        assert!(said.starts_with(expected), "{said}");
    }

    #[test]
    fn a_masqueraded_flow_reads_well() {
        let [there, _] = ways();
        let there = Half {
            src: NODE.into(),
            sport: 40_001_u16.to_be(),
            rewrite: rewrite::SRC,
            ..there
        };
        let flow = Flow {
            state: state::ANSWERED | state::ASSURED | state::BYPASS | state::STICKY,
            halves: [there, Half::default()],
            ..Flow::default()
        };
        assert_eq!(
            printed(&flow),
            "tcp 10.0.0.2:40000 <-> 198.51.100.7:443 answered assured bypass sticky\n  \
             -> onto the wire, by eth0, source 192.0.2.1:40001, 12 packets past the stack\n  \
             <- not learned, 0 packets past the stack\n"
        );
    }

    #[test]
    fn a_way_counts_only_where_the_flow_takes_the_bypass() {
        let flow = |state| Flow {
            state,
            halves: ways(),
            ..Flow::default()
        };
        assert_eq!(
            printed(&flow(state::ANSWERED | state::BYPASS)),
            "tcp 10.0.0.2:40000 <-> 198.51.100.7:443 answered bypass\n  \
             -> onto the wire, by eth0, 12 packets past the stack\n  \
             <- into the pod, by veth0, 0 packets past the stack\n"
        );
        assert_eq!(
            printed(&flow(state::ANSWERED)),
            "tcp 10.0.0.2:40000 <-> 198.51.100.7:443 answered\n  \
             -> to the stack, 12 packets past the stack\n  \
             <- to the stack, 0 packets past the stack\n"
        );
    }

    #[test]
    fn what_is_none_of_ours_says_so() {
        let mut flow = Flow::default();
        flow.halves[1].action = action::OTHERS;
        assert_eq!(
            printed(&flow),
            "tcp 10.0.0.2:40000 <-> 198.51.100.7:443 \n  \
             -> not learned, 0 packets past the stack\n  \
             <- the host's own stack translates it, 0 packets past the stack\n"
        );
    }
}
