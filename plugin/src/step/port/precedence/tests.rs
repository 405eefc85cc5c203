use std::collections::HashMap;

use super::*;

/// The maps in memory.
#[derive(Default)]
struct Model {
    serving: HashMap<HostPort, PortTarget>,
    shadowed: HashMap<ShadowedPort, PortTarget>,
    alive: BTreeSet<Owner>,
}

impl Table for Model {
    fn server(&self, port: &HostPort) -> Result<Option<PortTarget>, Error> {
        Ok(self.serving.get(port).copied())
    }

    fn serving(&self) -> Result<Vec<(HostPort, PortTarget)>, Error> {
        Ok(self.serving.iter().map(|(k, v)| (*k, *v)).collect())
    }

    fn shadowed(&self) -> Result<Vec<(ShadowedPort, PortTarget)>, Error> {
        Ok(self.shadowed.iter().map(|(k, v)| (*k, *v)).collect())
    }

    fn serve(&mut self, port: HostPort, target: &PortTarget) -> Result<(), Error> {
        self.serving.insert(port, *target);
        Ok(())
    }

    fn close(&mut self, port: &HostPort) -> Result<(), Error> {
        self.serving.remove(port);
        Ok(())
    }

    fn shadow(&mut self, port: HostPort, target: &PortTarget) -> Result<(), Error> {
        let owner = target.owner;
        self.shadowed.insert(ShadowedPort { port, owner }, *target);
        Ok(())
    }

    fn forget(&mut self, key: &ShadowedPort) -> Result<(), Error> {
        self.shadowed.remove(key);
        Ok(())
    }

    fn is_alive(&self, owner: Owner) -> Result<bool, Error> {
        Ok(self.alive.contains(&owner))
    }
}

impl Model {
    fn add(&mut self, owner: u8, ports: &[u16]) {
        self.alive.insert([owner; 16]);
        for number in ports {
            let target = PortTarget {
                owner: [owner; 16],
                serial: 1,
                ..PortTarget::default()
            };
            claim(self, port(*number), target).expect("memory does not fail");
        }
    }

    fn del(&mut self, owner: u8) {
        self.del_all(&[owner]);
    }

    fn del_all(&mut self, owners: &[u8]) {
        let owners = owners.iter().map(|owner| [*owner; 16]).collect();
        release(self, &owners).expect("memory does not fail");
        self.alive.retain(|owner| !owners.contains(owner));
    }

    /// The owner that serves a port.
    fn owner(&self, number: u16) -> Option<u8> {
        self.serving
            .get(&port(number))
            .map(|target| target.owner[0])
    }

    fn is_empty(&self) -> bool {
        self.serving.is_empty() && self.shadowed.is_empty()
    }
}

fn port(number: u16) -> HostPort {
    HostPort {
        port: number,
        ..HostPort::default()
    }
}

#[test]
fn the_newest_serves_at_once() {
    let mut model = Model::default();
    model.add(1, &[80, 81]);
    model.add(2, &[80]);
    assert_eq!((model.owner(80), model.owner(81)), (Some(2), Some(1)));
    let [older, newer] = [model.shadowed.values().next(), model.serving.get(&port(80))]
        .map(|target| target.expect("both are known").serial);
    assert!(older < newer, "{older} {newer}");
}

#[test]
fn the_older_serves_again_when_the_newer_is_gone() {
    let mut model = Model::default();
    model.add(1, &[80]);
    model.add(2, &[80]);
    model.add(3, &[80]);
    model.del(3);
    assert_eq!(model.owner(80), Some(2), "the newest of the older ones");
    model.del(2);
    assert_eq!(model.owner(80), Some(1));
    model.del(1);
    assert!(model.is_empty());
}

#[test]
fn an_older_one_leaves_without_a_trace() {
    let mut model = Model::default();
    model.add(1, &[80]);
    model.add(2, &[80]);
    model.add(3, &[80]);
    model.del(1);
    model.del(2);
    assert_eq!(model.owner(80), Some(3));
    assert!(model.shadowed.is_empty());
    model.del(3);
    assert!(model.is_empty());
}

#[test]
fn of_several_that_leave_none_inherits_from_another() {
    let mut model = Model::default();
    for owner in 1..=4 {
        model.add(owner, &[80]);
    }
    model.add(5, &[81]);
    assert_eq!(
        owners(&model).expect("memory does not fail"),
        (1..=5).map(|owner| [owner; 16]).collect()
    );
    model.del_all(&[2, 4, 5]);
    assert_eq!((model.owner(80), model.owner(81)), (Some(3), None));
    model.del_all(&[1, 3]);
    assert!(model.is_empty());
}

#[test]
fn the_dead_inherit_nothing() {
    let mut model = Model::default();
    model.add(1, &[80]);
    model.add(2, &[80]);
    model.add(3, &[80]);
    model.alive.remove(&[2; 16]);
    model.del(3);
    assert_eq!(model.owner(80), Some(1));
    model.alive.remove(&[1; 16]);
    model.add(4, &[80]);
    assert!(model.shadowed.is_empty(), "a dead owner is not kept");
    model.del(4);
    assert!(model.is_empty());
}

#[test]
fn an_owner_that_served_again_and_was_replaced_again_is_known_once() {
    let mut model = Model::default();
    model.add(1, &[80]);
    model.add(2, &[80]);
    model.del(2);
    model.add(3, &[80]);
    assert_eq!(model.shadowed.len(), 1);
    model.del(3);
    model.del(1);
    assert!(model.is_empty());
}

#[test]
fn a_claim_killed_between_its_two_writes_leaves_nothing() {
    let mut model = Model::default();
    model.add(1, &[80, 81]);
    let older = model.serving[&port(80)];
    model.alive.insert([2; 16]);
    model
        .shadow(port(80), &older)
        .expect("memory does not fail");
    model.del(2);
    assert_eq!(model.owner(80), Some(1));
    assert!(model.shadowed.is_empty());
    model.del(1);
    assert!(model.is_empty());
}

#[test]
fn a_call_killed_between_two_writes_can_be_repeated() {
    // Killed after the older mapping was shadowed, before the newer one was written: the older one
    // is there twice.
    let mut model = Model::default();
    model.add(1, &[80]);
    let served = model.serving[&port(80)];
    model.shadow(port(80), &served).expect("memory");
    model.del(2);
    assert_eq!(model.owner(80), Some(1));
    model.del(1);
    assert!(model.is_empty());
}
