// Elements, and text of models as elements: nothing is ever parsed as HTML.

export const $ = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "role") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const INLINE = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)|\[([^\]\n]+)\]\((https?:[^)\s]+)\)/g;

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index));
    if (match[1]) nodes.push(el("code", {}, match[1].slice(1, -1)));
    else if (match[2]) nodes.push(el("strong", {}, match[2].slice(2, -2)));
    else if (match[3]) nodes.push(el("em", {}, match[3].slice(1, -1)));
    else nodes.push(el("a", { href: match[5], rel: "noreferrer noopener", target: "_blank" }, match[4]));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

const LISTS = [["ul", /^\s*[-*+] /], ["ol", /^\s*\d+[.)] /]];
const kindOf = (line) => LISTS.find(([, mark]) => mark.test(line))?.[0] ?? "p";

function block(lines) {
  const heading = lines.length === 1 && /^(#{1,6}) (.*)/.exec(lines[0]);
  if (heading) return el(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2]));
  for (const [tag, mark] of LISTS) {
    if (lines.every((line) => mark.test(line))) {
      const start = tag === "ol" ? { start: parseInt(lines[0], 10) } : {};
      return el(tag, start, ...lines.map((line) => el("li", {}, ...inline(line.replace(mark, "")))));
    }
  }
  const nodes = lines.flatMap((line, i) => (i ? [el("br"), ...inline(line)] : inline(line)));
  return el("p", {}, ...nodes);
}

// Markdown as models write it: fences, headings, lists, emphasis, code, links.
export function markdown(text) {
  const nodes = [];
  let lines = [];
  let fence = null;
  let ending = null;
  const flush = () => {
    if (lines.length) nodes.push(block(lines));
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (fence !== null) {
      if (ending.test(line)) { nodes.push(codeBlock(fence)); fence = null; }
      else fence.push(line);
    } else if (/^\s*```/.test(line)) {
      flush();
      fence = [];
      ending = new RegExp(`^\\s*\`{${/`+/.exec(line)[0].length},}`);
    }
    else if (!line.trim()) flush();
    else if (/^#{1,6} /.test(line)) { flush(); lines = [line]; flush(); }
    else {
      if (lines.length && kindOf(line) !== kindOf(lines[0])) flush();
      lines.push(line);
    }
  }
  flush();
  if (fence !== null) nodes.push(codeBlock(fence));
  return nodes;
}

function codeBlock(lines) {
  const text = lines.join("\n");
  return el("pre", { tabIndex: 0 }, el("code", {}, text));
}
