//! The header is what the source says, and says everything.

use std::mem::offset_of;
use std::path::{Path, PathBuf};

use gpu_ipc_c::*;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn header() -> PathBuf {
    root().join("include/gpu_ipc.h")
}

fn written() -> String {
    let config =
        cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("a good configuration");
    let mut text = Vec::new();
    cbindgen::generate_with_config(root(), config)
        .expect("the source can be read")
        .write(&mut text);
    // Before the end of the guard.
    let end = text
        .windows(21)
        .rposition(|bytes| bytes == b"#endif  /* GPU_IPC_H ")
        .expect("a guard");
    text.splice(end..end, layouts().into_bytes());
    // Rust's heading of what a caller promises, as a line of the comment.
    String::from_utf8(text)
        .expect("text")
        .replace("// # Safety\n//\n// ", "// Caller: ")
}

/// Asserts, where the header is compiled, the size of each structure and the place and size of each
/// field as Rust has them.
fn layouts() -> String {
    fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
        size_of::<F>()
    }
    let mut text = String::from(
        "// The structures are those that the library was compiled with.\n#ifdef __cplusplus\n\
         #define GPU_IPC_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), #type)\n\
         #define GPU_IPC_FIELD(type, field, at, bytes) \\\n    \
         static_assert(offsetof(type, field) == (at) && sizeof(type::field) == (bytes), #type \".\" #field)\n#else\n\
         #define GPU_IPC_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type)\n\
         #define GPU_IPC_FIELD(type, field, at, bytes) \\\n    \
         _Static_assert(offsetof(type, field) == (at) && sizeof(((type *)0)->field) == (bytes), #type \".\" #field)\n\
         #endif\n",
    );
    macro_rules! same {
        ($($type:ident { $($field:ident),* };)*) => {$(
            // A field that is left out here does not compile.
            let _: fn($type) = |value| { let $type { $($field: _),* } = value; };
            let name = stringify!($type);
            text.push_str(&format!("GPU_IPC_SIZE({name}, {});\n", size_of::<$type>()));
            $(
                let (field, at) = (stringify!($field), offset_of!($type, $field));
                let size = size_of_field(|value: &$type| &value.$field);
                text.push_str(&format!("GPU_IPC_FIELD({name}, {field}, {at}, {size});\n"));
            )*
        )*};
    }
    same! {
        gpu_ipc_client_options { size, dir, name, patience_ns };
        gpu_ipc_collected { size, blocks, bytes, returned };
        gpu_ipc_connect_options { size, name, timeout_ns, cache_bytes, cache_regions, read_only, reserved, wait_for_producer_ns };
        gpu_ipc_create_options { size, user, user_len, uids, uid_count, readers, expect, expected, replace, reserved, groups, unchanged, unchanged_count };
        gpu_ipc_descriptor { bytes };
        gpu_ipc_descriptor_info { size, len, participant, session, user };
        gpu_ipc_device_info { size, backend, number, uuid, total_bytes, name };
        gpu_ipc_grant { block, participant, claims, reserved };
        gpu_ipc_identity { bytes };
        gpu_ipc_key { bytes };
        gpu_ipc_notice { kind, how, number };
        gpu_ipc_part { size, ptr, len, rank, type_code, type_bits, type_lanes, shape, strides, name };
        gpu_ipc_part_spec { name, shape, strides, rank, type_code, type_bits, type_lanes };
        gpu_ipc_pool_info { size, generation, identity, part_count, user_len, blocks, previous, name };
        gpu_ipc_reader_info { size, epoch, identity, part_count, user_len, asleep, reserved, name };
        gpu_ipc_region { ptr, len };
        gpu_ipc_seal { key, block };
        gpu_ipc_sealed { key, block, generation };
        gpu_ipc_session_options { size, socket, uids, uid_count, region_bytes, time_to_live_ns, quarantine_ns, max_leases, grows_in_place };
        gpu_ipc_share_options { size, time_to_live_ns, user, read_only, reserved };
        gpu_ipc_stats { size, live_blocks, live_bytes, limbo_blocks, limbo_bytes, in_flight, held, quarantined, quarantined_bytes, poisoned, leaked_blocks, leaked_bytes, revoked, expired, deaths, corrupt_words, tickets, participants, regions, reserved_bytes, in_use_bytes, pinned_bytes, unmarked_blocks };
    }
    text + "#undef GPU_IPC_SIZE\n#undef GPU_IPC_FIELD\n\n"
}

/// `GPU_IPC_WRITE_HEADER=1` writes it anew.
#[test]
fn the_header_is_the_one_that_is_checked_in() {
    let written = written();
    if std::env::var_os("GPU_IPC_WRITE_HEADER").is_some() {
        std::fs::write(header(), &written).expect("the header can be written");
    }
    let checked_in = std::fs::read_to_string(header()).expect("a header");
    let differs = written
        .lines()
        .zip(checked_in.lines())
        .find(|(written, there)| written != there);
    assert!(
        written == checked_in,
        "the header differs from the source, first at {differs:?}; run this test with GPU_IPC_WRITE_HEADER=1"
    );
}

/// Finds the declarations of functions, each with the comment above.
fn functions(header: &str) -> Vec<(String, String)> {
    let paragraphs = header.split("\n\n").filter(|paragraph| {
        paragraph.contains(");") && !paragraph.contains("typedef") && !paragraph.contains("#define")
    });
    let split = |paragraph: &str| {
        let (comment, code): (Vec<&str>, Vec<&str>) =
            paragraph.lines().partition(|line| line.starts_with("//"));
        (code.join(" "), comment.join("\n"))
    };
    paragraphs.map(split).collect()
}

#[test]
fn every_function_says_what_it_keeps_where_it_may_be_called_whether_it_blocks_and_its_errors() {
    let header = std::fs::read_to_string(header()).expect("a header");
    let functions = functions(&header);
    assert!(
        functions.len() > 80,
        "only {} functions were found",
        functions.len()
    );
    for (code, comment) in &functions {
        for word in ["Keeps: ", "Thread: ", "Blocks: ", "Errors: "] {
            assert!(
                comment.replace('\n', " ").contains(word),
                "{code}: nothing on {word}"
            );
        }
    }
}

#[test]
fn every_structure_has_its_size_asserted() {
    let header = std::fs::read_to_string(header()).expect("a header");
    let structures = header.matches("typedef struct ").count();
    let opaque = header
        .lines()
        .filter(|line| line.starts_with("typedef struct ") && line.ends_with(';'))
        .count();
    assert_eq!(
        header.matches("\nGPU_IPC_SIZE(").count(),
        structures - opaque
    );
}

/// The symbols that the library may export are in a list, which is what the header declares.
#[test]
fn the_list_of_symbols_is_that_of_the_header() {
    let header = written();
    let mut declared: Vec<String> = functions(&header)
        .iter()
        .map(|(code, _)| {
            code.split('(')
                .next()
                .and_then(|head| head.rsplit([' ', '*']).next())
                .expect("a name")
                .into()
        })
        .collect();
    declared.sort();
    let path = root().join("symbols.txt");
    let listed = declared.join("\n") + "\n";
    if std::env::var_os("GPU_IPC_WRITE_HEADER").is_some() {
        std::fs::write(&path, &listed).expect("the list can be written");
    }
    assert_eq!(std::fs::read_to_string(path).expect("a list"), listed);
}

/// No function of the list is without a caller in the programs that are run.
#[test]
fn every_function_is_called_by_a_program() {
    let programs: String = [
        "tests/c/misuse.c",
        "tests/c/usual.c",
        "tests/c/objects.c",
        "tests/c/pools.c",
        "tests/c/strict.c",
        "examples/first.c",
        "examples/ring.cpp",
        "examples/hot_swap.c",
    ]
    .map(|path| std::fs::read_to_string(root().join(path)).expect("a program"))
    .concat();
    let list = std::fs::read_to_string(root().join("symbols.txt")).expect("a list");
    for name in list.lines() {
        assert!(
            programs.contains(&format!("{name}(")),
            "no program calls {name}"
        );
    }
}
