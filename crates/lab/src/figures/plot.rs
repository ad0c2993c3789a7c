//! Plots: lines and bars as SVG. Text stays text, so that drawing needs no fonts.

use super::number::label;
use anyhow::{Result, bail};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

const SIZE: (u32, u32) = (1010, 540);
/// How much wider a picture with two plots side by side is.
const PANELS_WIDER: u32 = 250;
/// Width of a plot that has room for few labels below it.
const NARROW: u32 = 400;
/// Width of the legend.
const LEGEND: i32 = 250;
const FONT: &str = "sans-serif";
const CAPTION: i32 = 20;
const TEXT: i32 = 14;
/// Size of the figures above bars. Small, because many bars may stand side by side.
const FIGURE: i32 = 11;

/// Okabe and Ito's colours, which people with colour blindness can tell apart.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(60, 60, 60),
];

/// The length of a dash, 0 for a solid line. Lines get the next length each time the colours start
/// again.
const DASHES: [i32; 4] = [0, 12, 6, 2];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

/// One line of a [`Plot`], or one colour in the groups of [`Bars`].
pub struct Series {
    /// The name in the legend.
    pub name: String,
    /// The points, by x. For bars, x is the number of the group and y is the height.
    pub points: Vec<(f64, f64)>,
}

/// Lines over a numeric axis. A logarithmic axis leaves out points that are not above 0.
pub struct Plot<'a> {
    /// The heading of the picture.
    pub title: &'a str,
    /// What the horizontal axis shows.
    pub x: &'a str,
    /// What the vertical axis shows.
    pub y: &'a str,
    /// Whether the horizontal axis is logarithmic.
    pub log_x: bool,
    /// Whether the vertical axis is logarithmic.
    pub log_y: bool,
    /// The lines.
    pub series: Vec<Series>,
}

/// Plots of the same series side by side.
pub struct Panels<'a> {
    /// Number of plots in a row of the picture.
    pub columns: usize,
    /// The plots, row by row.
    pub plots: Vec<Plot<'a>>,
}

/// Groups of bars: a group for each key, and in each group a bar for each series.
pub struct Bars<'a> {
    /// The heading of the picture.
    pub title: &'a str,
    /// What the heights show.
    pub y: &'a str,
    /// Whether the vertical axis is logarithmic. Such an axis begins at a power of ten.
    pub log_y: bool,
    /// The groups' names, from left to right.
    pub keys: Vec<String>,
    /// The bars of each group.
    pub series: Vec<Series>,
}

impl Plot<'_> {
    /// Draws the plot as SVG.
    pub fn svg(&self) -> Result<String> {
        picture(SIZE, &self.series, |area| self.draw_in(area))
    }

    /// Makes axes that fit the points, and draws the lines.
    fn draw_in<'a>(&self, area: &Area<'a>) -> Drawn<'a> {
        let points = || self.series.iter().flat_map(|series| self.shown(series));
        let x = range(points().map(|point| point.0), self.log_x, false);
        let y = range(points().map(|point| point.1), self.log_y, true);
        match (self.log_x, self.log_y) {
            (false, false) => self.draw(area, x, y),
            (false, true) => self.draw(area, x, y.log_scale()),
            (true, false) => self.draw(area, x.log_scale(), y),
            (true, true) => self.draw(area, x.log_scale(), y.log_scale()),
        }
    }

    /// Returns the points of a line that the axes can show.
    fn shown(&self, series: &Series) -> Vec<(f64, f64)> {
        let fits = |value: f64, log: bool| value.is_finite() && (!log || value > 0.0);
        let points = series.points.iter().copied();
        points
            .filter(|&(x, y)| fits(x, self.log_x) && fits(y, self.log_y))
            .collect()
    }

    fn draw<'a, X, Y>(&self, area: &Area<'a>, x: X, y: Y) -> Drawn<'a>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut chart = builder(area, self.title).build_cartesian_2d(x, y)?;
        let labels = if area.dim_in_pixel().0 < NARROW {
            4
        } else {
            10
        };
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(labels)
            .x_desc(self.x)
            .y_desc(self.y)
            .x_label_formatter(&|value| label(*value))
            .y_label_formatter(&|value| label(*value))
            .label_style((FONT, TEXT))
            .draw()?;
        for (at, (series, colour)) in coloured(&self.series).enumerate() {
            let points = self.shown(series);
            // A line of one point is only its dot.
            let radius = if points.len() == 1 { 5 } else { 2 };
            let dots = points
                .iter()
                .map(|&at| Circle::new(at, radius, colour.filled()));
            chart.draw_series(dots)?;
            let line = colour.stroke_width(2);
            match DASHES[at / COLOURS.len() % DASHES.len()] {
                0 => chart.draw_series(LineSeries::new(points, line))?,
                dash => chart.draw_series(DashedLineSeries::new(points, dash, 4, line))?,
            };
        }
        Ok(())
    }
}

impl Panels<'_> {
    /// Draws the plots as SVG.
    pub fn svg(&self) -> Result<String> {
        let Some(first) = self.plots.first() else {
            bail!("nothing was measured, so there is nothing to plot");
        };
        let lines = self.plots.len().div_ceil(self.columns);
        let height = SIZE.1 * 4 / 3 / self.columns as u32;
        let size = (SIZE.0 + PANELS_WIDER, height * lines as u32);
        picture(size, &first.series, |area| {
            let panels = area.split_evenly((lines, self.columns));
            let mut both = self.plots.iter().zip(&panels);
            both.try_for_each(|(plot, area)| plot.draw_in(area))
        })
    }
}

impl Bars<'_> {
    /// Draws the bars as SVG.
    pub fn svg(&self) -> Result<String> {
        if self.keys.is_empty() || self.series.is_empty() {
            bail!("nothing was measured, so there is nothing to plot");
        }
        let heights = self.series.iter().flat_map(|series| &series.points);
        let heights = heights.map(|point| point.1);
        let y = range(
            heights.filter(|&height| self.shows(height)),
            self.log_y,
            true,
        );
        if !self.log_y {
            let foot = y.start;
            return picture(SIZE, &self.series, |area| self.draw(area, y.clone(), foot));
        }
        let foot = 10f64.powf(y.start.log10().floor());
        let y = foot..y.end * 1.2;
        picture(SIZE, &self.series, |area| {
            self.draw(area, y.clone().log_scale(), foot)
        })
    }

    fn shows(&self, height: f64) -> bool {
        height.is_finite() && (!self.log_y || height > 0.0)
    }

    /// Draws the bars, which stand on `foot`.
    fn draw<'a, Y>(&self, area: &Area<'a>, y: Y, foot: f64) -> Drawn<'a>
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut chart =
            builder(area, self.title).build_cartesian_2d(0.0..self.keys.len() as f64, y)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(0)
            .y_desc(self.y)
            .y_label_formatter(&|value| label(*value))
            .label_style((FONT, TEXT))
            .draw()?;
        for (at, (series, colour)) in coloured(&self.series).enumerate() {
            for &(group, height) in &series.points {
                if self.shows(height) {
                    let (left, right) = (group + self.left(at), group + self.left(at + 1));
                    let bar = Rectangle::new([(left, foot), (right, height)], colour.filled());
                    chart.draw_series([bar])?;
                    let (x, y) = chart.backend_coord(&((left + right) / 2.0, height));
                    area.draw_text(&label(height), &style(FIGURE, HPos::Center), (x, y - 7))?;
                }
            }
        }
        for (group, key) in self.keys.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(group as f64 + 0.5, foot));
            area.draw_text(key, &style(TEXT, HPos::Center), (x, y + 14))?;
        }
        Ok(())
    }

    /// Returns where a group's bar begins, measured from the group's left side. A fifth of a group
    /// stays empty.
    fn left(&self, bar: usize) -> f64 {
        0.1 + 0.8 * bar as f64 / self.series.len() as f64
    }
}

fn style(size: i32, horizontal: HPos) -> TextStyle<'static> {
    let at = Pos::new(horizontal, VPos::Center);
    TextStyle::from((FONT, size).into_font()).pos(at)
}

/// Draws a chart, with the legend beside it.
fn picture(
    size: (u32, u32),
    series: &[Series],
    draw: impl for<'a> Fn(&Area<'a>) -> Drawn<'a>,
) -> Result<String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let (chart, beside) = area.split_horizontally(size.0 as i32 - LEGEND);
        let drawn = area
            .fill(&WHITE)
            .and_then(|()| draw(&chart))
            .and_then(|()| legend(&beside, series))
            .and_then(|()| area.present());
        if let Err(error) = drawn {
            bail!("cannot draw: {error}");
        }
    }
    Ok(text)
}

fn builder<'a, 'b>(area: &'b Area<'a>, title: &str) -> ChartBuilder<'b, 'b, SVGBackend<'a>> {
    let mut builder = ChartBuilder::on(area);
    builder
        .caption(title, (FONT, CAPTION))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(64);
    builder
}

/// Returns the series with their colours.
fn coloured(series: &[Series]) -> impl Iterator<Item = (&Series, RGBColor)> {
    series.iter().zip(COLOURS.iter().copied().cycle())
}

/// Draws the names of the series beside the chart, where they hide nothing.
fn legend<'a>(area: &Area<'a>, series: &[Series]) -> Drawn<'a> {
    for (at, (series, colour)) in coloured(series).enumerate() {
        let y = 48 + 20 * at as i32;
        match DASHES[at / COLOURS.len() % DASHES.len()] {
            0 => area.draw(&Rectangle::new([(0, y), (14, y + 10)], colour.filled()))?,
            dash => {
                let line = [(0, y + 5), (16, y + 5)];
                let line = DashedPathElement::new(line, dash, 4, colour.stroke_width(3));
                area.draw(&line)?;
            }
        }
        area.draw_text(&series.name, &style(TEXT, HPos::Left), (20, y + 5))?;
    }
    Ok(())
}

/// Returns an axis from the smallest to the largest value, with some room. The axis begins at 0 if
/// `from_zero` is true and it can. It is never empty, because an axis must have a length.
fn range(values: impl Iterator<Item = f64>, log: bool, from_zero: bool) -> Range<f64> {
    let (low, high) = values
        .filter(|value| value.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    match (low > high, log) {
        (true, _) => 1.0..2.0,
        (false, true) => low / 1.2..high * 1.2,
        (false, false) if from_zero && low >= 0.0 && high > 0.0 => 0.0..high * 1.1,
        (false, false) => {
            let room = ((high - low) * 0.05).max(high.abs().max(low.abs()).max(1.0) * 0.01);
            low - room..high + room
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(points: &[(f64, f64)]) -> Vec<Series> {
        vec![Series {
            name: "a < b".to_owned(),
            points: points.to_vec(),
        }]
    }

    #[test]
    fn all_kinds_of_points_can_be_drawn() {
        for points in [
            &[][..],
            &[(0.0, 0.0)],
            &[(1.0, 5.0)],
            &[(-3.0, -7.0), (f64::NAN, 1.0), (2.0, f64::INFINITY)],
            &[(1.0, 1e-9), (1e12, 1e9)],
        ] {
            for (log_x, log_y) in [(false, false), (false, true), (true, false), (true, true)] {
                let (title, x, y) = ("title", "across", "up");
                let keys = vec!["key".to_owned()];
                let bars = points.iter().map(|&(_, y)| (0.0, y)).collect::<Vec<_>>();
                let plot = Plot {
                    title,
                    x,
                    y,
                    log_x,
                    log_y,
                    series: series(points),
                };
                let lines = plot.svg().unwrap();
                let bars = Bars {
                    title,
                    y,
                    log_y,
                    keys,
                    series: series(&bars),
                };
                let bars = bars.svg().unwrap();
                for (picture, word) in [(lines, "across"), (bars, "key")] {
                    for text in [word, "title", "up", "a &lt; b"] {
                        assert!(
                            picture.lines().any(|line| line == text),
                            "{text}: {picture}"
                        );
                    }
                    assert!(picture.ends_with("</svg>\n"), "{picture}");
                }
            }
        }
    }
}
