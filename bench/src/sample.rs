//! Repeated measurements, and what is said of them.

use serde::Serialize;

/// Median and quartiles.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    /// The middle sample, or the mean of the middle two.
    pub(crate) median: f64,
    /// A quarter of the samples is below.
    pub(crate) q1: f64,
    /// A quarter of the samples is above.
    pub(crate) q3: f64,
}

impl Summary {
    /// Of at least one sample; `None` of none.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        if samples.is_empty() {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&sorted, 2),
            q1: quantile(&sorted, 1),
            q3: quantile(&sorted, 3),
        })
    }

    /// How two series of the same rounds compare: the ratio of their medians, and the quartiles of each round's own ratio.
    pub(crate) fn ratio(samples: &[f64], base: &[f64]) -> Option<Self> {
        let (own, other) = (Self::of(samples)?, Self::of(base)?);
        let each: Vec<f64> = samples.iter().zip(base).map(|(a, b)| a / b).collect();
        let spread = Self::of(&each)?;
        Some(Self {
            median: own.median / other.median,
            ..spread
        })
    }
}

/// The `quarters`-th quartile of sorted samples, interpolated between neighbours.
fn quantile(sorted: &[f64], quarters: usize) -> f64 {
    let steps = (sorted.len() - 1) * quarters;
    let (below, rest) = (steps / 4, steps % 4);
    let fraction = [0.0, 0.25, 0.5, 0.75][rest];
    let low = sorted[below];
    let high = sorted.get(below + 1).copied().unwrap_or(low);
    low + (high - low) * fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn quartiles_are_interpolated() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0]).expect("there are samples");
        assert!(near(summary.q1, 1.75) && near(summary.median, 2.5) && near(summary.q3, 3.25));
        let one = Summary::of(&[7.0]).expect("there is a sample");
        assert!(near(one.q1, 7.0) && near(one.median, 7.0) && near(one.q3, 7.0));
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn a_ratio_pairs_the_rounds() {
        // A machine that slows down by half in the second round changes both, and the ratio of neither round.
        let ratio = Summary::ratio(&[9.0, 4.5], &[10.0, 5.0]).expect("there are samples");
        assert!(near(ratio.median, 0.9) && near(ratio.q1, 0.9) && near(ratio.q3, 0.9));
    }
}
