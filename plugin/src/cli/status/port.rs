//! The host ports, as `underpass status` shows them.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use serde::Serialize;
use underpass_dataplane::{
    Error, Pins,
    port::{HostPorts, Text, destination},
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
    /// Whether it is the newest mapping of the port; the others wait for its end.
    pub(super) serving: bool,
}

/// All mappings, sorted; of one port, the one that counts first. `attachment` names the attachment
/// of a device.
pub(super) fn collect(
    pins: &Pins,
    attachment: impl Fn(u32) -> String,
) -> Result<Vec<HostPort>, Error> {
    let maps = HostPorts::open(pins)?;
    let serving = maps.serving()?.into_iter();
    let shadowed = maps.shadowed()?.into_iter();
    let all = serving
        .map(|(port, target)| (port, target, true))
        .chain(shadowed.map(|(key, target)| (key.port, target, false)));
    let mut ports: Vec<_> = all
        .map(|(key, target, serving)| {
            let (from, to) = (Text(&key), destination(&target));
            HostPort {
                address: from.socket().ip(),
                port: from.socket().port(),
                protocol: from.protocol(),
                container_address: to.ip(),
                container_port: to.port(),
                attachment: attachment(target.ifindex),
                serving,
            }
        })
        .collect();
    ports.sort_by_key(|port| (port.port, port.protocol, port.address, !port.serving));
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
        let waits = if port.serving {
            ""
        } else {
            " (waits: a newer mapping serves the port)"
        };
        writeln!(
            out,
            "  {from:<32} {to:<28} {FAINT}{}{waits}{FAINT:#}",
            port.attachment
        )?;
    }
    Ok(())
}
