//! The stack that a program's deepest chain of calls takes, reckoned as the verifier of the oldest kernels reckons it.

use std::collections::BTreeSet;

/// 5.10 and 6.1 round every frame up to that; 6.12 and newer to 16 where the program is compiled.
const ROUNDING: u64 = 32;
const INSTRUCTION: usize = 8;

const CALL: u8 = 0x85;
/// In the source register of a call: the callee is a function of the same program.
const PSEUDO_CALL: u8 = 1;
const LOAD_64: u8 = 0x18;
/// In the source register of a load: the address of a function, for helpers that call back.
const PSEUDO_FUNCTION: u8 = 4;

/// From the verifier's log.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Figures {
    /// Instructions gone through.
    pub(super) verified: u64,
    /// Bytes that each function's frame takes, in the order of the functions.
    pub(super) frames: Vec<u64>,
}

/// Reads the verifier's statistics.
pub(super) fn figures(log: &str) -> Option<Figures> {
    let word = |prefix: &str| {
        let line = log.lines().find_map(|line| line.strip_prefix(prefix))?;
        line.split_whitespace().next()
    };
    let frames = match word("stack depth ")? {
        // Since 7.3 the frames have lines of their own: `subprog 2 (name) static ... stack 8`.
        "max" => log
            .lines()
            .filter(|line| line.starts_with("subprog "))
            .map(|line| line.rsplit_once(" stack ")?.1.parse().ok())
            .collect::<Option<_>>()?,
        list => list
            .split('+')
            .map(|frame| frame.parse().ok())
            .collect::<Option<_>>()?,
    };
    Some(Figures {
        verified: word("processed ")?.parse().ok()?,
        frames,
    })
}

/// Bytes of the deepest chain of calls from the first function on; `None` if frames and functions don't match.
pub(super) fn deepest(program: &[u8], frames: &[u64]) -> Option<u64> {
    let mut starts = BTreeSet::from([0]);
    let mut calls = Vec::new();
    for (index, bytes) in program.chunks_exact(INSTRUCTION).enumerate() {
        let &[code, registers, _, _, a, b, c, d] = bytes else {
            return None;
        };
        let kind = (code, registers >> 4);
        if kind == (CALL, PSEUDO_CALL) || kind == (LOAD_64, PSEUDO_FUNCTION) {
            let offset = i32::from_le_bytes([a, b, c, d]);
            let callee = index
                .checked_add(1)?
                .checked_add_signed(isize::try_from(offset).ok()?)?;
            starts.insert(callee);
            calls.push((index, callee));
        }
    }
    let starts: Vec<usize> = starts.into_iter().collect();
    if starts.len() != frames.len() {
        return None;
    }
    let function = |index: usize| starts.partition_point(|&start| start <= index) - 1;
    let mut callees = vec![BTreeSet::new(); starts.len()];
    for (caller, callee) in calls {
        callees[function(caller)].insert(function(callee));
    }
    // The verifier refuses recursion, and a chain of more than eight.
    Some(chain(0, frames, &callees, 8))
}

fn chain(function: usize, frames: &[u64], callees: &[BTreeSet<usize>], further: u32) -> u64 {
    let below = match further.checked_sub(1) {
        Some(further) => callees[function]
            .iter()
            .map(|&callee| chain(callee, frames, callees, further))
            .max()
            .unwrap_or(0),
        None => 0,
    };
    frames[function].max(1).next_multiple_of(ROUNDING) + below
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXIT: [u8; 8] = [0x95, 0, 0, 0, 0, 0, 0, 0];

    fn call(offset: i8) -> [u8; 8] {
        let [a, b, c, d] = i32::from(offset).to_le_bytes();
        [CALL, PSEUDO_CALL << 4, 0, 0, a, b, c, d]
    }

    /// A call of a helper, which has no frame.
    const HELPER: [u8; 8] = [CALL, 0, 0, 0, 5, 0, 0, 0];

    #[test]
    fn the_deepest_chain_counts_not_the_sum() {
        // 0: calls 1 and 2; 1: a helper; 2: calls 3; 3: nothing.
        let program = [call(2), call(3), EXIT, HELPER, EXIT, call(1), EXIT, EXIT].concat();
        assert_eq!(deepest(&program, &[8, 200, 33, 0]), Some(32 + 224));
        assert_eq!(deepest(&program, &[8, 100, 33, 70]), Some(32 + 64 + 96));
        assert_eq!(deepest(&program, &[8, 100]), None);
    }

    #[test]
    fn the_log_of_statistics_is_read() {
        let log = "verification time 2517 usec\nstack depth 0+112+8\n\
                   processed 104957 insns (limit 1000000) max_states_per_insn 9 total_states 4364\n";
        let expected = Figures {
            verified: 104_957,
            frames: vec![0, 112, 8],
        };
        assert_eq!(figures(log), Some(expected));
        let newer = "verification time 3240 usec\nstack depth max 368\n\
                     subprog 0 (from_pod) main insns_self 370 insns_total 370 stack 32\n\
                     subprog 1 (memset) static insns_self 20932 insns_total 20932 stack 0\n\
                     processed 167521 insns (limit 1000000)\n";
        let expected = Figures {
            verified: 167_521,
            frames: vec![32, 0],
        };
        assert_eq!(figures(newer), Some(expected));
        assert_eq!(figures("verification time 2517 usec\n"), None);
    }
}
