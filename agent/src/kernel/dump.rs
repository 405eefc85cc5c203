//! Lists that the kernel answers in pieces, and whether they are whole.
//!
//! Between two pieces anything may change. Of devices and addresses the kernel then says that the list was interrupted
//! (`NLM_F_DUMP_INTR`): one that lacks an address would have a node on no link, and its routes moved. Of routes and
//! neighbours it does not say so. What such a list lacks is made once more, which changes nothing, and nothing is
//! removed because it is missing from a list: what is removed is in the list, and not in the plan.

use anyhow::{Context as _, bail};
use futures::{Stream, StreamExt as _};
use rtnetlink::packet_core::{
    NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;

use super::Kernel;

/// How often a list is asked for that is interrupted each time. After that the next comparison has to do.
const TRIES: u32 = 10;

impl Kernel {
    /// Lists what `read` takes of the answers. An error is the end of this comparison: half a list is none.
    pub(super) async fn dump<T>(
        &self,
        request: RouteNetlinkMessage,
        read: impl Fn(RouteNetlinkMessage) -> Option<T>,
    ) -> anyhow::Result<Vec<T>> {
        for _ in 0..TRIES {
            let mut message = NetlinkMessage::from(request.clone());
            message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
            let answers = self.handle.clone().request(message)?;
            if let Some(list) = whole(answers, &read).await? {
                return Ok(list);
            }
        }
        bail!("what is there has changed {TRIES} times while it was listed");
    }
}

/// Reads one list; nothing, if it was interrupted.
async fn whole<T>(
    mut answers: impl Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Unpin,
    read: impl Fn(RouteNetlinkMessage) -> Option<T>,
) -> anyhow::Result<Option<Vec<T>>> {
    let mut list = Vec::new();
    let mut is_whole = true;
    loop {
        let answer = answers.next().await;
        let answer = answer.context("the list has no end: the socket is closed")?;
        is_whole &= answer.header.flags & NLM_F_DUMP_INTR == 0;
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => list.extend(read(message)),
            // What came after the last piece is said by the end itself.
            NetlinkPayload::Done(done) if done.code == 0 => return Ok(is_whole.then_some(list)),
            NetlinkPayload::Done(done) => {
                return Err(std::io::Error::from_raw_os_error(-done.code).into());
            }
            NetlinkPayload::Error(error) => {
                return Err(rtnetlink::Error::NetlinkError(error).into());
            }
            NetlinkPayload::Overrun(_) => bail!("a piece of the list was lost"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use rtnetlink::packet_core::{DoneMessage, NetlinkHeader};
    use rtnetlink::packet_route::address::AddressMessage;

    use super::*;

    fn piece(
        flags: u16,
        payload: NetlinkPayload<RouteNetlinkMessage>,
    ) -> NetlinkMessage<RouteNetlinkMessage> {
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        NetlinkMessage::new(header, payload)
    }

    fn address(flags: u16) -> NetlinkMessage<RouteNetlinkMessage> {
        let message = RouteNetlinkMessage::NewAddress(AddressMessage::default());
        piece(flags, NetlinkPayload::InnerMessage(message))
    }

    fn end(flags: u16, code: i32) -> NetlinkMessage<RouteNetlinkMessage> {
        let mut done = DoneMessage::default();
        done.code = code;
        piece(flags, NetlinkPayload::Done(done))
    }

    async fn counted(pieces: Vec<NetlinkMessage<RouteNetlinkMessage>>) -> Option<Option<usize>> {
        let list = whole(stream::iter(pieces), Some).await.ok()?;
        Some(list.map(|list| list.len()))
    }

    #[tokio::test]
    async fn only_a_whole_list_is_one() {
        let interrupted = NLM_F_DUMP_INTR;
        assert_eq!(
            counted(vec![address(0), address(0), end(0, 0)]).await,
            Some(Some(2))
        );
        assert_eq!(counted(vec![end(0, 0)]).await, Some(Some(0)));
        assert_eq!(
            counted(vec![address(0), address(interrupted), end(0, 0)]).await,
            Some(None)
        );
        assert_eq!(
            counted(vec![address(0), end(interrupted, 0)]).await,
            Some(None)
        );
        assert_eq!(counted(vec![address(0), end(0, -12)]).await, None);
        assert_eq!(counted(vec![address(0)]).await, None);
        let lost = piece(0, NetlinkPayload::Overrun(Vec::new()));
        assert_eq!(counted(vec![address(0), lost]).await, None);
    }
}
