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

use super::{FAINT, Failure, Format, HEADING};
use crate::{
    datapath::{Error as DatapathError, Maps, Pins},
    error::Error,
    netlink::Netlink,
};

/// One entry of a flow map.
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
    let pins = Pins::at(root);
    if !pins.are_complete() {
        return Err(DatapathError::NotLoaded(root.to_owned()).into());
    }
    let maps = Maps::open(&pins)?;
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
                .map(|half| Direction::new(half, names)),
            state: state_names(flow.state),
        }
    }

    fn print(&self, out: &mut impl io::Write) -> io::Result<()> {
        let Self {
            protocol,
            ends: [a, b],
            directions,
            state,
        } = self;
        writeln!(
            out,
            "{HEADING}{protocol}{HEADING:#} {a} <-> {b} {FAINT}{}{FAINT:#}",
            state.join(" ")
        )?;
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
    fn new<A: Family>(half: &Half<A>, names: &HashMap<u32, String>) -> Self {
        let bypassed = matches!(half.action, action::PEER | action::WIRE);
        let name = |index: u32| {
            names
                .get(&index)
                .cloned()
                .unwrap_or_else(|| format!("(gone: {index})"))
        };
        Self {
            action: action_name(half.action),
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

const fn action_name(action: u8) -> &'static str {
    match action {
        action::NONE => "not learned",
        action::PEER => "into the pod",
        action::WIRE => "onto the wire",
        action::STACK => "to the stack",
        action::TAKEN => "taken",
        action::HOST => "by loopback",
        _ => "unknown",
    }
}

fn state_names(bits: u32) -> Vec<&'static str> {
    [
        (state::ANSWERED, "answered"),
        (state::FIN_A, "fin->"),
        (state::FIN_B, "<-fin"),
        (state::RST, "reset"),
        (state::OUTER, "outer"),
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

    #[test]
    fn a_masqueraded_flow_reads_well() {
        let pod = Addr4::from(Ipv4Addr::new(10, 0, 0, 2));
        let node = Addr4::from(Ipv4Addr::new(192, 0, 2, 1));
        let world = Addr4::from(Ipv4Addr::new(198, 51, 100, 7));
        let tuple = Tuple::new(
            protocol::TCP,
            pod,
            40_000_u16.to_be(),
            world,
            443_u16.to_be(),
        );
        let (key, _) = tuple.key();
        let mut flow = Flow {
            state: state::ANSWERED,
            ..Flow::default()
        };
        flow.halves[0] = Half {
            src: node,
            sport: 40_001_u16.to_be(),
            action: action::WIRE,
            rewrite: rewrite::SRC,
            out_ifindex: 2,
            packets: 12,
            ..Half::default()
        };
        let names = HashMap::from([(2, "eth0".to_owned())]);
        let mut out = Vec::new();
        Line::new(&key, &flow, &names)
            .print(&mut anstream::StripStream::new(&mut out))
            .expect("a vector takes everything");
        assert_eq!(
            String::from_utf8(out).expect("text"),
            "tcp 10.0.0.2:40000 <-> 198.51.100.7:443 answered\n  \
             -> onto the wire, by eth0, source 192.0.2.1:40001, 12 packets past the stack\n  \
             <- not learned, 0 packets past the stack\n"
        );
    }
}
