//! Traffic on all paths, round by round: each round measures each load on every path before the next load's turn.

use std::time::Instant;

use anstream::eprintln;
use anyhow::{Context as _, Result};
use serde::{Serialize, Serializer};
use underpass_tests::Family;

use crate::{
    Settings,
    load::Load,
    path::{Carrier, Path, Route},
    sample::Summary,
};

/// One load of one family on one path, in all rounds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Series {
    pub(crate) route: Route,
    pub(crate) carrier: Carrier,
    pub(crate) load: Load,
    #[serde(serialize_with = "family")]
    pub(crate) family: Family,
    /// Bits, transactions or packets per second.
    pub(crate) summary: Summary,
    /// Against the limit of the same route, load and family.
    pub(crate) of_limit: Summary,
    pub(crate) samples: Vec<f64>,
    /// Processor time of the whole machine for each [piece](Load::piece), in microseconds.
    pub(crate) cpu_us: Summary,
}

/// Measures everything; paths must begin each route with its limit.
pub(crate) fn measure(paths: &[Path], settings: &Settings) -> Result<Vec<Series>> {
    let begin = Instant::now();
    let turns: Vec<(Load, Family)> = settings
        .loads
        .iter()
        .copied()
        .flat_map(|load| Family::BOTH.map(|family| (load, family)))
        .collect();
    let mut samples = vec![vec![Vec::new(); paths.len()]; turns.len()];
    for round in 0..settings.rounds {
        eprintln!(
            "traffic: round {} of {}, after {} s",
            round + 1,
            settings.rounds,
            begin.elapsed().as_secs()
        );
        for (turn, &(load, family)) in turns.iter().enumerate() {
            for step in 0..paths.len() {
                // Each round begins with another path: none is always the one after an idle moment.
                let index = (step + round * 3) % paths.len();
                let path = &paths[index];
                let sample = load
                    .measure(&path.ends(family), settings.timing())
                    .with_context(|| format!("{} over {family:?}, {}", load.name(), path.name()))?;
                samples[turn][index].push(sample);
            }
        }
    }

    let mut all = Vec::new();
    for (&(load, family), samples) in turns.iter().zip(&samples) {
        let rates: Vec<Vec<f64>> = samples
            .iter()
            .map(|own| own.iter().map(|sample| sample.rate).collect())
            .collect();
        for ((path, own), samples) in paths.iter().zip(&rates).zip(samples) {
            let cpu: Vec<f64> = samples.iter().map(|sample| sample.cpu_us).collect();
            let limit = paths
                .iter()
                .position(|other| other.route == path.route && other.carrier == Carrier::Limit)
                .context("a route without a limit")?;
            all.push(Series {
                route: path.route,
                carrier: path.carrier,
                load,
                family,
                summary: Summary::of(own).context("no rounds of traffic were asked for")?,
                of_limit: Summary::ratio(own, &rates[limit]).context("no rounds of the limit")?,
                samples: own.clone(),
                cpu_us: Summary::of(&cpu).context("no rounds of traffic were asked for")?,
            });
        }
    }
    Ok(all)
}

/// The series of one load on one path.
pub(crate) fn find(
    all: &[Series],
    route: Route,
    carrier: Carrier,
    load: Load,
    family: Family,
) -> Option<&Series> {
    all.iter().find(|series| {
        series.route == route
            && series.carrier == carrier
            && series.load == load
            && series.family == family
    })
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde asks for a reference"
)]
fn family<S: Serializer>(family: &Family, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match family {
        Family::V4 => "v4",
        Family::V6 => "v6",
    })
}
