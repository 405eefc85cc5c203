//! The functions that programs call: each is verified once, on its own, whoever calls it and
//! whatever was found out before.
//!
//! That is what the kernel does for functions that are global in BTF (5.6). Inlined, or as local
//! functions, the paths through all of them multiply beyond what it is willing to check, and their
//! stack frames beyond 512 bytes. Such a function takes the context and numbers only (5.10); what
//! else it needs is in [`Work`](crate::kernel::maps::Work).

use aya_ebpf::bindings::__sk_buff;
use underpass_ebpf::{
    crc32c,
    ip::{V4, V6},
};

use crate::{
    bypass::{self, revalidate},
    filter::quota,
    flow::{entry, join, learn},
    fragment::reorder,
    hook::{from_host, from_pod, from_wire, to_pod, to_wire},
    icmp_error,
    kernel::{net::Net, route},
    nat::{hairpin, host_port, mapping, port_allocation, translate},
    parse,
};

macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty = $body:path;)*) => {
        /// The functions of one family; each is documented where its body is.
        pub trait Call: Net {
            $(
                #[doc = concat!("See [`", stringify!($body), "`].")]
                fn $name($($arg: $type),*) -> $result;
            )*
        }

        functions!(@family V4 "4" $($name($($arg: $type),*) -> $result = $body;)*);
        functions!(@family V6 "6" $($name($($arg: $type),*) -> $result = $body;)*);
    };
    (@family $family:ident $suffix:literal $($name:ident($($arg:ident: $type:ty),*) -> $result:ty = $body:path;)*) => {
        impl Call for $family {
            $(
                #[inline(always)]
                fn $name($($arg: $type),*) -> $result {
                    #[unsafe(export_name = concat!(stringify!($name), $suffix))]
                    #[inline(never)]
                    extern "C" fn global($($arg: $type),*) -> $result {
                        use $body as body;
                        body::<$family>($($arg),*)
                    }
                    global($($arg),*)
                }
            )*
        }
    };
}

functions! {
    send(ctx: *mut __sk_buff, side: u32, trust: u32) -> i32 = bypass::send;
    settle(ctx: *mut __sk_buff) -> u32 = revalidate::settle;
    check(ctx: *mut __sk_buff) -> i32 = from_pod::check;
    serve(ctx: *mut __sk_buff) -> i32 = from_pod::serve;
    enter_stack(ctx: *mut __sk_buff) -> i32 = from_pod::enter_stack;
    deliver(ctx: *mut __sk_buff) -> i32 = to_pod::deliver;
    arrive(ctx: *mut __sk_buff) -> i32 = to_pod::arrive;
    translate_back(ctx: *mut __sk_buff, l3: u32) -> i32 = from_wire::translate_back;
    known(ctx: *mut __sk_buff, l3: u32) -> i32 = to_wire::known;
    open(ctx: *mut __sk_buff) -> i32 = to_wire::open;
    error_in(ctx: *mut __sk_buff, quoted: u32) -> i32 = icmp_error::from_wire;
    error_out(ctx: *mut __sk_buff, quoted: u32) -> i32 = icmp_error::to_wire;
    error_to_pod(ctx: *mut __sk_buff, quoted: u32) -> i32 = icmp_error::to_pod;
    error_back(ctx: *mut __sk_buff, quoted: u32) -> i32 = icmp_error::from_pod;
    parse_whole(ctx: *mut __sk_buff, l3: u32) -> u32 = parse::whole;
    parse_quoted(ctx: *mut __sk_buff) -> u32 = parse::quoted;
    translate(ctx: *mut __sk_buff) -> u32 = translate::to_partner;
    keep(ctx: *mut __sk_buff) -> u32 = reorder::keep;
    release(ctx: *mut __sk_buff, way: u32) -> i32 = reorder::release;
    copy_live() -> u32 = entry::copy_live;
    note() -> u32 = entry::note;
    withdraw() -> u32 = entry::withdraw;
    forget() -> u32 = join::forget;
    learn_pod(ctx: *mut __sk_buff, from: u32, to: u32) -> u32 = learn::to_pod;
    learn_wire(ctx: *mut __sk_buff, pod: u32, uplink: u32) -> u32 = learn::to_wire;
    leave_by_wire(pod: u32, uplink: u32) -> u32 = learn::leave_by_wire;
    join() -> u32 = join::join;
    suspend() -> u32 = join::suspend;
    stick() -> u32 = join::stick;
    note_others(ctx: *mut __sk_buff) -> u32 = learn::note_others;
    follow(ctx: *mut __sk_buff) -> u32 = revalidate::follow;
    route(ctx: *mut __sk_buff, in_ifindex: u32, asked: u32) -> u32 = route::lookup;
    is_local(ctx: *mut __sk_buff, in_ifindex: u32) -> u32 = route::is_local;
    host_port(ctx: *mut __sk_buff, client: u32) -> u32 = host_port::open;
    serve_host(ctx: *mut __sk_buff) -> i32 = from_host::serve;
    finish(ctx: *mut __sk_buff) -> i32 = from_host::finish;
    open_twice(ctx: *mut __sk_buff, client: u32) -> u32 = hairpin::open;
    turn(ctx: *mut __sk_buff) -> i32 = hairpin::turn;
    claim(ctx: *mut __sk_buff) -> u32 = port_allocation::claim;
    aim(at: u32) -> u32 = host_port::aim;
    host_uses(ctx: *mut __sk_buff) -> u32 = port_allocation::host_uses;
    insert() -> u32 = port_allocation::insert;
    probe(attempt: u32) -> u32 = port_allocation::probe;
    commit() -> u32 = mapping::commit;
    restore() -> u32 = mapping::restore;
}

/// See [`crc32c::change`]; the same for both families.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn crc32c_change(word: u32, length: u32) -> u32 {
    crc32c::change(word, length)
}

/// See [`quota::charge`]; the same for both families.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn charge(pod: u32) -> u32 {
    quota::charge(pod)
}

/// See [`quota::refund`]; the same for both families.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn refund(pod: u32) -> u32 {
    quota::refund(pod)
}
