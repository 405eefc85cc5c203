//! The host ports, as `underpass status` shows them.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use serde::Serialize;
use underpass_abi::port::{HostPort as Key, PortTarget};
use underpass_dataplane::{
    Error, Maps,
    port::{HostPorts, Text, destination, is_closed},
};

use super::{FAINT, HEADING};

/// A mapping of a host port.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct HostPort {
    /// Of the host; unspecified where every address is meant.
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) protocol: &'static str,
    pub(super) container_address: IpAddr,
    pub(super) container_port: u16,
    /// Network, container and interface, as the device's alias has them.
    pub(super) attachment: String,
    pub(super) state: State,
}

/// What becomes of a mapping.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(into = "&'static str")]
pub(in crate::cli) enum State {
    /// It is the newest of the port.
    Serving,
    /// It is the newest of the port, which is that of a tunnel: the programs leave it to the node.
    Closed,
    /// It serves when the newer ones are gone.
    Waiting,
}

impl From<State> for &'static str {
    fn from(state: State) -> Self {
        match state {
            State::Serving => "serving",
            State::Closed => "closed",
            State::Waiting => "waiting",
        }
    }
}

impl State {
    /// In the order in which they are shown.
    pub(in crate::cli) const ALL: [Self; 3] = [Self::Serving, Self::Waiting, Self::Closed];

    /// Lists all mappings, each with what becomes of it.
    pub(in crate::cli) fn of_all(maps: &Maps) -> Result<Vec<(Key, PortTarget, Self)>, Error> {
        let ports = HostPorts::open(maps.pins())?;
        let tunnels = maps.state()?.tunnels;
        let mut all = Vec::new();
        for (port, target) in ports.serving()? {
            let pod = maps.device(target.ifindex)?;
            let state = if is_closed(&port, pod.as_ref(), &tunnels) {
                Self::Closed
            } else {
                Self::Serving
            };
            all.push((port, target, state));
        }
        let waiting = ports.shadowed()?.into_iter();
        all.extend(waiting.map(|(key, target)| (key.port, target, Self::Waiting)));
        Ok(all)
    }
}

/// All mappings, sorted; of one port, the one that counts first. `attachment` names the attachment
/// of a device.
pub(super) fn collect(
    maps: &Maps,
    attachment: impl Fn(u32) -> String,
) -> Result<Vec<HostPort>, Error> {
    let mut ports: Vec<_> = State::of_all(maps)?
        .into_iter()
        .map(|(key, target, state)| {
            let (from, to) = (Text(&key), destination(&target));
            HostPort {
                address: from.socket().ip(),
                port: from.socket().port(),
                protocol: from.protocol(),
                container_address: to.ip(),
                container_port: to.port(),
                attachment: attachment(target.ifindex),
                state,
            }
        })
        .collect();
    ports.sort_by_key(|port| (port.port, port.protocol, port.address, port.state));
    Ok(ports)
}

/// Prints a section, if there are any.
pub(super) fn print(ports: &[HostPort], out: &mut impl io::Write) -> io::Result<()> {
    if ports.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{HEADING}Host ports{HEADING:#}")?;
    for port in ports {
        let from = SocketAddr::new(port.address, port.port);
        let from = format!("{from}/{}", port.protocol);
        let to = SocketAddr::new(port.container_address, port.container_port).to_string();
        let why = match port.state {
            State::Serving => "",
            State::Closed => " (closed: the port of a tunnel of the node)",
            State::Waiting => " (waits: a newer mapping serves the port)",
        };
        writeln!(
            out,
            "  {from:<32} {to:<28} {FAINT}{}{why}{FAINT:#}",
            port.attachment
        )?;
    }
    Ok(())
}
