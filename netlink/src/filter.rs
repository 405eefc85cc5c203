//! tc: the clsact qdisc and eBPF filters in direct-action mode.
//!
//! A filter is identified by device, direction, priority and handle; ours have numbers of their
//! own, so a request never meets a filter of anyone else. The qdisc is shared: it is created where
//! it is missing and never deleted.

use std::{
    collections::BTreeMap,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcMessage, TcOption},
};

use super::{Error, Mode, Netlink, link::Device};

/// Priority of our filters: behind those that other programs place by hand, which are small
/// numbers.
const PRIORITY: u16 = 0xC0DE;
/// Handle of our filters.
const HANDLE: TcHandle = TcHandle { major: 0, minor: 1 };
/// `ETH_P_ALL` (3) in network order, the protocol of a filter that sees every packet.
const ALL_PROTOCOLS: u16 = 3_u16.to_be();

/// The side of a device that a filter sits at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The filter sees what the device receives.
    Ingress,
    /// The filter sees what the device sends.
    Egress,
}

impl Direction {
    const fn parent(self) -> TcHandle {
        TcHandle {
            major: TcHandle::CLSACT.major,
            minor: match self {
                Self::Ingress => TcHandle::MIN_INGRESS,
                Self::Egress => TcHandle::MIN_EGRESS,
            },
        }
    }

    /// The name that `tc` has for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

/// A filter of one direction of a device, whoever has put it there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Filter {
    /// The kernel asks filters in the order of this number.
    pub priority: u16,
    /// Its kind: `bpf`, `flower`, `u32`.
    pub kind: String,
    /// The name of an eBPF filter.
    pub name: Option<String>,
}

impl Filter {
    /// Tells whether it has the priority of our filters.
    #[must_use]
    pub const fn is_ours(&self) -> bool {
        self.priority == PRIORITY
    }

    /// Tells whether the kernel asks it before our filter.
    #[must_use]
    pub const fn is_before_ours(&self) -> bool {
        self.priority < PRIORITY
    }
}

impl Netlink {
    /// Gives a device the clsact qdisc, unless it has it.
    pub fn add_clsact(&self, device: &Device) -> Result<(), Error> {
        let mut message = tc_message(device.index);
        message.header.handle = TcHandle {
            major: TcHandle::CLSACT.major,
            minor: 0,
        };
        message.header.parent = TcHandle::CLSACT;
        message
            .attributes
            .push(TcAttribute::Kind("clsact".to_owned()));
        let answer = self.change(
            &RouteNetlinkMessage::NewQueueDiscipline(message),
            Mode::Create,
            || format!("add the clsact qdisc to {}", device.name),
        );
        match answer {
            Err(error) if error.is_present() => self.require_clsact(device, error),
            answer => answer.map_err(|error| {
                error.advise(&[libc::ENOENT], "load the kernel module sch_ingress")
            }),
        }
    }

    /// What is in the place of the clsact qdisc may be the older `ingress`, which has one list of
    /// filters for whatever direction one asks for.
    fn require_clsact(&self, device: &Device, error: Error) -> Result<(), Error> {
        let kinds = self.qdisc_kinds(device.index)?;
        if kinds.iter().any(|kind| kind == "ingress") {
            let action = format!(
                "add the clsact qdisc to {}, where another program (the plugin bandwidth?) has put the qdisc ingress",
                device.name
            );
            return Err(Error { action, ..error }.advise(
                &[libc::EEXIST],
                "have it removed (`tc qdisc del dev <device> ingress`)",
            ));
        }
        Ok(())
    }

    /// Puts our filter of that direction onto a device that has the clsact qdisc, in place of an
    /// older one of ours.
    pub fn set_filter(
        &self,
        device: &Device,
        direction: Direction,
        program: BorrowedFd<'_>,
        name: &str,
    ) -> Result<(), Error> {
        let mut message = filter_message(device.index, direction);
        let options = [
            TcFilterBpfOption::ProgFd(program.as_raw_fd().cast_unsigned()),
            TcFilterBpfOption::ProgName(name.to_owned()),
            TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
        ];
        message
            .attributes
            .push(TcAttribute::Kind(TcFilterBpf::KIND.to_owned()));
        message.attributes.push(TcAttribute::Options(
            options.into_iter().map(TcOption::Bpf).collect(),
        ));
        self.change(
            &RouteNetlinkMessage::NewTrafficFilter(message),
            Mode::Replace,
            || {
                format!(
                    "attach {name} to the {} of {}",
                    direction.name(),
                    device.name
                )
            },
        )
    }

    /// Takes our filter of that direction off a device. Returns whether there was one.
    pub fn delete_filter(&self, index: u32, direction: Direction) -> Result<bool, Error> {
        let mut message = filter_message(index, direction);
        message
            .attributes
            .push(TcAttribute::Kind(TcFilterBpf::KIND.to_owned()));
        let answer = self.change(
            &RouteNetlinkMessage::DelTrafficFilter(message),
            Mode::Existing,
            || {
                format!(
                    "detach from the {} of device number {index}",
                    direction.name()
                )
            },
        );
        match answer {
            Ok(()) => Ok(true),
            // A device without the qdisc answers EINVAL.
            Err(error) if error.is_absent() || error.errno() == Some(libc::EINVAL) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Asks for the ids of the programs that our filters run, in the order of the devices and directions
    /// asked for: `None` where the device or the filter does not exist.
    pub fn filter_programs(&self, places: &[(u32, Direction)]) -> Result<Vec<Option<u32>>, Error> {
        let questions = places.iter().map(|&(index, direction)| {
            RouteNetlinkMessage::GetTrafficFilter(filter_message(index, direction))
        });
        let answers = self
            .get_each(questions)
            .map_err(|source| Error::new("look at filters".to_owned(), source))?;
        answers
            .into_iter()
            .zip(places)
            .map(|(answer, &(index, direction))| {
                let action = || {
                    format!(
                        "look at the filter at the {} of device number {index}",
                        direction.name()
                    )
                };
                match answer.map_err(|source| Error::new(action(), source)) {
                    Ok(RouteNetlinkMessage::NewTrafficFilter(message)) => Ok(program(message)),
                    Ok(_) => Ok(None),
                    // A device without the qdisc answers EINVAL, and so does one without filters.
                    Err(error) if error.is_absent() || error.errno() == Some(libc::EINVAL) => {
                        Ok(None)
                    }
                    Err(error) => Err(error),
                }
            })
            .collect()
    }

    /// Lists the filters of one direction of a device, in the order in which the kernel asks them: one for each priority.
    pub fn filters(&self, index: u32, direction: Direction) -> Result<Vec<Filter>, Error> {
        let mut message = tc_message(index);
        message.header.parent = direction.parent();
        let message = RouteNetlinkMessage::GetTrafficFilter(message);
        let answers = self.dump(
            &message,
            |_| true,
            || {
                format!(
                    "list the filters at the {} of device number {index}",
                    direction.name()
                )
            },
        );
        let answers = match answers {
            // A device without the qdisc, or one that is gone.
            Err(error) if error.is_absent() || error.errno() == Some(libc::EINVAL) => {
                return Ok(Vec::new());
            }
            answers => answers?,
        };
        let mut filters = BTreeMap::new();
        for answer in answers {
            let RouteNetlinkMessage::NewTrafficFilter(message) = answer else {
                continue;
            };
            let filter = described(message);
            // The kernel tells of a priority, and then of each filter that has it.
            let known = filters
                .entry(filter.priority)
                .or_insert_with(|| filter.clone());
            if known.name.is_none() {
                *known = filter;
            }
        }
        Ok(filters.into_values().collect())
    }
}

/// Reads what a filter is.
fn described(message: TcMessage) -> Filter {
    let [high, low, ..] = message.header.info.to_be_bytes();
    let mut filter = Filter {
        priority: u16::from_be_bytes([high, low]),
        kind: String::new(),
        name: None,
    };
    for attribute in message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => filter.kind = kind,
            TcAttribute::Options(options) => {
                let name = options.into_iter().find_map(|option| match option {
                    TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => Some(name),
                    _ => None,
                });
                filter.name = name.or(filter.name);
            }
            _ => {}
        }
    }
    filter
}

/// Reads the program of a filter.
fn program(message: TcMessage) -> Option<u32> {
    message.attributes.into_iter().find_map(|attribute| {
        let TcAttribute::Options(options) = attribute else {
            return None;
        };
        options.into_iter().find_map(|option| match option {
            TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(id),
            _ => None,
        })
    })
}

fn tc_message(index: u32) -> TcMessage {
    TcMessage::with_index(index.cast_signed())
}

fn filter_message(index: u32, direction: Direction) -> TcMessage {
    let mut message = tc_message(index);
    message.header.parent = direction.parent();
    message.header.handle = HANDLE;
    message.header.info = u32::from(PRIORITY) << 16 | u32::from(ALL_PROTOCOLS);
    message
}
