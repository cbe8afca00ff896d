//! A picture of a run: how many times its floor each row takes, and what costs do as numbers grow.

use std::path::Path;

use plotters::backend::SVGBackend;
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::coord::Shift;
use plotters::coord::combinators::IntoLogRange;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::series::LineSeries;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{BLACK, Color, IntoFont, RGBColor, WHITE};

use super::report::Report;
use super::row::{Row, Unit, digits, fraction, show};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const WIDTH: u32 = 1200;
const HEAD: i32 = 90;
/// Pixels of one row.
const LINE: i32 = 20;
/// Where bars begin and end.
const BARS: (i32, i32) = (190, 1040);
const CURVES: i32 = 380;
const FONT: &str = "sans-serif";

const REACHED: RGBColor = RGBColor(0x2a, 0x9d, 0x5c);
const MISSED: RGBColor = RGBColor(0xd1, 0x49, 0x3d);
const WITHOUT_GOAL: RGBColor = RGBColor(0x6b, 0x84, 0xa8);
const GRID: RGBColor = RGBColor(0xd8, 0xd8, 0xd8);
const CURVE_COLOURS: [RGBColor; 4] = [
    RGBColor(0x1f, 0x5f, 0xa8),
    RGBColor(0x9a, 0x9a, 0x9a),
    RGBColor(0xd9, 0x8c, 0x1a),
    RGBColor(0x7b, 0x4b, 0xa6),
];

/// Draws it into a file.
///
/// # Errors
///
/// What the file system says.
pub fn draw(report: &Report, file: &Path) -> Result<(), String> {
    let mut text = String::new();
    render(report, &mut text)?;
    std::fs::write(file, text).map_err(|e| e.to_string())
}

fn render(report: &Report, into: &mut String) -> Result<(), String> {
    let rows: Vec<&Row> = report
        .rows
        .iter()
        .filter(|row| row.ratio.is_some_and(|ratio| ratio > 0.0))
        .collect();
    let bars = HEAD + LINE * rows.len() as i32 + 40;
    let curves = curves(report);
    let lines = curves.len().div_ceil(2) as i32;
    let size = (WIDTH, (bars + CURVES * lines) as u32);
    let root = SVGBackend::with_string(into, size).into_drawing_area();
    let drawn = || -> Result<(), Box<dyn std::error::Error + '_>> {
        root.fill(&WHITE)?;
        head(&root, report)?;
        self::bars(&root, &rows)?;
        let (_, below) = root.split_vertically(bars);
        for (area, curve) in below
            .split_evenly((lines.max(1) as usize, 2))
            .iter()
            .zip(&curves)
        {
            curve.draw(area)?;
        }
        root.present()?;
        Ok(())
    };
    drawn().map_err(|error| error.to_string())
}

fn head(root: &Area<'_>, report: &Report) -> Result<(), Box<dyn std::error::Error>> {
    let place = &report.place;
    let mut title = format!("gpu-ipc on {}, {}", place.device, place.backend);
    for (what, value) in [
        ("driver", place.driver.as_str()),
        ("commit", place.commit.as_deref().unwrap_or("")),
    ] {
        if !value.is_empty() {
            title += &format!(", {what} {value}");
        }
    }
    root.draw(&Text::new(title, (20, 14), (FONT, 20)))?;
    let what = if place.jobs {
        "Median as a multiple of what people use today"
    } else {
        "Median of our call as a multiple of the raw calls that it cannot do without"
    };
    let legend = [
        (what, BLACK, 20),
        ("goal reached", REACHED, 640),
        ("goal missed", MISSED, 770),
        ("no goal", WITHOUT_GOAL, 890),
    ];
    for (words, colour, at) in legend {
        root.draw(&Text::new(
            words,
            (at, 44),
            (FONT, 14).into_font().color(&colour),
        ))?;
    }
    Ok(())
}

fn bars(root: &Area<'_>, rows: &[&Row]) -> Result<(), Box<dyn std::error::Error>> {
    let ratios = rows.iter().filter_map(|row| row.ratio);
    let (least, most) = ratios.fold((1.0f64, 10.0f64), |(least, most), ratio| {
        (least.min(ratio), most.max(ratio))
    });
    let (first, last) = (least.log10().floor(), most.log10().ceil());
    let place = |ratio: f64| {
        let part = (ratio.log10() - first) / (last - first);
        BARS.0 + (part * f64::from(BARS.1 - BARS.0)) as i32
    };
    let bottom = HEAD + LINE * rows.len() as i32;
    for power in first as i32..=last as i32 {
        let at = place(10f64.powi(power));
        let colour = if power == 0 {
            BLACK.to_rgba()
        } else {
            GRID.to_rgba()
        };
        root.draw(&PathElement::new(
            vec![(at, HEAD - 4), (at, bottom)],
            colour,
        ))?;
        let middle = (FONT, 12)
            .into_font()
            .color(&BLACK)
            .pos(Pos::new(HPos::Center, VPos::Bottom));
        root.draw(&Text::new(times(10f64.powi(power)), (at, HEAD - 6), middle))?;
    }
    for (number, row) in (0..).zip(rows) {
        let Some(ratio) = row.ratio else { continue };
        let top = HEAD + LINE * number;
        let colour = match row.met {
            Some(true) => REACHED,
            Some(false) => MISSED,
            None => WITHOUT_GOAL,
        };
        let (one, end) = (place(1.0), place(ratio));
        let bar = [
            (one.min(end), top + 3),
            (one.max(end).max(one + 1), top + LINE - 3),
        ];
        root.draw(&Rectangle::new(bar, colour.filled()))?;
        let right = (FONT, 13)
            .into_font()
            .color(&BLACK)
            .pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new(
            row.row.clone(),
            (BARS.0 - 12, top + LINE / 2),
            right,
        ))?;
        let ours = row
            .ours
            .map_or_else(String::new, |ours| show(ours.median, row.unit));
        let left = (FONT, 12)
            .into_font()
            .color(&BLACK)
            .pos(Pos::new(HPos::Left, VPos::Center));
        let label = format!("{}, {ours}", times(ratio));
        root.draw(&Text::new(label, (one.max(end) + 6, top + LINE / 2), left))?;
    }
    Ok(())
}

fn times(ratio: f64) -> String {
    if ratio < 0.1 {
        fraction(ratio)
    } else {
        format!("{} x", digits(ratio))
    }
}

/// Costs over a number.
struct Curve {
    title: &'static str,
    over: &'static str,
    unit: fn(f64) -> String,
    /// Of the logarithm.
    base: f64,
    lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// Finds what grows with a number.
fn curves(report: &Report) -> Vec<Curve> {
    let line = |group: &str, name: &str, of: fn(&Row) -> Option<f64>| {
        let rows = report
            .rows
            .iter()
            .filter(|row| row.group() == group && row.unit == Unit::Nanoseconds);
        let points: Vec<(f64, f64)> = rows
            .filter_map(|row| Some((row.at?.max(1) as f64, of(row)?.max(1.0))))
            .collect();
        (name.to_owned(), points)
    };
    let ours = |row: &Row| row.ours.map(|f| f.median);
    let floor = |row: &Row| row.floor.map(|f| f.median);
    let baseline = |row: &Row| row.baseline.map(|f| f.median);
    let count = |number: f64| digits(number);
    let bytes = |number: f64| show(number, Unit::Bytes);
    let all = vec![
        Curve {
            title: "Drop at the producer",
            over: "blocks in limbo (none at 1)",
            unit: count,
            base: 10.0,
            lines: vec![
                line("limbo", "gpu-ipc", ours),
                line("limbo", "a counter file by name, limbo scanned", baseline),
            ],
        },
        Curve {
            title: "Grant, claim and release, nothing queued",
            over: "leases outstanding",
            unit: count,
            base: 10.0,
            lines: vec![
                line("leases", "gpu-ipc", ours),
                line("leases", "with none outstanding, same run", floor),
            ],
        },
        Curve {
            title: "Grant, claim, release and drop, nothing queued",
            over: "participants connected",
            unit: count,
            base: 2.0,
            lines: vec![
                line("participants", "gpu-ipc", ours),
                line("participants", "with one, same run", floor),
            ],
        },
        Curve {
            title: "One block for many consumers",
            over: "consumers",
            unit: count,
            base: 2.0,
            lines: vec![
                line("fan-out", "gpu-ipc", ours),
                line("fan-out", "one batch of writes", floor),
            ],
        },
        Curve {
            title: "First mapping of a region",
            over: "bytes",
            unit: bytes,
            base: 2.0,
            lines: vec![
                line("first-map-fd", "by file descriptor", ours),
                line("first-map-fd", "raw import and map", floor),
                line("first-map-handle", "by handle", ours),
                line("first-map-handle", "raw open", floor),
            ],
        },
    ];
    all.into_iter()
        .map(|curve| Curve {
            lines: curve
                .lines
                .into_iter()
                .filter(|line| line.1.len() > 1)
                .collect(),
            ..curve
        })
        .filter(|curve| !curve.lines.is_empty())
        .collect()
}

impl Curve {
    fn draw(&self, area: &Area<'_>) -> Result<(), Box<dyn std::error::Error>> {
        let points = || self.lines.iter().flat_map(|line| &line.1);
        let bounds = |of: fn(&(f64, f64)) -> f64| {
            points()
                .map(of)
                .fold((f64::MAX, f64::MIN), |(least, most), one| {
                    (least.min(one), most.max(one))
                })
        };
        let ((left, right), (low, high)) = (bounds(|p| p.0), bounds(|p| p.1));
        let (bottom, top) = (
            10f64.powf(low.log10().floor()),
            10f64.powf(high.log10().ceil() + 0.7),
        );
        let mut chart = ChartBuilder::on(area)
            .margin(16)
            .margin_right(48)
            .caption(self.title, (FONT, 16))
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(
                (left..right).log_scale().base(self.base),
                (bottom..top).log_scale(),
            )?;
        chart
            .configure_mesh()
            .x_desc(self.over)
            .x_labels(8)
            .y_labels(6)
            .light_line_style(WHITE)
            .bold_line_style(GRID)
            .label_style((FONT, 12))
            .x_label_formatter(&|number| (self.unit)(*number))
            .y_label_formatter(&|number| show(*number, Unit::Nanoseconds))
            .draw()?;
        for ((name, points), colour) in self.lines.iter().zip(CURVE_COLOURS) {
            let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
            let legend =
                move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2));
            chart.draw_series(line)?.label(name).legend(legend);
            chart.draw_series(
                points
                    .iter()
                    .map(|&point| Circle::new(point, 3, colour.filled())),
            )?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE)
            .label_font((FONT, 12))
            .draw()?;
        Ok(())
    }
}
