//! What a program costs for one packet of a flow that it knows, by `BPF_PROG_TEST_RUN`.
//!
//! A program changes the packet that it sends on, so a run can't simply be repeated on the same one: each is a run of its own, timed by
//! the kernel, and cold, because a system call lies before it. Where nothing is translated and any source MAC is right, a packet stays
//! one of its flow until its TTL is used up: that run is repeated, and warm. The same is done with a program that does nothing; the difference is what
//! the program costs.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use aya::programs::SchedClassifier;
use nix::net::if_::if_nametoindex;
use serde::Serialize;
use underpass_dataplane::test_run::Run;
use underpass_tests::{
    Family, Lab, Node,
    counter::pins,
    frame::{self, Ends},
    netns::Netns,
    runtime::Conf,
};

use crate::{
    cpu::{self, End},
    redirect,
    sample::Summary,
};

/// `TC_ACT_REDIRECT`: the packet was sent on past the stack.
const REDIRECT: u32 = 7;

/// Bytes of payload, as in the load of datagrams.
const PAYLOAD: [u8; 64] = [0; 64];

const CLIENT_PORT: u16 = 40_000;
const SERVER_PORT: u16 = 50_000;

mod live;

/// Everything about programs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) single: Vec<Cost>,
    pub(crate) live: Vec<live::Live>,
}

/// What the processor has at hand when a program begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Cache {
    /// What a system call left.
    Cold,
    /// What the same program needed a moment ago.
    Warm,
}

impl Cache {
    /// Runs between two system calls. Below the TTL of a packet.
    const fn repeat(self) -> u32 {
        match self {
            Self::Cold => 1,
            Self::Warm => 50,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
        }
    }
}

/// One program on one kind of packet.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cost {
    pub(crate) program: &'static str,
    pub(crate) packet: String,
    pub(crate) cache: Cache,
    /// Whether every run sent the packet past the stack; otherwise the figure is of something else.
    pub(crate) bypassed: bool,
    /// Nanoseconds of a run, as the kernel timed it.
    pub(crate) ns: Summary,
    /// The same less the median of a program that does nothing.
    pub(crate) net_ns: f64,
}

/// Runs each program of the fast path on packets of flows that were learned just before.
pub(crate) fn measure(runs: usize) -> Result<Outcome> {
    let lab = Lab::open()?;
    let node = &lab.node;
    let conf: Conf = lab.conf();
    let client = lab.pod_with("client", &conf)?;
    let server = lab.pod_with("server", &conf)?;
    let any_mac = conf.clone().with("macspoofchk", false);
    let repeater = lab.pod_with("repeater", &any_mac)?;
    let nothing = Path::new("/sys/fs/bpf/nothing");
    node.netns().run(|| redirect::pin_nothing(nothing))?;

    let mut costs = Vec::new();
    for family in Family::BOTH {
        let to_pod = client
            .ends(server.ip(family))?
            .udp(CLIENT_PORT, SERVER_PORT, &PAYLOAD);
        let to_world = client
            .ends(family.remote())?
            .udp(CLIENT_PORT, SERVER_PORT, &PAYLOAD);
        let reply = Ends {
            src_mac: mac(lab.world.netns(), "eth0")?,
            dst_mac: mac(node.netns(), Node::UPLINK)?,
            src: family.remote(),
            dst: family.node(),
        }
        .udp(SERVER_PORT, CLIENT_PORT, &PAYLOAD);

        stream([
            (client.netns(), server.netns(), server.ip(family)),
            (client.netns(), lab.world.netns(), family.remote()),
            (repeater.netns(), server.netns(), server.ip(family)),
        ])?;
        let untouched = repeater
            .ends(server.ip(family))?
            .udp(CLIENT_PORT, SERVER_PORT, &PAYLOAD);
        let from_pod = pins(node).join("programs/from_pod");
        let from_wire = pins(node).join("programs/from_wire");
        let veth = client.host_veth();
        for (name, pin, device, what, frame, cache) in [
            ("nothing", nothing, veth, "pod to pod", &to_pod, Cache::Cold),
            (
                "nothing",
                nothing,
                repeater.host_veth(),
                "pod to pod",
                &untouched,
                Cache::Warm,
            ),
            (
                "from_pod",
                &from_pod,
                repeater.host_veth(),
                "pod to pod",
                &untouched,
                Cache::Warm,
            ),
            (
                "from_pod",
                &from_pod,
                veth,
                "pod to pod",
                &to_pod,
                Cache::Cold,
            ),
            (
                "from_pod",
                &from_pod,
                veth,
                "pod to world",
                &to_world,
                Cache::Cold,
            ),
            (
                "from_wire",
                &from_wire,
                Node::UPLINK,
                "reply from world",
                &reply,
                Cache::Cold,
            ),
        ] {
            let (ns, bypassed) = time(node, pin, device, frame, runs, cache)
                .with_context(|| format!("run {name} on a packet {what}"))?;
            costs.push(Cost {
                program: name,
                packet: format!("{what}, {family:?}"),
                cache,
                bypassed,
                ns,
                net_ns: 0.0,
            });
        }
    }
    subtract_floor(&mut costs)?;
    let live = live::measure(&lab, &client, &server)?;
    client.del()?;
    server.del()?;
    repeater.del()?;
    Ok(Outcome {
        single: costs,
        live,
    })
}

/// Takes away what the measuring itself costs, cold and warm.
fn subtract_floor(costs: &mut [Cost]) -> Result<()> {
    for cache in [Cache::Cold, Cache::Warm] {
        let floor: Vec<f64> = costs
            .iter()
            .filter(|cost| cost.program == "nothing" && cost.cache == cache)
            .map(|cost| cost.ns.median)
            .collect();
        let floor = Summary::of(&floor).context("the empty program was not run")?;
        for cost in costs.iter_mut().filter(|cost| cost.cache == cache) {
            cost.net_ns = cost.ns.median - floor.median;
        }
    }
    Ok(())
}

/// Flows, each of a client, a server and the server's address, that are old enough: until connection tracking takes UDP for a stream one packet of each
/// second has to go through the stack.
fn stream(flows: [(&Netns, &Netns, IpAddr); 3]) -> Result<()> {
    for second in 0..6 {
        if second > 0 {
            thread::sleep(Duration::from_secs(1));
        }
        for (client, server, target) in flows {
            teach(client, server, target)?;
        }
    }
    Ok(())
}

/// A flow with several packets in both directions.
fn teach(client: &Netns, server: &Netns, target: IpAddr) -> Result<()> {
    let target = SocketAddr::new(target, SERVER_PORT);
    let source = Family::of(target.ip()).port(CLIENT_PORT);
    let bind = |netns: &Netns, at: SocketAddr| {
        netns
            .run(|| std::net::UdpSocket::bind(at))
            .with_context(|| format!("receive datagrams at {at}"))
    };
    let (here, there) = (bind(client, source)?, bind(server, target)?);
    for socket in [&here, &there] {
        socket.set_read_timeout(Some(Duration::from_millis(300)))?;
    }
    let mut answered = 0;
    for _ in 0..20 {
        let mut buffer = PAYLOAD;
        here.send_to(&PAYLOAD, target).context("send a datagram")?;
        let Ok((_, from)) = there.recv_from(&mut buffer) else {
            continue;
        };
        there.send_to(&buffer, from).context("answer a datagram")?;
        answered += usize::from(here.recv(&mut buffer).is_ok());
    }
    ensure!(
        answered > 10,
        "only {answered} of 20 datagrams to {target} were answered"
    );
    Ok(())
}

/// Nanoseconds of runs of a pinned program, and whether all of them redirected.
fn time(
    node: &Node,
    pin: &Path,
    device: &str,
    frame: &[u8],
    runs: usize,
    cache: Cache,
) -> Result<(Summary, bool)> {
    let (times, bypassed) = node.netns().run(|| {
        cpu::pin(End::Client)?;
        let program =
            SchedClassifier::from_pin(pin).with_context(|| format!("open {}", pin.display()))?;
        let ifindex =
            if_nametoindex(device).with_context(|| format!("find the device {device}"))?;
        let run = Run::on(frame).at(ifindex).times(cache.repeat());
        let mut times = Vec::with_capacity(runs);
        let mut bypassed = true;
        for _ in 0..runs {
            let result = run.of(&program).context("BPF_PROG_TEST_RUN")?;
            times.push(result.duration.as_secs_f64() * 1e9);
            bypassed &= result.return_value == REDIRECT;
        }
        anyhow::Ok((times, bypassed))
    })?;
    let summary = Summary::of(&times).context("no runs were asked for")?;
    Ok((summary, bypassed))
}

fn mac(netns: &Netns, device: &str) -> Result<[u8; 6]> {
    let links = netns.ip_json(&["link", "show", "dev", device])?;
    let text = links[0]["address"]
        .as_str()
        .with_context(|| format!("the device {device} has no MAC"))?;
    frame::mac(text)
}
