//! Entries of a prompt, reduced while they are read to what the prompt will show. The size of a prompt in memory does not
//! depend on the size of the stored results.

use std::collections::VecDeque;

use rap_protocol::{Body, Content};

use super::messages::{OLD_IMAGE, UNUSABLE_IMAGE, is_usable, omitted_image_text};
use super::{IMAGES, MAX_BYTES_OF_IMAGES, MAX_BYTES_OF_RESULTS, MAX_BYTES_PER_RESULT};
use crate::{Entry, Item, Seq};

/// Space for the note at the end of a text that is cut, in bytes.
const NOTE_BYTES: usize = 80;

/// Collects the entries of a prompt, oldest first.
#[derive(Debug, Default)]
pub struct PromptEntries {
    entries: Vec<(Seq, Entry)>,
    /// Indexes of the entries with results whose text is kept, and the sizes of these texts.
    texts: VecDeque<(usize, usize)>,
    text_bytes: usize,
    /// Index of the entry, index of the part, and size of each image that is kept.
    images: VecDeque<(usize, usize, usize)>,
    image_bytes: usize,
}

impl PromptEntries {
    /// Adds an entry. Its results are cut as in a prompt, and older results and images are left out if the space for all
    /// of them is used up.
    pub fn push(&mut self, seq: Seq, mut entry: Entry) {
        if let Item::User { content, .. } = &mut entry.item {
            self.add_images(content);
        }
        if let Item::Result { content, display, .. } = &mut entry.item {
            display.clear();
            if let Body::Content(parts) = content {
                self.add_images(parts);
            }
            let bytes = cut(content);
            self.texts.push_back((self.entries.len(), bytes));
            self.text_bytes += bytes;
        }
        self.entries.push((seq, entry));
        while self.text_bytes > MAX_BYTES_OF_RESULTS
            && let Some((entry, bytes)) = self.texts.pop_front()
        {
            self.text_bytes -= bytes;
            if let Item::Result { content, .. } = &mut self.entries[entry].1.item {
                leave_out_texts(content, bytes);
            }
        }
        while (self.images.len() > IMAGES || self.image_bytes > MAX_BYTES_OF_IMAGES)
            && let Some((entry, part, bytes)) = self.images.pop_front()
        {
            self.image_bytes -= bytes;
            if let Item::Result { content: Body::Content(parts), .. } | Item::User { content: parts, .. } =
                &mut self.entries[entry].1.item
            {
                leave_out_image(&mut parts[part], OLD_IMAGE);
            }
        }
    }

    /// Returns the entries, in order.
    pub fn into_entries(self) -> Vec<(Seq, Entry)> {
        self.entries
    }

    /// Counts the images of a result or message, and leaves out those that no model accepts.
    fn add_images(&mut self, parts: &mut [Content]) {
        for (index, part) in parts.iter_mut().enumerate() {
            let Content::Image(image) = part else { continue };
            if is_usable(image) {
                let bytes = image.data.len();
                self.images.push_back((self.entries.len(), index, bytes));
                self.image_bytes += bytes;
            } else {
                leave_out_image(part, UNUSABLE_IMAGE);
            }
        }
    }
}

fn leave_out_image(part: &mut Content, why: &str) {
    if let Content::Image(image) = part {
        *part = Content::Text { text: omitted_image_text(image, why) };
    }
}

fn texts(content: &mut Body) -> Vec<&mut String> {
    match content {
        Body::Text(text) => vec![text],
        Body::Content(parts) => parts.iter_mut().filter_map(text_of).collect(),
    }
}

fn text_of(part: &mut Content) -> Option<&mut String> {
    match part {
        Content::Text { text } => Some(text),
        Content::Image(_) => None,
    }
}

/// Cuts the texts of a result to the size that a prompt shows. Returns the size that is left.
fn cut(content: &mut Body) -> usize {
    let mut texts = texts(content);
    let whole: usize = texts.iter().map(|text| text.len()).sum();
    if whole <= MAX_BYTES_PER_RESULT {
        return whole;
    }
    let (mut space, mut shown) = (MAX_BYTES_PER_RESULT - NOTE_BYTES, 0);
    let mut last = None;
    for (index, text) in texts.iter_mut().enumerate() {
        let end = text.floor_char_boundary(space);
        text.truncate(end);
        text.shrink_to_fit();
        (space, shown) = (space - end, shown + end);
        if end > 0 {
            last = Some(index);
        }
    }
    let note = format!("\n[cut: {shown} of {whole} bytes are shown]");
    if let Some(text) = texts.get_mut(last.unwrap_or(0)) {
        text.push_str(&note);
    }
    shown + note.len()
}

/// Replaces the texts of a result by a note.
fn leave_out_texts(content: &mut Body, bytes: usize) {
    let mut note = Some(format!("[{bytes} bytes are not shown: newer results need the space]"));
    for text in texts(content) {
        *text = note.take().unwrap_or_default();
    }
}
