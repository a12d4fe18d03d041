// Charts by uPlot: the timeline of a rank, its memory, the roofline.

const KIND = [
  { name: "computation", colour: "computation" },
  { name: "wait for communication", colour: "exposed" },
  { name: "wait for the last rank", colour: "late" },
  { name: "communication", colour: "hidden" },
];
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const ROW = 30, LEFT = 128, RIGHT = 16;

/** What redraws when the colours or the width change. */
const redraws = new Set();

function mounted(build, label) {
  const box = el("div", { class: "chart", role: "img", "aria-label": label });
  let plot = null, width = 0, range = null;
  const redraw = () => {
    if (!box.isConnected || !box.clientWidth) return;
    width = box.clientWidth;
    if (plot) { const x = plot.scales.x; range = plot.keepRange && [x.min, x.max]; plot.destroy(); }
    plot = build(box, width);
    if (range) plot.setScale("x", { min: range[0], max: range[1] });
    box.plot = plot;
  };
  new ResizeObserver(() => box.clientWidth !== width && redraw()).observe(box);
  redraws.add(redraw);
  return box;
}

const axisStyle = () => ({
  stroke: css("soft"), font: FONT, grid: { stroke: css("line"), width: 1 }, ticks: { stroke: css("line"), width: 1, size: 5 },
});
/** Ticks of one axis have one unit. */
const unitOf = (s) => s < 1e-3 ? [1e6, "µs"] : s < 1 ? [1e3, "ms"] : [1, "s"];
const timeTicks = (u, ticks) => {
  const [factor, unit] = unitOf(Math.max(...ticks.map(Math.abs)));
  const step = ticks.length > 1 ? (ticks[1] - ticks[0]) * factor : 1;
  const places = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
  return ticks.map((t) => `${(t * factor).toFixed(places)} ${unit}`);
};

/** Zoom and move a group of charts together, by buttons, keys and ctrl with the wheel. */
class Zoom {
  constructor(total) { this.total = total; this.charts = []; this.range = [0, total]; this.busy = false; }
  add(chart) { this.charts.push(chart); return chart; }
  set(min, max) {
    const width = Math.min(Math.max(max - min, this.total / 1e5), this.total);
    const begin = Math.min(Math.max(min, 0), this.total - width);
    this.range = [begin, begin + width];
    this.busy = true;
    for (const c of this.charts) if (c.plot) c.plot.setScale("x", { min: begin, max: begin + width });
    this.busy = false;
  }
  by(factor, at = (this.range[0] + this.range[1]) / 2) {
    this.set(at - (at - this.range[0]) * factor, at + (this.range[1] - at) * factor);
  }
  move(part) { const d = part * (this.range[1] - this.range[0]); this.set(this.range[0] + d, this.range[1] + d); }
  reset() { this.set(0, this.total); }
  hooks() {
    return {
      setScale: [(u, key) => {
        if (key !== "x" || this.busy) return;
        const { min, max } = u.scales.x;
        if (Math.abs(min - this.range[0]) + Math.abs(max - this.range[1]) > this.total * 1e-9) this.set(min, max);
      }],
      ready: [(u) => {
        u.over.addEventListener("wheel", (event) => {
          if (!event.ctrlKey && !event.metaKey) return;
          event.preventDefault();
          this.by(event.deltaY > 0 ? 1.25 : 0.8, u.posToVal(event.offsetX, "x"));
        }, { passive: false });
        u.over.addEventListener("dblclick", () => this.reset());
      }],
    };
  }
  controls() {
    const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    return [
      button("+", "Zoom in", () => this.by(0.5)), button("−", "Zoom out", () => this.by(2)),
      button("←", "Earlier", () => this.move(-0.5)), button("→", "Later", () => this.move(0.5)),
      button("Whole step", "Show the whole step", () => this.reset()),
    ];
  }
  keys(node) {
    node.setAttribute("tabindex", "0");
    node.setAttribute("role", "group");
    node.addEventListener("keydown", (event) => {
      const act = {
        "+": () => this.by(0.5), "=": () => this.by(0.5), "-": () => this.by(2),
        ArrowLeft: () => this.move(-0.25), ArrowRight: () => this.move(0.25), Home: () => this.reset(), 0: () => this.reset(),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
    return node;
  }
}

/** The rows of a rank: events of the step, and of the runs of its stages' functions. */
function timelineRows(program, rows, runs = []) {
  const found = new Map();
  const row = (name) => { if (!found.has(name)) found.set(name, []); return found.get(name); };
  if (runs.length) row("functions");
  for (const [begin, end, text, name] of runs) {
    row("functions").push({ begin, end, text, kind: 0, op: -1 });
    for (const [at, columns] of Object.entries(program.functions[name] ?? {}))
      columns.begin.forEach((b, i) => row(at).push({
        begin: begin + b, end: begin + columns.end[i], op: columns.op[i], kind: columns.kind[i],
      }));
  }
  for (const [at, columns] of Object.entries(rows))
    columns.begin.forEach((b, i) => row(at).push({ begin: b, end: columns.end[i], op: columns.op[i], kind: columns.kind[i] }));
  const rank = (name) => name === "functions" ? 0 : name === "compute" ? 1 : name.startsWith("links") ? 2 : 3;
  const names = [...found.keys()].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  for (const name of names) found.get(name).sort((a, b) => a.begin - b.begin);
  return names.map((name) => ({ name, events: found.get(name) }));
}

function timelineChart(program, rows, zoom, label) {
  const height = rows.length * ROW + 42;
  const chart = mounted((box, width) => {
    const colours = KIND.map((k) => css(k.colour));
    const back = css("inset"), text = css("text");
    let hovered = null;
    function draw(u) {
      const { ctx } = u, dpr = devicePixelRatio;
      ctx.save();
      ctx.beginPath();
      ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
      ctx.clip();
      rows.forEach((row, i) => {
        const top = u.bbox.top + u.bbox.height * i / rows.length + 4 * dpr;
        const tall = u.bbox.height / rows.length - 8 * dpr;
        ctx.fillStyle = back;
        ctx.fillRect(u.bbox.left, top, u.bbox.width, tall);
        const { min, max } = u.scales.x;
        let last = -1, lastKind = -1;
        for (const e of row.events) {
          if (e.end < min || e.begin > max) continue;
          const x = u.valToPos(e.begin, "x", true);
          const w = Math.max(u.valToPos(e.end, "x", true) - x, 0.7 * dpr);
          if (x + w <= last && e.kind === lastKind) continue; // hidden by what is drawn
          ctx.fillStyle = e === hovered ? text : colours[e.kind];
          ctx.fillRect(x, top, w > 3 * dpr ? w - 0.6 * dpr : w, tall);
          [last, lastKind] = [x + w, e.kind];
          const name = e.text ?? (w > 60 * dpr && e.op >= 0 ? opTitle(program, e.op) : "");
          if (name && w > 14 * dpr) {
            ctx.save();
            ctx.beginPath();
            ctx.rect(x, top, w - 3 * dpr, tall);
            ctx.clip();
            ctx.fillStyle = document.documentElement.dataset.theme === "dark" || e.kind === 2 ? "#0c1116" : "#fff";
            ctx.font = `${11 * dpr}px ui-monospace, monospace`;
            ctx.textBaseline = "middle";
            ctx.textAlign = "left";
            ctx.fillText(name, x + 4 * dpr, top + tall / 2);
            ctx.restore();
          }
        }
      });
      ctx.restore();
    }
    function find(u) {
      const { left, top } = u.cursor;
      if (left === undefined || left < 0) return null;
      const row = rows[Math.floor(top / (u.over.clientHeight / rows.length))];
      if (!row) return null;
      const slack = (u.scales.x.max - u.scales.x.min) / u.over.clientWidth;
      const at = u.posToVal(left, "x");
      let best = null;
      for (const e of row.events) {
        if (e.begin - slack > at) break;
        if (e.end + slack >= at && (!best || e.end - e.begin >= best.end - best.begin || e.begin <= at)) best = e;
      }
      return best && { row, event: best };
    }
    const hooks = zoom.hooks();
    const plot = new uPlot({
      width, height, padding: [6, RIGHT, 0, 0],
      scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { range: [0, rows.length], dir: -1 } },
      legend: { show: false },
      axes: [
        { ...axisStyle(), size: 30, values: timeTicks, space: 90 },
        { ...axisStyle(), size: LEFT, grid: { show: false }, ticks: { show: false }, splits: () => rows.map((_, i) => i + 0.5), values: () => rows.map((r) => r.name.replace(/^links: /, "links, ")) },
      ],
      series: [{}, { paths: () => null, points: { show: false } }],
      cursor: { drag: { x: true, y: false, setScale: true }, y: false, points: { show: false }, sync: { key: zoom.key } },
      hooks: {
        ...hooks, draw: [draw],
        setCursor: [(u) => {
          if (!u.over.matches(":hover")) return;
          const found = find(u);
          if (hovered !== (found && found.event)) { hovered = found && found.event; u.redraw(false); }
          if (!found) { tip.hide(); return; }
          const { event } = found, { left, top } = u.over.getBoundingClientRect();
          const long = `${time(event.end - event.begin)}, from ${time(event.begin)}`;
          const pointer = { clientX: left + u.cursor.left, clientY: top + u.cursor.top };
          if (event.text) tip.show(pointer, event.text, [long]);
          else tip.show(pointer, event.op < 0 ? found.row.name : opTitle(program, event.op), [
            event.op < 0 ? null : opAbout(program, event.op), event.op < 0 ? null : shortPlace(opPlace(program, event.op)), `${KIND[event.kind].name}: ${long}`,
          ]);
        }],
      },
    }, [[0, zoom.total], [null, null]], box);
    plot.keepRange = true;
    plot.over.addEventListener("mouseleave", () => { tip.hide(); hovered = null; plot.redraw(false); });
    return plot;
  }, label);
  return zoom.add(zoom.keys(chart));
}

function memoryChart(rank, zoom, label) {
  const limit = rank.use.limit;
  const x = [], y = [];
  for (const [at, held] of rank.memory) { x.push(at); y.push(held); }
  x.push(zoom.total);
  y.push(y.at(-1) ?? 0);
  const peak = rank.use.peak;
  const top = limit && limit < 2.5 * peak ? Math.max(limit, peak) * 1.08 : peak * 1.15;
  const chart = mounted((box, width) => {
    const hooks = zoom.hooks();
    const level = (u, value, colour, text) => {
      const { ctx } = u, at = u.valToPos(value, "y", true);
      if (at < u.bbox.top) return;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour;
      ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(u.bbox.left, at);
      ctx.lineTo(u.bbox.left + u.bbox.width, at);
      ctx.stroke();
      ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.textAlign = "right";
      ctx.textBaseline = "bottom";
      ctx.fillText(text, u.bbox.left + u.bbox.width - 4, at - 3);
      ctx.restore();
    };
    const plot = new uPlot({
      width, height: 190, padding: [8, RIGHT, 0, 0],
      scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { range: [0, top] } },
      legend: { show: false },
      axes: [
        { ...axisStyle(), size: 30, values: timeTicks, space: 90 },
        { ...axisStyle(), size: LEFT, incrs: binarySteps(), values: (u, ticks) => ticks.map(bytes), space: 34 },
      ],
      series: [{}, { stroke: css("activations"), fill: css("activations") + "33", width: 1.5, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }],
      cursor: { drag: { x: true, y: false }, y: false, sync: { key: zoom.key }, points: { size: 6 } },
      hooks: {
        ...hooks,
        draw: [(u) => {
          if (limit && limit <= top) level(u, limit, css("exposed"), `a device has ${bytes(limit)}`);
          level(u, rank.use.arguments, css("soft"), `held throughout: ${bytes(rank.use.arguments)}`);
        }],
        setCursor: [(u) => {
          if (!u.over.matches(":hover") || u.cursor.idx === null) return;
          const at = u.posToVal(u.cursor.left, "x");
          let i = 0;
          while (i + 1 < x.length && x[i + 1] <= at) i++;
          const { left, top: t } = u.over.getBoundingClientRect();
          tip.show({ clientX: left + u.cursor.left, clientY: t + u.cursor.top }, bytes(y[i]), [
            `live at ${time(at)}`, limit ? `${share(y[i] / limit)} of the device's ${bytes(limit)}` : null, y[i] === peak ? "the peak" : null,
          ]);
        }],
      },
    }, [x, y], box);
    plot.keepRange = true;
    plot.over.addEventListener("mouseleave", tip.hide);
    return plot;
  }, label);
  return zoom.add(zoom.keys(chart));
}
function binarySteps() {
  const steps = [];
  for (let n = 1; n < 2 ** 44; n *= 2) steps.push(n);
  return steps;
}

/** The powers of ten within a range. */
function powers([low, high]) {
  const found = [];
  for (let i = Math.ceil(Math.log10(low) - 1e-9); i <= Math.log10(high) + 1e-9; i++) found.push(Number(`1e${i}`));
  return found;
}

/** Points {x, y, size, colour, title, lines} on logarithmic axes, below the ceilings of a device. */
function rooflineChart(points, ceilings, bandwidth, label) {
  const xs = points.map((p) => p.x), ys = points.map((p) => p.y);
  const ridge = bandwidth && ceilings.length ? Math.max(...ceilings.map((c) => c.rate)) / bandwidth : 1;
  const floor10 = (v) => 10 ** Math.floor(Math.log10(v)), ceil10 = (v) => 10 ** Math.ceil(Math.log10(v));
  const xr = [floor10(Math.min(...xs, ridge / 10)), ceil10(Math.max(...xs, ridge * 4))];
  const highest = Math.max(...ceilings.map((c) => c.rate), ...ys);
  const yr = [floor10(Math.max(Math.min(...ys), highest / 1e6)), highest * 3];
  return mounted((box, width) => {
    const plot = new uPlot({
      width, height: 340, padding: [10, 30, 0, 0],
      scales: { x: { time: false, distr: 3, range: () => xr }, y: { distr: 3, range: () => yr } },
      legend: { show: false },
      axes: [
        { ...axisStyle(), size: 42, label: "flops per byte that an op touches", labelFont: FONT, labelSize: 20, splits: () => powers(xr), values: (u, ticks) => ticks.map((t) => t >= 1 ? t.toLocaleString("en") : `${t}`) },
        { ...axisStyle(), size: 96, splits: () => powers(yr), values: (u, ticks) => ticks.map((t) => rate(t, "flop/s").replace(/\.0+ /, " ")) },
      ],
      series: [{}, { paths: () => null, points: { show: false } }],
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      hooks: {
        draw: [(u) => {
          const { ctx } = u, dpr = devicePixelRatio;
          ctx.save();
          ctx.beginPath();
          ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
          ctx.clip();
          const to = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
          ctx.font = `${12 * dpr}px system-ui, sans-serif`;
          for (const c of ceilings) {
            const bend = bandwidth ? c.rate / bandwidth : xr[0];
            ctx.strokeStyle = css("soft");
            ctx.lineWidth = 1.5 * dpr;
            ctx.beginPath();
            ctx.moveTo(...to(xr[0], bandwidth ? xr[0] * bandwidth : c.rate));
            ctx.lineTo(...to(Math.max(bend, xr[0]), c.rate));
            ctx.lineTo(...to(xr[1], c.rate));
            ctx.stroke();
            ctx.fillStyle = css("text");
            ctx.textAlign = "right";
            ctx.textBaseline = "bottom";
            const [right, up] = to(xr[1], c.rate);
            ctx.fillText(`${c.name}: ${rate(c.rate, "flop/s")}`, right - 6 * dpr, up - 3 * dpr);
          }
          ctx.globalAlpha = 0.75;
          for (const p of points) {
            const [x, y] = to(p.x, p.y);
            ctx.fillStyle = css(p.colour);
            ctx.beginPath();
            ctx.arc(x, y, p.size * dpr, 0, 7);
            ctx.fill();
          }
          ctx.restore();
        }],
        setCursor: [(u) => {
          const { left, top } = u.cursor;
          if (left < 0) { tip.hide(); return; }
          let best = null, near = 14;
          for (const p of points) {
            const d = Math.hypot(u.valToPos(p.x, "x") - left, u.valToPos(p.y, "y") - top) - p.size;
            if (d < near) [best, near] = [p, d];
          }
          const box = u.over.getBoundingClientRect();
          if (best) tip.show({ clientX: box.left + left, clientY: box.top + top }, best.title, best.lines);
          else tip.hide();
        }],
      },
    }, [[...xr], [null, null]], box);
    plot.over.addEventListener("mouseleave", tip.hide);
    return plot;
  }, label);
}
