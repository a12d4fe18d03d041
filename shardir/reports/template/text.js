// Elements, numbers with units, and the tooltip. Whatever a program names is set as text.

function el(tag, attributes = {}, ...children) {
  const node = tag === "svg" || el.svg.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((x) => x !== null && x !== undefined && x !== false));
  return node;
}
el.svg = new Set(["g", "rect", "line", "path", "text", "circle"]);

function digits(x, n = 3) {
  if (!x) return "0";
  const size = Math.floor(Math.log10(Math.abs(x))) + 1;
  return size >= n ? Math.round(x).toLocaleString("en") : x.toFixed(Math.min(n - size, 8));
}
function time(s) {
  if (s === null || s === undefined) return "-";
  const a = Math.abs(s);
  if (a === 0) return "0 s";
  if (a < 999.5e-6) return `${digits(s * 1e6)} µs`;
  return a < 0.9995 ? `${digits(s * 1e3)} ms` : `${digits(s)} s`;
}
function bytes(n) {
  if (n === null || n === undefined) return "-";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (Math.abs(n) >= size) return `${(n / size).toFixed(1)} ${unit}`;
  return `${n} B`;
}
function rate(n, unit) {
  for (const [prefix, size] of [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (n >= size) return `${digits(n / size)} ${prefix}${unit}`;
  return `${digits(n)} ${unit}`;
}
const share = (x) => x === null || x === undefined ? "-"
  : x === 0 ? "0%" : x > 0 && x < 0.0005 ? "<0.1%" : `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)}%`;
const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const shortPlace = (place) => place.slice(place.lastIndexOf("/") + 1);
/** A text with file names in place of paths. */
const plainPlaces = (text) => text.replaceAll(/ at \S*\/(?=[^\s\/]+:\d+)/g, " at ");
const shortKind = (kind) => kind.replace(/^dist\./, "").replaceAll("_", "-");
/** Equal layers have equal names but for their numbers. */
const folded = (name) => name.replace(/\d+/g, "*");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const tip = {
  show(event, title, lines) {
    const box = document.getElementById("tip");
    box.replaceChildren(el("b", {}, title), ...lines.filter(Boolean).map((line) => el("div", {}, line)));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    box.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};
function hint(node, title, ...lines) {
  node.addEventListener("mousemove", (event) => tip.show(event, title, lines));
  node.addEventListener("mouseleave", tip.hide);
  return node;
}

/** A bar of parts: {name, value, colour, hatch}; the rest of `total` stays empty. */
function stack(parts, total, thin = false) {
  const shown = parts.filter((p) => p.value > 0);
  const label = shown.map((p) => `${p.name} ${p.text}`).join(", ");
  return el("div", { class: thin ? "stack thin" : "stack", role: "img", "aria-label": label },
    shown.map((p) => hint(el("span", {
      class: p.hatch ? "hatch" : null,
      style: `width:${100 * p.value / total}%;background-color:var(--${p.colour})`,
    }), p.name, p.text, share(p.value / total))));
}
function legend(parts) {
  return el("ul", { class: "legend" }, parts.map((p) => el("li", {},
    el("span", { class: p.hatch ? "swatch hatch" : "swatch", style: `background-color:var(--${p.colour})` }),
    p.name, el("b", {}, p.text), p.share === undefined ? null : share(p.share))));
}
function meter(parts, total) {
  return el("span", { class: "meter", role: "img", "aria-label": parts.map((p) => `${p.name} ${p.text}`).join(", ") },
    parts.map((p) => el("span", { style: `width:${total ? 100 * p.value / total : 0}%;background-color:var(--${p.colour})` })));
}

/** Whether a text has a word; `:4` is no part of `:40`. */
function has(text, word) {
  for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + 1))
    if (!/:\d+$/.test(word) || !/\d/.test(text[at + word.length] ?? "")) return true;
  return false;
}

/**
 * A table that is searched and sorted. Columns: {name, get, text, number, node, wide}: `get` is what
 * sorts, `text` what is shown and searched.
 */
function sortedTable({ caption, label, columns, rows, sort, descending = true, detail, best, search = true, most = 40, tools = [], select }) {
  const state = { sort, descending, query: "", all: false };
  const used = columns.filter(Boolean);
  const body = el("tbody");
  const counted = el("span", { class: "count", role: "status" });
  const heads = used.map((c) => el("th", { scope: "col", class: c.number ? "number" : null },
    el("button", { type: "button", onclick: () => order(c) }, c.name)));
  const more = el("button", { type: "button", class: "more", onclick: () => { state.all = true; draw(); } });
  const input = search && el("input", {
    type: "search", placeholder: "Search", "aria-label": `Search ${label}`,
    oninput: () => { state.query = input.value.toLowerCase(); draw(); },
  });
  const shown = (c, row) => c.text ? c.text(row) : `${c.get(row) ?? "-"}`;
  function order(c) {
    state.descending = state.sort === c.name ? !state.descending : Boolean(c.number);
    state.sort = c.name;
    draw();
  }
  function draw() {
    const column = used.find((c) => c.name === state.sort);
    const words = state.query.split(/\s+/).filter(Boolean);
    let found = rows.filter((row) => words.every((word) =>
      used.some((c) => has(shown(c, row).toLowerCase(), word))));
    if (column) {
      const direction = state.descending ? -1 : 1;
      found = [...found].sort((a, b) => {
        const [x, y] = [column.get(a), column.get(b)];
        if (x === y) return 0;
        if (x === null || x === undefined) return 1;
        if (y === null || y === undefined) return -1;
        return direction * (typeof x === "number" ? x - y : String(x).localeCompare(String(y)));
      });
    }
    used.forEach((c, i) => {
      if (c.name === state.sort) heads[i].setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      else heads[i].removeAttribute("aria-sort");
    });
    const limit = state.all ? found.length : most;
    body.replaceChildren(...found.slice(0, limit).flatMap(line));
    counted.textContent = found.length === rows.length ? count(rows.length, "row") : `${found.length} of ${count(rows.length, "row")}`;
    more.hidden = found.length <= limit;
    more.textContent = `Show all ${found.length.toLocaleString("en")} rows`;
  }
  function line(row) {
    const cells = used.map((c, i) => {
      const text = shown(c, row);
      let content = c.node ? c.node(row) : text;
      if (i === 0 && detail) {
        content = el("button", { type: "button", class: "open", "aria-expanded": "false", onclick: (e) => toggle(e.currentTarget, row) }, content);
      } else if (i === 0 && select) {
        content = el("button", { type: "button", class: "open plain", onclick: () => select(row) }, content);
      }
      return el("td", { class: [i === 0 && "first", c.number && "number", c.wide && "wide", c.mono && "mono"].filter(Boolean).join(" ") || null }, content);
    });
    return el("tr", { class: best && best(row) ? "best" : null }, cells);
  }
  function toggle(button, row) {
    const open = button.getAttribute("aria-expanded") === "true";
    const at = button.closest("tr");
    button.setAttribute("aria-expanded", String(!open));
    if (open) at.nextElementSibling.remove();
    else at.after(el("tr", { class: "detail" }, el("td", { colspan: used.length }, detail(row))));
  }
  draw();
  const table = el("table", {}, caption && el("caption", {}, caption), el("thead", {}, el("tr", {}, heads)), body);
  const box = el("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, table);
  const controls = input || tools.length ? el("div", { class: "controls" }, input, tools, counted) : null;
  return el("div", {}, controls, box, el("p", { style: "margin:8px 0 0" }, more));
}
