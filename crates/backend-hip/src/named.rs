//! Enums whose variants have names that texts hold.

/// Declares such an enum, with the list of its variants and both ways between a variant and its
/// name.
macro_rules! named {
    ($(#[$meta:meta])* $type:ident[$count:literal]; $($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum $type {
            $($(#[$doc])* $variant,)*
        }

        impl $type {
            /// All of them, in their order.
            pub const ALL: [$type; $count] = [$($type::$variant),*];

            /// Returns the name that a proof's text and a finding have for it.
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$variant => $name,)*
                }
            }

            /// Finds one by its name.
            pub fn from_name(name: &str) -> Option<$type> {
                $type::ALL.into_iter().find(|known| known.name() == name)
            }
        }
    };
}
pub(crate) use named;
