//! Reads what `iptables -S` prints: the rules of the table `filter`.

use std::net::IpAddr;

use ipnet::IpNet;

use super::rule::{Base, Family, Match, Range, Rule, Ruleset, Side, Test, Verdict};

const FORWARD: &str = "FORWARD";
/// Docker has rules of others in that chain of its own.
const DOCKER_USER: &str = "DOCKER-USER";
/// Targets after which the next rule decides.
const CONTINUING: [&str; 12] = [
    "AUDIT",
    "CLASSIFY",
    "CONNMARK",
    "CONNSECMARK",
    "DSCP",
    "LOG",
    "MARK",
    "NFLOG",
    "SECMARK",
    "SET",
    "TCPMSS",
    "TRACE",
];

/// Reads the rules of one family, as `program -S` has them.
pub(super) fn parse(family: Family, program: &str, text: &str) -> Ruleset {
    let mut ruleset = Ruleset::default();
    let mut drops_by_policy = false;
    let mut rules = Vec::new();
    for line in text.lines() {
        let words = words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["-P", chain, policy, ..] => {
                ruleset.chains.entry(chain.to_owned()).or_default();
                if chain == FORWARD {
                    drops_by_policy = policy == "DROP";
                }
            }
            ["-N", chain, ..] => {
                ruleset.chains.entry(chain.to_owned()).or_default();
            }
            ["-A", chain, ref rest @ ..] => rules.push((chain.to_owned(), rest_of(rest))),
            _ => {}
        }
    }
    // Which targets are chains is known when all have been read.
    for (chain, (matches, target)) in rules {
        let verdict = match target {
            Target::None => Verdict::Continue,
            Target::Jump(name) => verdict(name, &ruleset, Verdict::Jump),
            Target::Goto(name) => verdict(name, &ruleset, Verdict::Goto),
        };
        let rules = ruleset.chains.entry(chain).or_default();
        rules.push(Rule { matches, verdict });
    }
    if ruleset.chains.contains_key(FORWARD) {
        let policy = if drops_by_policy { "DROP" } else { "ACCEPT" };
        let into = if ruleset.chains.contains_key(DOCKER_USER) {
            DOCKER_USER
        } else {
            FORWARD
        };
        ruleset.bases.push(Base {
            chain: FORWARD.to_owned(),
            family: Some(family),
            drops_by_policy,
            title: format!("the chain FORWARD of {program} (policy {policy})"),
            insert: format!("{program} -I {into}"),
            is_iptables: true,
        });
    }
    ruleset
}

/// What `-j` or `-g` names.
enum Target {
    None,
    Jump(String),
    Goto(String),
}

fn verdict(name: String, ruleset: &Ruleset, to: fn(String) -> Verdict) -> Verdict {
    match name.as_str() {
        "ACCEPT" => Verdict::Accept,
        "DROP" | "REJECT" => Verdict::Drop,
        "RETURN" => Verdict::Return,
        _ if ruleset.chains.contains_key(&name) => to(name),
        target if CONTINUING.contains(&target) => Verdict::Continue,
        _ => Verdict::Unknown,
    }
}

/// Reads what follows the chain's name in a rule.
fn rest_of(words: &[&str]) -> (Vec<Match>, Target) {
    let mut matches = Vec::new();
    let mut words = words.iter().copied().peekable();
    let mut negated = false;
    while let Some(word) = words.next() {
        if word == "!" {
            negated = true;
            continue;
        }
        let mut value = || words.next().unwrap_or_default();
        let test = match word {
            "-j" => return (matches, Target::Jump(value().to_owned())),
            "-g" => return (matches, Target::Goto(value().to_owned())),
            "-i" => Some(Test::Device(Side::From, vec![pattern(value())])),
            "-o" => Some(Test::Device(Side::To, vec![pattern(value())])),
            "-s" => Some(addresses(Side::From, value())),
            "-d" => Some(addresses(Side::To, value())),
            "-p" => Some(Test::Protocol(vec![value().to_owned()])),
            "--ctstate" | "--state" => {
                let states = value().split(',').map(str::to_ascii_lowercase);
                Some(Test::State(states.collect()))
            }
            "--mark" => Some(mark(value())),
            "--match-set" => Some(set(value())),
            "--comment" => {
                value();
                None
            }
            "-m" => match value() {
                "physdev" => Some(Test::Never),
                _ => None,
            },
            // The rest of an option that was not understood.
            word if !word.starts_with('-') => None,
            _ => Some(Test::Unknown),
        };
        matches.extend(test.map(|test| Match { test, negated }));
        negated = false;
    }
    (matches, Target::None)
}

fn pattern(name: &str) -> String {
    name.strip_suffix('+')
        .map_or_else(|| name.to_owned(), |beginning| format!("{beginning}*"))
}

fn addresses(side: Side, text: &str) -> Test {
    let net = text.parse::<IpNet>();
    let net = net.or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    net.map_or(Test::Unknown, |net| {
        Test::Address(side, vec![Range::from(net)])
    })
}

/// Sets can't be looked into here. Docker's has the ranges of its own bridges.
fn set(name: &str) -> Test {
    if name.starts_with("docker-ext-bridges") {
        Test::Never
    } else {
        Test::Unknown
    }
}

/// What containers send has no mark, unless a rule gives it one.
fn mark(text: &str) -> Test {
    let value = text.split('/').next().unwrap_or_default();
    if value
        .trim_start_matches("0x")
        .chars()
        .all(|digit| digit == '0')
    {
        Test::Unknown
    } else {
        Test::Never
    }
}

/// Takes a line apart as a shell does. iptables puts words with spaces between double quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut is_quoted = false;
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => word.extend(characters.next()),
            '"' => is_quoted = !is_quoted,
            ' ' if !is_quoted => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            other => word.push(other),
        }
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}
