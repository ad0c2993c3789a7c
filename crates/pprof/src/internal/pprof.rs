//! The profile format of the `pprof` tools: a gzip'd message of protocol buffers.
//! <https://github.com/google/pprof/blob/main/proto/profile.proto> numbers the fields.

use super::ParseError;
use crate::internal::profile::{Line, Location, Mapping, Profile, Stack, Values};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use prost::Message;
use std::collections::HashMap;
use std::io::{Read, Write};

#[derive(Clone, PartialEq, Message)]
struct Proto {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "3")]
    mapping: Vec<ProtoMapping>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<ProtoLocation>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(message, optional, tag = "11")]
    period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    period: i64,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
    #[prost(int64, tag = "14")]
    default_sample_type: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct ProtoMapping {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    memory_start: u64,
    #[prost(uint64, tag = "3")]
    memory_limit: u64,
    #[prost(uint64, tag = "4")]
    file_offset: u64,
    #[prost(int64, tag = "5")]
    filename: i64,
    #[prost(int64, tag = "6")]
    build_id: i64,
    #[prost(bool, tag = "7")]
    has_functions: bool,
}

#[derive(Clone, PartialEq, Message)]
struct ProtoLocation {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    mapping_id: u64,
    #[prost(uint64, tag = "3")]
    address: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<ProtoLine>,
}

#[derive(Clone, PartialEq, Message)]
struct ProtoLine {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
}

/// The sample types, with their units, in the order of [`values`].
const TYPES: [(&str, &str); 4] = [
    ("alloc_objects", "count"),
    ("alloc_space", "bytes"),
    ("inuse_objects", "count"),
    ("inuse_space", "bytes"),
];

fn values(values: &Values) -> Vec<i64> {
    let all = [
        values.allocated_objects,
        values.allocated_bytes,
        values.objects,
        values.bytes,
    ];
    all.map(|value| value.round() as i64).into()
}

/// The strings and functions of a message, each of them once.
#[derive(Default)]
struct Tables {
    strings: Vec<String>,
    string_ids: HashMap<String, i64>,
    functions: Vec<Function>,
    function_ids: HashMap<(String, String), u64>,
}

impl Tables {
    fn string(&mut self, text: &str) -> i64 {
        if let Some(&id) = self.string_ids.get(text) {
            return id;
        }
        let id = self.strings.len() as i64;
        self.strings.push(text.to_owned());
        self.string_ids.insert(text.to_owned(), id);
        id
    }

    fn function(&mut self, line: &Line) -> u64 {
        let key = (line.function.clone(), line.file.clone());
        if let Some(&id) = self.function_ids.get(&key) {
            return id;
        }
        let id = self.functions.len() as u64 + 1;
        let (name, filename) = (self.string(&line.function), self.string(&line.file));
        self.functions.push(Function {
            id,
            name,
            system_name: name,
            filename,
        });
        self.function_ids.insert(key, id);
        id
    }
}

/// Returns the counts of samples, for which the format has no field, as a comment.
fn counts(profile: &Profile) -> String {
    let [in_use, all, dropped] = [profile.samples, profile.all_samples, profile.dropped];
    format!("samples in use: {in_use}; samples: {all}; dropped: {dropped}")
}

/// Returns the numbers in a comment of [`counts`], or zeroes.
fn numbers(comment: &str) -> [u64; 3] {
    let mut parts = comment.split("; ").map(|part| {
        let number = part.rsplit(": ").next()?;
        number.parse().ok()
    });
    [(); 3].map(|()| parts.next().flatten().unwrap_or(0))
}

/// Returns the profile as a gzip'd message.
pub fn encode(profile: &Profile) -> Vec<u8> {
    let mut tables = Tables::default();
    // The format requires an empty string 0.
    tables.string("");
    let mapping = (1..)
        .zip(&profile.mappings)
        .map(|(id, mapping)| ProtoMapping {
            id,
            memory_start: mapping.start,
            memory_limit: mapping.end,
            file_offset: mapping.offset,
            filename: tables.string(&mapping.path),
            build_id: tables.string(&mapping.build_id),
            has_functions: profile.names_functions_of(id as usize - 1),
        });
    let mapping = mapping.collect();
    let location = (1..)
        .zip(&profile.locations)
        .map(|(id, location)| ProtoLocation {
            id,
            mapping_id: location.mapping.map_or(0, |nth| nth as u64 + 1),
            address: location.address,
            line: location
                .lines
                .iter()
                .map(|line| ProtoLine {
                    function_id: tables.function(line),
                    line: line.line,
                })
                .collect(),
        });
    let location = location.collect();
    let sample = profile.stacks.iter().map(|stack| Sample {
        location_id: stack.locations.iter().map(|&nth| nth as u64 + 1).collect(),
        value: values(&stack.values),
    });
    let mut kind = |(kind, unit): (&str, &str)| ValueType {
        kind: tables.string(kind),
        unit: tables.string(unit),
    };
    let proto = Proto {
        sample_type: TYPES.map(&mut kind).into(),
        sample: sample.collect(),
        mapping,
        location,
        period_type: Some(kind(("space", "bytes"))),
        period: profile.interval as i64,
        time_nanos: profile.time_ns,
        comment: [profile.title.clone(), counts(profile)]
            .map(|text| tables.string(&text))
            .into(),
        default_sample_type: tables.string("inuse_space"),
        function: tables.functions,
        string_table: tables.strings,
    };
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    let packed = gzip.write_all(&proto.encode_to_vec());
    packed
        .and_then(|()| gzip.finish())
        .expect("a Vec takes all bytes")
}

/// More bytes than a profile of this command has. Guards against files that unpack to any size.
const MOST: u64 = 256 << 20;

/// Reads a message that [`encode`] has made.
///
/// # Errors
///
/// Fails if the bytes are none.
pub fn decode(bytes: &[u8]) -> Result<Profile, ParseError> {
    let mut message = Vec::new();
    GzDecoder::new(bytes)
        .take(MOST)
        .read_to_end(&mut message)
        .map_err(|_| ParseError::NotGzip)?;
    let proto = Proto::decode(&message[..]).map_err(|_| ParseError::NotPprof)?;
    let text = |id: i64| {
        let found = usize::try_from(id)
            .ok()
            .and_then(|id| proto.string_table.get(id));
        found.cloned().unwrap_or_default()
    };
    let types = proto.sample_type.iter().map(|kind| text(kind.kind));
    if !types.eq(TYPES.map(|(kind, _)| kind)) {
        return Err(ParseError::NotHeap);
    }
    let functions = proto
        .function
        .iter()
        .map(|function| (function.id, function));
    let functions: HashMap<u64, &Function> = functions.collect();
    let mapping_ids = (proto.mapping.iter().zip(0..)).map(|(mapping, nth)| (mapping.id, nth));
    let mapping_ids: HashMap<u64, usize> = mapping_ids.collect();
    let locations = proto.location.iter().map(|location| Location {
        address: location.address,
        mapping: mapping_ids.get(&location.mapping_id).copied(),
        lines: location
            .line
            .iter()
            .filter_map(|line| {
                let function = functions.get(&line.function_id)?;
                Some(Line {
                    function: text(function.name),
                    file: text(function.filename),
                    line: line.line,
                })
            })
            .collect(),
        // Only the allocator's frames need a symbol, and a file has none of them.
        symbol: String::new(),
    });
    let places = (proto.location.iter().zip(0..)).map(|(location, nth)| (location.id, nth));
    let places: HashMap<u64, usize> = places.collect();
    let stacks = proto.sample.iter().map(|sample| {
        let value = |nth: usize| sample.value.get(nth).map_or(0.0, |&value| value as f64);
        Stack {
            locations: sample
                .location_id
                .iter()
                .filter_map(|id| places.get(id).copied())
                .collect(),
            values: Values {
                allocated_objects: value(0),
                allocated_bytes: value(1),
                objects: value(2),
                bytes: value(3),
                ..Values::default()
            },
        }
    });
    let comment = |nth: usize| {
        let id = proto.comment.get(nth);
        id.map_or_else(String::new, |&id| text(id))
    };
    let [samples, all_samples, dropped] = numbers(&comment(1));
    Ok(Profile {
        has_looked: false,
        has_fragments: false,
        title: comment(0),
        samples,
        all_samples,
        dropped,
        time_ns: proto.time_nanos,
        older: None,
        notes: Vec::new(),
        interval: proto.period.max(1) as u64,
        stacks: stacks.collect(),
        locations: locations.collect(),
        mappings: proto
            .mapping
            .iter()
            .map(|mapping| Mapping {
                start: mapping.memory_start,
                end: mapping.memory_limit,
                offset: mapping.file_offset,
                path: text(mapping.filename),
                build_id: text(mapping.build_id),
            })
            .collect(),
    })
}
