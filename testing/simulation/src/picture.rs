//! Many runs as a picture: rounds over the number of hosts.

use std::path::Path;

use plotters::backend::SVGBackend;
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::coord::combinators::IntoLogRange;
use plotters::drawing::IntoDrawingArea;
use plotters::element::{Circle, PathElement};
use plotters::series::LineSeries;
use plotters::style::{Color, RGBColor, WHITE};

use crate::outcome::Outcome;
use crate::report::Report;
use crate::scenario::Trouble;

const SIZE: (u32, u32) = (900, 480);
const FONT: &str = "sans-serif";
const GRID: RGBColor = RGBColor(0xd8, 0xd8, 0xd8);
const OPTIMUM: RGBColor = RGBColor(0x20, 0x20, 0x20);
const CONTROL: RGBColor = RGBColor(0xd1, 0x49, 0x3d);
const COLOURS: [RGBColor; 5] = [
    RGBColor(0x1f, 0x5f, 0xa8),
    RGBColor(0x2a, 0x9d, 0x5c),
    RGBColor(0xd9, 0x8c, 0x1a),
    RGBColor(0x7b, 0x4b, 0xa6),
    RGBColor(0x8a, 0x6d, 0x3b),
];

/// A line of the picture.
struct Line {
    name: String,
    colour: RGBColor,
    points: Vec<(f64, f64)>,
}

/// Draws it into a file.
///
/// # Errors
///
/// What the file system and plotters say.
pub fn draw(report: &Report, file: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let mut text = String::new();
    render(&lines(report), &mut text).map_err(|error| error.to_string())?;
    Ok(std::fs::write(file, text)?)
}

fn lines(report: &Report) -> Vec<Line> {
    let points = |rows: &mut dyn Iterator<Item = &Outcome>, of: fn(&Outcome) -> f64| {
        rows.map(|row| (f64::from(row.hosts), of(row))).collect()
    };
    let of_kind = |trouble| report.plan.iter().filter(move |row| row.trouble == trouble);
    let rounds = |row: &Outcome| row.rounds;
    let mut lines = vec![
        Line {
            name: "optimum, equal hosts".to_owned(),
            colour: OPTIMUM,
            points: points(&mut of_kind(Trouble::None), |row| row.optimum),
        },
        Line {
            name: "control: all read from the origin".to_owned(),
            colour: CONTROL,
            points: points(&mut report.origin_only.iter(), rounds),
        },
    ];
    for (trouble, colour) in Trouble::EACH.into_iter().zip(COLOURS) {
        let (name, points) = (
            trouble.name().to_owned(),
            points(&mut of_kind(trouble), rounds),
        );
        lines.push(Line {
            name,
            colour,
            points,
        });
    }
    lines
}

fn render(lines: &[Line], into: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let hosts = points().map(|point| point.0).fold(2.0, f64::max);
    let rounds = points().map(|point| point.1).fold(2.0, f64::max);
    let root = SVGBackend::with_string(into, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(|error| error.to_string())?;
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .margin_right(32)
        .caption("Rounds until every host has the object", (FONT, 18))
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (2.0..hosts.max(4.0)).log_scale().base(2.0),
            (0.9..rounds * 1.5).log_scale(),
        )
        .map_err(|error| error.to_string())?;
    chart
        .configure_mesh()
        .x_desc("hosts, the origin among them")
        .y_desc("times of one read over a whole link")
        .light_line_style(WHITE)
        .bold_line_style(GRID)
        .label_style((FONT, 12))
        .x_label_formatter(&|hosts| format!("{hosts:.0}"))
        .y_label_formatter(&|rounds| format!("{rounds:.0}"))
        .draw()
        .map_err(|error| error.to_string())?;
    for Line {
        name,
        colour,
        points,
    } in lines
    {
        let colour = *colour;
        let series = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
        let legend =
            move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2));
        chart
            .draw_series(series)
            .map_err(|error| error.to_string())?
            .label(name)
            .legend(legend);
        let dots = points
            .iter()
            .map(|&point| Circle::new(point, 3, colour.filled()));
        chart.draw_series(dots).map_err(|error| error.to_string())?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .label_font((FONT, 12))
        .draw()
        .map_err(|error| error.to_string())?;
    root.present().map_err(|error| error.to_string())?;
    Ok(())
}
