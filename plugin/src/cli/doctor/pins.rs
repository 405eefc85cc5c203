//! Whether what is pinned is what this executable can use, and what it goes by.

use underpass_dataplane::{layout::Layout, object};

use super::{Diagnosis, Node, Report};
use crate::error::Error;

pub(super) fn check(node: &Node<'_>, report: &mut Report) -> Result<(), Error> {
    if let Some(maps) = &node.maps {
        let build = maps.node()?.build;
        report.add(other_build(build, object::build()));
    }
    let layouts = node.pins.layouts()?.into_iter();
    let others: Vec<_> = layouts.filter(Layout::is_other).collect();
    for layout in others {
        let used = layout.attachments().unwrap_or(0);
        report.add([other_layout(layout.number(), used)]);
    }
    Ok(())
}

/// Says that the pins can't be used, with the reason.
pub(super) fn unusable(error: &underpass_dataplane::Error) -> Diagnosis {
    Diagnosis::error(
        "pins-unusable",
        format!("what is pinned can't be used, so every ADD fails: {error}"),
        "do what the sentence says; `underpass status` fails by the same reason until that is done",
    )
}

fn other_build(loaded: u32, own: u32) -> Option<Diagnosis> {
    (loaded != own).then(|| {
        Diagnosis::warning(
            "other-build",
            "another build has loaded the programs: this one uses them as they are, and an ADD that needs one more fails",
            "underpass upgrade",
        )
    })
}

fn other_layout(number: u32, attachments: usize) -> Diagnosis {
    let who = match attachments {
        0 => "it has no containers".to_owned(),
        1 => "1 container is attached to it".to_owned(),
        many => format!("{many} containers are attached to it"),
    };
    let fix = if attachments == 0 {
        "underpass unload (it takes away this version's own programs as well; the next ADD loads them)"
    } else {
        "drain the node, and then: underpass unload"
    };
    Diagnosis::warning(
        "other-layout",
        format!(
            "programs and maps of another version (layout {number}) are pinned beside ours: {who}"
        ),
        fix,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_build_is_as_it_should_be() {
        assert_eq!(other_build(7, 7), None);
        let found = other_build(7, 8).expect("another build");
        assert_eq!(found.fix, "underpass upgrade");
    }

    #[test]
    fn who_uses_another_layout_is_drained_first() {
        assert!(other_layout(7, 0).fix.starts_with("underpass unload"));
        assert!(other_layout(7, 2).fix.starts_with("drain the node"));
        assert!(other_layout(7, 1).what.contains("1 container is"));
    }
}
