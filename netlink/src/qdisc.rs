//! tc: the token bucket filter (`tbf`), which shapes what a device sends.

use netlink_packet_core::{DefaultNla, Nla as _, NlasIterator};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcHandle, TcMessage, TcOption},
};

use super::{Error, Mode, Netlink, link::Device, socket::word};

const KIND: &str = "tbf";
/// Offset of the device's index in a `tcmsg`.
const INDEX_AT: usize = 4;
/// `TCA_TBF_PARMS`: a `tc_tbf_qopt`, two `tc_ratespec` of 12 bytes and three words, in host order.
const PARAMETERS: u16 = 1;
/// `TCA_TBF_RATE64`: the rate, where it does not fit 32 bits.
const RATE64: u16 = 4;
const PARAMETERS_LEN: usize = 36;
/// Offsets in `tc_tbf_qopt`.
const RATE_AT: usize = 8;
const LIMIT_AT: usize = 24;
const BUFFER_AT: usize = 28;

/// Ticks per second of the packet scheduler's clock: 64 ns each, on every kernel since 2.6.31.
const TICKS_PER_SECOND: u128 = 15_625_000;
/// The most that is queued is what is sent in so many milliseconds, and a burst.
const LATENCY_MS: u64 = 25;

/// A token bucket filter's parameters, as the kernel has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tbf {
    /// In bytes per second.
    pub rate: u64,
    /// Size of the bucket: the time that it takes to fill it, in ticks of 64 ns.
    pub buffer: u32,
    /// Longest queue, in bytes.
    pub limit: u32,
}

impl Tbf {
    /// Shapes to `rate` bytes per second, after a pause `burst` bytes at once.
    ///
    /// The kernel counts the bucket as time, in 32 bits: at most 274 seconds' worth of the rate.
    #[must_use]
    pub fn new(rate: u64, burst: u32) -> Self {
        let rate = rate.max(1);
        let ticks = (u128::from(burst) * TICKS_PER_SECOND).div_ceil(rate.into());
        let waiting = rate.saturating_mul(LATENCY_MS) / 1000;
        Self {
            rate,
            buffer: u32::try_from(ticks).unwrap_or(u32::MAX),
            limit: u32::try_from(waiting.saturating_add(burst.into())).unwrap_or(u32::MAX),
        }
    }

    fn rate32(self) -> u32 {
        u32::try_from(self.rate).unwrap_or(u32::MAX)
    }

    fn options(self) -> Vec<TcOption> {
        let mut parameters = [0; PARAMETERS_LEN];
        for (at, value) in [
            (RATE_AT, self.rate32()),
            (LIMIT_AT, self.limit),
            (BUFFER_AT, self.buffer),
        ] {
            parameters[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        let mut options = vec![DefaultNla::new(PARAMETERS, parameters.to_vec())];
        if self.rate > u64::from(self.rate32()) {
            options.push(DefaultNla::new(RATE64, self.rate.to_ne_bytes().to_vec()));
        }
        options.into_iter().map(TcOption::Other).collect()
    }

    /// Reads what the kernel answers: the nested attributes as one value.
    fn parse(options: &[TcOption]) -> Option<Self> {
        let [TcOption::Other(nested)] = options else {
            return None;
        };
        let mut bytes = vec![0; nested.value_len()];
        nested.emit_value(&mut bytes);
        let mut tbf = None;
        let mut rate64 = None;
        for attribute in NlasIterator::new(bytes.as_slice()) {
            let attribute = attribute.ok()?;
            let value = attribute.value();
            let word = |at: usize| {
                let bytes = value.get(at..at + 4)?;
                Some(u32::from_ne_bytes(bytes.try_into().ok()?))
            };
            match attribute.kind() {
                PARAMETERS => {
                    tbf = Some(Self {
                        rate: word(RATE_AT)?.into(),
                        buffer: word(BUFFER_AT)?,
                        limit: word(LIMIT_AT)?,
                    });
                }
                RATE64 => rate64 = Some(u64::from_ne_bytes(value.try_into().ok()?)),
                _ => {}
            }
        }
        let tbf = tbf?;
        Some(Self {
            rate: rate64.unwrap_or(tbf.rate),
            ..tbf
        })
    }
}

/// The root qdisc that somebody gave a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Root {
    /// The number before the colon in the handle that `tc` shows, never zero.
    pub handle: u16,
    /// Its kind: `tbf`, `fq`, `htb`.
    pub kind: String,
    /// Its parameters, if it is a token bucket filter.
    pub tbf: Option<Tbf>,
}

impl Netlink {
    /// Makes a token bucket filter the root qdisc of a device that has none but the kernel's own. The handle's
    /// number tells whose it is.
    pub fn add_tbf(&self, device: &Device, handle: u16, tbf: Tbf) -> Result<(), Error> {
        let mut message = root_of(device, handle);
        message.attributes = vec![
            TcAttribute::Kind(KIND.to_owned()),
            TcAttribute::Options(tbf.options()),
        ];
        self.change(
            &RouteNetlinkMessage::NewQueueDiscipline(message),
            Mode::Create,
            || format!("add the qdisc {KIND} to {}", device.name),
        )
        .map_err(|error| {
            error
                .advise(&[libc::ENOENT], "load the kernel module sch_tbf")
                .advise(
                    &[libc::EINVAL, libc::ERANGE],
                    "the kernel takes no such rate or burst, lower them",
                )
        })
    }

    /// Takes the root qdisc of that handle off a device, which gets the kernel's own again. Returns whether there
    /// was one.
    pub fn delete_root(&self, device: &Device, handle: u16) -> Result<bool, Error> {
        let answer = self.change(
            &RouteNetlinkMessage::DelQueueDiscipline(root_of(device, handle)),
            Mode::Existing,
            || format!("delete the root qdisc {handle:x}: of {}", device.name),
        );
        match answer {
            Ok(()) => Ok(true),
            Err(error) if error.is_absent() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Lists the kinds of all qdiscs of a device.
    pub(super) fn qdisc_kinds(&self, index: u32) -> Result<Vec<String>, Error> {
        let qdiscs = self.qdiscs(index)?;
        Ok(qdiscs.iter().filter_map(kind_of).collect())
    }

    /// Finds the root qdisc that somebody gave a device. The kernel's own, which has no handle, is none.
    pub fn root_qdisc(&self, index: u32) -> Result<Option<Root>, Error> {
        let qdiscs = self.qdiscs(index)?;
        let mut roots = qdiscs
            .iter()
            .filter(|message| message.header.parent == TcHandle::ROOT);
        Ok(roots.find_map(|message| {
            let handle = message.header.handle.major;
            (handle != 0).then(|| Root {
                handle,
                kind: kind_of(message).unwrap_or_default(),
                tbf: tbf_of(message),
            })
        }))
    }

    /// Finds the token bucket filter that is the root qdisc of a device, if one is.
    pub fn root_tbf(&self, index: u32) -> Result<Option<Tbf>, Error> {
        Ok(self.root_qdisc(index)?.and_then(|root| root.tbf))
    }

    fn qdiscs(&self, index: u32) -> Result<Vec<TcMessage>, Error> {
        let message = TcMessage::with_index(index.cast_signed());
        let message = RouteNetlinkMessage::GetQueueDiscipline(message);
        // Kernels may answer with the qdiscs of every device.
        let wanted = |payload: &[u8]| word(payload, INDEX_AT) == Some(index);
        let answers = self.dump(&message, wanted, || {
            format!("list the qdiscs of device number {index}")
        })?;
        let qdiscs = answers.into_iter().filter_map(|answer| match answer {
            RouteNetlinkMessage::NewQueueDiscipline(message) => Some(message),
            _ => None,
        });
        Ok(qdiscs.collect())
    }
}

fn root_of(device: &Device, handle: u16) -> TcMessage {
    let mut message = TcMessage::with_index(device.index.cast_signed());
    message.header.handle = TcHandle {
        major: handle,
        minor: 0,
    };
    message.header.parent = TcHandle::ROOT;
    message
}

fn kind_of(message: &TcMessage) -> Option<String> {
    message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            TcAttribute::Kind(kind) => Some(kind.clone()),
            _ => None,
        })
}

fn tbf_of(message: &TcMessage) -> Option<Tbf> {
    let is_tbf = |attribute: &TcAttribute| *attribute == TcAttribute::Kind(KIND.to_owned());
    message.attributes.iter().any(is_tbf).then_some(())?;
    message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            TcAttribute::Options(options) => Tbf::parse(options),
            _ => None,
        })
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable as _;

    use super::*;

    #[test]
    fn numbers_of_the_reference_plugin() {
        // 20 Mbit/s and 1 Mbit: 2,500,000 and 125,000 bytes; 50 ms; 25 ms more.
        assert_eq!(
            Tbf::new(2_500_000, 125_000),
            Tbf {
                rate: 2_500_000,
                buffer: 781_250,
                limit: 187_500,
            }
        );
    }

    #[test]
    fn what_does_not_fit_is_as_large_as_can_be() {
        let slow = Tbf::new(0, u32::MAX);
        assert_eq!(
            (slow.rate, slow.buffer, slow.limit),
            (1, u32::MAX, u32::MAX)
        );
        let fast = Tbf::new(u64::MAX, u32::MAX);
        assert_eq!(fast.buffer, 1);
        assert_eq!(fast.limit, u32::MAX);
    }

    #[test]
    fn what_is_sent_is_read_back() {
        for rate in [1, 2_500_000, u64::from(u32::MAX), 1 << 40] {
            let tbf = Tbf::new(rate, 125_000);
            let options = tbf.options();
            let mut bytes = vec![0; options.as_slice().buffer_len()];
            options.as_slice().emit(&mut bytes);
            let nested = TcOption::Other(DefaultNla::new(2, bytes));
            assert_eq!(Tbf::parse(&[nested]), Some(tbf));
        }
    }
}
