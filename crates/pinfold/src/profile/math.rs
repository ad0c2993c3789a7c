//! Logarithm and exponential function, which `core` does not have.

use core::f64::consts::{LN_2, SQRT_2};

/// Returns the natural logarithm of `x`, a normal positive number. The relative error is below
/// 10⁻¹².
///
/// x = m·2^e with m near 1, so ln x = e·ln 2 + ln m, and ln m = 2·(s + s³/3 + s⁵/5 + …) with
/// s = (m − 1)/(m + 1).
pub(super) fn ln(x: f64) -> f64 {
    const FRACTION: u64 = (1 << 52) - 1;
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut m = f64::from_bits(bits & FRACTION | 1023 << 52);
    if m > SQRT_2 {
        m /= 2.0;
        exponent += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let series = (0..9)
        .rev()
        .fold(0.0, |sum, nth| sum * square + 1.0 / f64::from(2 * nth + 1));
    exponent as f64 * LN_2 + 2.0 * s * series
}

/// Returns 1 − e^(−x) for `x` of at least 0. The relative error is below 10⁻¹².
pub(super) fn one_minus_exp(x: f64) -> f64 {
    // Both series are nested: e^(−r) = 1 − r·(1 − r/2·(1 − r/3·(1 − …))).
    let nested = |r: f64| {
        let terms = (2..18).rev();
        r * terms.fold(1.0, |sum, nth| 1.0 - sum * r / f64::from(nth))
    };
    if x < 0.5 {
        // The subtraction from 1 would lose the digits of a small result.
        return nested(x);
    }
    if x > 40.0 {
        // The difference from 1 is below the precision of the number.
        return 1.0;
    }
    // e^(−x) = 2^(−k)·e^(−r) with |r| at most ln 2 / 2.
    let k = (x / LN_2 + 0.5) as i64;
    let power = f64::from_bits(((1023 - k) as u64) << 52);
    1.0 - power * (1.0 - nested(x - k as f64 * LN_2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_agree_with_the_standard_library() {
        let mut x = 1e-9_f64;
        while x < 1e6 {
            let (ln, exp) = (ln(x), one_minus_exp(x));
            assert!(
                (ln - x.ln()).abs() <= 1e-12 * x.ln().abs().max(1.0),
                "ln {x}"
            );
            assert!((exp + (-x).exp_m1()).abs() <= 1e-12 * exp, "exp {x}");
            x *= 1.01;
        }
    }
}
