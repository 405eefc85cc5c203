//! Processor time: how much the machine worked, and how much of that was others' work.

use std::{fs, time::Instant};

use anyhow::{Context as _, Result};
use nix::{
    sys::{
        resource::{Usage, UsageWho, getrusage},
        time::TimeValLike as _,
    },
    unistd::{SysconfVar, sysconf},
};

/// Processor time until one moment, in seconds.
pub(crate) struct Used {
    moment: Instant,
    /// Of all processes, without what interrupts took.
    all: f64,
    /// Of this process, and of children that it has reaped.
    own: f64,
}

impl Used {
    /// Until now.
    pub(crate) fn now() -> Result<Self> {
        let all = processors(&BUSY)?;
        let own = [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN]
            .map(getrusage)
            .into_iter()
            .map(|usage| usage.map(|usage| seconds(&usage)))
            .sum::<nix::Result<f64>>()
            .context("ask for the own processor time")?;
        Ok(Self {
            moment: Instant::now(),
            all,
            own,
        })
    }

    /// Cores that others took on average from an earlier moment to this one. Never negative: the kernel counts in ticks.
    pub(crate) fn others_since(&self, earlier: &Self) -> f64 {
        let elapsed = (self.moment - earlier.moment).as_secs_f64();
        let others = (self.all - earlier.all) - (self.own - earlier.own);
        (others / elapsed).max(0.0)
    }
}

/// Processor time of the whole machine until now, in seconds, what interrupts took included.
pub(crate) fn worked() -> Result<f64> {
    processors(&WORKED)
}

/// Fields of /proc/stat's first line: time in user mode, niced or not, in the kernel, and stolen by the hypervisor.
const BUSY: [usize; 4] = [0, 1, 2, 7];

/// Time in user mode, niced or not, in the kernel, for interrupts and for what they have left to do later.
const WORKED: [usize; 5] = [0, 1, 2, 5, 6];

/// The sum of these fields of /proc/stat's first line, in seconds.
fn processors(fields: &[usize]) -> Result<f64> {
    let ticks = sysconf(SysconfVar::CLK_TCK)
        .context("ask for the length of a tick")?
        .context("the system does not say how long a tick is")?;
    let stat = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let all = sum(&stat, fields).context("find the processors' times in /proc/stat")?;
    Ok(all / to_f64(ticks))
}

fn sum(stat: &str, wanted: &[usize]) -> Option<f64> {
    let fields: Vec<i64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .map_while(|field| field.parse().ok())
        .collect();
    wanted
        .iter()
        .map(|&index| fields.get(index).copied().map(to_f64))
        .sum()
}

fn seconds(usage: &Usage) -> f64 {
    let times = [usage.user_time(), usage.system_time()];
    times
        .into_iter()
        .map(|time| to_f64(time.num_microseconds()) / 1e6)
        .sum()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "ticks and microseconds of processor time stay far below 2^53"
)]
const fn to_f64(count: i64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_and_idle_time_are_not_work_of_processes() {
        let stat = "cpu  100 20 30 4000 5 6 7 8 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(sum(stat, &BUSY), Some(158.0));
        assert_eq!(sum(stat, &WORKED), Some(163.0));
        assert_eq!(sum("intr 1 2 3\n", &BUSY), None);
    }

    #[test]
    fn what_this_process_does_itself_is_not_of_others() {
        let used = |all, own| Used {
            moment: Instant::now(),
            all,
            own,
        };
        let (before, mut after) = (used(10.0, 1.0), used(13.0, 3.0));
        after.moment = before.moment + std::time::Duration::from_secs(2);
        assert!((after.others_since(&before) - 0.5).abs() < 1e-9);
    }
}
