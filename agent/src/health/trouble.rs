//! What may be wrong with the network that is installed.

/// What is wrong with the network, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// It is installed, and runtimes take another one: no pod gets to it.
    Hidden(String),
    /// It is that of other ranges than the Node has: pods get addresses that others may have.
    Outdated(String),
    /// It is the Node's, and could not be looked after the last time.
    Unkept(String),
    /// It is the Node's, and there are pods that have outlived the maps.
    LeftBehind(String),
    /// The agent looks after nothing any more, while its last command is brought to its end.
    Ended(String),
}

impl Trouble {
    pub(super) fn why(&self) -> &String {
        match self {
            Self::Hidden(why)
            | Self::Outdated(why)
            | Self::Unkept(why)
            | Self::LeftBehind(why)
            | Self::Ended(why) => why,
        }
    }
}
