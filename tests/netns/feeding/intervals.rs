//! How often connection tracking is fed goes by its timers, which somebody may change: they are read at each ADD and GC.

use std::{
    net::UdpSocket,
    thread,
    time::{Duration, Instant},
};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{netfilter::LONGEST, patience, prelude::*, runtime::Call};

use super::{PAUSE, PORT, QUESTION};

/// The timers of UDP.
const TIMERS: [&str; 2] = ["udp_timeout", "udp_timeout_stream"];

/// Says how many seconds connection tracking remembers datagrams.
fn set_timers(lab: &Lab, seconds: [&str; 2]) -> Result<()> {
    let node = lab.node.netns();
    TIMERS.iter().zip(seconds).try_for_each(|(timer, seconds)| {
        node.set_sysctl(&format!("net/netfilter/nf_conntrack_{timer}"), seconds)
    })
}

/// What the timers of now ask for in milliseconds, and whether the programs go by it.
fn interval(lab: &Lab) -> Result<(u64, bool)> {
    let said = lab.node.underpass(&["status", "--json"])?;
    let status: Value = serde_json::from_str(&said)?;
    let stack = &status["networkStack"];
    let found = stack["feedMs"]["udp"]
        .as_u64()
        .zip(stack["inForce"].as_bool());
    found.with_context(|| format!("{stack:#}"))
}

/// How many packets of a conversation are shown to the stack while any other entry would be forgotten.
fn fed(lab: &Lab, client: &mut udp::Client, to: std::net::SocketAddr) -> Result<u64> {
    let meter = Meter::start(&lab.node)?;
    let start = Instant::now();
    while start.elapsed() < patience::here(LONGEST) {
        client.ask(to, 100)?;
        thread::sleep(PAUSE);
    }
    Ok(meter.read()?.get(Counter::Fed))
}

/// Timers of minutes become those of seconds: the flows that there are already are fed in time.
#[rstest]
fn timers_of_now_count_from_the_next_call_on(
    #[values(V4, V6)] family: Family,
    #[values("ADD", "GC")] verb: &str,
) -> Result<()> {
    /// By timers of minutes a direction is shown once in ten seconds.
    const RARE: u64 = 10_000;
    needs_root!();
    let lab = Lab::new()?;
    let node = lab.node.netns();
    let mut short = Vec::new();
    for timer in TIMERS {
        short.push(node.sysctl(&format!("net/netfilter/nf_conntrack_{timer}"))?);
    }
    set_timers(&lab, ["120", "180"])?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let mut client = udp::Client::open(pod.netns(), family)?;
    // A conversation from here on: what has begun lately is shown more often.
    fed(&lab, &mut client, remote)?;
    let before = interval(&lab)?;
    ensure!(
        before.0 > RARE / 2 && before.0 <= RARE && before.1,
        "{before:?}"
    );
    set_timers(&lab, [&short[0], &short[1]])?;
    let (wanted, is_in_force) = interval(&lab)?;
    ensure!(
        wanted < before.0 / 3 && !is_in_force,
        "{wanted} ms, {is_in_force}"
    );
    let _other = if verb == "ADD" {
        Some(lab.pod("b")?)
    } else {
        let valid = json!([{ "containerID": pod.name(), "ifname": Pod::IFNAME }]);
        let conf = lab.conf().with("cni.dev/valid-attachments", valid);
        Call::new("GC").conf(&conf).run(&lab.node)?.silence()?;
        None
    };
    let after = interval(&lab)?;
    ensure!(after == (wanted, true), "{after:?}");
    // Of each direction half of what fits: more than there would be of both in ten seconds.
    let shown = fed(&lab, &mut client, remote)?;
    let least = u64::try_from(patience::here(LONGEST).as_millis())? / wanted;
    ensure!(
        shown >= least,
        "{shown} packets instead of {least} at least"
    );
    Ok(())
}

/// What is answered late is a stream as soon as what is answered at once: connection tracking hears of it two seconds after it began, and
/// remembers it for longer from then on.
#[rstest]
fn a_stream_is_one_whenever_its_first_answer_comes(
    #[values(V4, V6)] family: Family,
    #[values(0, 1_500)] late_ms: u64,
) -> Result<()> {
    /// From when on connection tracking takes a flow for a stream, and a few ticks.
    const SOON: Duration = Duration::from_secs(6);
    needs_root!();
    let lab = Lab::new()?;
    set_timers(&lab, ["30", "120"])?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let server = lab.world.netns().run(|| UdpSocket::bind(remote))?;
    server.set_read_timeout(Some(patience::here(Duration::from_secs(2))))?;
    let client = pod.netns().run(|| UdpSocket::bind(family.port(0)))?;
    client.connect(remote)?;
    let start = Instant::now();
    client.send(QUESTION)?;
    let (_, from) = server.recv_from(&mut [0; 64])?;
    thread::sleep(Duration::from_millis(late_ms));
    server.send_to(QUESTION, from)?;
    let port = format!("sport={}", client.local_addr()?.port());
    let meter = Meter::start(&lab.node)?;
    while start.elapsed() < SOON {
        client.send(b"nothing to answer")?;
        thread::sleep(PAUSE);
    }
    let found = lab.firewall.entries(family, &["udp", &port])?;
    ensure!(
        found.len() == 1 && found[0].contains("[ASSURED]"),
        "{found:#?}"
    );
    meter.expect(Counter::BypassWire, 20)
}
