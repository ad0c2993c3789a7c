//! The order of subjects in a round, and medians, spreads and means of the rounds' values.

/// Returns the value below which the share `at` (0 to 1) of `values` lies, interpolated. Returns
/// NaN if there are no values.
pub fn quantile(values: &[f64], at: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let position = at * last as f64;
    let (low, high) = (position.floor() as usize, position.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (position - position.floor())
}

/// Returns the middle value.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Returns the width of the middle half of `values`, relative to their median.
pub fn spread(values: &[f64]) -> f64 {
    (quantile(values, 0.75) - quantile(values, 0.25)) / median(values)
}

/// Returns whether the rounds differ so much that their median says little: their middle half is
/// wider than a quarter of the median.
pub fn is_doubtful(rounds: &[f64]) -> bool {
    spread(rounds) > 0.25
}

/// What [`marked`] appends, for the end of a table.
pub const DOUBTFUL: &str =
    "? doubtful: the middle half of the rounds is wider than a quarter of the median.\n";

/// Formats a figure with `digits` after the point, and with a `?` if its rounds are doubtful.
pub fn marked(figure: f64, digits: usize, rounds: &[f64]) -> String {
    let mark = if is_doubtful(rounds) { "?" } else { "" };
    format!("{figure:.digits$}{mark}")
}

/// Returns the geometric mean, which is the mean that suits ratios. Returns NaN if there are no
/// values.
pub fn geometric_mean(values: &[f64]) -> f64 {
    (values.iter().map(|value| value.ln()).sum::<f64>() / values.len() as f64).exp()
}

/// Returns each of the values once, in their order.
pub fn distinct<T: PartialEq>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for one in all {
        if !once.contains(&one) {
            once.push(one);
        }
    }
    once
}

/// Returns the order of `count` subjects in a round. Each round begins with another subject, and
/// every other round goes backwards, so that what one subject leaves in the caches does not always
/// affect the same other one.
pub fn turns(count: usize, round: usize) -> impl Iterator<Item = usize> {
    let first = round % count;
    (0..count).map(move |step| match round % 2 {
        0 => (first + step) % count,
        _ => (first + count - step) % count,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads_are_interpolated() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(spread(&[1.0, 2.0, 3.0, 4.0, 5.0]), 2.0 / 3.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_geometric_mean_of_a_ratio_and_its_inverse_is_one() {
        assert!((geometric_mean(&[0.5, 2.0]) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn each_round_has_every_subject_once_and_begins_with_another() {
        for round in 0..4 {
            let mut order: Vec<_> = turns(4, round).collect();
            assert_eq!(order[0], round);
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2, 3]);
        }
    }
}
