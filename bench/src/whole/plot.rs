//! Plots time against memory: a large chart of the means, and a small chart for each program.

use super::rows::{self, BASE, Cost, Row};
use anyhow::{Result, anyhow, ensure};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::Path;

const WIDTH: u32 = 960;
const LARGE: u32 = 560;
const SMALL: u32 = 220;
const COLUMNS: usize = 4;

/// Okabe and Ito's colours, adapted, which people with colour blindness can tell apart. Pinfold is
/// black.
const COLOURS: [RGBColor; 8] = [
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(150, 140, 40),
    RGBColor(120, 120, 120),
];

/// A subject's place in a chart: its time and memory relative to the base.
struct Point<'a> {
    subject: &'a str,
    at: (f64, f64),
    colour: RGBColor,
}

/// Writes the plot to `path`.
pub fn write(path: &Path, rows: &[Row]) -> Result<()> {
    let text = draw(rows)?;
    std::fs::write(path, text)
        .map_err(|error| anyhow!("cannot write the plot {}: {error}", path.display()))
}

fn draw(rows: &[Row]) -> Result<String> {
    let means = points(rows, |subject, cost| {
        Some(rows::mean_ratio(rows, subject, BASE, cost)?.0)
    });
    ensure!(
        !means.is_empty(),
        "a plot shows ratios to {BASE}: add {BASE} to --subjects"
    );
    let programs = rows::programs(rows);
    let lines = programs.len().div_ceil(COLUMNS) as u32;
    let mut text = String::new();
    {
        let area =
            SVGBackend::with_string(&mut text, (WIDTH, LARGE + lines * SMALL)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let (top, rest) = area.split_vertically(LARGE);
        let title = format!("{} programs: geometric means, {BASE} = 1", programs.len());
        chart(&top, &title, &means, 16)?;
        for (panel, program) in rest
            .split_evenly((lines as usize, COLUMNS))
            .iter()
            .zip(programs)
        {
            let of = points(rows, |subject, cost| {
                let base = cost.of(rows::find(rows, program, BASE)?)?;
                Some(cost.of(rows::find(rows, program, subject)?)? / base)
            });
            chart(panel, program, &of, 9)?;
        }
        area.present().map_err(failed)?;
    }
    Ok(text)
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("the plot could not be drawn: {error}")
}

/// Returns the subjects that have both costs.
fn points<'a>(rows: &'a [Row], ratio: impl Fn(&str, Cost) -> Option<f64>) -> Vec<Point<'a>> {
    let mut points = Vec::new();
    let mut colours = COLOURS.iter().cycle();
    for subject in rows::subjects(rows) {
        let is_pinfold = rows
            .iter()
            .any(|row| row.subject == subject && row.is_pinfold);
        let colour = if is_pinfold {
            BLACK
        } else {
            *colours.next().unwrap_or(&BLUE)
        };
        if let (Some(time), Some(memory)) =
            (ratio(subject, Cost::Time), ratio(subject, Cost::Memory))
        {
            points.push(Point {
                subject,
                at: (time, memory),
                colour,
            });
        }
    }
    points
}

/// Draws a chart with a labelled point for each subject. Lower and further left is better.
fn chart<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    title: &str,
    points: &[Point<'_>],
    size: u32,
) -> Result<()>
where
    DB::ErrorType: 'static,
{
    let range = |values: Vec<f64>| {
        let least = values.iter().copied().fold(1.0, f64::min);
        let most = values.iter().copied().fold(1.0, f64::max);
        let margin = ((most - least) * 0.15).max(0.05);
        least - margin..most + margin
    };
    let times = range(points.iter().map(|point| point.at.0).collect());
    let memories = range(points.iter().map(|point| point.at.1).collect());
    let is_large = size > 12;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", size + 4))
        .margin(size / 2)
        .margin_right(size * 2)
        .x_label_area_size(size * 3)
        .y_label_area_size(size * 4)
        .build_cartesian_2d(times.clone(), memories.clone())
        .map_err(failed)?;
    let mut mesh = chart.configure_mesh();
    let ticks = if is_large { 8 } else { 4 };
    mesh.x_labels(ticks)
        .y_labels(ticks)
        .max_light_lines(0)
        .bold_line_style(RGBColor(225, 225, 225))
        .label_style(("sans-serif", size))
        .x_label_formatter(&|value| format!("{value:.2}"))
        .y_label_formatter(&|value| format!("{value:.2}"));
    if is_large {
        mesh.x_desc(format!("time / {BASE}"))
            .y_desc(format!("peak memory / {BASE}"));
    }
    mesh.draw().map_err(failed)?;
    let radius = if is_large { 6 } else { 3 };
    chart
        .draw_series(
            (points.iter()).map(|point| Circle::new(point.at, radius, point.colour.filled())),
        )
        .map_err(failed)?;
    let middle = (times.start + times.end) / 2.0;
    let labels = points.iter().map(|point| {
        // The label of a point on the right side stands left of the point, so that it stays inside
        // the chart.
        let is_right = point.at.0 > middle;
        let dx = if is_right {
            -(size as i32) / 2 - radius
        } else {
            size as i32 / 2 + radius
        };
        let anchor = if is_right {
            plotters::style::text_anchor::HPos::Right
        } else {
            plotters::style::text_anchor::HPos::Left
        };
        let style = TextStyle::from(("sans-serif", size).into_font())
            .color(&point.colour)
            .pos(plotters::style::text_anchor::Pos::new(
                anchor,
                plotters::style::text_anchor::VPos::Center,
            ));
        EmptyElement::at(point.at) + Text::new(point.subject.to_owned(), (dx, 0), style)
    });
    chart.draw_series(labels).map_err(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::whole::rows::tests::example;

    /// Returns whether every opened element is closed, in the right order.
    fn is_well_formed(text: &str) -> bool {
        let mut open = Vec::new();
        for part in text.split('<').skip(1) {
            let Some((tag, _)) = part.split_once('>') else {
                return false;
            };
            let name = tag
                .trim_start_matches('/')
                .split([' ', '/', '\n'])
                .next()
                .unwrap_or("");
            if tag.starts_with(['?', '!']) || tag.ends_with('/') {
                continue;
            } else if tag.starts_with('/') {
                if open.pop() != Some(name) {
                    return false;
                }
            } else {
                open.push(name);
            }
        }
        open.is_empty()
    }

    #[test]
    fn the_plot_is_well_formed_and_has_a_labelled_point_for_each_subject() {
        let text = draw(&example()).unwrap();
        assert!(
            text.starts_with("<svg") && text.contains("viewBox"),
            "{text}"
        );
        assert!(is_well_formed(&text), "{text}");
        // Three means, three subjects of the first program, and two of the second, where the third
        // subject failed.
        assert_eq!(text.matches("<circle").count(), 3 + 3 + 2);
        for label in ["pinfold-malloc", "glibc", "mimalloc"] {
            assert!(text.contains(label), "{label}");
        }
        assert!(!is_well_formed("<svg><text></svg>"));
    }

    #[test]
    fn a_plot_needs_the_base() {
        let rows: Vec<_> = example()
            .into_iter()
            .filter(|row| row.subject != BASE)
            .collect();
        assert!(draw(&rows).unwrap_err().to_string().contains("--subjects"));
    }
}
