//! A TCP connection between two network namespaces, with more in it than fits into one packet.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd as _,
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use underpass_netlink::Netns;

/// How long anything may take that should take microseconds.
const PATIENCE: Duration = Duration::from_secs(5);
/// What is sent, in bytes: several packets of any usual MTU, and less than a socket takes that nobody reads.
const LENGTH: usize = 8192;

/// Connects a client in one namespace to a server in another, and has both tell each other something.
pub(super) fn talk(client: (&Netns, IpAddr), server: (&Netns, IpAddr)) -> io::Result<()> {
    let (inside, address) = server;
    let listener = inside
        .run(|| TcpListener::bind(SocketAddr::new(address, 0)))
        .map_err(io::Error::other)??;
    let server = listener.local_addr()?;
    let mut client = client
        .0
        .run(|| TcpStream::connect_timeout(&server, PATIENCE))
        .map_err(io::Error::other)??;
    let mut server = accept(&listener, client.local_addr()?)?;
    for end in [&client, &server] {
        end.set_read_timeout(Some(PATIENCE))?;
        end.set_write_timeout(Some(PATIENCE))?;
    }
    hand_over(&mut client, &mut server)?;
    hand_over(&mut server, &mut client)
}

/// Accepts the connection of this client. Where somebody else answered in the server's place, none comes.
fn accept(listener: &TcpListener, client: SocketAddr) -> io::Result<TcpStream> {
    let mut ready = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    let patience = PollTimeout::try_from(PATIENCE).map_err(io::Error::other)?;
    if poll(&mut ready, patience)? == 0 {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client is connected, and not to the server: something between them answers in its place",
        ));
    }
    let (server, seen) = listener.accept()?;
    if seen == client {
        Ok(server)
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the server sees {seen}, and the client is {client}"),
        ))
    }
}

fn hand_over(from: &mut TcpStream, to: &mut TcpStream) -> io::Result<()> {
    let sent: Vec<u8> = (0..=u8::MAX).cycle().take(LENGTH).collect();
    from.write_all(&sent)?;
    let mut received = vec![0; LENGTH];
    to.read_exact(&mut received)?;
    if received == sent {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "what was received is not what was sent",
        ))
    }
}
