//! Checks that no other user can change a file that programs load as code.

use anyhow::{Context, Result, bail};
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The users who may be able to change a file or folder.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    owners: [u32; 3],
    groups: Groups,
    /// Whether everybody may make files in a folder where nobody can replace those of others, as in
    /// /tmp.
    allows_sticky: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Groups {
    None,
    /// A group with the user's number. Many systems give each user such a group, without any other
    /// member.
    OfTheUser,
    All,
}

/// The number that the kernel shows for an owner who has no number here.
const UNMAPPED: u32 = 65_534;

/// Returns the number of this process's user.
///
/// # Errors
///
/// Fails if the user has no number here: files of other users would look like the user's own.
fn user() -> Result<u32> {
    let user = rustix::process::geteuid().as_raw();
    #[expect(clippy::disallowed_methods, reason = "a file of the kernel's own")]
    if user == UNMAPPED && !is_mapped(&fs::read_to_string("/proc/self/uid_map")?, user) {
        bail!("this user has no number in this user namespace");
    }
    Ok(user)
}

/// Returns whether a line of `/proc/self/uid_map` has the number: the first number inside, the
/// first one outside, and how many there are.
fn is_mapped(map: &str, user: u32) -> bool {
    map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_whitespace().flat_map(str::parse).collect();
        matches!(numbers[..], [first, _, count] if (first..first + count).contains(&user.into()))
    })
}

impl Rule {
    /// The user alone.
    pub fn user_only() -> Result<Rule> {
        let owners = [user()?; 3];
        Ok(Rule {
            owners,
            groups: Groups::None,
            allows_sticky: false,
        })
    }

    /// The user, root, and the owner of `/`.
    pub fn user_or_root() -> Result<Rule> {
        // In a user namespace, root's files may have another number than 0.
        let owners = [user()?, 0, fs::metadata("/")?.uid()];
        Ok(Rule {
            owners,
            groups: Groups::OfTheUser,
            allows_sticky: true,
        })
    }

    /// The user, root, and the owner of `file`. Any group, as in /usr/local on some systems. In a
    /// folder like /tmp, other users can make links to files of these owners.
    pub fn owner_of(file: &Path) -> Result<Rule> {
        let user = rustix::process::geteuid().as_raw();
        Ok(Rule {
            owners: [user, 0, fs::metadata(file)?.uid()],
            groups: Groups::All,
            allows_sticky: false,
        })
    }

    /// Fails if another user can change `path`, or if `path` is a symbolic link.
    pub fn check(self, path: &Path) -> Result<Metadata> {
        let about = fs::symlink_metadata(path).with_context(|| path.display().to_string())?;
        match self.objection(about.uid(), about.gid(), about.mode()) {
            None => Ok(about),
            Some(objection) => bail!("{} {objection}", path.display()),
        }
    }

    fn objection(self, owner: u32, group: u32, mode: u32) -> Option<String> {
        let kind = mode & libc::S_IFMT;
        if kind == libc::S_IFLNK {
            return Some("is a symbolic link".to_owned());
        }
        if !self.owners.contains(&owner) {
            return Some(format!("belongs to user {owner}"));
        }
        let is_sticky = kind == libc::S_IFDIR && mode & libc::S_ISVTX != 0;
        let may_group = match self.groups {
            Groups::None => false,
            Groups::OfTheUser => group == self.owners[0],
            Groups::All => true,
        };
        let writable = mode & libc::S_IWOTH != 0 || mode & libc::S_IWGRP != 0 && !may_group;
        let is_safe = !writable || is_sticky && self.allows_sticky;
        (!is_safe).then(|| "may be changed by other users".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_of_users_says_who_has_a_number() {
        assert!(is_mapped("         0          0 4294967295\n", UNMAPPED));
        assert!(is_mapped("0 1000 1\n1 100000 65536\n", UNMAPPED));
        assert!(!is_mapped("0 1000 1\n", UNMAPPED));
        assert!(!is_mapped("", UNMAPPED));
    }

    #[test]
    fn owners_groups_and_modes_decide() {
        let rule = |groups| Rule {
            owners: [1000, 0, 0],
            groups,
            allows_sticky: groups == Groups::OfTheUser,
        };
        let ok = |groups, owner, group, mode| rule(groups).objection(owner, group, mode).is_none();
        let (folder, file) = (libc::S_IFDIR, libc::S_IFREG);
        for groups in [Groups::None, Groups::OfTheUser, Groups::All] {
            assert!(ok(groups, 1000, 1000, folder | 0o755));
            assert!(ok(groups, 0, 0, file | 0o644));
            let allows_sticky = rule(groups).allows_sticky;
            assert_eq!(ok(groups, 0, 0, folder | 0o1777), allows_sticky);
            assert!(!ok(groups, 0, 0, file | 0o1666));
            assert!(!ok(groups, 1001, 1000, folder | 0o700));
            assert!(!ok(groups, 1000, 1000, folder | 0o757));
            assert!(!ok(groups, 1000, 1000, libc::S_IFLNK | 0o777));
        }
        let group_writable = |groups, group| ok(groups, 1000, group, folder | 0o775);
        assert!(!group_writable(Groups::None, 1000));
        assert!(group_writable(Groups::OfTheUser, 1000));
        assert!(!group_writable(Groups::OfTheUser, 50));
        assert!(group_writable(Groups::All, 50));
    }
}
