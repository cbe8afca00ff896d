//! The kernel's signs of a process's GPU work.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::OnceLock;

use gpu_api::Result;

/// What a runtime may add to an allocation.
const ROUNDED: u64 = 2 << 20;

/// The folder in which KFD has one folder for each process with queues, until after they are gone.
/// It is named by the pid in the first PID namespace, which other namespaces do not tell.
pub(crate) struct Signs {
    folder: PathBuf,
    sees_pids: bool,
    own: OnceLock<u32>,
}

impl Signs {
    /// Takes a folder, if it is there. `sees_pids` says whether its names are pids of this
    /// process's namespace.
    pub(crate) fn find(folder: impl Into<PathBuf>, sees_pids: bool) -> Option<Signs> {
        let folder = folder.into();
        folder.is_dir().then_some(Signs {
            folder,
            sees_pids,
            own: OnceLock::new(),
        })
    }

    /// Names the signs of a process that is `pid` here and told `told`, 0 for nothing. A pid of
    /// another namespace would be a stranger's name.
    pub(crate) fn of(&self, pid: u32, told: u32) -> Vec<PathBuf> {
        let pid = Some(pid).filter(|_| self.sees_pids);
        let names: BTreeSet<u32> = pid.into_iter().chain([told]).collect();
        let names = names.into_iter().filter(|name| *name != 0);
        names
            .map(|name| self.folder.join(name.to_string()))
            .collect()
    }

    /// Returns this process's name in the folder. In another namespace it is the one whose memory
    /// grows while `hold` holds some, and shrinks when it is freed.
    pub(crate) fn own(&self, hold: impl Fn(u64, &mut dyn FnMut()) -> Result<()>) -> Option<u32> {
        if self.sees_pids {
            return Some(process::id());
        }
        if let Some(own) = self.own.get() {
            return Some(*own);
        }
        let mut found = BTreeMap::new();
        for _ in 0..3 {
            let mut random = [0; 2];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).ok()?;
            // Odd sizes, beyond those that a runtime serves from memory which it has already.
            let len = ((16 + u64::from(random[0] % 48)) << 20) + (u64::from(random[1]) << 12);
            let (before, mut during) = (usage(&self.folder), BTreeMap::new());
            hold(len, &mut || during = usage(&self.folder)).ok()?;
            let after = usage(&self.folder);
            for (name, bytes) in before
                .iter()
                .filter(|(name, bytes)| after.get(name) == Some(bytes))
            {
                let grown = during
                    .get(name)
                    .and_then(|during| during.checked_sub(*bytes));
                if grown.is_some_and(|grown| (len..=len + ROUNDED).contains(&grown)) {
                    *found.entry(*name).or_insert(0) += 1;
                }
            }
        }
        // An allocation of another thread may spoil one attempt, and another process's may look like
        // ours once.
        let mut sure = found.into_iter().filter(|(_, times)| *times >= 2);
        match (sure.next(), sure.next()) {
            (Some((own, _)), None) => Some(*self.own.get_or_init(|| own)),
            _ => None,
        }
    }
}

/// Sums up the memory of each process in the folder: its files `vram_<GPU>`.
fn usage(folder: &Path) -> BTreeMap<u32, u64> {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = |process: &Path| {
        entries(process)
            .filter(|file| file.file_name().as_encoded_bytes().starts_with(b"vram_"))
            .filter_map(|file| {
                fs::read_to_string(file.path())
                    .ok()?
                    .trim()
                    .parse::<u64>()
                    .ok()
            })
            .sum()
    };
    entries(folder)
        .filter_map(|process| {
            let name = process.file_name().to_str()?.parse().ok()?;
            Some((name, bytes(&process.path())))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A folder of three processes, and what the memory of the second is.
    fn processes() -> (tempfile::TempDir, impl Fn(u32, u64)) {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().to_owned();
        let set = move |name: u32, bytes: u64| {
            let process = path.join(name.to_string());
            fs::create_dir_all(&process).expect("made");
            fs::write(process.join("vram_51"), format!("{}\n", bytes / 2)).expect("written");
            fs::write(process.join("vram_52"), format!("{}\n", bytes - bytes / 2))
                .expect("written");
            fs::write(process.join("pasid"), "32769\n").expect("written");
        };
        [7, 70, 700].into_iter().for_each(|name| set(name, 4096));
        (folder, set)
    }

    fn hidden(folder: &Path) -> Signs {
        Signs::find(folder, false).expect("it is there")
    }

    #[test]
    fn a_process_finds_its_own_name_by_the_memory_that_it_holds() {
        let (folder, set) = processes();
        let signs = hidden(folder.path());
        let own = signs.own(|len, then| {
            set(70, 4096 + len + 4096);
            then();
            set(70, 4096);
            Ok(())
        });
        assert_eq!(own, Some(70));
        // Known from now on.
        assert_eq!(signs.own(|_, _| panic!("asked again")), Some(70));
    }

    #[test]
    fn no_name_is_found_where_the_memory_is_no_ones_or_anyones() {
        let (folder, set) = processes();
        let at = |len, then: &mut dyn FnMut(), names: &[u32], left: u64| {
            names.iter().for_each(|name| set(*name, 4096 + len));
            then();
            names.iter().for_each(|name| set(*name, 4096 + left));
            Ok(())
        };
        let own =
            |names: &[u32], left| hidden(folder.path()).own(|len, then| at(len, then, names, left));
        assert_eq!(own(&[], 0), None, "a kernel that does not count");
        assert_eq!(own(&[7, 700], 0), None, "two that cannot be told apart");
        let times = Cell::new(0);
        let once = hidden(folder.path()).own(|len, then| {
            times.set(times.get() + 1);
            at(len, then, if times.get() == 2 { &[7] } else { &[] }, 0)
        });
        assert_eq!((once, times.get()), (None, 3), "a chance");
        let refused = || gpu_api::Error::Forked { what: "the device" };
        assert_eq!(
            hidden(folder.path()).own(|_, _| Err(refused())),
            None,
            "no memory"
        );
        assert_eq!(own(&[7], 100), None, "it does not shrink");
    }

    #[test]
    fn a_sign_is_a_pid_of_this_namespace_or_what_was_told() {
        let folder = tempfile::tempdir().expect("a directory");
        let named = |sees_pids, pid, told| {
            let signs = Signs::find(folder.path(), sees_pids)
                .expect("it is there")
                .of(pid, told);
            let names = signs
                .iter()
                .map(|sign| sign.file_name().expect("a name").to_owned());
            names
                .map(|name| name.into_string().expect("digits"))
                .collect::<Vec<_>>()
        };
        assert_eq!(named(true, 5, 0), ["5"]);
        assert_eq!(named(true, 5, 5), ["5"]);
        // The producer's namespace shows no pid of the participant.
        assert_eq!(named(true, 0, 9), ["9"]);
        assert_eq!(named(false, 5, 9), ["9"]);
        assert!(named(false, 5, 0).is_empty());
        assert!(Signs::find(folder.path().join("absent"), true).is_none());
        let own = Signs::find(folder.path(), true)
            .expect("it is there")
            .own(|_, _| panic!("known"));
        assert_eq!(own, Some(process::id()));
    }
}
