//! The drawing: shares of the limit as bars with their quartiles, and the time of ADD and DEL.

use std::fmt::{self, Write as _};

use underpass_tests::Family;

use crate::{
    Outcome,
    control::crowd::OWN_WITH_PORTS,
    load::Load,
    path::{Carrier, Route},
    traffic::Series,
};

const WIDTH: f64 = 1_000.0;
/// Where bars begin: room for names to the left.
const LEFT: f64 = 190.0;
/// Where the scale ends: room for figures to the right.
const RIGHT: f64 = 840.0;
const ROW: f64 = 15.0;
const BAR: f64 = 11.0;

const OWN: &str = "#0b7285";
const PEER: &str = "#868e96";
const LIMIT: &str = "#e8590c";

/// An SVG document.
pub(crate) fn plot(outcome: &Outcome) -> String {
    let mut canvas = Canvas {
        body: String::new(),
        y: 30.0,
    };
    // Writing to a String can't fail.
    let _ = canvas.outcome(outcome);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}</svg>\n",
        canvas.body,
        height = canvas.y + 10.0
    )
}

/// What is drawn so far, and how far down it reaches.
struct Canvas {
    body: String,
    y: f64,
}

/// A bar: its length, and the quartiles around its end.
struct Bar<'a> {
    name: &'a str,
    value: f64,
    spread: [f64; 2],
    label: String,
    colour: &'static str,
}

impl Canvas {
    fn outcome(&mut self, outcome: &Outcome) -> fmt::Result {
        self.text(
            10.0,
            "15",
            "underpass: shares of the kernel's limits, and calls",
        )?;
        self.y += 16.0;
        self.text(10.0, "11", &outcome.machine.describe())?;
        self.y += 14.0;
        for route in Route::ALL {
            for load in Load::ALL {
                self.load(&outcome.traffic, route, load)?;
            }
        }
        if let Some(control) = &outcome.control {
            for verb in ["ADD", "DEL"] {
                for &containers in &outcome.settings.containers {
                    let calls: Vec<_> = control
                        .calls
                        .iter()
                        .filter(|call| call.verb == verb && call.containers == containers)
                        .collect();
                    let longest = calls.iter().map(|call| call.ms.q3).fold(1.0, f64::max);
                    self.heading(&format!("{verb}, {containers} containers on the node, ms"))?;
                    let top = self.y;
                    for call in calls {
                        self.bar(
                            &Bar {
                                name: call.caller,
                                value: call.ms.median,
                                spread: [call.ms.q1, call.ms.q3],
                                label: format!("{:.1}", call.ms.median),
                                colour: match call.caller {
                                    "learned" | OWN_WITH_PORTS => OWN,
                                    "ip link" => LIMIT,
                                    _ => PEER,
                                },
                            },
                            longest,
                        )?;
                    }
                    self.line(LEFT, top, LEFT, self.y, "#495057")?;
                }
            }
        }
        Ok(())
    }

    fn load(&mut self, all: &[Series], route: Route, load: Load) -> fmt::Result {
        let bars: Vec<&Series> = Family::BOTH
            .into_iter()
            .flat_map(|family| {
                all.iter().filter(move |series| {
                    series.route == route && series.load == load && series.family == family
                })
            })
            .collect();
        if bars.is_empty() {
            return Ok(());
        }
        let full = bars
            .iter()
            .map(|series| series.of_limit.q3)
            .fold(1.1, f64::max);
        let limit = Carrier::Limit.name(route);
        self.heading(&format!("{}, {}, of {limit}", route.name(), load.name()))?;
        let top = self.y;
        for series in bars {
            let (family, figure) = (series.family, series.summary.median / load.scale());
            let name = format!("{} {family:?}", series.carrier.name(route));
            let (value, spread, label) = if series.carrier == Carrier::Limit {
                (1.0, [1.0, 1.0], format!("{figure:.1} {}", load.unit()))
            } else {
                let share = series.of_limit;
                let label = format!("{:.3}   {figure:.1} {}", share.median, load.unit());
                (share.median, [share.q1, share.q3], label)
            };
            self.bar(
                &Bar {
                    name: &name,
                    value,
                    spread,
                    label,
                    colour: match series.carrier {
                        Carrier::Limit => LIMIT,
                        carrier if carrier.is_ours() => OWN,
                        Carrier::HandedOver
                        | Carrier::Plugin(_)
                        | Carrier::Translated(_)
                        | Carrier::Crowded
                        | Carrier::Wire
                        | Carrier::WireXdp => PEER,
                    },
                },
                full,
            )?;
        }
        let one = LEFT + (RIGHT - LEFT) / full;
        self.line(LEFT, top, LEFT, self.y, "#495057")?;
        self.line(one, top, one, self.y, LIMIT)
    }

    fn heading(&mut self, text: &str) -> fmt::Result {
        self.y += 20.0;
        self.text(10.0, "13", text)?;
        self.y += 7.0;
        Ok(())
    }

    /// A bar on a scale that ends at `full`.
    fn bar(&mut self, bar: &Bar<'_>, full: f64) -> fmt::Result {
        let scale = (RIGHT - LEFT) / full;
        let middle = self.y + ROW / 2.0;
        writeln!(
            self.body,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LEFT:.0}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"{}\"/>\
             <text x=\"{:.0}\" y=\"{:.1}\">{}</text>",
            LEFT - 6.0,
            middle + 4.0,
            bar.name,
            middle - BAR / 2.0,
            bar.value * scale,
            bar.colour,
            RIGHT + 8.0,
            middle + 4.0,
            bar.label
        )?;
        let [from, to] = bar.spread.map(|value| LEFT + value * scale);
        self.line(from, middle, to, middle, "black")?;
        for end in [from, to] {
            self.line(end, middle - 3.0, end, middle + 3.0, "black")?;
        }
        self.y += ROW;
        Ok(())
    }

    fn text(&mut self, x: f64, size: &str, text: &str) -> fmt::Result {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        writeln!(
            self.body,
            "<text x=\"{x:.0}\" y=\"{:.0}\" font-size=\"{size}\">{text}</text>",
            self.y
        )
    }

    fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64, colour: &str) -> fmt::Result {
        writeln!(
            self.body,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
        )
    }
}
