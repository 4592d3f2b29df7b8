//! How much memory this process may still take: what the system has free, or less where a container limits it.

use std::path::{Path, PathBuf};

/// Memory that is left, and who limits it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Available {
    /// Bytes.
    pub bytes: f64,
    /// `this machine` or `this container`.
    pub owner: &'static str,
}

/// Memory left for this process, where the system tells (Linux): what programs can take without swapping
/// (`MemAvailable`), or what its control groups, version 1 or 2, leave of their limits where that is less.
pub fn available() -> Option<Available> {
    available_below(Path::new("/"))
}

fn available_below(root: &Path) -> Option<Available> {
    let machine = machine(&root.join("proc/meminfo"));
    let groups = groups(root).into_iter().filter_map(|group| group.left()).reduce(f64::min);
    let owned = |owner| move |bytes| Available { bytes, owner };
    let both = [machine.map(owned("this machine")), groups.map(owned("this container"))];
    both.into_iter().flatten().min_by(|a, b| a.bytes.total_cmp(&b.bytes))
}

fn machine(path: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(path).ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024.0)
    };
    field("MemAvailable:").or_else(|| field("MemTotal:"))
}

/// A memory control group: its folder and the names of its files.
struct Group {
    folder: PathBuf,
    limit: &'static str,
    usage: &'static str,
    reclaimable: &'static str,
}

impl Group {
    /// What is left of its limit, if it has one. Cached file pages count as free, as the kernel drops them first.
    fn left(&self) -> Option<f64> {
        let read = |name: &str| std::fs::read_to_string(self.folder.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<f64>().ok();
        let cached = read("memory.stat").and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix(self.reclaimable))?;
            line.trim().parse::<f64>().ok()
        });
        let used = number(self.usage).unwrap_or(0.0) - cached.unwrap_or(0.0);
        Some((number(self.limit)? - used.max(0.0)).max(0.0))
    }
}

/// The control groups of this process and those above them, as far as they can be seen.
fn groups(root: &Path) -> Vec<Group> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let path = |controller: &str| {
        text.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            controllers.split(',').any(|name| name == controller).then(|| path.trim_start_matches('/'))
        })
    };
    // In a container the path may be that of the host, so that only the topmost folder is there.
    let above = |top: PathBuf, path: Option<&str>| -> Vec<PathBuf> {
        let start = top.join(path.unwrap_or_default());
        start.ancestors().take_while(|folder| folder.starts_with(&top)).map(Path::to_path_buf).collect()
    };
    let second = above(root.join("sys/fs/cgroup"), path("")).into_iter().map(|folder| Group {
        folder,
        limit: "memory.max",
        usage: "memory.current",
        reclaimable: "inactive_file ",
    });
    let first = above(root.join("sys/fs/cgroup/memory"), path("memory")).into_iter().map(|folder| Group {
        folder,
        limit: "memory.limit_in_bytes",
        usage: "memory.usage_in_bytes",
        reclaimable: "total_inactive_file ",
    });
    second.chain(first).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = (1u64 << 30) as f64;

    fn files(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    fn found(extra: &[(&str, &str)]) -> Option<Available> {
        let meminfo = "MemTotal:       16777216 kB\nMemFree:  100 kB\nMemAvailable:    8388608 kB\n";
        let root = files(&[&[("proc/meminfo", meminfo)], extra].concat());
        available_below(root.path())
    }

    #[test]
    fn the_least_of_machine_and_control_groups_is_taken() {
        let machine = Some(Available { bytes: 8.0 * GIB, owner: "this machine" });
        let container = |bytes| Some(Available { bytes, owner: "this container" });
        assert_eq!(found(&[]), machine);
        let second = ("proc/self/cgroup", "0::/a/b\n");
        let limit = |path, text| (path, text);
        assert_eq!(found(&[second, limit("sys/fs/cgroup/a/b/memory.max", "max\n")]), machine);
        assert_eq!(
            found(&[second, limit("sys/fs/cgroup/a/b/memory.max", "1073741824\n")]),
            container(GIB),
            "its own group"
        );
        assert_eq!(
            found(&[
                second,
                limit("sys/fs/cgroup/a/b/memory.max", "4294967296"),
                limit("sys/fs/cgroup/a/memory.max", "2147483648"),
                limit("sys/fs/cgroup/a/memory.current", "1610612736"),
                limit("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 536870912\n"),
            ]),
            container(GIB),
            "the group above, less what is used and cannot be dropped"
        );
        assert_eq!(
            found(&[second, limit("sys/fs/cgroup/memory.max", "1073741824")]),
            container(GIB),
            "the topmost folder where the path is the host's"
        );
        let first = ("proc/self/cgroup", "12:cpu,cpuacct:/x\n5:memory:/docker/1\n");
        let folder = "sys/fs/cgroup/memory/docker/1";
        let file = |name: &str| format!("{folder}/{name}");
        let [limit_file, usage_file, stat_file] =
            ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"].map(file);
        assert_eq!(
            found(&[
                first,
                (&limit_file, "3221225472"),
                (&usage_file, "3221225472"),
                (&stat_file, "inactive_file 1\ntotal_inactive_file 1073741824\n"),
            ]),
            container(GIB),
            "version 1"
        );
        assert_eq!(found(&[first, (&limit_file, "9223372036854771712")]), machine, "no limit");
        let full = [second, ("sys/fs/cgroup/memory.max", "100"), ("sys/fs/cgroup/memory.current", "200")];
        assert_eq!(found(&full), container(0.0));
        assert_eq!(available_below(files(&[]).path()), None);
    }
}
