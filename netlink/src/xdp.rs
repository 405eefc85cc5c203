//! XDP: the program of a device that sees frames before the kernel has made packets of them. A device
//! has one, and whoever came first keeps it.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkMessage, LinkXdp},
};

use super::{Error, Mode, Netlink, link::Device};

/// Who runs the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XdpMode {
    /// The driver.
    Native,
    /// The kernel, once it has made a packet: for any device, and slower than no XDP.
    Generic,
}

impl XdpMode {
    const fn flag(self) -> u32 {
        match self {
            Self::Generic => 1 << 1,
            Self::Native => 1 << 2,
        }
    }

    /// The name of its place on the device.
    #[must_use]
    pub const fn hook(self) -> &'static str {
        match self {
            Self::Native => "native XDP",
            Self::Generic => "generic XDP",
        }
    }

    /// The name that the configuration has for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }
}

/// `XDP_FLAGS_UPDATE_IF_NOEXIST`: an error if there is a program already.
const IF_NONE: u32 = 1;
/// `XDP_FLAGS_REPLACE` (5.7): an error if the program there is another than the one expected.
const IF_EXPECTED: u32 = 1 << 4;
/// No program.
const NONE: i32 = -1;

/// A program that a device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attached {
    /// Who runs it.
    pub mode: XdpMode,
    /// The program's id.
    pub program: u32,
}

/// The programs that a description of a device names.
pub(super) fn attached(description: &[LinkXdp]) -> Vec<Attached> {
    description
        .iter()
        .filter_map(|attribute| {
            let (mode, program) = match attribute {
                LinkXdp::DrvProgId(id) => (XdpMode::Native, id),
                LinkXdp::SkbProgId(id) => (XdpMode::Generic, id),
                _ => return None,
            };
            Some(Attached {
                mode,
                program: *program,
            })
        })
        .collect()
}

impl Netlink {
    /// Attaches a program to a device that has none.
    pub fn attach_xdp(
        &self,
        device: &Device,
        mode: XdpMode,
        program: BorrowedFd<'_>,
    ) -> Result<(), Error> {
        let attributes = vec![
            LinkXdp::Fd(program.as_raw_fd()),
            LinkXdp::Flags(IF_NONE | mode.flag()),
        ];
        self.change_xdp(device, attributes, || {
            format!("attach the {} XDP program to {}", mode.name(), device.name)
        })
    }

    /// Puts a program into the place of another one that a device has.
    pub fn replace_xdp(
        &self,
        device: &Device,
        mode: XdpMode,
        old: BorrowedFd<'_>,
        new: BorrowedFd<'_>,
    ) -> Result<(), Error> {
        let attributes = vec![
            LinkXdp::Fd(new.as_raw_fd()),
            LinkXdp::Flags(IF_EXPECTED | mode.flag()),
            LinkXdp::ExpectedFd(old.as_raw_fd().cast_unsigned()),
        ];
        self.change_xdp(device, attributes, || {
            format!("replace the {} XDP program of {}", mode.name(), device.name)
        })
    }

    /// Takes this program off a device that has it.
    pub fn detach_xdp(
        &self,
        device: &Device,
        mode: XdpMode,
        program: BorrowedFd<'_>,
    ) -> Result<(), Error> {
        let attributes = vec![
            LinkXdp::Fd(NONE),
            LinkXdp::Flags(IF_EXPECTED | mode.flag()),
            LinkXdp::ExpectedFd(program.as_raw_fd().cast_unsigned()),
        ];
        self.change_xdp(device, attributes, || {
            format!(
                "detach the {} XDP program from {}",
                mode.name(),
                device.name
            )
        })
    }

    fn change_xdp(
        &self,
        device: &Device,
        attributes: Vec<LinkXdp>,
        action: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        let mut message = LinkMessage::default();
        message.header.index = device.index;
        message.attributes.push(LinkAttribute::Xdp(attributes));
        self.change(
            &RouteNetlinkMessage::SetLink(message),
            Mode::Existing,
            action,
        )
    }
}
