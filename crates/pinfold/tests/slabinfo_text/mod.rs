//! Parses text in the form of `/proc/slabinfo`.

/// A line, with the kernel's names of the columns.
#[derive(Debug, PartialEq)]
pub struct Line {
    pub name: String,
    pub active_objs: usize,
    pub num_objs: usize,
    pub objsize: usize,
    pub objperslab: usize,
    pub pagesperslab: usize,
    pub tunables: [usize; 3],
    pub active_slabs: usize,
    pub num_slabs: usize,
    pub sharedavail: usize,
}

/// Parses the text by columns, as `slabtop` does, and fails unless the spacing is exactly the
/// kernel's.
pub fn parse(text: &str) -> Vec<Line> {
    let mut lines = text.split_inclusive('\n');
    assert_eq!(lines.next(), Some("slabinfo - version: 2.1\n"));
    assert_eq!(
        lines.next(),
        Some(
            "# name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> : tunables <limit> <batchcount> <sharedfactor> : slabdata <active_slabs> <num_slabs> <sharedavail>\n"
        )
    );
    lines.map(parse_line).collect()
}

fn parse_line(line: &str) -> Line {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    assert_eq!(words.len(), 16, "{line:?}");
    assert!(line.is_ascii() && !line.starts_with('#'), "{line:?}");
    assert_eq!([words[6], words[7]], [":", "tunables"]);
    assert_eq!([words[11], words[12]], [":", "slabdata"]);
    let number = |at: usize| -> usize { words[at].parse().unwrap() };
    let parsed = Line {
        name: words[0].to_owned(),
        active_objs: number(1),
        num_objs: number(2),
        objsize: number(3),
        objperslab: number(4),
        pagesperslab: number(5),
        tunables: [number(8), number(9), number(10)],
        active_slabs: number(13),
        num_slabs: number(14),
        sharedavail: number(15),
    };
    assert_eq!(printed_by_the_kernel(&parsed), line);
    parsed
}

/// Formats a line with the kernel's own format string, by the C library.
fn printed_by_the_kernel(line: &Line) -> String {
    let name = std::ffi::CString::new(line.name.as_str()).unwrap();
    let mut buffer = vec![0u8; 4096];
    let [limit, batchcount, shared] = line.tunables.map(|value| value as u32);
    // SAFETY: the buffer has the length that is passed, and each argument has the type that its
    // conversion names.
    let length = unsafe {
        libc::snprintf(
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            c"%-17s %6lu %6lu %6u %4u %4d : tunables %4u %4u %4u : slabdata %6lu %6lu %6lu\n"
                .as_ptr(),
            name.as_ptr(),
            line.active_objs,
            line.num_objs,
            line.objsize as u32,
            line.objperslab as u32,
            line.pagesperslab as i32,
            limit,
            batchcount,
            shared,
            line.active_slabs,
            line.num_slabs,
            line.sharedavail,
        )
    };
    buffer.truncate(length as usize);
    String::from_utf8(buffer).unwrap()
}
