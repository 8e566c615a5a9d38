// Images that a person attaches to a message. They stay in the page until the message is sent.

import { h, toast, visible } from './dom.js';

const TYPES = ['image/png', 'image/jpeg', 'image/gif', 'image/webp'];
/** Limits of the runtime: images of a message, and characters of base64 of an image. */
const IMAGES = 20;
const LONGEST = 5 * 1024 * 1024;

/** Returns the base64 of a file. */
function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener('load', () => resolve(reader.result.slice(reader.result.indexOf(',') + 1)));
    reader.addEventListener('error', () => reject(new Error('This file cannot be read.')));
    reader.readAsDataURL(file);
  });
}

/** Makes the button with which images are attached, and the list of those that are. `target` also takes them by paste and drop. */
export function attachments(target) {
  let attached = [];
  const list = h('ul', { class: 'attached', 'aria-label': 'Attached images', hidden: true });
  const input = h('input', { type: 'file', accept: TYPES.join(','), multiple: true, hidden: true, 'aria-label': 'Images' });
  const button = h('button', { type: 'button', class: 'quiet attach', click: () => input.click() }, 'Attach image');

  const draw = () => {
    list.hidden = attached.length === 0;
    list.replaceChildren(...attached.map((item) => h('li', {},
      h('img', { src: `data:${item.mediaType};base64,${item.data}`, alt: item.name }),
      h('button', { type: 'button', class: 'quiet', 'aria-label': `Remove ${item.name}`, click: () => {
        attached = attached.filter((other) => other !== item);
        draw();
        button.focus();
      } }, 'Remove'))));
  };
  const add = async (files) => {
    for (const file of files) {
      const name = visible(file.name || 'image');
      if (!TYPES.includes(file.type)) {
        toast(`${name} is not a PNG, JPEG, GIF or WebP image.`, 'error');
      } else if (attached.length >= IMAGES) {
        toast(`A message can have ${IMAGES} images.`, 'error');
        break;
      } else {
        try {
          const data = await base64(file);
          if (data.length > LONGEST) toast(`${name} is too large: an image can have 3.9 MB.`, 'error');
          else attached.push({ name, data, mediaType: file.type });
        } catch (error) {
          toast(error.message, 'error');
        }
      }
    }
    draw();
  };
  const images = (transfer) => [...transfer?.files ?? []];

  input.addEventListener('change', async () => {
    await add(images(input));
    input.value = '';
    target.focus();
  });
  target.addEventListener('paste', (event) => {
    const files = images(event.clipboardData);
    if (files.length === 0) return;
    event.preventDefault();
    add(files);
  });
  target.addEventListener('dragover', (event) => event.dataTransfer?.types.includes('Files') && event.preventDefault());
  target.addEventListener('drop', (event) => {
    const files = images(event.dataTransfer);
    if (files.length === 0) return;
    event.preventDefault();
    add(files);
  });
  return {
    list,
    controls: [input, button],
    button,
    content: () => attached.map(({ data, mediaType }) => ({ type: 'image', data, mediaType })),
    clear() {
      attached = [];
      draw();
    },
  };
}
