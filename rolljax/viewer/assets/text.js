// Text that a policy or an environment wrote, as DOM nodes. What would be invisible, or would reorder what stands around
// it, is shown as a mark. Nothing here, or anywhere on the page, makes markup of text.

const NAMES = {
  0x00: 'NUL', 0x07: 'BEL', 0x08: 'BS', 0x0d: 'CR', 0x1b: 'ESC', 0x7f: 'DEL', 0xad: 'SHY',
  0x061c: 'ALM', 0x200b: 'ZWSP', 0x200c: 'ZWNJ', 0x200d: 'ZWJ', 0x200e: 'LRM', 0x200f: 'RLM',
  0x2028: 'LS', 0x2029: 'PS', 0x202a: 'LRE', 0x202b: 'RLE', 0x202c: 'PDF', 0x202d: 'LRO', 0x202e: 'RLO',
  0x2060: 'WJ', 0x2066: 'LRI', 0x2067: 'RLI', 0x2068: 'FSI', 0x2069: 'PDI', 0xfeff: 'BOM',
};

// Controls but tab and newline, separators, formats, surrogates on their own, fillers, tags, private ones
// A joiner or variation selector behind an emoji is a part of it.
const HIDDEN = new RegExp(
  '(?<![\\p{Extended_Pictographic}\\p{Emoji_Modifier}\\ufe0f])[\\u200d\\ufe0e\\ufe0f]'
  + '|(?![\\t\\n\\u200d\\ufe0e\\ufe0f])'
  + '[\\p{Cc}\\p{Cf}\\p{Cs}\\p{Co}\\p{Zl}\\p{Zp}\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u3164\\ufe00-\\ufe0d'
  + '\\uffa0\\ufffd\\u{e0100}-\\u{e01ef}]',
  'gu',
);

function codePoint(character) {
  return 'U+' + character.codePointAt(0).toString(16).toUpperCase().padStart(4, '0');
}

function mark(character) {
  const node = document.createElement('span');
  node.className = 'mark';
  node.textContent = NAMES[character.codePointAt(0)] || codePoint(character).slice(2);
  node.title = codePoint(character);
  return node;
}

/** The nodes of a text. */
export function shown(text) {
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > at) nodes.push(document.createTextNode(text.slice(at, found.index)));
    nodes.push(mark(found[0]));
    at = found.index + found[0].length;
  }
  if (at < text.length) nodes.push(document.createTextNode(text.slice(at)));
  return nodes;
}

/** A text for a place that takes no nodes, such as a title. */
export function plain(text) {
  return text.replace(HIDDEN, (character) => `<${codePoint(character)}>`);
}

/** A token: as `shown`, and with white space that can be seen. */
export function spelled(text) {
  const nodes = [];
  text.split(/([\n\t]+)/u).forEach((part, i) => {
    if (i % 2 === 0) {
      nodes.push(...shown(part));
      return;
    }
    for (const character of part) {
      const node = document.createElement('span');
      node.className = 'space';
      node.dataset.mark = character === '\n' ? '↵' : '⇥';
      node.textContent = character;
      nodes.push(node);
    }
  });
  return nodes;
}
