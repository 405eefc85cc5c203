//! Default routes, of a table that may have one route for each of a thousand containers besides.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::{
    AddressFamily,
    route::{RouteAttribute, RouteFlags},
};

use super::{Error, Installed, LENGTH_AT, MAIN, Netlink, question::Question};

/// Addresses that nobody has, so that packets to them leave by a default route. IPv4's is of the range that was kept for later (RFC 1112), as 0.0.0.0 is the
/// host itself.
const NOBODY: [(AddressFamily, IpAddr); 2] = [
    (AddressFamily::Inet, IpAddr::V4(Ipv4Addr::new(240, 0, 0, 1))),
    (AddressFamily::Inet6, IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
];

impl Netlink {
    /// Lists the unicast default routes of the main table; one with several next hops is several.
    pub fn default_routes(&self) -> Result<Vec<Installed>, Error> {
        self.routes_to_all(None)
    }

    /// Lists those by a device; of those of a family the one that the kernel prefers may be the only one.
    pub fn default_routes_by(&self, device: u32) -> Result<Vec<Installed>, Error> {
        let mut routes = self.routes_to_all(Some(device))?;
        // Of several next hops each may be by another device.
        routes.retain(|route| route.index == device);
        Ok(routes)
    }

    fn routes_to_all(&self, by: Option<u32>) -> Result<Vec<Installed>, Error> {
        let mut routes = Vec::new();
        for (family, nobody) in NOBODY {
            routes.extend(
                match by.and_then(|device| self.best_route_by(device, nobody)) {
                    Some(best) => best,
                    None => self.listed(family, by)?,
                },
            );
        }
        Ok(routes)
    }

    fn listed(&self, family: AddressFamily, by: Option<u32>) -> Result<Vec<Installed>, Error> {
        let question = Question {
            family,
            by,
            ..Question::of(MAIN)
        };
        let is_default = |payload: &[u8]| payload.get(LENGTH_AT) == Some(&0);
        let messages = self.dump_family(&question, is_default)?;
        Ok(messages
            .into_iter()
            .flat_map(Installed::from_message)
            .collect())
    }

    /// Looks up the route of packets to nobody by a device: its default route in the main table, if that is what the kernel chooses. For a list the kernel looks at all
    /// routes, each at another place of its memory: some tenths of a millisecond with a thousand containers.
    fn best_route_by(&self, device: u32, nobody: IpAddr) -> Option<Vec<Installed>> {
        let by = Some(RouteAttribute::Oif(device));
        let flags = match nobody {
            // The kernel calls each table the main one unless it is asked which one it is.
            IpAddr::V4(_) => RouteFlags::FibMatch | RouteFlags::LookupTable,
            // It says so unasked, and refuses the question.
            IpAddr::V6(_) => RouteFlags::FibMatch,
        };
        let message = self.look_up(nobody, flags, by).ok()??;
        // Before 5.18 a device in a VRF may get the answer of another one.
        let routes = Installed::from_message(message);
        let is_ours = |route: &Installed| {
            route.index == device && route.route.dst.prefix_len() == 0 && route.route.table == MAIN
        };
        routes.iter().any(is_ours).then_some(routes)
    }
}
