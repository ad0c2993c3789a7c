//! Enums whose variants have names.

/// A value with a name, by which the command line, the tables and the rows know it.
pub trait Name: Copy + PartialEq {
    /// Returns the name.
    fn name(self) -> &'static str;
}

/// Declares an enum of names. The crate that uses this macro depends on `clap` and `serde`.
#[macro_export]
macro_rules! names {
    (
        $(#[$about:meta])*
        $visible:vis enum $enum:ident {
            $($(#[$doc:meta])* $variant:ident = $name:literal,)+
        }
    ) => {
        $(#[$about])*
        #[derive(
            Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd,
            clap::ValueEnum, serde::Deserialize, serde::Serialize,
        )]
        $visible enum $enum {
            $($(#[$doc])* #[value(name = $name)] #[serde(rename = $name)] $variant,)+
        }

        #[allow(dead_code, reason = "not every enum uses both")]
        impl $enum {
            /// All values, in the order of their declaration.
            $visible const ALL: [$enum; [$($enum::$variant),+].len()] = [$($enum::$variant),+];

            /// Returns the name.
            $visible fn name(self) -> &'static str {
                match self {
                    $($enum::$variant => $name,)+
                }
            }
        }

        impl $crate::Name for $enum {
            fn name(self) -> &'static str {
                $enum::name(self)
            }
        }

        impl std::fmt::Display for $enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad($enum::name(*self))
            }
        }
    };
}
