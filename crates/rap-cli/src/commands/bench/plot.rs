//! Line plots as SVG.

use std::fmt::Write;

/// Size of a plot and its margins, in pixels.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// Colours of the lines, which differ in lightness too.
const COLOURS: [&str; 3] = ["#1f5fa8", "#d9822b", "#3a8f5c"];
/// Number of marks of an axis that is not logarithmic.
const MARKS: u32 = 5;

/// An axis, which begins at zero unless it is logarithmic.
pub(super) struct Axis {
    pub(super) label: &'static str,
    pub(super) is_logarithmic: bool,
}

/// A plot of lines with names.
pub(super) struct Plot {
    pub(super) title: &'static str,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<(&'static str, Vec<(f64, f64)>)>,
}

/// Places values on an axis.
struct Scale {
    is_logarithmic: bool,
    low: f64,
    high: f64,
}

impl Scale {
    fn new(axis: &Axis, values: impl Iterator<Item = f64>) -> Scale {
        let is_logarithmic = axis.is_logarithmic;
        let values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
        let high = values.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        if !is_logarithmic {
            return Scale { is_logarithmic, low: 0.0, high: round_up(high) };
        }
        let low = values.iter().copied().filter(|value| *value > 0.0).fold(high, f64::min);
        let (low, high) = (low.log10().floor(), high.log10().ceil());
        Scale { is_logarithmic, low, high: if high > low { high } else { low + 1.0 } }
    }

    /// Returns a share of the axis, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let value = if self.is_logarithmic { value.max(f64::MIN_POSITIVE).log10() } else { value };
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    fn marks(&self) -> Vec<f64> {
        if self.is_logarithmic {
            return (self.low as i32..=self.high as i32).map(|power| 10_f64.powi(power)).collect();
        }
        (0..=MARKS).map(|mark| self.high * f64::from(mark) / f64::from(MARKS)).collect()
    }
}

/// Returns the next number above one with one or two significant digits, so that marks are short.
fn round_up(value: f64) -> f64 {
    let unit = 10_f64.powf(value.log10().floor());
    (value / unit * 2.0).ceil() / 2.0 * unit
}

fn number(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{}M", short(value / 1e6)),
        value if value >= 1e3 => format!("{}k", short(value / 1e3)),
        value => short(value),
    }
}

fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Plot {
    pub(super) fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|(_, points)| points);
        let x_scale = Scale::new(&self.x, points().map(|(x, _)| *x));
        let y_scale = Scale::new(&self.y, points().map(|(_, y)| *y));
        let x = |value: f64| LEFT + x_scale.place(value) * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| HEIGHT - BOTTOM - y_scale.place(value) * (HEIGHT - TOP - BOTTOM);
        let mut svg = String::new();
        // Writing to a string cannot fail.
        let mut line = |text: std::fmt::Arguments<'_>| writeln!(svg, "{text}").unwrap_or_default();
        line(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\" role=\"img\"><title>{}</title>",
            self.title
        ));
        line(format_args!("<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>"));
        line(format_args!("<text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>", self.title));
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for mark in y_scale.marks() {
            let at = y(mark);
            line(format_args!("<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#dddddd\"/>"));
            let text = number(mark);
            line(format_args!(
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 6.0,
                at + 4.0
            ));
        }
        for mark in x_scale.marks() {
            let (at, text) = (x(mark), number(mark));
            line(format_args!("<path d=\"M{at:.1} {bottom}v5\" stroke=\"#555555\"/>"));
            line(format_args!(
                "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
                bottom + 18.0
            ));
        }
        line(format_args!("<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#555555\"/>"));
        let middle = (LEFT + right) / 2.0;
        line(format_args!(
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 10.0,
            self.x.label
        ));
        line(format_args!(
            "<text x=\"{LEFT}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            TOP - 6.0,
            self.y.label
        ));
        for (at, (name, points)) in self.series.iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            let path: Vec<String> =
                points.iter().map(|(value, height)| format!("{:.1},{:.1}", x(*value), y(*height))).collect();
            let path = path.join(" ");
            line(format_args!(
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
            ));
            let top = TOP + 14.0 + 16.0 * at as f64;
            line(format_args!(
                "<text x=\"{}\" y=\"{top}\" text-anchor=\"end\" fill=\"{colour}\">{name}</text>",
                right - 6.0
            ));
        }
        line(format_args!("</svg>"));
        svg
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>, is_logarithmic: bool) -> String {
        let x = Axis { label: "threads", is_logarithmic };
        let y = Axis { label: "per second", is_logarithmic: false };
        Plot { title: "A plot", x, y, series: vec![("rap", points)] }.svg()
    }

    #[test]
    fn points_lie_within_the_axes() {
        let svg = plot(vec![(1.0, 0.0), (10.0, 500.0), (100.0, 1000.0)], true);
        assert!(svg.contains("points=\"70.0,310.0 345.0,175.0 620.0,40.0\""), "{svg}");
        assert!(svg.contains(">100</text>") && svg.contains(">1k</text>"), "{svg}");
    }

    #[test]
    fn a_plot_without_points_or_with_one_is_still_a_plot() {
        for points in [vec![], vec![(0.0, 0.0)], vec![(5.0, f64::NAN)]] {
            for is_logarithmic in [false, true] {
                let svg = plot(points.clone(), is_logarithmic);
                assert!(svg.ends_with("</svg>\n") && !svg.contains("inf"), "{svg}");
            }
        }
    }

    #[test]
    fn marks_are_short_numbers() {
        assert_eq!([0.0, 0.25, 12.5, 1500.0, 1e6].map(number), ["0", "0.25", "12.5", "1.5k", "1M"]);
        assert_eq!(round_up(980.0), 1000.0);
        assert_eq!(round_up(6_310.0), 6_500.0);
    }
}
