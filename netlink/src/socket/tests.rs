use netlink_packet_core::{
    DoneMessage, NLM_F_ACK, NLM_F_DUMP, NLM_F_MULTIPART, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::AddressMessage;
use netlink_sys::protocols::NETLINK_ROUTE;

use super::*;

const SEQUENCE: u32 = 7;

/// The message about an address of that device, as a part of a list.
fn address(index: u32) -> NetlinkMessage<RouteNetlinkMessage> {
    let mut message = AddressMessage::default();
    message.header.index = index;
    let mut message = NetlinkMessage::from(RouteNetlinkMessage::NewAddress(message));
    message.header.flags = NLM_F_MULTIPART;
    message.header.sequence_number = SEQUENCE;
    message
}

/// What ends a list, or refuses it.
fn word_of(kind: u16, code: i32) -> Vec<u8> {
    let mut done = DoneMessage::default();
    done.code = code;
    let done = NetlinkPayload::<RouteNetlinkMessage>::Done(done);
    let mut message = NetlinkMessage::new(address(0).header, done);
    message.finalize();
    message.header.message_type = kind;
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn bytes(messages: impl IntoIterator<Item = NetlinkMessage<RouteNetlinkMessage>>) -> Vec<u8> {
    let mut all = Vec::new();
    for mut message in messages {
        message.finalize();
        let start = all.len();
        all.resize(start + message.buffer_len(), 0);
        message.serialize(&mut all[start..]);
    }
    all
}

#[test]
fn a_request_in_bytes_has_a_header() {
    let header = header(82, NLM_F_REQUEST, SEQUENCE, 4);
    let mut bytes = vec![0; header.buffer_len()];
    header.emit(&mut bytes);
    bytes.extend([2, 0, 0, 0]);
    let message = NetlinkBuffer::new_checked(&bytes).expect("a message");
    assert_eq!(message.message_type(), 82);
    assert_eq!(message.flags(), NLM_F_REQUEST);
    assert_eq!(message.sequence_number(), SEQUENCE);
    assert_eq!(message.payload(), [2, 0, 0, 0]);
}

#[test]
fn an_attribute_is_found_behind_others() {
    let one = 5_u16.to_ne_bytes();
    let (first, second) = (3_u16.to_ne_bytes(), 1_u16.to_ne_bytes());
    let payload = [
        // What precedes the attributes.
        &[9, 9, 9, 9],
        // A value of one byte, padded.
        one.as_slice(),
        &first,
        &[7, 0, 0, 0],
        &8_u16.to_ne_bytes(),
        &second,
        &[1, 2, 3, 4],
    ]
    .concat();
    assert_eq!(attribute(&payload, 4, 3), Some([7].as_slice()));
    assert_eq!(attribute(&payload, 4, 1), Some([1, 2, 3, 4].as_slice()));
    assert_eq!(attribute(&payload, 4, 2), None);
    assert_eq!(attribute(&payload[..14], 4, 1), None, "cut short");
    assert_eq!(attribute(&[], 4, 1), None);
}

fn indices(answer: &Answer) -> Vec<u32> {
    let index = |object: RouteNetlinkMessage| match object {
        RouteNetlinkMessage::NewAddress(message) => message.header.index,
        other => panic!("{other:?} is no address"),
    };
    let objects = answer.objects.iter().filter_map(Object::decode);
    objects.map(index).collect()
}

/// Wants devices with even numbers.
fn even(payload: &[u8]) -> bool {
    word(payload, 4).is_some_and(|index| index % 2 == 0)
}

#[test]
fn a_list_is_what_is_wanted_of_all_datagrams() {
    let mut reader = Reader::new(SEQUENCE, Last::Word, even);
    let first = bytes([1, 2, 3].map(address));
    assert!(matches!(reader.read(&first), Ok(Progress::More)));
    let mut last = bytes([4, 5, 6].map(address));
    last.extend(word_of(NLMSG_DONE, 0));
    assert!(matches!(reader.read(&last), Ok(Progress::Complete)));
    assert_eq!(indices(&reader.answer), [2, 4, 6]);
    assert!(!reader.answer.interrupted);
}

#[test]
fn what_is_not_wanted_is_not_decoded() {
    let mut broken = bytes([address(1)]);
    // The first attribute says that it is longer than the message.
    broken.extend([0xff, 0xff, 1, 0]);
    let length = u32::try_from(broken.len()).expect("a short message");
    broken[..4].copy_from_slice(&length.to_ne_bytes());
    for (wanted, expected) in [(true, vec![2]), (false, vec![])] {
        let mut seen = 0;
        let mut reader = Reader::new(SEQUENCE, Last::Word, |payload: &[u8]| {
            seen += 1;
            assert!(payload.len() >= 8);
            wanted
        });
        let mut datagram = broken.clone();
        datagram.extend(bytes([address(2)]));
        assert!(matches!(reader.read(&datagram), Ok(Progress::More)));
        // One that cannot be read does not spoil the others.
        assert_eq!(indices(&reader.answer), expected);
        assert_eq!(seen, 2);
    }
}

#[test]
fn an_interrupted_list_is_noticed_wherever_the_kernel_says_so() {
    for position in 0..3 {
        let mut messages = [1, 2, 3].map(address);
        messages[position].header.flags |= NLM_F_DUMP_INTR;
        let mut reader = Reader::new(SEQUENCE, Last::Word, |_: &[u8]| false);
        assert!(matches!(reader.read(&bytes(messages)), Ok(Progress::More)));
        assert!(reader.answer.interrupted);
    }
}

#[test]
fn the_kernel_refuses_before_and_after_it_began() {
    for kind in [NLMSG_ERROR, NLMSG_DONE] {
        for before in [0, 2] {
            let mut datagram = bytes((0..before).map(address));
            datagram.extend(word_of(kind, -libc::ENODEV));
            let mut reader = Reader::new(SEQUENCE, Last::Word, even);
            match reader.read(&datagram) {
                Ok(Progress::Refused(error)) => {
                    assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn answers_to_other_requests_are_passed_over() {
    let mut stale = [address(2), address(4)];
    for message in &mut stale {
        message.header.sequence_number = SEQUENCE - 1;
        message.header.flags |= NLM_F_DUMP_INTR;
    }
    let mut datagram = bytes(stale);
    datagram.extend(bytes([address(6)]));
    datagram.extend(word_of(NLMSG_ERROR, 0));
    let mut reader = Reader::new(SEQUENCE, Last::Word, even);
    assert!(matches!(reader.read(&datagram), Ok(Progress::Complete)));
    assert_eq!(indices(&reader.answer), [6]);
    assert!(!reader.answer.interrupted);
}

#[test]
fn a_question_about_one_object_ends_with_it() {
    let mut reader = Reader::new(SEQUENCE, Last::Object, |_: &[u8]| true);
    let datagram = bytes([address(1)]);
    assert!(matches!(reader.read(&datagram), Ok(Progress::Complete)));
    assert_eq!(indices(&reader.answer), [1]);
}

#[test]
fn datagrams_that_are_cut_off_are_errors() {
    let whole = bytes([address(1)]);
    for length in 1..whole.len() {
        let mut reader = Reader::new(SEQUENCE, Last::Word, even);
        let error = reader.read(&whole[..length]).expect_err("a part of it");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
    // An end without a number is one without an error.
    let mut end = word_of(NLMSG_DONE, -1);
    end.truncate(16);
    end[..4].copy_from_slice(&16_u32.to_ne_bytes());
    let mut reader = Reader::new(SEQUENCE, Last::Word, even);
    assert!(matches!(reader.read(&end), Ok(Progress::Complete)));
}

#[test]
fn the_kernel_answers_questions_in_one_go_each_for_itself() {
    use netlink_packet_route::link::LinkMessage;

    let question = |index| {
        let mut message = LinkMessage::default();
        message.header.index = index;
        RouteNetlinkMessage::GetLink(message)
    };
    let socket = Socket::open(NETLINK_ROUTE).expect("a socket");
    let absent = u32::MAX >> 1;
    // Every network namespace has a loopback device, whose number is 1.
    let answers = socket
        .exchange_each([1, absent, 1].map(question), NLM_F_REQUEST)
        .expect("answers");
    assert!(answers[0].is_ok() && answers[2].is_ok());
    let error = answers[1].as_ref().expect_err("no such device");
    assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    assert!(
        socket
            .exchange_each([], NLM_F_REQUEST)
            .expect("no answers")
            .is_empty()
    );

    let list = socket
        .exchange(
            &RouteNetlinkMessage::GetLink(LinkMessage::default()),
            NLM_F_REQUEST | NLM_F_DUMP,
            |payload| word(payload, 4) == Some(1),
        )
        .expect("a list");
    assert_eq!(list.objects.len(), 1);
    let refused = socket.exchange(&question(absent), NLM_F_REQUEST | NLM_F_ACK, |_| true);
    let error = refused.expect_err("no such device");
    assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
}
