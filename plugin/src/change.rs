//! What was put right on the node: one line for each thing that somebody changed behind our back.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use underpass_abi::{addr::Addr, endpoint::Device};
use underpass_netlink::Mac;

/// One thing that is as it has to be again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// The programs do not know a device any more that is gone. Only its number is left of it.
    Forgotten(u32),
    /// The programs know a device that they did not know.
    Known(String),
    /// The programs know what is different about a device.
    Updated {
        /// Its name.
        device: String,
        /// What is different, a few words each.
        differences: Vec<String>,
    },
    /// Programs sit on a device that they were missing on.
    Attached {
        /// Its name.
        device: String,
        programs: Vec<&'static str>,
    },
    /// Programs sit on a device no more that has become a part of another uplink.
    Detached(String),
    /// The programs go by other sysctls, or other policies of IPsec.
    Rules,
    /// A sysctl of the node is what containers need again.
    Setting {
        /// Its name, as `sysctl` takes it.
        name: String,
        value: &'static str,
        /// What it was.
        before: String,
    },
    /// Host ports lead nowhere any more that led to a container whose device is gone.
    HostPorts {
        /// The container's addresses.
        addresses: Vec<IpAddr>,
        /// Entries that they had, one for each port of each family.
        count: u32,
    },
    /// Other addresses than before are those of Services.
    ServiceAddresses,
    /// The node is an end of other tunnels than before.
    Tunnels,
    /// Other destinations than before see the own addresses of a network's containers.
    Masquerade {
        /// The network's name.
        network: String,
        nets: Vec<IpNet>,
        /// Whether they see them now.
        is_kept: bool,
    },
}

impl Change {
    /// Says what the programs learn of a device.
    pub(crate) fn of_device(name: &str, before: Option<&Device>, now: &Device) -> Self {
        let device = name.to_owned();
        match before {
            None => Self::Known(device),
            Some(before) => Self::Updated {
                device,
                differences: differences(before, now),
            },
        }
    }
}

fn differences(before: &Device, now: &Device) -> Vec<String> {
    let mut list = Vec::new();
    if before.mtu != now.mtu {
        list.push(format!("MTU {} instead of {}", now.mtu, before.mtu));
    }
    if before.mac != now.mac {
        list.push(format!(
            "MAC {} instead of {}",
            Mac(now.mac),
            Mac(before.mac)
        ));
    }
    let addresses = [
        ("IPv4", before.masquerade4, now.masquerade4),
        ("IPv6", before.masquerade6, now.masquerade6),
    ];
    for (family, before, now) in addresses {
        if before != now {
            list.push(format!(
                "{family} address {} instead of {}",
                address(now),
                address(before)
            ));
        }
    }
    if list.is_empty() {
        list.push("its kind, its VRF or its rp_filter".to_owned());
    }
    list
}

fn address(addr: Addr) -> String {
    if addr == Addr::default() {
        "none".to_owned()
    } else {
        IpAddr::from(addr).to_string()
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forgotten(index) => write!(f, "device {index} is gone: forgotten"),
            Self::Known(device) => write!(f, "{device}: known now"),
            Self::Updated {
                device,
                differences,
            } => write!(f, "{device}: {}", differences.join(", ")),
            Self::Attached { device, programs } => {
                write!(f, "{device}: attached {}", programs.join(", "))
            }
            Self::Detached(device) => {
                write!(f, "{device}: detached, it is a part of another uplink now")
            }
            Self::Rules => f.write_str(
                "network stack: the programs go by its sysctls and IPsec policies as they are now",
            ),
            Self::Setting {
                name,
                value,
                before,
            } => write!(f, "{name}: {value} instead of {before}"),
            Self::HostPorts { addresses, count } => {
                let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
                let addresses = addresses.join(" and ");
                write!(
                    f,
                    "host ports ({count} entries) of the container at {addresses}: free, its device is gone"
                )
            }
            Self::ServiceAddresses => {
                f.write_str("host ports: not served at the addresses of Services as they are now")
            }
            Self::Tunnels => {
                f.write_str("tunnels: containers are kept out of those that there are now")
            }
            Self::Masquerade {
                network,
                nets,
                is_kept,
            } => {
                let nets: Vec<String> = nets.iter().map(IpNet::to_string).collect();
                let word = if *is_kept {
                    "not masqueraded"
                } else {
                    "masqueraded"
                };
                write!(f, "network {network}: {word} to {}", nets.join(", "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let before = Device {
            mtu: 1500,
            masquerade4: IpAddr::from([192, 0, 2, 1]).into(),
            ..Device::default()
        };
        let now = Device {
            mtu: 1400,
            masquerade4: Addr::default(),
            ..before
        };
        let said = |before, now| Change::of_device("eth0", before, now).to_string();
        assert_eq!(
            said(Some(&before), &now),
            "eth0: MTU 1400 instead of 1500, IPv4 address none instead of 192.0.2.1"
        );
        let flagged = Device { flags: 1, ..now };
        assert_eq!(
            said(Some(&now), &flagged),
            "eth0: its kind, its VRF or its rp_filter"
        );
        assert_eq!(said(None, &now), "eth0: known now");
    }
}
