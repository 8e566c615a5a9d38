//! Entries of a prompt that are reduced while they are read.

use rap_agent::Item;
use rap_agent::prompt::{IMAGES, MAX_BYTES_OF_RESULTS, MAX_BYTES_PER_RESULT, PromptEntries};
use rap_protocol::{Body, Content, Image};

use crate::items::{entries, returns};

/// Returns the contents of results after all of them were read.
fn read(results: Vec<Body>) -> Vec<Body> {
    let mut bounded = PromptEntries::default();
    let items = results.into_iter().map(|content| returns("c", content)).collect();
    for (seq, entry) in (1..).zip(entries(items)) {
        bounded.push(seq, entry);
    }
    let content = |item| match item {
        Item::Result { content, .. } => content,
        other => panic!("{other:?}"),
    };
    bounded.into_entries().into_iter().map(|(_, entry)| content(entry.item)).collect()
}

fn text(content: &Body) -> &str {
    match content {
        Body::Text(text) => text,
        Body::Content(_) => panic!("{content:?}"),
    }
}

#[test]
fn a_result_is_cut_to_the_size_that_a_prompt_shows() {
    let (fits, long) = ("x".repeat(MAX_BYTES_PER_RESULT), "ü".repeat(MAX_BYTES_PER_RESULT));
    let read = read(vec![Body::Text(fits.clone()), Body::Text(long)]);
    assert_eq!(text(&read[0]), fits);
    let cut = text(&read[1]);
    assert!(
        cut.len() <= MAX_BYTES_PER_RESULT && cut.ends_with(" of 524288 bytes are shown]"),
        "{}",
        cut.len()
    );
}

#[test]
fn the_texts_of_a_result_share_its_size() {
    let part = |text: String| Content::Text { text };
    let parts =
        vec![part("a".repeat(MAX_BYTES_PER_RESULT - 100)), part("b".repeat(300)), part("c".repeat(300))];
    let Body::Content(parts) = read(vec![Body::Content(parts)]).remove(0) else { panic!("not parts") };
    let texts: Vec<&str> = parts
        .iter()
        .map(|part| match part {
            Content::Text { text } => text.as_str(),
            Content::Image(_) => panic!("an image"),
        })
        .collect();
    assert_eq!(texts[0].len(), MAX_BYTES_PER_RESULT - 100);
    let (shown, whole) = (MAX_BYTES_PER_RESULT - 80, MAX_BYTES_PER_RESULT + 500);
    assert_eq!(texts[1], format!("{}\n[cut: {shown} of {whole} bytes are shown]", "b".repeat(20)));
    assert_eq!(texts[2], "");
}

#[test]
fn old_results_and_images_make_room_for_newer_ones() {
    let fit = MAX_BYTES_OF_RESULTS / MAX_BYTES_PER_RESULT;
    let results = read(vec![Body::Text("x".repeat(MAX_BYTES_PER_RESULT)); fit + 2]);
    let note = "[262144 bytes are not shown: newer results need the space]";
    let left_out = results.iter().filter(|content| text(content) == note).count();
    assert_eq!((left_out, text(&results[1]), text(&results[2]).len()), (2, note, MAX_BYTES_PER_RESULT));
    let image = |data: &str, kind: &str| {
        Body::Content(vec![Content::Image(Image { data: data.into(), media_type: kind.into() })])
    };
    let mut images = vec![image("aGk=", "image/png"); IMAGES + 1];
    images.push(image("aGk=", "image/tiff"));
    let kept: Vec<bool> = read(images)
        .iter()
        .map(|content| matches!(content, Body::Content(parts) if matches!(parts[0], Content::Image(_))))
        .collect();
    assert!(!kept[0] && kept[1..=IMAGES].iter().all(|kept| *kept) && !kept[IMAGES + 1], "{kept:?}");
}
