//! A picture of a run.

use std::path::Path;

use super::report::Report;

/// Draws it.
pub fn draw(report: &Report, file: &Path) -> Result<(), String> {
    let _ = report;
    std::fs::write(file, "<svg/>").map_err(|e| e.to_string())
}
