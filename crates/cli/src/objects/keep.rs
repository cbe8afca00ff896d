//! `gpu-ipc keep`: holds the descriptors of a broker, and starts it again when it dies. Starts a
//! gateway again too, which has no descriptors: `supervise`.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args as Arguments;
use gpu_ipc::broker::keeper::process::{End, Keeper};

use super::{BrokerDir, manager, reload, supervise};
use crate::device::explain;
use crate::log::LogOptions;
use crate::{Outcome, output};

/// Options of a keeper.
#[derive(Arguments, Debug)]
pub struct KeepOptions {
    /// Which broker.
    #[command(flatten)]
    pub place: BrokerDir,
    /// Take every descriptor over from the keeper that is in the directory, which ends then; its
    /// broker lives on
    #[arg(long)]
    pub take_over: bool,
    /// Most descriptors to keep, one for each region and manifest [default: the process's limit]
    #[arg(long, value_name = "N")]
    pub most: Option<usize>,
    /// Its log.
    #[command(flatten)]
    pub log: LogOptions,
    /// The command of a broker, which serves the keeper's directory, or of a gateway; without one it
    /// keeps alone
    #[arg(last = true, num_args = 1..)]
    pub command: Vec<String>,
}

/// Keeps until the broker ends by itself.
pub fn run(options: &KeepOptions) -> Outcome {
    let prepared = common_dir(options).and_then(|dir| Ok((dir, options.log.start()?)));
    let (dir, _log) = match prepared {
        Ok(prepared) => prepared,
        Err(why) => return output::fail(&why, false, Outcome::Usage),
    };
    let kept = match supervise::is_gateway(&options.command) {
        true => keep_gateway(options),
        false => keep(options, &dir),
    };
    match kept {
        Ok(outcome) => outcome,
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

/// Finds the directory that a broker's command names, as `--dir D` or `--dir=D`.
fn dir_of(command: &[String]) -> Option<PathBuf> {
    let mut words = command.iter();
    while let Some(word) = words.next() {
        if word == "--dir" {
            return words.next().map(PathBuf::from);
        }
        if let Some(dir) = word.strip_prefix("--dir=") {
            return Some(dir.into());
        }
    }
    None
}

/// Returns the directory of both: the keeper's, or the one that the broker's command names.
fn common_dir(options: &KeepOptions) -> Result<PathBuf, String> {
    let of_broker = dir_of(&options.command);
    match (&options.place.dir, &of_broker) {
        (Some(ours), Some(theirs)) if absolute(ours) != absolute(theirs) => Err(format!(
            "the keeper's --dir is {}, and its broker's is {}: name one directory",
            ours.display(),
            theirs.display()
        )),
        (None, Some(theirs)) => Ok(theirs.clone()),
        _ => options.place.path(),
    }
}

fn absolute(dir: &Path) -> PathBuf {
    std::path::absolute(dir).unwrap_or_else(|_| dir.into())
}

fn keep_gateway(options: &KeepOptions) -> Result<Outcome, String> {
    if options.take_over || options.most.is_some() {
        return Err("--take-over and --most are about a broker's descriptors, and a gateway has none: leave them out".into());
    }
    supervise::run(|| {
        let mut command = Command::new(&options.command[0]);
        command.args(&options.command[1..]);
        // Else it finds the broker by itself.
        if let Some(dir) = &options.place.dir {
            command.env("NVIDIA_DRA_LOCAL_IPC_DIR", absolute(dir));
        }
        command
    })
}

fn keep(options: &KeepOptions, dir: &Path) -> Result<Outcome, String> {
    let open = if options.take_over {
        Keeper::take_over
    } else {
        Keeper::open
    };
    let mut keeper = open(dir, options.most).map_err(|error| explain(&error))?;
    manager::start(keeper.path(), dir)?;
    // A broker without such a file, and its keeper, end with their terminal.
    let is_options = |word: &String| word == "--options" || word.starts_with("--options=");
    if options.command.iter().any(is_options) {
        reload::pass_on(dir.to_owned())?;
    }
    let Some((program, arguments)) = options.command.split_first() else {
        keeper.run_alone();
        return Ok(Outcome::Good);
    };
    let start = || {
        let mut command = Command::new(program);
        command.args(arguments);
        // A broker whose command names no directory serves this one.
        command.env("NVIDIA_DRA_LOCAL_IPC_DIR", absolute(dir));
        command
    };
    let end = keeper.run(start).map_err(|error| explain(&error))?;
    Ok(match end {
        End::Broker(status) if !status.success() => Outcome::Finding,
        End::Broker(_) | End::Replaced => Outcome::Good,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(dir: Option<&str>, command: &[&str]) -> KeepOptions {
        KeepOptions {
            place: BrokerDir {
                dir: dir.map(PathBuf::from),
            },
            take_over: false,
            most: None,
            log: LogOptions::default(),
            command: command.iter().map(|&word| word.to_owned()).collect(),
        }
    }

    #[test]
    fn keeper_and_broker_have_one_directory() {
        let dir = |options: &KeepOptions| common_dir(options).expect("one directory");
        let broker = ["gpu-ipc", "broker", "--dir", "/run/a"];
        assert_eq!(dir(&options(None, &broker)), Path::new("/run/a"));
        assert_eq!(dir(&options(Some("/run/a"), &broker)), Path::new("/run/a"));
        let other = ["gpu-ipc", "broker", "--dir=/run/b"];
        assert_eq!(dir(&options(None, &other)), Path::new("/run/b"));
        assert_eq!(
            dir(&options(Some("/run/a"), &["gpu-ipc", "broker"])),
            Path::new("/run/a")
        );
        let why = common_dir(&options(Some("/run/a"), &other)).expect_err("two directories");
        assert_eq!(
            why,
            "the keeper's --dir is /run/a, and its broker's is /run/b: name one directory"
        );
    }
}
