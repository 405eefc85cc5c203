//! What programs cost under traffic: the kernel's own statistics, which cost some 20 to 40 ns a run themselves.

use std::time::Duration;

use anyhow::{Context as _, Result};
use aya::{
    programs::SchedClassifier,
    sys::{Stats, enable_stats},
};
use serde::Serialize;
use underpass_abi::map;
use underpass_tests::{Family, Lab, Pod, counter::pins};

use crate::{
    fdinfo,
    load::{Ends, Load, Timing},
};

const TIMING: Timing = Timing {
    warm_up: Duration::from_millis(100),
    window: Duration::from_millis(400),
};

/// Runs that a program must have had to be worth a line.
const MANY: u64 = 1_000;

/// One program under one kind of traffic.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Live {
    pub(crate) program: &'static str,
    pub(crate) traffic: String,
    pub(crate) runs: u64,
    /// Nanoseconds, the mean of all runs, with the kernel's clock reads.
    pub(crate) mean_ns: u64,
}

/// Small datagrams to a pod and to the world, with statistics switched on until this returns.
pub(super) fn measure(lab: &Lab, client: &Pod, server: &Pod) -> Result<Vec<Live>> {
    let _on =
        enable_stats(Stats::RunTime).context("switch on the kernel's statistics of programs")?;
    let programs = lab.node.netns().run(|| {
        let open = |&name| {
            let path = pins(&lab.node).join("programs").join(name);
            let program = SchedClassifier::from_pin(&path)
                .with_context(|| format!("open the pinned program {}", path.display()))?;
            anyhow::Ok((name, program))
        };
        map::USUAL_PROGRAMS
            .iter()
            .map(open)
            .collect::<Result<Vec<_>>>()
    })?;
    let read = || {
        let numbers = programs.iter().map(|(name, program)| {
            let fd = program.fd()?;
            let runs = fdinfo::number(fd, "run_cnt")?;
            anyhow::Ok((*name, runs, fdinfo::number(fd, "run_time_ns")?))
        });
        numbers.collect::<Result<Vec<_>>>()
    };

    let mut all = Vec::new();
    for family in Family::BOTH {
        for (what, netns, target) in [
            ("pod to pod", server.netns(), server.ip(family)),
            ("pod to world", lab.world.netns(), family.remote()),
        ] {
            let before = read()?;
            let ends = Ends {
                client: client.netns(),
                server: netns,
                target,
                own: target,
            };
            Load::Packets.measure(&ends, TIMING)?;
            for (&(program, runs, time), (_, runs_before, time_before)) in
                read()?.iter().zip(before)
            {
                let runs = runs - runs_before;
                if runs >= MANY {
                    all.push(Live {
                        program,
                        traffic: format!("{what}, {family:?}"),
                        runs,
                        mean_ns: (time - time_before) / runs,
                    });
                }
            }
        }
    }
    Ok(all)
}
