//! `docs/demo.svg`: the beginning of `rap demo` as a picture of a terminal.
//!
//! The text is the program's real output. Only the colours and weights that `rap` uses are translated.

use std::fmt::Write;
use std::fs;
use std::process::{Command, ExitCode};

/// Picture that the README shows.
const FILE: &str = "docs/demo.svg";
/// Line of the demo's output at which the picture ends.
const END: &str = "4. ";
/// Size of a character and of the margin, in pixels.
const CHARACTER: (usize, usize) = (8, 18);
const MARGIN: usize = 16;
const FONT: &str = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

/// Writes the picture. Without a binary, the release binary is built.
pub fn run(binary: Option<&str>) -> ExitCode {
    let output = match demo(binary).env("CLICOLOR_FORCE", "1").output() {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
        Ok(output) => {
            eprintln!("xtask: the demo failed: {}", String::from_utf8_lossy(&output.stderr));
            return ExitCode::FAILURE;
        }
        Err(error) => {
            eprintln!("xtask: the demo cannot be started: {error}");
            return ExitCode::FAILURE;
        }
    };
    if !output.contains('\u{1b}') {
        eprintln!("xtask: the demo printed no colours");
        return ExitCode::FAILURE;
    }
    let lines = output.lines().map(|line| line.trim_end_matches('\r'));
    let shown: Vec<&str> = lines.take_while(|line| !plain(line).starts_with(END)).collect();
    match fs::write(crate::root().join(FILE), svg(&shown)) {
        Ok(()) => {
            println!("{FILE}: {} lines", shown.len());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("xtask: {FILE}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn demo(binary: Option<&str>) -> Command {
    let Some(binary) = binary else {
        let mut demo = crate::cargo();
        demo.args(["run", "--release", "--quiet", "--", "demo"]).current_dir(crate::root());
        return demo;
    };
    let mut demo = Command::new(binary);
    demo.arg("demo");
    demo
}

/// A piece of a line in one style.
#[derive(Debug, PartialEq)]
struct Span {
    /// Parameter of the escape sequence that began it, such as `1` for bold.
    style: String,
    text: String,
}

fn spans(line: &str) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut style = String::new();
    for (at, part) in line.split("\u{1b}[").enumerate() {
        let text = match part.split_once('m') {
            Some((parameter, text)) if at > 0 => {
                style = parameter.trim_start_matches('0').to_owned();
                text
            }
            _ => part,
        };
        if !text.is_empty() {
            spans.push(Span { style: style.clone(), text: text.to_owned() });
        }
    }
    spans
}

fn plain(line: &str) -> String {
    spans(line).into_iter().map(|span| span.text).collect()
}

/// Attributes of a span, for the few styles that `rap` prints.
fn attributes(style: &str) -> &'static str {
    match style {
        "1" => " fill=\"#f0f6fc\" font-weight=\"bold\"",
        "2" => " fill=\"#8b949e\"",
        "31" => " fill=\"#ff7b72\"",
        "32" => " fill=\"#7ee787\"",
        "33" => " fill=\"#e3b341\"",
        "36" => " fill=\"#79c0ff\"",
        _ => "",
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn svg(lines: &[&str]) -> String {
    let columns = lines.iter().map(|line| plain(line).chars().count()).max().unwrap_or(0);
    let (width, height) = (columns * CHARACTER.0 + 2 * MARGIN, lines.len() * CHARACTER.1 + 2 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#0d1117\"/>\n\
         <g font-family=\"{FONT}\" font-size=\"13\" fill=\"#c9d1d9\" xml:space=\"preserve\">\n"
    );
    for (row, line) in lines.iter().enumerate() {
        let y = MARGIN + (row + 1) * CHARACTER.1 - 5;
        let mut column = 0;
        for Span { style, text } in spans(line) {
            let (x, count) = (MARGIN + column * CHARACTER.0, text.chars().count());
            column += count;
            if text.trim().is_empty() {
                continue;
            }
            // A given length keeps the columns aligned whatever font the reader has.
            let length = count * CHARACTER.0;
            writeln!(
                svg,
                "<text x=\"{x}\" y=\"{y}\" textLength=\"{length}\"{}>{}</text>",
                attributes(&style),
                escaped(&text)
            )
            .expect("bug: a string can be written to");
        }
    }
    svg + "</g>\n</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_split_where_its_style_changes() {
        let line = "\u{1b}[2m 1.0 s\u{1b}[0m  \u{1b}[32magent\u{1b}[0m  says <hi>";
        let found: Vec<(String, String)> =
            spans(line).into_iter().map(|span| (span.style, span.text)).collect();
        let expected = [("2", " 1.0 s"), ("", "  "), ("32", "agent"), ("", "  says <hi>")];
        assert_eq!(found, expected.map(|(style, text)| (style.to_owned(), text.to_owned())));
        assert_eq!(plain(line), " 1.0 s  agent  says <hi>");
    }

    #[test]
    fn text_is_escaped_and_keeps_its_column() {
        let picture = svg(&["\u{1b}[1mA\u{1b}[0m & <b>"]);
        assert!(picture.contains(">A</text>"), "{picture}");
        assert!(picture.contains("x=\"24\"") && picture.contains("> &amp; &lt;b&gt;</text>"), "{picture}");
    }
}
