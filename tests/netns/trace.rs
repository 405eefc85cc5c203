//! `underpass trace`: what it prints, and that the programs are silent when it does not run.

use nix::sys::signal::Signal;
use rstest::rstest;
use underpass_tests::{
    prelude::*,
    trace::{Trace, set_level, state, take_records},
    traffic::raw::RawLink,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// The number of a level of records.
const DEBUG: u32 = 4;

#[rstest]
fn flows_are_logged_and_single_drops_are_not(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let remote = family.remote_at(PORT);
    let _world = udp::Server::start(lab.world.netns(), remote)?;
    let _inside = udp::Server::start(b.netns(), family.port(PORT))?;
    let trace = Trace::start(&lab.node, &[])?;

    for pod in [&a, &b] {
        let seen = udp::Client::open_at(pod.netns(), family, SOURCE)?
            .chat(remote, 3)?
            .seen;
        let (words, port) = ("masquerade protocol 17 source port", seen.port());
        trace.expect(&[&format!("{words} {SOURCE} as port {port}")])?;
    }
    udp::Client::open_at(a.netns(), family, SOURCE + 1)?.chat(b.at(family, PORT), 3)?;
    // Which end is named first depends on how their addresses compare.
    trace.expect(&[
        "learned protocol 17 ",
        &format!("port {} ", SOURCE + 1),
        &format!("port {PORT} "),
        &format!("at device {}", lab.node.netns().ifindex(b.host_veth())?),
    ])?;

    let meter = Meter::start(&lab.node)?;
    let forged = a.ends(remote.ip())?.from_ip(family.unused_pod());
    RawLink::open(a.netns(), Pod::IFNAME)?.send(&forged.udp(SOURCE + 2, PORT, b"forged"))?;
    meter.expect(Counter::DropSourceAddress, 1)?;
    // What comes after it is logged, and it is not.
    udp::Client::open_at(a.netns(), family, SOURCE + 3)?.chat(remote, 1)?;
    trace.expect(&[&format!("source port {}", SOURCE + 3)])?;
    let lines = trace.stop(Signal::SIGINT)?;
    let forged = format!("port {}", SOURCE + 2);
    ensure!(
        !lines.iter().any(|line| line.contains(&forged)),
        "{lines:#?}"
    );
    for line in &lines {
        ensure!(line.starts_with("DEBUG "), "{lines:#?}");
    }
    Ok(())
}

#[rstest]
fn nothing_is_logged_when_nobody_listens(
    #[values(Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP)] signal: Signal,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let remotes = [V4, V6].map(|family| family.remote_at(PORT));
    let mut servers = Vec::new();
    for remote in remotes {
        servers.push(udp::Server::start(lab.world.netns(), remote)?);
        let family = Family::of(remote.ip());
        servers.push(udp::Server::start(b.netns(), b.at(family, PORT))?);
    }
    let flows = || -> Result<()> {
        let meter = Meter::start(&lab.node)?;
        for remote in remotes {
            let family = Family::of(remote.ip());
            for server in [remote, b.at(family, PORT)] {
                udp::Client::open(a.netns(), family)?.chat(server, 3)?;
            }
        }
        meter.expect(Counter::Learned, 2)?;
        meter.expect(Counter::Masqueraded, 2)
    };
    let silent = || -> Result<()> {
        ensure!(state(&lab.node)?.trace == 0);
        flows()?;
        let records = take_records(&lab.node)?;
        ensure!(records == 0, "{records} records");
        Ok(())
    };
    silent()?;
    let trace = Trace::start(&lab.node, &[])?;
    flows()?;
    trace.expect(&["masquerade"])?;
    trace.stop(signal)?;
    silent()?;
    // They would be found here.
    set_level(&lab.node, DEBUG)?;
    flows()?;
    ensure!(take_records(&lab.node)? >= 4);
    Ok(())
}

#[test]
fn one_trace_runs_at_a_time() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _pod = lab.pod("a")?;
    let first = Trace::start(&lab.node, &["--level", "warn"])?;
    let error = lab
        .node
        .underpass(&["trace"])
        .err()
        .context("a second one")?;
    ensure!(
        format!("{error:#}").contains("another `underpass trace`"),
        "{error:#}"
    );
    ensure!(state(&lab.node)?.trace == 2, "the first one's level stays");
    first.stop(Signal::SIGTERM)?;
    Trace::start(&lab.node, &[])?.stop(Signal::SIGTERM)?;
    Ok(())
}
