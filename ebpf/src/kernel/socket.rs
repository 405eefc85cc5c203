//! Questions to the host's sockets.

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
};
use underpass_abi::flow::protocol;

use crate::{
    kernel::{
        global::{global, number},
        net::Net,
        work_area::WorkArea,
    },
    model::{request::Request, work::Work},
};

number!(
    /// What socket of the host would get the replies to a tuple.
    pub enum Socket {
        /// A connection, or a listener that one may yet be made to.
        Used,
        /// One of UDP that is connected to nobody. It keeps its port for itself, but where the port is
        /// mapped it steps back, as it does where netfilter translates.
        Served,
        /// None.
        None,
    }
);

global!(
    /// Finds the socket of the host that would get the replies to the outer tuple of [`Work::request`].
    pub fn host_uses<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> Socket {
        let Work {
            request: Request { outer, .. },
            ..
        } = &mut **work;
        if outer.protocol != protocol::TCP && outer.protocol != protocol::UDP {
            return Socket::None;
        }
        let mut tuple = I::socket_tuple(&outer.reversed());
        if outer.protocol == protocol::TCP {
            // SAFETY: the context is valid, the tuple has the size that is passed.
            let socket = unsafe {
                bpf_skc_lookup_tcp(
                    ctx.cast(),
                    &raw mut tuple,
                    I::SOCKET_TUPLE,
                    BPF_F_CURRENT_NETNS,
                    0,
                )
            };
            if socket.is_null() {
                return Socket::None;
            }
            // SAFETY: a reference that the lookup took, released once.
            unsafe { bpf_sk_release(socket.cast()) };
            return Socket::Used;
        }
        // SAFETY: as above.
        let socket = unsafe {
            bpf_sk_lookup_udp(
                ctx.cast(),
                &raw mut tuple,
                I::SOCKET_TUPLE,
                BPF_F_CURRENT_NETNS,
                0,
            )
        };
        if socket.is_null() {
            return Socket::None;
        }
        // SAFETY: a socket, until it is released.
        let is_connected = unsafe { (*socket).state } == BPF_TCP_ESTABLISHED;
        // SAFETY: as above.
        unsafe { bpf_sk_release(socket.cast()) };
        if is_connected {
            Socket::Used
        } else {
            Socket::Served
        }
    }
);

const BPF_F_CURRENT_NETNS: u64 = u64::MAX;

/// State of a connected socket, of UDP as well.
const BPF_TCP_ESTABLISHED: u32 = 1;
