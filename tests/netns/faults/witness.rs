//! A container that must notice nothing: somebody talks through it all the time, both ways, by datagrams and pings that nobody repeats.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use underpass_tests::{prelude::*, runtime::Conf, traffic::serve};

/// The node's port that leads to it.
const PORT: u16 = 8081;
const INSIDE: u16 = 80;
/// Where the world serves.
const REMOTE: u16 = 443;
/// Between two rounds: the machine is shared with what is tested.
const REST: Duration = Duration::from_millis(50);

/// The container, its servers, and who talks to it.
pub(super) struct Witness {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    trouble: Arc<Mutex<Option<anyhow::Error>>>,
    talking: Option<JoinHandle<()>>,
    now: Vec<Talk>,
    lab: Arc<Lab>,
    _servers: Vec<(tcp::Server, udp::Server)>,
    pub(super) pod: Pod,
}

impl Witness {
    /// A container with a port of the node, which it keeps, and one more of this number, which others may take for a while.
    pub(super) fn start(lab: &Arc<Lab>, conf: Conf, contested: u16) -> Result<Self> {
        let conf = conf.with_host_ports(&[(PORT, INSIDE), (contested, INSIDE)]);
        let pod = lab.pod_with("witness", &conf)?;
        let mut servers = Vec::new();
        for family in Family::BOTH {
            servers.push(serve(pod.netns(), pod.at(family, INSIDE))?);
            servers.push(serve(lab.world.netns(), family.remote_at(REMOTE))?);
        }
        let talks = || Family::BOTH.map(|family| Talk::begin(lab, &pod, family));
        let now = talks().into_iter().collect::<Result<Vec<_>>>()?;
        let mut always = talks().into_iter().collect::<Result<Vec<_>>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU64::new(0));
        let trouble = Arc::new(Mutex::new(None));
        let talking = thread::spawn({
            let (stop, rounds, trouble) = (stop.clone(), rounds.clone(), trouble.clone());
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Err(error) = always.iter_mut().try_for_each(Talk::round) {
                        *trouble.lock().expect("nobody panics with it") = Some(error);
                        return;
                    }
                    rounds.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(REST);
                }
            }
        });
        Ok(Self {
            stop,
            rounds,
            trouble,
            talking: Some(talking),
            now,
            lab: Arc::clone(lab),
            _servers: servers,
            pod,
        })
    }

    /// Fails if anything was lost since the last look, or is now. What is new reaches it as well as what has been there.
    pub(super) fn expect_served(&mut self) -> Result<()> {
        let trouble = self.trouble.lock().expect("nobody panics with it").take();
        if let Some(error) = trouble {
            return Err(error).context("the witness noticed something");
        }
        self.now
            .iter_mut()
            .try_for_each(Talk::round)
            .context("the witness notices something")
    }

    /// Fails unless a new connection to the contested port reaches it.
    pub(super) fn expect_at(&self, contested: u16) -> Result<()> {
        for family in Family::BOTH {
            let port = SocketAddr::new(family.node(), contested);
            tcp::visit(self.lab.world.netns(), port).context("the contested port")?;
        }
        Ok(())
    }

    /// Ends the traffic: what was said, at least so much.
    pub(super) fn end(mut self) -> Result<Pod> {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.talking.take().map(JoinHandle::join);
        self.expect_served()?;
        ensure!(self.rounds.load(Ordering::Relaxed) > 0, "nobody talked");
        Ok(self.pod)
    }
}

/// Sockets that stay open, so that each round is a packet of a flow that is known.
struct Talk {
    served: SocketAddr,
    remote: SocketAddr,
    connections: [tcp::Client; 2],
    asking: [udp::Client; 2],
    ping: ping::Ping,
}

impl Talk {
    fn begin(lab: &Lab, pod: &Pod, family: Family) -> Result<Self> {
        let (world, inside) = (lab.world.netns(), pod.netns());
        let served = SocketAddr::new(family.node(), PORT);
        let remote = family.remote_at(REMOTE);
        let to: IpAddr = family.remote();
        Ok(Self {
            served,
            remote,
            connections: [
                tcp::Client::connect(world, served)?,
                tcp::Client::connect(inside, remote)?,
            ],
            asking: [
                udp::Client::open(world, family)?,
                udp::Client::open(inside, family)?,
            ],
            ping: ping::Ping::new(inside, to)?,
        })
    }

    fn round(&mut self) -> Result<()> {
        for connection in &mut self.connections {
            connection.chat(1)?;
        }
        self.asking[0].ask(self.served, 100)?;
        self.asking[1].ask(self.remote, 100)?;
        self.ping.echo(56).map(drop)
    }
}
