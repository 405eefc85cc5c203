//! Functions that the kernel verifies one by one, whoever calls them and whatever was found out
//! before.
//!
//! That is what it does with functions that are global in BTF (5.6). Inlined, or as local functions,
//! the paths through all of them multiply beyond what it is willing to check, and their stack frames
//! beyond 512 bytes. Such a function takes the context and numbers only, and returns a number (5.10):
//! what else it needs is in [`Work`](crate::kernel::maps::Work).

use core::num::NonZeroU32;

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::flow::End;

/// A value that a global function takes or returns, as the register has it.
pub trait Number: Copy {
    /// The register's content.
    type Raw: Copy;

    /// The number that says the value.
    fn encode(self) -> Self::Raw;

    /// The value that a number says.
    fn decode(raw: Self::Raw) -> Self;
}

/// What a global function returns.
pub trait Outcome: Number {
    /// What is returned if this CPU has no work area, which never happens.
    const FALLBACK: Self;
}

impl Outcome for bool {
    const FALLBACK: Self = false;
}

impl Outcome for () {
    const FALLBACK: Self = ();
}

impl Outcome for Option<NonZeroU32> {
    const FALLBACK: Self = None;
}

impl Number for *mut __sk_buff {
    type Raw = Self;

    #[inline(always)]
    fn encode(self) -> Self {
        self
    }

    #[inline(always)]
    fn decode(raw: Self) -> Self {
        raw
    }
}

impl Number for u32 {
    type Raw = Self;

    #[inline(always)]
    fn encode(self) -> Self {
        self
    }

    #[inline(always)]
    fn decode(raw: Self) -> Self {
        raw
    }
}

impl Number for u8 {
    type Raw = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        self.into()
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "it was one")]
    fn decode(raw: u32) -> Self {
        raw as Self
    }
}

impl Number for End {
    type Raw = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        (self == Self::B).into()
    }

    #[inline(always)]
    fn decode(raw: u32) -> Self {
        if raw == 0 { Self::A } else { Self::B }
    }
}

impl Number for bool {
    type Raw = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        self.into()
    }

    #[inline(always)]
    fn decode(raw: u32) -> Self {
        raw != 0
    }
}

/// The number of a device, which none is 0.
impl Number for Option<NonZeroU32> {
    type Raw = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        self.map_or(0, NonZeroU32::get)
    }

    #[inline(always)]
    fn decode(raw: u32) -> Self {
        NonZeroU32::new(raw)
    }
}

/// A global function returns a number even if it has nothing to say.
impl Number for () {
    type Raw = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        0
    }

    #[inline(always)]
    fn decode(_: u32) -> Self {}
}

/// Makes an enum a [`Number`]. A number that is none of its variants, which nobody encodes, is
/// decoded as the first.
macro_rules! number {
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $name:ident {
            $(#[$first_attribute:meta])*
            $first:ident,
            $($(#[$other_attribute:meta])* $other:ident,)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        $visibility enum $name {
            $(#[$first_attribute])*
            $first,
            $($(#[$other_attribute])* $other,)*
        }

        impl $crate::kernel::global::Outcome for $name {
            const FALLBACK: Self = Self::$first;
        }

        impl $crate::kernel::global::Number for $name {
            type Raw = u32;

            #[inline(always)]
            fn encode(self) -> u32 {
                self as u32
            }

            #[inline(always)]
            fn decode(raw: u32) -> Self {
                $(
                    if raw == Self::$other as u32 {
                        return Self::$other;
                    }
                )*
                Self::$first
            }
        }
    };
}

/// Makes a function one that is verified once. If it is generic over the family, there are two of
/// them, whose names in the object end with 4 and 6, and the caller's family says which one is called.
/// One that is lent a work area opens a view of its own.
macro_rules! global {
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident<$family:ident: $bound:ident>(
            $work:ident: &mut $view:ident<$of:ident>
            $(, $argument:ident: $type:ty)* $(,)?
        )
        $body:block
    ) => {
        $crate::kernel::global::global!(
            $(#[$attribute])*
            $visibility fn $name<$family: $bound>(
                $work: &mut $view<$of>
                $(, $argument: $type)*
            ) -> () $body
        );
    };
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident<$family:ident: $bound:ident>(
            $work:ident: &mut $view:ident<$of:ident>
            $(, $argument:ident: $type:ty)* $(,)?
        ) -> $result:ty
        $body:block
    ) => {
        $(#[$attribute])*
        #[inline(always)]
        $visibility fn $name<$family: $bound>(
            _: &mut $view<$of>,
            $($argument: $type),*
        ) -> $result {
            $crate::kernel::global::global!(
                fn global<$family: $bound>($($argument: $type),*) -> $result {
                    // SAFETY: the caller has lent its view, and refers to nothing in the area.
                    match unsafe { $view::<$of>::open() } {
                        Some(mut work) => lent(&mut work, $($argument),*),
                        None => <$result as $crate::kernel::global::Outcome>::FALLBACK,
                    }
                } as $name
            );

            #[inline(always)]
            fn lent<$family: $bound>(
                $work: &mut $view<$of>,
                $($argument: $type),*
            ) -> $result $body

            global::<$family>($($argument),*)
        }
    };
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident<$family:ident: $bound:ident>($($argument:ident: $type:ty),* $(,)?) -> $result:ty
        $body:block
    ) => {
        $crate::kernel::global::global!(
            $(#[$attribute])*
            $visibility fn $name<$family: $bound>($($argument: $type),*) -> $result $body as $name
        );
    };
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident<$family:ident: $bound:ident>($($argument:ident: $type:ty),*) -> $result:ty
        $body:block as $export:ident
    ) => {
        $(#[$attribute])*
        #[inline(always)]
        $visibility fn $name<$family: $bound>($($argument: $type),*) -> $result {
            use underpass_ebpf::ip::{V4, V6};

            #[inline(always)]
            fn body<$family: $bound>($($argument: $type),*) -> $result $body

            if <$family as $bound>::FAMILY == <V4 as $bound>::FAMILY {
                $crate::kernel::global::global!(@call $export "4" body::<V4>($($argument: $type),*) -> $result)
            } else {
                $crate::kernel::global::global!(@call $export "6" body::<V6>($($argument: $type),*) -> $result)
            }
        }
    };
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?)
        $body:block
    ) => {
        $crate::kernel::global::global!(
            $(#[$attribute])*
            $visibility fn $name($($argument: $type),*) -> () $body
        );
    };
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty
        $body:block
    ) => {
        $(#[$attribute])*
        #[inline(always)]
        $visibility fn $name($($argument: $type),*) -> $result {
            #[inline(always)]
            fn body($($argument: $type),*) -> $result $body

            $crate::kernel::global::global!(@call $name "" body($($argument: $type),*) -> $result)
        }
    };
    // Calls the function of the object that has this name, and is made here.
    (@call $name:ident $suffix:literal $body:ident $(::<$family:ident>)? ($($argument:ident: $type:ty),*) -> $result:ty) => {{
        use $crate::kernel::global::Number;

        #[unsafe(export_name = concat!(stringify!($name), $suffix))]
        #[inline(never)]
        extern "C" fn $name($($argument: <$type as Number>::Raw),*) -> <$result as Number>::Raw {
            $body $(::<$family>)? ($(Number::decode($argument)),*).encode()
        }

        Number::decode($name($(Number::encode($argument)),*))
    }};
}

pub(crate) use {global, number};
