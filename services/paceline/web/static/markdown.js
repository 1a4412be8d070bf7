// Markdown as DOM nodes. Each character keeps its place in the source, so that the view can tell its origin.
// Nothing of the source becomes markup but the elements that are made here: HTML in it is text, and links are http(s).

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const INDENTED = /^(?: {4}|\t)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const LINK = /\[((?:[^[\]\\]|\\.)*)\]\([ \t]*<?([^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)?)>?(?:[ \t]+"[^"]*")?[ \t]*\)/y;
const ADDRESS = /https?:\/\/[^\s<>]*[^\s<>.,:;!?"')\]*_]/y;
const ALLOWED = /^https?:\/\//i;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const DEEPEST = 12; // quotes and lists within each other

/** Lines `[start, end]` of a source, without their ends. */
function linesOf(source) {
  const found = [];
  for (let at = 0; at <= source.length; ) {
    const end = source.indexOf("\n", at);
    found.push([at, end < 0 ? source.length : end]);
    at = end < 0 ? source.length + 1 : end + 1;
  }
  return found;
}

/** The blocks of lines: objects with a `kind`, the `lines` or `children` that they hold, and their place. */
export function blocksOf(source, lines = linesOf(source), depth = 0) {
  const text = (i) => (i < lines.length ? source.slice(...lines[i]) : "");
  const blank = (i) => !text(i).trim();
  const begins = (i) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(text(i)));
  const isTable = (i) => text(i).includes("|") && i + 1 < lines.length && DELIMITERS.test(text(i + 1)) && text(i + 1).includes("-");
  const blocks = [];
  let i = 0;
  const put = (block, from) => blocks.push({ ...block, start: lines[from][0], end: lines[Math.min(i, lines.length) - 1][1] });
  while (i < lines.length) {
    const from = i;
    const line = text(i);
    let match;
    if (blank(i)) {
      i += 1;
    } else if ((match = FENCE.exec(line))) {
      const [, fence, name] = match;
      const closes = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
      for (i += 1; i < lines.length && !closes.test(text(i)); ) i += 1;
      const inner = lines.slice(from + 1, i);
      i = Math.min(i + 1, lines.length);
      put({ kind: "code", name: name.trim(), lines: inner }, from);
    } else if ((match = HEADING.exec(line))) {
      const end = lines[i][0] + line.replace(/[ \t]+#*[ \t]*$/, "").length;
      i += 1;
      put({ kind: "heading", level: match[1].length, lines: [[Math.min(lines[from][0] + match[0].length, end), end]] }, from);
    } else if (RULE.test(line)) {
      i += 1;
      put({ kind: "rule" }, from);
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      const inner = [];
      for (; i < lines.length && (match = QUOTE.exec(text(i))); i += 1) inner.push([lines[i][0] + match[0].length, lines[i][1]]);
      put({ kind: "quote", children: blocksOf(source, inner, depth + 1) }, from);
    } else if (ITEM.test(line) && depth < DEEPEST) {
      put(list(), from);
    } else if (INDENTED.test(line)) {
      const inner = [];
      for (; i < lines.length && (blank(i) || INDENTED.test(text(i))); i += 1) {
        inner.push([Math.min(lines[i][0] + (INDENTED.exec(text(i))?.[0].length ?? 4), lines[i][1]), lines[i][1]]);
      }
      while (inner.length && !source.slice(...inner.at(-1)).trim()) inner.pop();
      put({ kind: "code", name: "", lines: inner }, from);
    } else if (isTable(i)) {
      const head = cellsOf(source, lines[i]);
      const rows = [];
      for (i += 2; i < lines.length && !blank(i) && text(i).includes("|"); i += 1) rows.push(cellsOf(source, lines[i]).slice(0, head.length));
      put({ kind: "table", head, rows }, from);
    } else {
      for (i += 1; i < lines.length && !blank(i) && !begins(i); ) i += 1;
      put({ kind: "paragraph", lines: lines.slice(from, i) }, from);
    }
  }
  return blocks;

  /** The list that begins at line `i`, which goes on behind it. */
  function list() {
    const [, , first] = ITEM.exec(text(i));
    const kindOf = (mark) => mark.at(-1);
    const items = [];
    for (let match; i < lines.length && (match = ITEM.exec(text(i))) && kindOf(match[2]) === kindOf(first) && !RULE.test(text(i)); ) {
      const [, before, mark, space] = match;
      const indent = before.length + mark.length + (space.length > 4 || !space ? 1 : space.length);
      const inner = [[Math.min(lines[i][0] + indent, lines[i][1]), lines[i][1]]];
      for (i += 1; i < lines.length; i += 1) {
        const deep = text(i).length - text(i).trimStart().length;
        if (blank(i)) {
          let next = i;
          while (next < lines.length && blank(next)) next += 1;
          if (next >= lines.length || text(next).length - text(next).trimStart().length < indent) break;
          inner.push([lines[i][1], lines[i][1]]);
        } else if (deep >= indent) {
          inner.push([lines[i][0] + indent, lines[i][1]]);
        } else if (begins(i) || blank(i - 1)) {
          break;
        } else {
          inner.push([lines[i][0] + deep, lines[i][1]]); // a line of a paragraph goes on without its indent
        }
      }
      items.push(blocksOf(source, inner, depth + 1));
      let next = i;
      while (next < lines.length && blank(next)) next += 1;
      if (next < lines.length && next > i && ITEM.test(text(next))) i = next;
    }
    return { kind: "list", first: /\d/.test(first) ? parseInt(first, 10) : null, items };
  }
}

/** The ranges of a table row's cells. */
function cellsOf(source, [start, end]) {
  const cells = [];
  let from = start;
  for (let at = start; at <= end; at += 1) {
    if (at < end && source[at] === "\\") at += 1;
    else if (at === end || source[at] === "|") {
      const whole = source.slice(from, at);
      const lead = whole.length - whole.trimStart().length;
      cells.push([from + Math.min(lead, whole.length), from + Math.max(whole.trimEnd().length, lead)]);
      from = at + 1;
    }
  }
  const empty = ([a, b]) => a >= b;
  if (cells.length && empty(cells[0])) cells.shift();
  if (cells.length && empty(cells.at(-1))) cells.pop();
  return cells;
}

/** Ranges of the source as one text; `at[i]`: the place of its character `i`. */
function joined(source, ranges) {
  const at = [];
  let text = "";
  ranges.forEach(([start, end], i) => {
    if (i) {
      text += "\n";
      at.push(ranges[i - 1][1]);
    }
    text += source.slice(start, end);
    for (let place = start; place < end; place += 1) at.push(place);
  });
  return { text, at };
}

const element = (name, ...children) => {
  const made = document.createElement(name);
  made.append(...children);
  return made;
};

/** The nodes of characters `from` to `to` of a joined text, with what inline marks make of it.
 *  `leaf(text, places)` makes the nodes of plain text. */
function inline({ text, at }, from, to, leaf) {
  const nodes = [];
  const without = new Set(); // marks that nothing closes from here on
  let plain = from;
  const flush = (end) => {
    if (end > plain) nodes.push(...leaf(text.slice(plain, end), at.slice(plain, end)));
  };
  const take = (begin, node, end) => {
    flush(begin);
    nodes.push(node);
    plain = end;
    return end;
  };
  const space = (i) => i < from || i >= to || /\s/.test(text[i]);
  const word = (i) => i >= from && i < to && /[\p{L}\p{N}]/u.test(text[i]);
  const closing = (mark, begin) => {
    if (without.has(mark)) return -1;
    for (let end = text.indexOf(mark, begin + 1); end >= 0 && end + mark.length <= to; end = text.indexOf(mark, end + 1)) {
      const single = mark.length === 2 || (text[end + 1] !== mark && text[end - 1] !== mark);
      if (single && !space(end - 1) && !(mark[0] === "_" && word(end + mark.length))) return end;
    }
    without.add(mark);
    return -1;
  };
  for (let i = from; i < to; ) {
    const one = text[i];
    if (one === "\\" && i + 1 < to && PUNCTUATION.test(text[i + 1])) {
      flush(i);
      plain = i + 1;
      i += 2;
      continue;
    }
    if (one === "`") {
      let width = 1;
      while (text[i + width] === "`") width += 1;
      const mark = "`".repeat(width);
      let end = without.has(mark) ? -1 : text.indexOf(mark, i + width);
      while (end >= 0 && (text[end + width] === "`" || text[end - 1] === "`")) end = text.indexOf(mark, end + 1);
      if (end < 0 || end + width > to) without.add(mark);
      else {
        i = take(i, element("code", ...leaf(text.slice(i + width, end), at.slice(i + width, end))), end + width);
        continue;
      }
      i += width;
      continue;
    }
    const [mark, name] = MARKS.find(([each]) => text.startsWith(each, i)) ?? [];
    if (mark && !space(i + mark.length) && !(mark[0] === "_" && word(i - 1))) {
      const begin = i + mark.length;
      const end = closing(mark, begin);
      if (end > begin) {
        i = take(i, element(name, ...inline({ text, at }, begin, end, leaf)), end + mark.length);
        continue;
      }
    }
    const form = one === "[" ? LINK : one === "h" && !word(i - 1) ? ADDRESS : null;
    if (form !== null) {
      form.lastIndex = i;
      const match = form.exec(text);
      const address = match?.[2] ?? match?.[0];
      if (match && i + match[0].length <= to && ALLOWED.test(address)) {
        const [begin, end] = form === LINK ? [i + 1, i + 1 + match[1].length] : [i, i + match[0].length];
        const inner = form === LINK ? inline({ text, at }, begin, end, leaf) : leaf(text.slice(begin, end), at.slice(begin, end));
        const link = element("a", ...inner);
        Object.assign(link, { href: address, rel: "noopener noreferrer nofollow", target: "_blank" });
        i = take(i, link, i + match[0].length);
        continue;
      }
    }
    i += mark ? mark.length : 1;
  }
  flush(to);
  return nodes;
}

/** The element of a block. `leaf(text, places)`: see `inline`; `decorate(code, block)`: what stands around code. */
export function elementOf(source, block, leaf, decorate = (code) => code) {
  const whole = (ranges) => {
    const content = joined(source, ranges);
    return inline(content, 0, content.text.length, leaf);
  };
  const children = (blocks) => blocks.map((one) => elementOf(source, one, leaf, decorate));
  if (block.kind === "rule") return element("hr");
  if (block.kind === "quote") return element("blockquote", ...children(block.children));
  if (block.kind === "code") {
    const { text, at } = joined(source, block.lines);
    return decorate(element("pre", element("code", ...leaf(text, at))), { ...block, text });
  }
  if (block.kind === "list") {
    const made = element(block.first === null ? "ul" : "ol", ...block.items.map((item) => element("li", ...children(item))));
    if (block.first !== null) made.start = block.first;
    return made;
  }
  if (block.kind === "table") {
    const row = (name, cells) => element("tr", ...cells.map((range) => element(name, ...whole([range]))));
    const body = element("tbody", ...block.rows.map((cells) => row("td", cells)));
    const box = element("div", element("table", element("thead", row("th", block.head)), body));
    box.className = "table";
    return box;
  }
  return element(block.kind === "heading" ? `h${Math.min(6, block.level + 2)}` : "p", ...whole(block.lines));
}
