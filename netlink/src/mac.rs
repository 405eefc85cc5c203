//! MAC addresses, as they are written and as the kernel has them.

use std::{fmt, str::FromStr};

/// A MAC address.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Mac(pub [u8; 6]);

/// A text is not a MAC address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a MAC address such as 02:00:00:00:00:01")]
pub struct ParseMacError;

impl Mac {
    /// Tells whether the address can belong to one device: it is neither a group's nor zero.
    #[must_use]
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self != Self::default()
    }
}

impl FromStr for Mac {
    type Err = ParseMacError;

    /// Reads six bytes of two hexadecimal digits each, with colons or hyphens between them, or three pairs of them with points between.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (separators, digits): (&[char], _) = if text.contains('.') {
            (&['.'], 4)
        } else {
            (&[':', '-'], 2)
        };
        let groups: Vec<&str> = text.split(separators).collect();
        if groups.iter().any(|group| group.len() != digits) {
            return Err(ParseMacError);
        }
        let number = groups.concat();
        if number.len() != 12 || !number.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(ParseMacError);
        }
        let number = u64::from_str_radix(&number, 16).map_err(|_| ParseMacError)?;
        let [_, _, mac @ ..] = number.to_be_bytes();
        Ok(Self(mac))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, byte) in self.0.iter().enumerate() {
            if position > 0 {
                f.write_str(":")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let mac = Mac([0x02, 0x11, 0x22, 0x33, 0x44, 0xff]);
        assert_eq!(mac.to_string(), "02:11:22:33:44:ff");
        for text in ["02:11:22:33:44:ff", "02-11-22-33-44-FF", "0211.2233.44Ff"] {
            assert_eq!(text.parse(), Ok(mac), "{text}");
        }
    }

    #[test]
    fn six_bytes_of_two_digits_are_a_mac_and_nothing_else() {
        for text in [
            "",
            "02:00",
            "2:0:0:0:0:1",
            "02:00:00:00:00:0g",
            "02:00:00:00:00:01:02",
            "020000000001",
            "0200.0000",
            "0200.0000.00+1",
            "02.00.00.00.00.01",
            "0200:0000:0001",
        ] {
            assert_eq!(text.parse::<Mac>(), Err(ParseMacError), "{text:?}");
        }
    }

    #[test]
    fn groups_and_zero_are_not_unicast() {
        assert!(Mac([2, 0, 0, 0, 0, 1]).is_unicast());
        assert!(!Mac([1, 0, 0x5e, 0, 0, 1]).is_unicast());
        assert!(!Mac([0xff; 6]).is_unicast());
        assert!(!Mac::default().is_unicast());
    }
}
