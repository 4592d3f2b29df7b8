//! A choice that recipes write as a name, `"delta_net"`, or as a table, `{ kind = "softmax_attention", window = 64 }`.

use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::names;

/// Options of a choice, as a table holds them.
pub(crate) type Options = Map<String, Value>;

/// Something that is chosen by name.
pub(crate) trait Choice: Sized {
    /// What is chosen, for messages.
    const WHAT: &'static str;

    /// Every name.
    fn names() -> &'static [&'static str];

    /// The choice of a name with the given options; none for an unknown name.
    fn with_options(name: &str, options: Options) -> Option<Result<Self, String>>;
}

/// Reads options one by one, so that a message can name the option; `name` is whose options they are.
pub(crate) fn parse<C: Default + Serialize + DeserializeOwned>(
    name: &str,
    options: Options,
) -> Result<C, String> {
    let known = match serde_json::to_value(C::default()) {
        Ok(Value::Object(defaults)) => defaults,
        _ => Options::new(),
    };
    let mut config = C::default();
    let mut accepted = Options::new();
    for (option, value) in options {
        if known.is_empty() {
            return Err(format!("unknown option {option:?}; {name} has no options"));
        }
        if !known.contains_key(&option) {
            let known: Vec<&str> = known.keys().map(String::as_str).collect();
            return Err(names::unknown(&format!("option of {name}"), &option, &known));
        }
        accepted.insert(option.clone(), value);
        config = serde_json::from_value(Value::Object(accepted.clone()))
            .map_err(|error| format!("{option} of {name}: {}", names::types_in_words(&error.to_string())))?;
    }
    Ok(config)
}

/// Reads a name or a table.
pub(crate) fn deserialize<'de, T: Choice, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    deserializer.deserialize_any(NameOrTable(PhantomData))
}

/// The schema of a kind's options in the place where they are used; of options that stand in several structures schemars would
/// give a reference, beside which a table can neither name nor close its keys.
pub(crate) fn options<C: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    C::json_schema(generator)
}

/// Adds to the schema of the tables, which differ by their `kind`, that a name alone will do, and that a table has no other
/// keys than its own.
pub(crate) fn or_name(schema: &mut Schema) {
    let Some(Value::Array(mut tables)) = schema.remove("oneOf") else { return };
    for table in tables.iter_mut().filter_map(Value::as_object_mut) {
        table.insert("additionalProperties".into(), false.into());
    }
    let names: Vec<Value> =
        tables.iter().filter_map(|table| table.pointer("/properties/kind/const").cloned()).collect();
    schema.insert("anyOf".into(), json!([{ "type": "string", "enum": names }, { "oneOf": tables }]));
}

struct NameOrTable<T>(PhantomData<T>);

impl<T: Choice> NameOrTable<T> {
    fn choose<E: Error>(name: &str, options: Options) -> Result<T, E> {
        match T::with_options(name, options) {
            None => Err(E::custom(names::unknown(T::WHAT, name, T::names()))),
            Some(result) => result.map_err(E::custom),
        }
    }
}

impl<'de, T: Choice> Visitor<'de> for NameOrTable<T> {
    type Value = T;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "a {}'s name or a table with its kind and options", T::WHAT)
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<T, E> {
        Self::choose(name, Options::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut options = Options::new();
        while let Some((key, Setting(value))) = map.next_entry()? {
            options.insert(key, value);
        }
        let Some(kind) = options.remove("kind") else {
            let example = T::names().first().copied().unwrap_or_default();
            let what = T::WHAT;
            return Err(A::Error::custom(format!(
                "a {what} table needs its kind, such as kind = {example:?}"
            )));
        };
        match kind.as_str() {
            None => Err(A::Error::custom(format!("kind is {kind}, expected a {}'s name", T::WHAT))),
            Some(name) => Self::choose(name, options),
        }
    }
}

/// A value of an option. Numbers that are not finite are refused: JSON has none, and would read them as absent.
struct Setting(Value);

impl<'de> Deserialize<'de> for Setting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SettingVisitor;

        impl<'de> Visitor<'de> for SettingVisitor {
            type Value = Setting;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("an option's value")
            }
            fn visit_bool<E: Error>(self, value: bool) -> Result<Setting, E> {
                Ok(Setting(value.into()))
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Setting, E> {
                Ok(Setting(value.into()))
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Setting, E> {
                Ok(Setting(value.into()))
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Setting, E> {
                if value.is_finite() {
                    Ok(Setting(value.into()))
                } else {
                    Err(E::custom(format!("an option is {value}, expected a finite number")))
                }
            }
            fn visit_str<E: Error>(self, value: &str) -> Result<Setting, E> {
                Ok(Setting(value.into()))
            }
            fn visit_unit<E: Error>(self) -> Result<Setting, E> {
                Ok(Setting(Value::Null))
            }
            fn visit_none<E: Error>(self) -> Result<Setting, E> {
                Ok(Setting(Value::Null))
            }
            fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Setting, D::Error> {
                Setting::deserialize(deserializer)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Setting, A::Error> {
                let mut values = Vec::new();
                while let Some(Setting(value)) = seq.next_element()? {
                    values.push(value);
                }
                Ok(Setting(values.into()))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Setting, A::Error> {
                let mut values = Options::new();
                while let Some((key, Setting(value))) = map.next_entry()? {
                    values.insert(key, value);
                }
                Ok(Setting(values.into()))
            }
        }

        deserializer.deserialize_any(SettingVisitor)
    }
}
