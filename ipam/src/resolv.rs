//! Resolver settings from a `resolv.conf(5)`.

use underpass_cni::Dns;

/// Reads what an attachment can use of it: servers, domain, search list, options.
pub(crate) fn parse(text: &str) -> Dns {
    let mut dns = Dns::default();
    for line in text.lines() {
        let mut fields = line.split_whitespace();
        let (Some(keyword), Some(first)) = (fields.next(), fields.next()) else {
            continue;
        };
        if keyword.starts_with(['#', ';']) {
            continue;
        }
        let all = std::iter::once(first).chain(fields).map(str::to_owned);
        match keyword {
            "nameserver" => dns.nameservers.push(first.to_owned()),
            "domain" => first.clone_into(&mut dns.domain),
            "search" => dns.search.extend(all),
            "options" => dns.options.extend(all),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_accumulate_and_the_last_domain_counts() {
        let dns = parse(
            "# nameserver 9.9.9.9\n;search nowhere\nnameserver 1.1.1.1 ignored\nnameserver 2001:db8::1\n\
             domain a\n domain b\nsearch x y\nsearch z\noptions ndots:5 rotate\nnameserver\nsortlist 1\n",
        );
        let texts = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(
            dns,
            Dns {
                nameservers: texts(&["1.1.1.1", "2001:db8::1"]),
                domain: "b".into(),
                search: texts(&["x", "y", "z"]),
                options: texts(&["ndots:5", "rotate"]),
            }
        );
    }
}
