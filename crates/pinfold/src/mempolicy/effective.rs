//! The rule that says which of several policies is in effect.

use super::{Mempolicy, Mode, SYSTEM_DEFAULT};

/// Returns the policy that is in effect for an allocation: the range's policy, else the task's
/// policy, else [`SYSTEM_DEFAULT`].
///
/// A `default` policy counts as no policy. Costs two comparisons. Counts no reference.
///
/// # Examples
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, SYSTEM_DEFAULT, effective};
///
/// let task = Mempolicy::parse("prefer:1")?;
/// assert_eq!(effective(Some(&Mempolicy::default()), Some(&task)), &task);
/// assert_eq!(effective(None, None), &SYSTEM_DEFAULT);
/// # Ok::<(), pinfold::mempolicy::ParseError>(())
/// ```
#[doc(alias = "get_vma_policy")]
pub fn effective<'p>(range: Option<&'p Mempolicy>, task: Option<&'p Mempolicy>) -> &'p Mempolicy {
    let says = |policy: &&Mempolicy| policy.mode() != Mode::Default;
    range
        .filter(says)
        .or(task.filter(says))
        .unwrap_or(&SYSTEM_DEFAULT)
}
