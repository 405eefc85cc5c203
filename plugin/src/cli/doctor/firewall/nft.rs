//! Reads what `nft -j list ruleset` prints (libnftables-json(5)).

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value};

use super::rule::{Base, Family, Match, Range, Rule, Ruleset, Side, Test, Verdict};

/// Reads the rules. The table `filter` of a family in `iptables` is left out: that command was asked, and says it better.
pub(super) fn parse(text: &str, iptables: &[Family]) -> Result<Ruleset, serde_json::Error> {
    let document: Value = serde_json::from_str(text)?;
    let objects = document.get("nftables").and_then(Value::as_array);
    let mut ruleset = Ruleset::default();
    for object in objects.into_iter().flatten() {
        if let Some(chain) = object.get("chain") {
            let key = key(chain, text_of(chain, "name"));
            ruleset.bases.extend(base(chain, &key, iptables));
            ruleset.chains.entry(key).or_default();
        } else if let Some(rule) = object.get("rule") {
            let rules = ruleset.chains.entry(key(rule, text_of(rule, "chain")));
            rules.or_default().extend(rules_of(rule));
        }
    }
    Ok(ruleset)
}

fn text_of<'a>(object: &'a Value, name: &str) -> &'a str {
    object.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// Names of chains count in their table.
fn key(object: &Value, chain: &str) -> String {
    let (family, table) = (text_of(object, "family"), text_of(object, "table"));
    format!("{family} {table} {chain}")
}

fn base(chain: &Value, key: &str, iptables: &[Family]) -> Option<Base> {
    if text_of(chain, "hook") != "forward" {
        return None;
    }
    let (table, name) = (text_of(chain, "table"), text_of(chain, "name"));
    let family = match text_of(chain, "family") {
        "ip" => Some(Family::V4),
        "ip6" => Some(Family::V6),
        "inet" => None,
        // Bridges forward frames of others.
        _ => return None,
    };
    let is_asked = |family| iptables.contains(&family);
    if (table, name) == ("filter", "FORWARD") && family.is_some_and(is_asked) {
        return None;
    }
    let policy = text_of(chain, "policy");
    Some(Base {
        chain: key.to_owned(),
        family,
        drops_by_policy: policy == "drop",
        title: format!(
            "the chain {name} of nftables' table {} {table} (policy {policy})",
            text_of(chain, "family")
        ),
        insert: format!("nft insert rule {key}"),
        is_iptables: false,
    })
}

/// Reads one rule; a map of verdicts makes several of it.
fn rules_of(rule: &Value) -> Vec<Rule> {
    let mut matches = Vec::new();
    let mut rules = Vec::new();
    let statements = rule.get("expr").and_then(Value::as_array);
    for statement in statements.into_iter().flatten() {
        let Some((name, body)) = statement
            .as_object()
            .and_then(|object| object.iter().next())
        else {
            continue;
        };
        if let Some(verdict) = verdict(rule, name, body) {
            if name == "reject" {
                matches.extend(family_of_reject(body).map(Match::from));
            }
            rules.push(Rule { matches, verdict });
            return rules;
        }
        match name.as_str() {
            "match" => matches.extend(conditions(body)),
            "vmap" => rules.extend(branches(rule, body, &matches)),
            // A condition that iptables had no words for, of which a comment is none.
            "xt" if text_of(body, "type") == "target" || text_of(body, "name") == "comment" => {}
            "xt" | "limit" | "quota" | "ct count" | "connlimit" => {
                matches.push(Test::Unknown.into());
            }
            _ => {}
        }
    }
    rules
}

/// Reads a verdict, if the statement is one.
fn verdict(rule: &Value, name: &str, body: &Value) -> Option<Verdict> {
    let target = || key(rule, text_of(body, "target"));
    Some(match name {
        "accept" => Verdict::Accept,
        "drop" | "reject" => Verdict::Drop,
        "return" => Verdict::Return,
        "continue" => Verdict::Continue,
        "jump" => Verdict::Jump(target()),
        "goto" => Verdict::Goto(target()),
        "queue" => Verdict::Unknown,
        _ => return None,
    })
}

/// Makes a rule of each entry of a map of verdicts.
fn branches(rule: &Value, body: &Value, matches: &[Match]) -> Vec<Rule> {
    let unknown = || Rule {
        matches: matches.to_vec(),
        verdict: Verdict::Unknown,
    };
    let entries = body.get("data").and_then(|data| data.get("set"));
    let (Some(left), Some(entries)) = (body.get("key"), entries.and_then(Value::as_array)) else {
        return vec![unknown()];
    };
    let branch = |entry: &Value| {
        let [value, verdict_of_it] = entry.as_array()?.as_slice() else {
            return None;
        };
        let (name, body) = verdict_of_it.as_object()?.iter().next()?;
        let mut matches = matches.to_vec();
        matches.push(test(left, value).into());
        Some(Rule {
            matches,
            verdict: verdict(rule, name, body)?,
        })
    };
    let branches = entries
        .iter()
        .map(|entry| branch(entry).unwrap_or_else(unknown));
    branches.collect()
}

/// nft leaves a condition out that follows from what is answered.
fn family_of_reject(body: &Value) -> Option<Test> {
    match text_of(body, "type") {
        "icmp" => Some(Test::Family(Family::V4)),
        "icmpv6" => Some(Test::Family(Family::V6)),
        _ => None,
    }
}

/// Reads a condition. One about a header is also one that the packet has it, whatever is in there.
fn conditions(body: &Value) -> Vec<Match> {
    let (Some(left), Some(right)) = (body.get("left"), body.get("right")) else {
        return vec![Test::Unknown.into()];
    };
    let part = match text_of(body, "op") {
        "==" | "in" => test(left, right).into(),
        "!=" => Match {
            test: test(left, right),
            negated: true,
        },
        _ => Test::Unknown.into(),
    };
    let header = left.get("payload").and_then(header);
    header.map(Match::from).into_iter().chain([part]).collect()
}

/// Says what a packet with such a header is.
fn header(payload: &Value) -> Option<Test> {
    Some(match text_of(payload, "protocol") {
        "ip" => Test::Family(Family::V4),
        "ip6" => Test::Family(Family::V6),
        "tcp" | "th" => return None,
        "udp" | "udplite" | "sctp" | "dccp" | "icmp" | "icmpv6" | "igmp" | "esp" | "ah" => {
            Test::Never
        }
        _ => Test::Unknown,
    })
}

/// Reads a condition that two things are equal, or the one is in the other.
fn test(left: &Value, right: &Value) -> Test {
    let Some(left) = left.as_object() else {
        return Test::Unknown;
    };
    let within = |name: &str| left.get(name);
    if let Some(meta) = within("meta") {
        return meta_test(text_of(meta, "key"), right);
    }
    if let Some(payload) = within("payload") {
        return payload_test(payload, right);
    }
    if let Some(ct) = within("ct") {
        return ct_test(text_of(ct, "key"), right);
    }
    if is_mark(left) && right.as_u64().is_some_and(|mark| mark != 0) {
        return Test::Never;
    }
    Test::Unknown
}

fn ct_test(key: &str, right: &Value) -> Test {
    let Some(names) = texts(right) else {
        return Test::Unknown;
    };
    let is_translated = |name: &String| matches!(name.as_str(), "dnat" | "snat");
    match key {
        "state" => Test::State(names),
        // To the world at large no destination is translated, and sources are by our programs, past the stack.
        "status" if names.iter().all(is_translated) => Test::Never,
        _ => Test::Unknown,
    }
}

/// Tells whether it is some bits of the mark.
fn is_mark(left: &Map<String, Value>) -> bool {
    let operands = left.get("&").and_then(Value::as_array);
    let first = operands.and_then(|operands| operands.first());
    let meta = first.and_then(|first| first.get("meta"));
    meta.is_some_and(|meta| text_of(meta, "key") == "mark")
}

fn meta_test(key: &str, right: &Value) -> Test {
    let named = |test: fn(Vec<String>) -> Test| texts(right).map_or(Test::Unknown, test);
    match key {
        "iifname" | "iif" => named(|names| Test::Device(Side::From, names)),
        "oifname" | "oif" => named(|names| Test::Device(Side::To, names)),
        "l4proto" => named(Test::Protocol),
        "nfproto" => match right.as_str() {
            Some("ipv4") => Test::Family(Family::V4),
            Some("ipv6") => Test::Family(Family::V6),
            _ => Test::Unknown,
        },
        "protocol" => match right.as_str() {
            Some("ip") => Test::Family(Family::V4),
            Some("ip6") => Test::Family(Family::V6),
            _ => Test::Unknown,
        },
        "mark" if right.as_u64().is_some_and(|mark| mark != 0) => Test::Never,
        _ => Test::Unknown,
    }
}

fn payload_test(payload: &Value, right: &Value) -> Test {
    let side = match text_of(payload, "field") {
        "saddr" => Some(Side::From),
        "daddr" => Some(Side::To),
        _ => None,
    };
    match (text_of(payload, "protocol"), side) {
        ("ip" | "ip6", Some(side)) => {
            let ranges = elements(right).map(range).collect::<Option<_>>();
            ranges.map_or(Test::Unknown, |ranges| Test::Address(side, ranges))
        }
        _ => Test::Unknown,
    }
}

/// Lists what is in a set, a list, or there alone.
fn elements(value: &Value) -> impl Iterator<Item = &Value> {
    let list = value.get("set").unwrap_or(value);
    let list = list
        .as_array()
        .map_or_else(|| std::slice::from_ref(list), Vec::as_slice);
    // One with a comment or a timeout is wrapped up.
    list.iter().map(|element| {
        let wrapped = element.get("elem").and_then(|elem| elem.get("val"));
        wrapped.unwrap_or(element)
    })
}

/// Reads words; none if one of them is no word, or the name of a set.
fn texts(value: &Value) -> Option<Vec<String>> {
    elements(value)
        .map(|element| match element {
            Value::String(text) if !text.starts_with('@') => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        })
        .collect()
}

fn range(value: &Value) -> Option<Range> {
    let address = |value: &Value| value.as_str()?.parse::<IpAddr>().ok();
    if let Some(prefix) = value.get("prefix") {
        let length = prefix.get("len").and_then(Value::as_u64)?;
        let net = IpNet::new(address(prefix.get("addr")?)?, u8::try_from(length).ok()?);
        return net.ok().map(Range::from);
    }
    if let Some([first, last]) = value
        .get("range")
        .and_then(Value::as_array)
        .map(Vec::as_slice)
    {
        return Some(Range(address(first)?, address(last)?));
    }
    let address = address(value)?;
    Some(Range(address, address))
}
