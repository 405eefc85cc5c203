//! One plan after the other, and what counts while the API says nothing of this node that is believed.

use std::sync::Arc;

use super::{Desired, Inputs, OnLink, plan};
use crate::nodes::All;
use crate::options::Options;

/// Plans again and again.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    /// The Nodes as they were when our own was last believed.
    believed: Option<Arc<All>>,
}

impl Planner {
    /// Plans by these Nodes. While our own is not believed those count that were there when it last was, so that what is
    /// desired stays so, on the links of now; the only remark is why. An error is that, where it never was.
    pub(crate) fn plan(
        &mut self,
        options: &Options,
        nodes: &Arc<All>,
        links: &[OnLink],
    ) -> Result<Desired, String> {
        let by = |nodes: &All| {
            plan(&Inputs {
                own: options.node(),
                nodes,
                links,
                routing: options.routing,
                cluster: &options.cluster_cidrs,
            })
        };
        let why = match by(nodes) {
            Ok(desired) => {
                self.believed = Some(Arc::clone(nodes));
                return Ok(desired);
            }
            Err(why) => why,
        };
        let Some(Ok(desired)) = self.believed.as_deref().map(by) else {
            return Err(why);
        };
        Ok(Desired {
            remarks: vec![why],
            ..desired
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::Parser as _;

    use super::super::{Way, tests};
    use super::*;
    use crate::peer::Peer;

    fn nodes(list: &[(&str, Peer)]) -> Arc<All> {
        Arc::new(tests::nodes(list))
    }

    fn peer(number: u8) -> Peer {
        tests::node(
            &[&format!("192.0.2.{number}")],
            &[&format!("10.{number}.0.0/24")],
        )
    }

    #[test]
    fn what_was_desired_stays_so() {
        let options = Options::try_parse_from(["agent", "--node", "a"]).expect("options");
        let mut links = tests::links();
        let whole = nodes(&[("a", tests::myself()), ("b", peer(2))]);
        let nobody: Arc<All> = Arc::new(BTreeMap::new());
        let nameless = nodes(&[("a", tests::node(&[], &["10.1.0.0/24"])), ("c", peer(3))]);

        // An agent that never had a plan has none.
        let mut planner = Planner::default();
        for nodes in [&nobody, &nameless] {
            planner
                .plan(&options, nodes, &links)
                .expect_err("not believed");
        }

        let before = planner.plan(&options, &whole, &links).expect("a plan");
        for (nodes, why) in [(&nobody, "no Node a"), (&nameless, "no InternalIP")] {
            let mut desired = planner.plan(&options, nodes, &links).expect("a plan");
            let [remark] = &desired.remarks[..] else {
                panic!("{:?}", desired.remarks);
            };
            assert!(remark.contains(why), "{remark}");
            desired.remarks.clone_from(&before.remarks);
            assert_eq!(desired, before);
        }

        // An uplink that was made anew.
        for link in &mut links {
            link.device = 7;
        }
        let desired = planner.plan(&options, &nobody, &links).expect("a plan");
        let way = desired.routes[&tests::net("10.2.0.0/24")];
        assert!(matches!(way, Way::Direct { device: 7, .. }), "{way:?}");

        // What others have become counts when our own is believed again.
        let grown = nodes(&[("a", tests::myself()), ("c", peer(3))]);
        let desired = planner.plan(&options, &grown, &links).expect("a plan");
        assert!(desired.routes.contains_key(&tests::net("10.3.0.0/24")));
        assert!(!desired.routes.contains_key(&tests::net("10.2.0.0/24")));
        assert_eq!(desired.remarks, [""; 0]);
    }
}
