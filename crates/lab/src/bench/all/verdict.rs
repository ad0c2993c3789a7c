//! Sentences that say whether Pinfold is faster or slower than its rivals, from measured figures
//! only.

/// What a figure says.
#[derive(Clone, Copy)]
pub enum Kind {
    /// How long an operation takes.
    Time,
    /// How many operations are made in a time.
    Rate,
}

/// Says how a figure of Pinfold's stands to each rival's, with the rival's figure. A percentage is
/// of the rival's figure. Rivals without a figure are left out. Returns an empty text if none is
/// left.
pub fn beside(kind: Kind, ours: Option<f64>, rivals: &[(&str, Option<f64>)]) -> String {
    let one = |&(rival, theirs): &(&str, Option<f64>)| Some(verdict(kind, ours?, theirs?, rival));
    let mut all: Vec<_> = rivals.iter().filter_map(one).collect();
    let last = all.pop();
    match (all.is_empty(), last) {
        (_, None) => String::new(),
        (true, Some(last)) => last,
        (false, Some(last)) => format!("{}, and {last}", all.join(", ")),
    }
}

fn verdict(kind: Kind, ours: f64, theirs: f64, rival: &str) -> String {
    let gain = match kind {
        Kind::Time => 100.0 * (theirs - ours) / theirs,
        Kind::Rate => 100.0 * (ours - theirs) / theirs,
    };
    let theirs = match theirs {
        large if large >= 1000.0 => format!("{large:.0}"),
        _ => format!("{theirs:.1}"),
    };
    // 99.6 % must not look like all of the time.
    let digits = usize::from((95.0..100.0).contains(&gain));
    match gain {
        near if near.abs() < 0.5 => format!("as fast as {rival} ({theirs})"),
        gain if gain > 0.0 => format!("faster by {gain:.digits$} % than {rival} ({theirs})"),
        loss => format!("slower by {:.0} % than {rival} ({theirs})", -loss),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sign_is_that_of_the_figures() {
        let time = |ours, theirs| verdict(Kind::Time, ours, theirs, "locked");
        assert_eq!(time(4.5, 6.0), "faster by 25 % than locked (6.0)");
        assert_eq!(time(9.0, 6.0), "slower by 50 % than locked (6.0)");
        assert_eq!(time(6.01, 6.0), "as fast as locked (6.0)");
        assert_eq!(time(4.0, 1000.0), "faster by 99.6 % than locked (1000)");
        let rate = |ours, theirs| verdict(Kind::Rate, ours, theirs, "counted");
        assert_eq!(rate(15.0, 10.0), "faster by 50 % than counted (10.0)");
        assert_eq!(rate(5.0, 10.0), "slower by 50 % than counted (10.0)");
    }

    #[test]
    fn rivals_without_a_figure_are_left_out() {
        let rivals = [("a", Some(2.0)), ("b", None), ("c", Some(4.0))];
        let text = beside(Kind::Time, Some(3.0), &rivals);
        assert_eq!(
            text,
            "slower by 50 % than a (2.0), and faster by 25 % than c (4.0)"
        );
        assert_eq!(beside(Kind::Time, None, &rivals), "");
    }
}
