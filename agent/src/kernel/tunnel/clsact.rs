//! The qdisc that the dataplane's programs sit at, which the device has before it is up.
//!
//! Who gives it to a device that is up costs it all packets that it sends meanwhile, some tenths of a millisecond to some milliseconds: the kernel
//! takes its queues away and gives them back after a grace period of RCU (`qdisc_graft` of `net/sched/sch_api.c` calls `dev_deactivate`; as of
//! Linux 6.18). `underpass apply` does that, to whatever uplink it finds without it, and finds this device only when it is up.

use std::io::ErrorKind;

use anyhow::{Context as _, bail};
use futures::StreamExt as _;
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::tc::{TcAttribute, TcHandle, TcMessage};

use crate::kernel::{DEVICE, Kernel};

impl Kernel {
    /// Gives the device with this number the qdisc, unless it has it.
    pub(super) async fn add_clsact(&self, index: u32) -> anyhow::Result<()> {
        let mut qdisc = TcMessage::with_index(index.cast_signed());
        qdisc.header.handle = TcHandle {
            major: TcHandle::CLSACT.major,
            minor: 0,
        };
        qdisc.header.parent = TcHandle::CLSACT;
        qdisc
            .attributes
            .push(TcAttribute::Kind("clsact".to_owned()));
        let mut request = NetlinkMessage::from(RouteNetlinkMessage::NewQueueDiscipline(qdisc));
        request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
        let mut answers = self.handle.clone().request(request)?;
        let answer = answers.next().await.map(|answer| answer.payload);
        let Some(NetlinkPayload::Error(answer)) = answer else {
            bail!("the kernel did not say whether {DEVICE} has the qdisc clsact");
        };
        let refusal = answer.to_io();
        if answer.code.is_none() || refusal.kind() == ErrorKind::AlreadyExists {
            return Ok(());
        }
        Err(refusal).with_context(|| {
            format!("{DEVICE} has no qdisc clsact (the kernel module sch_ingress) yet")
        })
    }
}
