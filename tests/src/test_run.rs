//! Single runs of a node's pinned programs on crafted frames, by `BPF_PROG_TEST_RUN`.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::programs::SchedClassifier;
use underpass_dataplane::test_run::Run;

use crate::{Node, counter::pins};

/// `TC_ACT_UNSPEC`: not mine, to the next filter or the stack.
pub const UNSPEC: i32 = -1;
/// `TC_ACT_SHOT`: dropped.
pub const SHOT: i32 = 2;
/// `TC_ACT_STOLEN`: kept, or sent on by the program itself.
pub const STOLEN: i32 = 4;
/// `TC_ACT_REDIRECT`: to another device.
pub const REDIRECT: i32 = 7;

/// A program of a node, ready to run as if at one device.
#[derive(Debug)]
pub struct Bench<'a> {
    node: &'a Node,
    program: SchedClassifier,
    ifindex: u32,
}

/// What a run did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The program's return value.
    pub action: i32,
    /// The frame after it.
    pub frame: Vec<u8>,
}

impl<'a> Bench<'a> {
    /// Opens the pin of a program; `device` is the interface that frames seem to be on.
    pub fn open(node: &'a Node, program: &str, device: &str) -> Result<Self> {
        Self::of(node, &pins(node).join("programs").join(program), device)
    }

    /// Opens any pin of a program in the node's own mounts.
    pub fn of(node: &'a Node, path: &Path, device: &str) -> Result<Self> {
        let program = node
            .netns()
            .run(|| SchedClassifier::from_pin(path))
            .with_context(|| format!("open the pinned program {}", path.display()))?;
        Ok(Self {
            node,
            program,
            ifindex: node.netns().ifindex(device)?,
        })
    }

    /// Runs the program on a frame.
    pub fn run(&self, frame: &[u8]) -> Result<Verdict> {
        self.node.netns().run(|| self.run_here(frame))
    }

    /// As [`Self::run`], for a thread that is in the node's network namespace.
    pub fn run_here(&self, frame: &[u8]) -> Result<Verdict> {
        let (outcome, frame) = Run::on(frame)
            .at(self.ifindex)
            .frame_of(&self.program)
            .context("BPF_PROG_TEST_RUN")?;
        Ok(Verdict {
            action: outcome.return_value.cast_signed(),
            frame,
        })
    }
}
