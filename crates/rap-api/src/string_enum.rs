//! Enums that are strings in JSON.

/// Defines an enum whose variants are strings in JSON. A last variant, `Unknown`, stands for the strings of newer versions.
macro_rules! string_enum {
    (
        $(#[$about:meta])*
        $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
        pub enum $name {
            $(
                $(#[$doc])*
                #[cfg_attr(feature = "clap", value(alias = $word))]
                $variant,
            )*
            /// A string of a newer version. It is only read, never written.
            #[cfg_attr(feature = "clap", value(skip))]
            Unknown,
        }

        impl $name {
            /// All variants but `Unknown`.
            pub const ALL: [$name; [$($word),*].len()] = [$($name::$variant),*];

            /// Returns the string in JSON.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)*
                    $name::Unknown => "unknown",
                }
            }
        }

        impl From<&str> for $name {
            fn from(word: &str) -> $name {
                match word {
                    $($word => $name::$variant,)*
                    _ => $name::Unknown,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                Ok(<std::borrow::Cow<'de, str>>::deserialize(deserializer)?.as_ref().into())
            }
        }

        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({"type": "string", "enum": $name::ALL.map($name::as_str)})
            }
        }
    };
}

pub(crate) use string_enum;
