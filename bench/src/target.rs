//! What this project wants to reach, and what was reached.

use serde::Serialize;
use underpass_tests::Family;

use crate::{
    Outcome,
    control::crowd::{OWN_WITH_PORTS, PORTMAP},
    load::Load,
    path::{Carrier, Many, Route, Rules, Translated},
    plugin::Plugin,
    program::Cache,
    sample::Summary,
    traffic::{self, Series},
};

const MIB: f64 = 1024.0 * 1024.0;

/// Which side of the target is the good one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Wanted {
    AtLeast,
    AtMost,
}

/// What the measurement says of a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    Reached,
    Missed,
    /// The target lies within the spread of the rounds: this run can't tell.
    Unclear,
}

impl Verdict {
    /// Its word in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Reached => "reached",
            Self::Missed => "MISSED",
            Self::Unclear => "unclear",
        }
    }
}

/// One target and the figure that it is about.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Target {
    pub(crate) what: String,
    pub(crate) wanted: Wanted,
    pub(crate) bound: f64,
    pub(crate) measured: f64,
    pub(crate) verdict: Verdict,
}

impl Target {
    /// Of a figure without a spread.
    fn new(what: String, wanted: Wanted, bound: f64, measured: f64) -> Self {
        let reached = match wanted {
            Wanted::AtLeast => measured >= bound,
            Wanted::AtMost => measured <= bound,
        };
        let verdict = if reached {
            Verdict::Reached
        } else {
            Verdict::Missed
        };
        Self {
            what,
            wanted,
            bound,
            measured,
            verdict,
        }
    }

    /// Of a figure with a spread. A machine that was not steady shows as a median beyond its own quartiles; that widens the spread.
    fn of(what: String, wanted: Wanted, bound: f64, measured: Summary) -> Self {
        let mut target = Self::new(what, wanted, bound, measured.median);
        let low = measured.q1.min(measured.median);
        let high = measured.q3.max(measured.median);
        if low < bound && bound < high {
            target.verdict = Verdict::Unclear;
        }
        target
    }
}

/// All targets that this outcome says something about.
pub(crate) fn judge(outcome: &Outcome) -> Vec<Target> {
    let mut targets = if outcome.settings.one_core {
        one_core(&outcome.traffic)
    } else {
        packets(&outcome.traffic)
    };
    targets.extend(services(&outcome.traffic));
    for cost in outcome.programs.iter().flat_map(|all| &all.single) {
        if cost.program != "nothing" && cost.bypassed && cost.cache == Cache::Warm {
            targets.push(Target::new(
                format!("{}, {}: ns a packet, warm", cost.program, cost.packet),
                Wanted::AtMost,
                120.0,
                cost.net_ns,
            ));
        }
    }
    targets.extend(calls(outcome));
    targets
}

fn packets(all: &[Series]) -> Vec<Target> {
    let mut targets = Vec::new();
    for (route, family) in Route::ALL
        .into_iter()
        .flat_map(|route| Family::BOTH.map(|family| (route, family)))
    {
        let find = |plugin, load| traffic::find(all, route, Carrier::Plugin(plugin), load, family);
        for (plugin, load, target) in [
            (Plugin::Learned, Load::Stream, 0.95),
            (Plugin::Learned, Load::Requests, 0.95),
            (Plugin::Learned, Load::Packets, 0.95),
            (Plugin::Learned, Load::Mix, 0.95),
            (Plugin::Learned, Load::Connections, 0.90),
        ] {
            if let Some(series) = find(plugin, load) {
                targets.push(Target::of(
                    format!(
                        "{}, {family:?}, {}, {}: of {}",
                        route.name(),
                        plugin.name(),
                        load.name(),
                        Carrier::Limit.name(route)
                    ),
                    Wanted::AtLeast,
                    target,
                    series.of_limit,
                ));
            }
        }
        let (peers, target) = match route {
            Route::PodToPod => ([Plugin::Bridge, Plugin::Bridge], 1.12),
            Route::PodToWorld | Route::WorldToPort => {
                ([Plugin::BridgeMasquerade, Plugin::PtpMasquerade], 1.10)
            }
            Route::PodToService | Route::PodToRemoteService => continue,
        };
        let best = peers
            .into_iter()
            .filter_map(|peer| find(peer, Load::Packets))
            .max_by(|a, b| a.summary.median.total_cmp(&b.summary.median));
        if let (Some(own), Some(best)) = (find(Plugin::Learned, Load::Packets), best)
            && let Some(ratio) = Summary::ratio(&own.samples, &best.samples)
        {
            targets.push(Target::of(
                format!(
                    "{}, {family:?}, learned, UDP 64 B: of {}",
                    route.name(),
                    best.carrier.name(route)
                ),
                Wanted::AtLeast,
                target,
                ratio,
            ));
        }
        // The road for one mapping, and for ten thousand.
        for load in Load::ALL {
            let crowded = traffic::find(all, route, Carrier::Crowded, load, family);
            if let (Some(few), Some(many)) = (find(Plugin::Learned, load), crowded)
                && let Some(ratio) = Summary::ratio(&many.samples, &few.samples)
            {
                targets.push(Target::of(
                    format!(
                        "{}, {family:?}, {}, {}: of the same with 1 mapping",
                        route.name(),
                        Carrier::Crowded.name(route),
                        load.name()
                    ),
                    Wanted::AtLeast,
                    0.97,
                    ratio,
                ));
            }
        }
    }
    targets
}

/// With both ends on one core all that a packet costs counts, and no wake-up of another one hides it.
fn one_core(all: &[Series]) -> Vec<Target> {
    let routes = [Route::PodToPod, Route::PodToWorld, Route::WorldToPort];
    let measured = routes
        .into_iter()
        .flat_map(|route| Family::BOTH.map(|family| (route, family)))
        .flat_map(|(route, family)| Load::ALL.map(|load| (route, family, load)));
    let mut targets = Vec::new();
    for (route, family, load) in measured {
        let find = |plugin| traffic::find(all, route, Carrier::Plugin(plugin), load, family);
        let what = |series: &Series, of: &str| {
            let name = series.carrier.name(route);
            format!(
                "{}, {family:?}, {name}, {}: of {of}",
                route.name(),
                load.name()
            )
        };
        // Those that translate as well, whether the flow needs it or not.
        let best = [Plugin::BridgeMasquerade, Plugin::PtpMasquerade]
            .into_iter()
            .filter_map(find)
            .max_by(|a, b| a.summary.median.total_cmp(&b.summary.median));
        let against_best = |own: &Series, bound| {
            let best = best?;
            let ratio = Summary::ratio(&own.samples, &best.samples)?;
            let what = what(own, &best.carrier.name(route));
            Some(Target::of(what, Wanted::AtLeast, bound, ratio))
        };
        if let Some(own) = find(Plugin::Learned) {
            let bound = match load {
                Load::Stream => None,
                Load::Connections | Load::Connections8 | Load::Connections64 => Some(0.85),
                _ => Some(0.95),
            };
            targets.extend(bound.map(|bound| {
                let what = what(own, &Carrier::Limit.name(route));
                Target::of(what, Wanted::AtLeast, bound, own.of_limit)
            }));
            if load == Load::Connections {
                targets.extend(against_best(own, 1.15));
            }
        }
        if let Some(own) = find(Plugin::Off) {
            targets.extend(against_best(own, 1.0));
        }
    }
    targets
}

/// A Service is as fast as its endpoint, however many there are, and a connection to it no slower than if nothing were learned, or by
/// the stack alone.
fn services(all: &[Series]) -> Vec<Target> {
    let mut targets = Vec::new();
    let measured = Route::SERVICES
        .into_iter()
        .flat_map(|route| Family::BOTH.map(|family| (route, family)))
        .flat_map(|(route, family)| Load::ALL.map(|load| (route, family, load)));
    for (route, family, load) in measured {
        let find = |plugin, rules, services| {
            let translated = Translated {
                plugin,
                rules,
                services,
            };
            traffic::find(all, route, Carrier::Translated(translated), load, family)
        };
        let what = |series: &Series| {
            let name = series.carrier.name(route);
            format!("{}, {family:?}, {name}, {}", route.name(), load.name())
        };
        for rules in [Rules::Iptables, Rules::Nftables] {
            let few = find(Plugin::Routed, rules, Many::One);
            for services in [Many::One, Many::TenThousand] {
                let Some(own) = find(Plugin::Routed, rules, services) else {
                    continue;
                };
                if load != Load::Connections {
                    let (what, ratio) = (format!("{}: of direct", what(own)), own.of_limit);
                    targets.push(Target::of(what, Wanted::AtLeast, 0.95, ratio));
                }
                let peers = match load {
                    Load::Connections => &[Plugin::RoutedOff, Plugin::Ptp][..],
                    _ => &[],
                };
                for &plugin in peers {
                    if let Some(peer) = find(plugin, rules, services)
                        && let Some(ratio) = Summary::ratio(&own.samples, &peer.samples)
                    {
                        let what = format!("{}: of {}", what(own), peer.carrier.name(route));
                        targets.push(Target::of(what, Wanted::AtLeast, 1.0, ratio));
                    }
                }
                if services != Many::One
                    && load != Load::Connections
                    && let Some(ratio) =
                        few.and_then(|few| Summary::ratio(&own.samples, &few.samples))
                {
                    let what = format!("{}: of the same with 1 Service", what(own));
                    targets.push(Target::of(what, Wanted::AtLeast, 0.97, ratio));
                }
            }
        }
    }
    targets
}

#[expect(
    clippy::cast_precision_loss,
    reason = "sizes in bytes stay far below 2^53"
)]
fn calls(outcome: &Outcome) -> Vec<Target> {
    let Some(control) = &outcome.control else {
        return Vec::new();
    };
    let at_most =
        |what: String, target, measured| Target::new(what, Wanted::AtMost, target, measured);
    let find = |caller: &str, verb: &str, containers: usize| {
        let mut calls = control.calls.iter();
        let call = calls.find(|call| {
            call.caller == caller && call.verb == verb && call.containers == containers
        });
        call.map(|call| call.ms.median)
    };
    let own = Plugin::Learned.name();
    let mut targets = Vec::new();
    for &containers in &outcome.settings.containers {
        let Some(add) = find(OWN_WITH_PORTS, "ADD", containers) else {
            continue;
        };
        targets.push(at_most(
            format!("ADD with 2 host ports at {containers} containers: ms"),
            5.0,
            add,
        ));
        if let Some(reference) = find(PORTMAP, "ADD", containers) {
            let share = if containers < 250 { 10.0 } else { 30.0 };
            targets.push(at_most(
                format!("ADD with 2 host ports at {containers} containers: of {PORTMAP}"),
                1.0 / share,
                add / reference,
            ));
        }
        if let (Some(del), Some(floor)) = (
            find(own, "DEL", containers),
            find("ip link", "DEL", containers),
        ) {
            targets.push(at_most(
                format!("DEL at {containers} containers: of `ip link delete` of a veth pair"),
                1.25,
                del / floor,
            ));
        }
        for (verb, target) in [("CHECK", 3.0), ("STATUS", 2.0), ("VERSION", 0.6)] {
            if let Some(ms) = find(own, verb, containers) {
                targets.push(at_most(
                    format!("{verb} at {containers} containers: ms"),
                    target,
                    ms,
                ));
            }
        }
    }
    // What a full node costs.
    for (caller, verb, bound) in [
        (OWN_WITH_PORTS, "ADD", 1.3),
        (own, "CHECK", 1.5),
        (own, "STATUS", 1.5),
    ] {
        if let (Some(few), Some(many)) = (find(caller, verb, 30), find(caller, verb, 1_000)) {
            targets.push(at_most(
                format!("{verb} at 1000 containers: of the same at 30"),
                bound,
                many / few,
            ));
        }
    }
    targets.push(Target::of(
        format!(
            "{} ADDs at once: of as many in a row",
            control.series.containers
        ),
        Wanted::AtMost,
        0.6,
        control.series.ratio,
    ));
    for (memory, target) in [control.memory.first(), control.memory.last()]
        .into_iter()
        .zip([16.0, 64.0])
    {
        targets.extend(memory.map(|memory| {
            at_most(
                format!(
                    "maps at {} containers and {} flows: MiB",
                    memory.containers, memory.flows
                ),
                target,
                memory.maps as f64 / MIB,
            )
        }));
    }
    targets.push(at_most(
        "executable: MiB".to_owned(),
        4.5,
        control.binary as f64 / MIB,
    ));
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_within_the_spread_is_neither_reached_nor_missed() {
        let verdict = |median, q1, q3| {
            let measured = Summary { median, q1, q3 };
            Target::of(String::new(), Wanted::AtLeast, 0.95, measured).verdict
        };
        assert_eq!(verdict(0.97, 0.96, 0.98), Verdict::Reached);
        assert_eq!(verdict(0.90, 0.88, 0.94), Verdict::Missed);
        assert_eq!(verdict(0.96, 0.94, 0.98), Verdict::Unclear);
        // The ratio of medians and the rounds' own ratios disagree.
        assert_eq!(verdict(0.97, 0.90, 0.93), Verdict::Unclear);
    }
}
