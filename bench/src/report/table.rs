//! The table of text.

use std::fmt::{self, Write as _};

use underpass_tests::Family;

use crate::{
    Outcome, control,
    load::Load,
    path::{Carrier, Route},
    program,
    target::{Target, Verdict, Wanted},
    traffic::{self, Series},
};

/// Cores that other processes may take on average before the result says that it is worth little.
const QUIET: f64 = 0.1;

/// Everything, as lines of at most some 120 characters.
pub(crate) fn table(outcome: &Outcome) -> String {
    let mut text = String::new();
    // Writing to a String can't fail.
    let _ = write(&mut text, outcome);
    text
}

fn write(text: &mut String, outcome: &Outcome) -> fmt::Result {
    let settings = &outcome.settings;
    writeln!(text, "underpass bench, revision {}", outcome.revision)?;
    writeln!(text, "machine: {}", outcome.machine.describe())?;
    writeln!(text, "peers:   {}", outcome.machine.peers())?;
    writeln!(
        text,
        "method:  {} rounds, {} ms each after {} ms; median, its share of the limit and the quartiles of that share; {} s in all",
        settings.rounds, settings.window_ms, settings.warm_up_ms, outcome.duration_s
    )?;
    if let Some(others) = outcome.others {
        writeln!(
            text,
            "others:  {:.2} cores were taken by other processes meanwhile{}",
            others,
            if others > QUIET {
                ": too much, do not trust shares and calls"
            } else {
                ""
            }
        )?;
    }
    if !outcome.traffic.is_empty() {
        for route in Route::ALL {
            if outcome.traffic.iter().any(|series| series.route == route) {
                packets(text, route, &outcome.traffic)?;
            }
        }
        writeln!(text)?;
        for bypassed in &outcome.bypassed {
            writeln!(
                text,
                "{:<14} {:<22} {:>12} packets past the stack, {} flow directions learned",
                bypassed.carrier.name(Route::PodToPod),
                bypassed.purpose.name(),
                bypassed.packets,
                bypassed.learned
            )?;
        }
    }
    for reason in &outcome.left_out {
        writeln!(text, "left out: {reason}")?;
    }
    if let Some(all) = &outcome.programs {
        programs(text, all)?;
    }
    if let Some(control) = &outcome.control {
        calls(text, control)?;
    }
    if !outcome.targets.is_empty() {
        targets(text, &outcome.targets)?;
    }
    Ok(())
}

fn programs(text: &mut String, all: &program::Outcome) -> fmt::Result {
    writeln!(
        text,
        "\nPROGRAMS, ns for a packet of a known flow: with the timer [quartiles], without"
    )?;
    for cost in &all.single {
        let ns = cost.ns;
        let spread = format!("[{:.0} - {:.0}]", ns.q1, ns.q3);
        let remark = if cost.bypassed || cost.program == "nothing" {
            ""
        } else {
            "  not the fast path: went to the stack"
        };
        writeln!(
            text,
            "  {:<10} {:<22} {:<5} {:>8.0}  {spread:<16} {:>8.0}{remark}",
            cost.program,
            cost.packet,
            cost.cache.name(),
            ns.median,
            cost.net_ns
        )?;
    }
    writeln!(
        text,
        "\nPROGRAMS under UDP 64 B, ns of a run with the kernel's statistics on (they cost some themselves)"
    )?;
    for live in &all.live {
        writeln!(
            text,
            "  {:<10} {:<28} {:>8}  mean of {} runs",
            live.program, live.traffic, live.mean_ns, live.runs
        )?;
    }
    Ok(())
}

fn packets(text: &mut String, route: Route, all: &[Series]) -> fmt::Result {
    writeln!(text, "\n{}", route.name().to_uppercase())?;
    let is_measured = |load: &Load| {
        all.iter()
            .any(|series| series.route == route && series.load == *load)
    };
    for load in Load::ALL.into_iter().filter(is_measured) {
        write!(text, "{:<18}", load.name())?;
        for family in ["v4", "v6"] {
            write!(
                text,
                " {:>10}  {:<24} {:>9}",
                format!("{family} {}", load.unit()),
                "of limit [quartiles]",
                format!("CPU {}", load.piece()),
            )?;
        }
        writeln!(text)?;
        for series in all {
            if series.route != route || series.load != load || series.family != Family::V4 {
                continue;
            }
            write!(text, "  {:<16}", series.carrier.name(route))?;
            for family in Family::BOTH {
                if let Some(series) = traffic::find(all, route, series.carrier, load, family) {
                    figures(text, series)?;
                }
            }
            text.truncate(text.trim_end().len());
            writeln!(text)?;
        }
    }
    Ok(())
}

fn figures(text: &mut String, series: &Series) -> fmt::Result {
    write!(
        text,
        " {:>10.2}  ",
        series.summary.median / series.load.scale()
    )?;
    let share = if series.carrier == Carrier::Limit {
        String::new()
    } else {
        let ratio = series.of_limit;
        format!("{:.3} [{:.3} - {:.3}]", ratio.median, ratio.q1, ratio.q3)
    };
    write!(text, "{share:<24} {:>9.2}", series.cpu_us.median)
}

fn calls(text: &mut String, control: &control::Outcome) -> fmt::Result {
    writeln!(
        text,
        "\nCALLS, ms of the whole process          containers     median  [quartiles]"
    )?;
    for call in &control.calls {
        writeln!(
            text,
            "  {:<8} {:<28} {:>10} {:>10.2}  [{:.2} - {:.2}]",
            call.verb, call.caller, call.containers, call.ms.median, call.ms.q1, call.ms.q3
        )?;
    }
    let series = &control.series;
    writeln!(
        text,
        "\n{} ADDs in a row {:.0} ms [{:.0} - {:.0}], at once {:.0} ms [{:.0} - {:.0}]: {:.2} of the time",
        series.containers,
        series.in_a_row_ms.median,
        series.in_a_row_ms.q1,
        series.in_a_row_ms.q3,
        series.at_once_ms.median,
        series.at_once_ms.q1,
        series.at_once_ms.q3,
        series.ratio.median
    )?;
    for memory in &control.memory {
        let largest: Vec<String> = memory
            .largest
            .iter()
            .take(4)
            .map(|(name, bytes)| format!("{name} {} KiB", bytes / 1024))
            .collect();
        writeln!(
            text,
            "memory at {} containers and {} flows: maps {} KiB ({}), programs {} KiB",
            memory.containers,
            memory.flows,
            memory.maps / 1024,
            largest.join(", "),
            memory.programs / 1024
        )?;
    }
    writeln!(text, "executable: {} KiB", control.binary / 1024)
}

fn targets(text: &mut String, targets: &[Target]) -> fmt::Result {
    writeln!(text, "\nTARGETS")?;
    for target in targets {
        let sign = match target.wanted {
            Wanted::AtLeast => ">=",
            Wanted::AtMost => "<=",
        };
        writeln!(
            text,
            "  {:<78} {:>9.3}  {sign} {:<7.3} {}",
            target.what,
            target.measured,
            target.bound,
            target.verdict.name()
        )?;
    }
    let count = |verdict| {
        let with = targets.iter().filter(|target| target.verdict == verdict);
        with.count()
    };
    writeln!(
        text,
        "  of {}: {} reached, {} missed, {} that the spread of this run leaves unclear",
        targets.len(),
        count(Verdict::Reached),
        count(Verdict::Missed),
        count(Verdict::Unclear)
    )
}
