//! A broker's file of options, in TOML: each key is the name of an option of its command line, and
//! holds in place of that.
//!
//! What was read well is copied into the broker's directory. A broker that is started again, and
//! finds a file that an editor left half, goes on with the copy: its objects are worth more than the
//! change.

use std::fs;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::{Args as Arguments, Command, FromArgMatches};
use toml::de::{DeTable, DeValue};
use tracing_subscriber::filter::Targets;

use super::rules::RuleOptions;

/// The most bytes of a file.
const MOST: u64 = 1 << 20;
/// The name of the copy in the broker's directory.
const COPY: &str = "options.last";

/// The options that a file may have.
#[derive(Arguments, Clone, Default, Debug)]
pub struct Rules {
    /// What is allowed.
    #[command(flatten)]
    pub rules: RuleOptions,
    /// What is logged, if the file says so.
    #[arg(long)]
    pub log: Option<Targets>,
}

/// A file of options.
#[derive(Clone, Debug)]
pub struct OptionsFile {
    path: PathBuf,
    copy: PathBuf,
    /// What holds where the file says nothing.
    usual: RuleOptions,
}

impl OptionsFile {
    /// Names a file, for the broker of a directory whose command line says what is usual.
    pub fn new(path: &Path, dir: &Path, usual: &RuleOptions) -> OptionsFile {
        OptionsFile {
            path: path.into(),
            copy: dir.join(COPY),
            usual: usual.clone(),
        }
    }

    /// Returns the file's path.
    pub fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// Reads the file.
    ///
    /// # Errors
    ///
    /// What is wrong with it, with file and line.
    pub fn read(&self) -> Result<Rules, String> {
        let text = text_of(&self.path)?;
        let rules = parse(&text, &self.usual)
            .map_err(|Wrong { line, why }| format!("{}:{line}: {why}", self.path.display()))?;
        self.keep(&text);
        Ok(rules)
    }

    /// Reads what was read well before.
    pub fn read_copy(&self) -> Option<Rules> {
        parse(&text_of(&self.copy).ok()?, &self.usual).ok()
    }

    /// Copies what was read; before the first start there is no directory to copy it into.
    fn keep(&self, text: &str) {
        let next = self.copy.with_extension("next");
        let kept = fs::write(&next, text).and_then(|()| fs::rename(&next, &self.copy));
        if let Err(error) = kept
            && self.copy.parent().is_some_and(Path::is_dir)
        {
            tracing::warn!(%error, copy = %self.copy.display(), "the options are not copied");
        }
    }
}

fn text_of(path: &Path) -> Result<String, String> {
    let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    let is = fs::metadata(path).map_err(|e| failed(&e))?;
    if !is.is_file() {
        return Err(failed(&"it is no regular file"));
    }
    if is.permissions().mode() & 0o002 != 0 {
        return Err(failed(
            &"every user may write it, and so say who may connect: chmod o-w",
        ));
    }
    let mut text = String::new();
    let file = fs::File::open(path).map_err(|e| failed(&e))?;
    let read = file.take(MOST + 1).read_to_string(&mut text);
    if read.map_err(|e| failed(&e))? as u64 > MOST {
        return Err(failed(&"it has more than 1 MiB"));
    }
    Ok(text)
}

/// What is wrong, and where.
#[derive(PartialEq, Eq, Debug)]
struct Wrong {
    line: usize,
    why: String,
}

fn parse(text: &str, usual: &RuleOptions) -> Result<Rules, Wrong> {
    let wrong = |span: Range<usize>, why: String| Wrong {
        line: 1 + text[..span.start.min(text.len())].matches('\n').count(),
        why,
    };
    let table = DeTable::parse(text)
        .map_err(|error| wrong(error.span().unwrap_or(0..0), error.message().into()))?;
    let known = Rules::augment_args(Command::new("options").no_binary_name(true));
    let mut rules = Rules {
        rules: usual.clone(),
        log: None,
    };
    for (key, value) in table.get_ref() {
        let name = key.get_ref();
        let mut names = known.get_arguments().filter_map(|option| option.get_long());
        if !names.any(|option| option == name) {
            let names: Vec<&str> = known
                .get_arguments()
                .filter_map(|option| option.get_long())
                .filter(|&option| option != "help")
                .collect();
            let why = format!(
                "{name} is no option of a file, which has {}",
                names.join(", ")
            );
            return Err(wrong(key.span(), why));
        }
        let words = words(name, value.get_ref()).map_err(|why| wrong(value.span(), why))?;
        // An empty list says that there is none, and not that the command line's holds.
        if words.is_empty() {
            let rules = &mut rules.rules;
            match &**name {
                "pin" => rules.pin.clear(),
                "allow-uid" => rules.allow_uid.clear(),
                "allow-gid" => rules.allow_gid.clear(),
                _ => return Err(wrong(value.span(), format!("{name} is no list"))),
            }
        }
        let matched = known.clone().try_get_matches_from(words);
        let matched = matched.and_then(|matches| rules.update_from_arg_matches(&matches));
        matched.map_err(|error| {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            let why = first.strip_prefix("error: ").unwrap_or(first);
            wrong(value.span(), why.into())
        })?;
    }
    Ok(rules)
}

/// Writes an option as words of a command line.
fn words(name: &str, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let one = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().into()),
        DeValue::Boolean(is) => Ok(is.to_string()),
        other => Err(format!(
            "{name} is {}, but must be a text, a decimal number, true, false, or a list of these",
            other.type_str()
        )),
    };
    let word = |value| one(value).map(|text| format!("--{name}={text}"));
    match value {
        DeValue::Array(all) => all.iter().map(|value| word(value.get_ref())).collect(),
        value => Ok(vec![word(value)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usual() -> RuleOptions {
        RuleOptions {
            limit: Some(7),
            evict: Some(true),
            allow_uid: vec![1, 2],
            ..RuleOptions::default()
        }
    }

    #[test]
    fn what_a_file_says_holds_in_place_of_the_command_line() {
        let text = r#"
            # of an operator
            limit = "4GiB"
            evict = false
            ttl = 3600
            pool-ttl = 7200
            pin = ["prod", "base/*"]
            allow-gid = [100]
            allow-uid = []
            keep-epochs = 3
            log = "info,broker=debug"
        "#;
        let Rules { rules, log } = parse(text, &usual()).expect("a good file");
        let limits = rules.limits();
        assert_eq!(
            (limits.bytes, limits.evict, limits.epochs),
            (4 << 30, false, 3)
        );
        assert_eq!(limits.ttl.map(|ttl| ttl.as_secs()), Some(3_600));
        assert_eq!(limits.pool_ttl.map(|ttl| ttl.as_secs()), Some(7_200));
        assert_eq!(limits.pins, ["prod", "base/*"]);
        assert_eq!(limits.device_percent, 90);
        let allowed = rules.allowed();
        assert_eq!((allowed.uids, allowed.gids), (vec![], vec![100]));
        assert!(log.is_some_and(|log| log.would_enable("broker", &tracing::Level::DEBUG)));
        let Rules { rules, log } = parse("", &usual()).expect("an empty file");
        assert_eq!(
            (rules.limit, rules.evict, rules.allow_uid, log),
            (Some(7), Some(true), vec![1, 2], None)
        );
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (text, line, words) in [
            (
                "limit = 8\nlimt = 16\n",
                2,
                "limt is no option of a file, which has limit, limit-per-uid,",
            ),
            ("\n\ndir = \"/run/x\"", 3, "dir is no option of a file"),
            (
                "limit = \"4 apples\"",
                1,
                "invalid value '4 apples' for '--limit <BYTES>'",
            ),
            (
                "evict = true\nttl = 0",
                2,
                "invalid value '0' for '--ttl <SECONDS>': 0 is not in 1..",
            ),
            ("ttl = 1.5", 1, "ttl is float, but must be a text"),
            (
                "limit = 0x10",
                1,
                "limit is integer, but must be a text, a decimal number",
            ),
            ("limit = []", 1, "limit is no list"),
            ("[limits]\nbytes = 1", 1, "limits is no option"),
            (
                "allow-uid = [1, -2]",
                1,
                "invalid value '-2' for '--allow-uid <UID>'",
            ),
            ("allow-uid = [[1]]", 1, "allow-uid is array"),
            (
                "evict = \"perhaps\"",
                1,
                "invalid value 'perhaps' for '--evict",
            ),
            (
                "log = \"broker=loud\"",
                1,
                "invalid value 'broker=loud' for '--log",
            ),
            ("limit = 8\nlimit = 16", 2, "duplicate key"),
            ("limit = 8\nevict", 2, ""),
            ("help = true", 1, "help is no option"),
        ] {
            let Err(wrong) = parse(text, &usual()) else {
                panic!("{text:?} is taken");
            };
            assert_eq!(wrong.line, line, "{text:?}: {wrong:?}");
            assert!(wrong.why.contains(words), "{text:?}: {wrong:?}");
        }
    }

    #[test]
    fn a_file_that_is_none_or_another_users_to_write_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("options.toml");
        let file = OptionsFile::new(&path, dir.path(), &usual());
        let why = || file.read().expect_err("no good file");
        assert!(why().contains("options.toml: No such file"), "{}", why());
        assert!(file.read_copy().is_none());
        fs::write(&path, "limit = 16").expect("a file");
        let open = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode));
        open(0o646).expect("it is ours");
        assert!(why().contains("every user may write it"), "{}", why());
        open(0o644).expect("it is ours");
        assert_eq!(file.read().expect("a good file").rules.limit, Some(16));
        // The copy of what was read well outlasts what is not.
        fs::write(&path, "limit = ").expect("a file");
        assert!(why().contains("options.toml:1: "), "{}", why());
        let copy = file.read_copy().expect("a copy");
        assert_eq!(copy.rules.limit, Some(16));
        fs::write(&path, vec![b'#'; (1 << 20) + 1]).expect("a file");
        assert!(why().contains("more than 1 MiB"), "{}", why());
        fs::remove_file(&path).expect("a file");
        fs::create_dir(&path).expect("a directory");
        assert!(why().contains("it is no regular file"), "{}", why());
    }
}
