//! The rows of a benchmark's JSON, and the figures in them.

use serde_json::Value;

/// The rows of one benchmark. There are none if it could not run.
pub struct Rows(Vec<Value>);

impl Rows {
    /// Reads the rows of the object that `--json` prints. Text that is no such object has no rows.
    pub fn parse(json: &str) -> Rows {
        let mut object: Value = serde_json::from_str(json).unwrap_or_default();
        match object["rows"].take() {
            Value::Array(rows) => Rows(rows),
            _ => Rows(Vec::new()),
        }
    }

    /// Returns a field of the first row that has all the given values.
    pub fn number(&self, of: &Value, field: &str) -> Option<f64> {
        let of = of.as_object().into_iter().flatten();
        let fits = |row: &&Value| of.clone().all(|(name, value)| row[name] == *value);
        self.0.iter().find(fits)?[field].as_f64()
    }

    /// Returns the largest value of a field, or 0.
    pub fn most(&self, field: &str) -> usize {
        let values = self.0.iter().filter_map(|row| row[field].as_u64());
        values.max().unwrap_or(0) as usize
    }
}
