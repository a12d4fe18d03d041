// The sections of a report, each from the record of a program.

const opName = (p, i) => p.ops.names[i];
const opTitle = (p, i) => opName(p, i) || opKind(p, i);
const opKind = (p, i) => shortKind(p.strings.kinds[p.ops.kinds[i]]);
const opPlace = (p, i) => p.strings.places[p.ops.places[i]];
function opAbout(p, i) {
  const c = collectiveOf(p).get(i);
  const moved = c ? `${bytes(p.ops.bytes[i])} received over ${c.over}` : `${rate(p.ops.flops[i], "flop")}, ${bytes(p.ops.bytes[i])} touched`;
  return `${opKind(p, i)}, ${moved}`;
}
const collectives = new WeakMap();
function collectiveOf(p) {
  if (!collectives.has(p)) collectives.set(p, new Map(p.collectives.map((c) => [c.op, c])));
  return collectives.get(p);
}
const measuredOf = (p, i) => p.measured ? p.measured.ops[i] : null;
const meshText = (m) => m.axes.map(([n, s]) => `${n} = ${s}`).join(", ");
const recomputedText = (r) => `${count(r.ops, "op")} of the forward part run again, ${time(r.seconds)}, in place of ${bytes(r.bytes)} kept${r.hosted ? `; ${bytes(r.hosted)} wait in host memory` : ""}${r.bound === null ? "" : `; at least ${time(r.bound)} within ${bytes(r.budget)}`}`;
const isStep = (p) => p.strings && p.ops.phases.some((x) => x > 0);

/** Sum rows by a key; `first` is the first member, `n` their number. */
function grouped(rows, key, sums) {
  const groups = new Map();
  for (const row of rows) {
    const k = key(row);
    const g = groups.get(k);
    if (!g) groups.set(k, { ...row, n: 1, members: [row] });
    else {
      g.n += 1;
      g.members.push(row);
      for (const name of sums) g[name] = g[name] === null && row[name] === null ? null : (g[name] ?? 0) + (row[name] ?? 0);
    }
  }
  return [...groups.values()];
}
const timesOf = (row) => row.n > 1 ? el("span", { class: "times" }, ` × ${row.n}`) : null;

function splitParts(s) {
  return [
    { name: "computation", value: s.computation, colour: "computation" },
    { name: "exposed communication", value: s.exposed, colour: "exposed" },
    { name: "wait for the last rank", value: s.late, colour: "late" },
    { name: "bubble of the pipeline", value: s.bubble, colour: "bubble" },
  ].map((p) => ({ ...p, text: time(p.value) }));
}

function sections(report, p, index, choose) {
  const found = [overview(report, p, index, choose)];
  if (report.comparison.length || report.programs.length > 1) found.push(comparison(report, p, choose));
  found.push(timeSection(p), timelineSection(p), memorySection(p), communication(p), parts(p), meshSection(p), layoutSection(p), roofline(p));
  if (p.search) found.push(searchSection(p));
  found.push(opsSection(p));
  return found.filter(Boolean);
}

function overview(report, p, index, choose) {
  const ranks = p.mesh.size, split = p.split, total = p.seconds;
  const unit = isStep(p) ? "step" : "call";
  const waits = split.exposed + split.late;
  const sentence = [
    `A ${unit} of @${p.function} takes ${time(total)} on ${count(ranks, "rank")} (${meshText(p.mesh)})`,
    ranks > 1 ? `: ${share(split.computation / total)} computation, ${share(waits / total)} waits for communication` : "",
    split.bubble > 0 ? ` and ${share(split.bubble / total)} bubble` : "",
    `. A device needs ${bytes(p.memory.peak)} at the peak`,
    p.memory.limit ? `, ${share(p.memory.peak / p.memory.limit)} of its ${bytes(p.memory.limit)}.` : ".",
  ].join("");
  const fits = p.memory.limit ? p.memory.peak <= p.memory.limit : null;
  const tile = (name, value, sub, extra) => el("div", { class: "tile" }, el("dt", {}, name),
    el("dd", {}, el("div", { class: "value" }, value), el("div", { class: "sub" }, sub), extra));
  const perSecond = p.tokens ? [`${digits(p.tokens, 4)}`, "tokens per second"] : p.samples ? [digits(p.samples, 4), "samples per second"] : null;
  const picker = report.programs.length > 1 && el("p", { class: "controls" },
    el("label", { for: "program" }, "Program "),
    el("select", { id: "program", onchange: (e) => choose(Number(e.target.value)) },
      report.programs.map((q, i) => el("option", { value: i, selected: i === index }, q.label))));
  return { id: "overview", title: "Overview", short: "Overview", nodes: [
    picker,
    el("h1", {}, p.label),
    el("p", { class: "lead" }, sentence),
    el("ul", { class: "plan" },
      el("li", {}, "Plan: ", el("code", {}, p.plan)), p.sentences.map((s) => el("li", {}, s)),
      p.recomputed ? el("li", {}, recomputedText(p.recomputed)) : null),
    el("dl", { class: "tiles" },
      tile(`Time of a ${unit}`, time(total), p.measured ? `measured: ${time(p.measured.seconds)}` : "predicted"),
      perSecond && tile("Throughput", perSecond[0], perSecond[1]),
      tile("Share of the peak rate", p.peak_share === null ? "-" : p.peak_share < 0.0005 ? "<0.1%" : `${(100 * p.peak_share).toFixed(1)}%`, p.peak_share === null ? "the cluster has no rate" : `of ${rate(p.mesh.rates[p.narrowest] ?? 0, "flop/s")} in ${p.narrowest}`),
      tile("Exposed communication", time(split.exposed), `${share(split.exposed / total)} of the ${unit}; ${time(split.hidden)} hidden`),
      tile("Memory of a device", bytes(p.memory.peak),
        fits === null ? "the limit is not known" : [fits ? el("span", { class: "badge good" }, "fits") : el("span", { class: "badge bad" }, "too large"), ` of ${bytes(p.memory.limit)}`],
        p.memory.limit ? meter([{ name: "peak", text: bytes(p.memory.peak), value: Math.min(p.memory.peak, p.memory.limit), colour: fits ? "activations" : "exposed" }], p.memory.limit) : null)),
  ] };
}

function comparison(report, p, choose) {
  const label = (r) => `${r.plan} on ${r.mesh}`;
  const rows = report.comparison.length ? report.comparison : report.programs.map((q) => ({
    plan: q.label, mesh: meshText(q.mesh), seconds: q.seconds, samples: q.samples, tokens: q.tokens, peak_share: q.peak_share,
    exposed: q.split.exposed, memory: q.memory.peak, fits: q.memory.limit ? q.memory.peak <= q.memory.limit : null,
    collectives: q.collectives.length, bytes: {}, compiled: null, error: "",
  }));
  const good = rows.filter((r) => !r.error);
  const best = good.filter((r) => r.fits !== false).sort((a, b) => a.seconds - b.seconds)[0];
  const longest = Math.max(...good.map((r) => r.seconds));
  const program = (r) => report.programs.findIndex((q) => q.label === label(r) || q.label === r.plan);
  const axes = [...new Set(good.flatMap((r) => Object.keys(r.bytes)))];
  const limit = Math.max(...report.programs.map((q) => q.memory.limit ?? 0));
  const has = (name) => good.some((r) => r[name] !== null && r[name] !== undefined);
  const bar = (r) => {
    const q = report.programs[program(r)];
    const parts = q ? splitParts(q.split) : [{ name: "step", value: r.seconds, text: time(r.seconds), colour: "computation" }];
    return el("div", { style: "min-width:170px;margin-top:4px" }, stack(parts, longest, true));
  };
  const table = sortedTable({
    label: "plans", rows: good, sort: "step", descending: false, search: rows.length > 8, best: (r) => r === best,
    columns: [
      { name: "plan", get: (r) => r.plan, node: (r) => el("span", {}, program(r) >= 0
        ? el("button", { type: "button", class: "open plain", onclick: () => choose(program(r)) }, r.plan) : r.plan,
      r === best ? [" ", el("span", { class: "badge good" }, "best")] : null, r.fits === false ? [" ", el("span", { class: "badge bad" }, "too large")] : null) },
      { name: "mesh", get: (r) => r.mesh },
      { name: "step", number: true, get: (r) => r.seconds, text: (r) => time(r.seconds) },
      { name: "of which", get: (r) => r.exposed / r.seconds, text: (r) => share(r.exposed / r.seconds), node: bar },
      has("tokens") ? { name: "tokens/s", number: true, get: (r) => r.tokens, text: (r) => r.tokens ? digits(r.tokens, 4) : "-" }
        : has("samples") && { name: "samples/s", number: true, get: (r) => r.samples, text: (r) => r.samples ? digits(r.samples, 4) : "-" },
      has("peak_share") && { name: "of peak", number: true, get: (r) => r.peak_share, text: (r) => share(r.peak_share) },
      { name: "exposed", number: true, get: (r) => r.exposed, text: (r) => time(r.exposed) },
      { name: "memory", number: true, get: (r) => r.memory, text: (r) => bytes(r.memory),
        node: (r) => el("div", {}, bytes(r.memory), limit ? el("div", {}, meter([{ name: "memory", text: bytes(r.memory), value: Math.min(r.memory, limit), colour: r.fits === false ? "exposed" : "activations" }], limit)) : null) },
      { name: "collectives", number: true, get: (r) => r.collectives },
      ...axes.map((a) => ({ name: `over ${a}`, number: true, get: (r) => r.bytes[a] ?? null, text: (r) => bytes(r.bytes[a]) })),
      has("compiled") && { name: "compiled", number: true, get: (r) => r.compiled, text: (r) => r.compiled === null ? "-" : `${r.compiled.toFixed(1)} s` },
    ],
  });
  const dearest = new Map();
  for (const q of report.programs) for (const l of q.layers) dearest.set(l.name, Math.max(dearest.get(l.name) ?? 0, l.computation + l.communication));
  const names = [...dearest].sort((a, b) => b[1] - a[1]).slice(0, 7).map(([name]) => name);
  const of = (q, name) => { const l = q.layers.find((x) => x.name === name); return l ? l.computation + l.communication : 0; };
  const times = (q, name) => { const l = q.layers.find((x) => x.name === name); return l && l.count > 1 ? ` × ${l.count}` : ""; };
  const differences = report.programs.length > 1 && names.length > 1 && el("div", {},
    el("h3", {}, "By layer"),
    el("p", { class: "note" }, `Computation and communication, one after the other: hidden communication counts too. Below each time is the difference to ${report.programs[0].label}.`),
    sortedTable({
      label: "plans by layer", rows: report.programs, search: false, sort: "", most: 20,
      columns: [
        { name: "plan", get: (q) => q.label },
        ...names.map((name) => ({
          name: `${name}${times(report.programs[0], name)}`, number: true, get: (q) => of(q, name), text: (q) => time(of(q, name)),
          node: (q) => { const more = of(q, name) - of(report.programs[0], name); return el("span", {}, time(of(q, name)), q === report.programs[0] ? null : el("div", { class: "times" }, more ? `${more > 0 ? "+" : "−"}${time(Math.abs(more))}` : "equal")); },
        })),
      ],
    }));
  const errors = rows.filter((r) => r.error);
  return { id: "plans", title: "Plans side by side", short: "Plans", nodes: el("div", { class: "card" },
    el("h2", {}, "Plans side by side"),
    el("p", { class: "note" }, best ? `The fastest plan that fits is ${best.plan} on ${best.mesh}: ${time(best.seconds)}. Choose a plan to see its report.` : "No plan fits in the memory of a device."),
    table, legend(splitParts({ computation: 1, exposed: 1, late: 0, bubble: 0 }).filter((x) => x.value).map(({ name, colour }) => ({ name, colour, text: "" }))),
    errors.length ? el("div", {}, el("h3", {}, "Plans that cannot be compiled"), el("ul", { class: "plan" }, errors.map((r) => el("li", {}, `${label(r)}: ${r.error}`)))) : null,
    differences) };
}

function timeSection(p) {
  const total = p.seconds;
  const staged = p.ranks.length > 1;
  const overall = splitParts(p.split).filter((x) => x.value > 0).map((x) => ({ ...x, share: x.value / total }));
  const moved = p.split.exposed + p.split.hidden;
  const line = (name, parts, whole, text) => el("div", { class: "stack-row" }, el("span", {}, name), stack(parts, whole), el("span", {}, text));
  const communicationParts = [
    { name: "exposed", value: p.split.exposed, text: time(p.split.exposed), colour: "exposed" },
    { name: "hidden beside computation", value: p.split.hidden, text: time(p.split.hidden), colour: "hidden", hatch: true },
  ];
  const m = p.measured;
  const measuredParts = m && [
    { name: "computation", value: m.split.computation, text: time(m.split.computation), colour: "computation" },
    { name: "waits for communication and other ranks", value: m.split.waits, text: time(m.split.waits), colour: "exposed" },
    { name: "the runtime, and waits between stages", value: m.split.rest, text: time(m.split.rest), colour: "bubble" },
  ];
  const scale = m ? Math.max(total, m.seconds) : total;
  return { id: "time", title: "Where the time goes", short: "Time", nodes: el("div", { class: "card" },
    el("h2", {}, "Where the time goes"),
    el("p", { class: "note" }, staged ? "The mean of all ranks of the pipeline, then each rank." : "All ranks do the same. The parts of the first bar add up to the time of the step; hidden communication runs beside computation."),
    line(m ? "predicted" : "the step", overall, scale, time(total)),
    m ? line("measured", measuredParts, scale, time(m.seconds)) : null,
    moved > 0 ? line("communication", communicationParts, scale, time(moved)) : null,
    staged ? p.ranks.map((r) => line(r.name, splitParts(r.split).filter((x) => x.value > 0), scale, bytes(r.use.peak))) : null,
    legend([...overall, ...(p.split.hidden > 0 ? [{ ...communicationParts[1], share: p.split.hidden / total }] : [])]),
    m ? el("p", { class: "note", style: "margin-top:12px" }, `Measured: the mean of ${count(m.calls, "call")} of ${count(m.ranks, "rank")}.`) : null) };
}

function timelineSection(p) {
  const nodes = [];
  const zoom = new Zoom(p.seconds);
  const holder = el("div");
  function show(i) {
    const r = i < 0 ? p.ranks.find((x) => x.use.peak === p.memory.peak) : p.ranks[i];
    zoom.charts = [];
    const rows = i < 0 ? p.ranks.map((x) => ({ name: x.name.replace("pipeline ", ""), events: x.runs.map(([begin, end, text]) => ({ begin, end, text, kind: 0, op: -1 })) })) : timelineRows(p, r.rows, r.runs);
    const memory = memoryChart(r, zoom, `Memory of ${r.name} over the step; its peak is ${bytes(r.use.peak)}. The table below has what lives at the peak.`);
    holder.replaceChildren(
      timelineChart(p, rows, zoom, `Timeline of ${i < 0 ? "all ranks" : r.name}: ${time(p.seconds)}. Arrows move, plus and minus zoom. The tables below have the same times.`),
      el("h3", {}, i < 0 ? `Memory of ${r.name}, which needs most` : "Memory"), memory);
    zoom.reset();
    redraws.forEach((redraw) => redraw());
  }
  const pick = p.ranks.length > 1 && [el("label", { for: "rank" }, "Rank "), el("select", { id: "rank", onchange: (e) => show(Number(e.target.value)) }, [el("option", { value: -1 }, "all ranks"), ...p.ranks.map((r, i) => el("option", { value: i }, r.name))])];
  nodes.push(el("h2", {}, "Timeline"),
    el("p", { class: "note" }, p.ranks.length > 1 ? "The functions of stages that each rank runs, such as 2F0, stage 2 forward for microbatch 0; gaps are the bubble. Choose a rank to see its ops and its links." : `What ${p.ranks[0].name} compute, and what is on their links at the same time.`),
    el("div", { class: "controls" }, pick, zoom.controls()), holder,
    legend(KIND.map((k) => ({ name: k.name, colour: k.colour, text: "" }))));
  if (p.measured) {
    const m = p.measured, again = new Zoom(m.seconds * 1.02), below = el("div");
    const showMeasured = (i) => {
      again.charts = [];
      below.replaceChildren(timelineChart(p, timelineRows(p, m.timelines[i]), again, `Measured timeline of rank ${i}: ${time(m.seconds)}`));
      again.reset();
      redraws.forEach((redraw) => redraw());
    };
    nodes.push(el("h3", {}, "Measured"), el("p", { class: "note" }, "The last recorded call of a rank."),
      el("div", { class: "controls" }, el("label", { for: "measured-rank" }, "Rank "),
        el("select", { id: "measured-rank", onchange: (e) => showMeasured(Number(e.target.value)) }, m.timelines.map((_, i) => el("option", { value: i }, `${i}`))), again.controls()), below);
    setTimeout(() => showMeasured(0));
  }
  setTimeout(() => show(p.ranks.length > 1 ? -1 : 0));
  return { id: "timeline", title: "Timeline", short: "Timeline", nodes: el("div", { class: "card" }, nodes) };
}

const PURPOSES = ["parameters", "states", "inputs", "gradients", "activations", "temporaries"];
function memorySection(p) {
  const use = p.memory, whole = Math.max(use.limit ?? 0, use.peak);
  const items = PURPOSES.map((name) => ({ name, value: use.parts[name] ?? 0, text: bytes(use.parts[name] ?? 0), colour: name })).filter((x) => x.value);
  const facts = [
    ["peak", bytes(use.peak), use.limit ? `${share(use.peak / use.limit)} of a device` : ""],
    ["lower bound", bytes(use.bound ?? use.peak), use.bound ? "of any placement of the values that the step makes" : "of any allocator, in this order of ops: bytes that live at once"],
    ["held throughout", bytes(use.arguments), "parameters, states, inputs"],
    use.block ? ["planned block", bytes(use.block), `gap ${share(use.block / use.bound - 1)}`] : null,
    use.host ? ["in host memory", bytes(use.host), ""] : null,
    ["a device has", use.limit ? bytes(use.limit) : "unknown", ""],
  ].filter(Boolean);
  const scale = use.limit && use.limit < 12 * use.peak ? whole : use.peak;
  return { id: "memory", title: "Memory at the peak", short: "Memory", nodes: el("div", { class: "card" },
    el("h2", {}, "Memory at the peak"),
    el("p", { class: "note" }, "The peak is at ", el("code", {}, plainPlaces(use.at)), use.limit && scale !== whole ? ". The bar is the peak: the device's memory is more than twelve times as large." : "."),
    stack(items, scale), legend(items.map((x) => ({ ...x, share: x.value / use.peak }))),
    el("div", { class: "figure", style: "margin-top:16px" },
      el("div", { style: "flex:1 1 300px;max-width:440px" }, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "memory in numbers" }, el("table", {}, el("caption", {}, "In numbers"), el("tbody", {}, facts.map(([name, value, about]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "number" }, value), el("td", {}, about))))))),
      el("div", { style: "flex:2 1 420px" }, sortedTable({
        label: "what lives at the peak", caption: "What lives at the peak, equal layers folded", most: 10, search: false, sort: "bytes",
        rows: [...use.storages.map(([name, n, part, number]) => ({ name: plainPlaces(name), bytes: n, part, n: number })), ...(use.others > 0 ? [{ name: "others, and buffers of collectives", bytes: use.others, part: "", n: 1 }] : [])],
        columns: [
          { name: "value", get: (s) => s.name, node: (s) => el("span", { class: "mono" }, s.name, timesOf(s)) },
          { name: "purpose", get: (s) => s.part, node: (s) => el("span", {}, s.part && el("span", { class: "swatch", style: `background-color:var(--${s.part});margin-right:6px` }), s.part) },
          { name: "bytes", number: true, get: (s) => s.bytes, text: (s) => bytes(s.bytes) },
        ],
      })))) };
}

function communication(p) {
  if (!p.collectives.length) return { id: "communication", title: "Communication", nodes: el("div", { class: "card" }, el("h2", {}, "Communication"), el("p", { class: "note" }, "There is none: the program needs no other device.")) };
  const rows = p.collectives.map((c) => ({
    ...c, name: opName(p, c.op), kind: opKind(p, c.op), place: shortPlace(opPlace(p, c.op)), fullPlace: opPlace(p, c.op),
    bytes: p.ops.bytes[c.op], seconds: p.ops.seconds[c.op], exposed: p.ops.exposed[c.op], measured: measuredOf(p, c.op),
    waited: p.measured ? p.measured.exposed[c.op] : null, phase: p.strings.phases[p.ops.phases[c.op]],
  }));
  const total = sum(rows.map((r) => r.seconds));
  const byAxes = grouped(rows, (r) => r.over, ["seconds", "exposed", "bytes"]).sort((a, b) => b.seconds - a.seconds);
  const holder = el("div");
  const check = el("input", { type: "checkbox", id: "fold", checked: true, onchange: draw });
  const alternatives = (lines) => lines.filter((line) => line.startsWith("instead ["));
  function detail(r) {
    const item = (name, value) => value ? [el("dt", {}, name), el("dd", {}, value)] : null;
    return el("dl", {},
      item("cause", r.cause), item("layout", el("code", {}, r.layouts)), item("algorithm", r.form ? `${r.form}${r.started ? ", started early and waited for later" : ", the device waits"}` : null),
      item("source", r.members && r.n > 1 ? `${count(r.n, "op")}: ${[...new Set(r.members.map((x) => x.place))].slice(0, 12).join(", ")}${r.n > 12 ? ", ..." : ""}` : r.fullPlace),
      item("redistribution", r.moved && el("pre", {}, [r.moved.steps, `for ${r.moved.readers.join(", ")}`, `receives ${bytes(r.moved.received)}, at least ${bytes(r.moved.bound)} by any plan`].join("\n"))),
      item("why this layout", r.why.length ? el("pre", {}, r.why.join("\n")) : "the value has no layout of its own before lowering: it follows from its op"),
      item("alternatives", alternatives(r.why).length ? el("ul", { class: "plan" }, alternatives(r.why).map((line) => el("li", {}, line))) : r.why.length ? "no other layout was proposed" : null));
  }
  function draw() {
    const shown = check.checked ? grouped(rows, (r) => [r.kind, r.over, folded(r.name), r.bytes, r.started, r.phase].join(" "), ["seconds", "exposed", "measured", "waited"]) : rows;
    const each = (r) => r.bytes * (r.n ?? 1);
    holder.replaceChildren(sortedTable({
      label: "collectives", rows: shown, sort: "predicted", detail, most: 15,
      tools: el("label", {}, check, " Fold equal layers"),
      columns: [
        { name: "collective", get: (r) => r.kind, text: (r) => `${r.kind} ${r.name}`, node: (r) => el("span", {}, el("strong", {}, r.kind), " ", r.n > 1 ? folded(r.name) : r.name, timesOf(r)) },
        { name: "line", get: (r) => r.place, mono: true },
        { name: "over", get: (r) => r.over, text: (r) => r.over === "host" ? "host" : `${r.over} of ${r.ranks}` },
        { name: "part", get: (r) => r.phase },
        { name: "received", number: true, get: each, text: (r) => bytes(each(r)) },
        { name: "predicted", number: true, get: (r) => r.seconds, text: (r) => time(r.seconds) },
        p.measured && { name: "measured", number: true, get: (r) => r.measured, text: (r) => time(r.measured) },
        { name: "exposed", number: true, get: (r) => r.exposed, text: (r) => time(r.exposed),
          node: (r) => el("div", {}, time(r.exposed), el("div", {}, meter([{ name: "exposed", text: share(r.exposed / r.seconds), value: r.exposed, colour: "exposed" }, { name: "hidden", text: share(1 - r.exposed / r.seconds), value: Math.max(r.seconds - r.exposed, 0), colour: "hidden" }], Math.max(r.seconds, r.exposed)))) },
        { name: "share", number: true, get: (r) => r.seconds ? r.exposed / r.seconds : 0, text: (r) => r.exposed > r.seconds * 1.0005 ? ">100%" : share(r.seconds ? r.exposed / r.seconds : 0) },
        { name: "cause", wide: true, get: (r) => r.cause, text: (r) => plainPlaces(r.cause) },
      ],
    }));
  }
  draw();
  return { id: "communication", title: "Communication", short: "Communication", nodes: el("div", { class: "card" },
    el("h2", {}, "Communication"),
    el("p", { class: "note" }, `${count(rows.length, "collective")} take ${time(total)}, of which ${time(p.split.exposed)} are exposed: a device waits. A device may wait longer than a collective takes, where another one is on its links. Open one to see its cause, and what other layouts would cost.`),
    byAxes.map((g) => el("div", { class: "stack-row" }, el("span", {}, g.over === "host" ? "host copies" : `over ${g.over}`), stack([
      { name: "exposed", value: g.exposed, text: time(g.exposed), colour: "exposed" },
      { name: "hidden", value: Math.max(g.seconds - g.exposed, 0), text: time(Math.max(g.seconds - g.exposed, 0)), colour: "hidden", hatch: true }], byAxes[0].seconds),
    el("span", {}, bytes(g.bytes)))),
    holder) };
}

function parts(p) {
  const indices = p.ops.names.map((_, i) => i);
  const work = sum(p.ops.seconds);
  const row = (name, n, computing, moving, most, extra) => el("tr", {},
    el("td", { class: "mono" }, name, n > 1 ? el("span", { class: "times" }, ` × ${n}`) : null),
    el("td", { class: "number" }, time(computing + moving)), el("td", { class: "number" }, share((computing + moving) / work)),
    el("td", { style: "width:34%" }, meter([{ name: "computation", text: time(computing), value: computing, colour: "computation" }, { name: "communication", text: time(moving), value: moving, colour: "hidden" }], most)), extra);
  const table = (caption, label, rows) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, el("table", {}, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, label), el("th", { scope: "col", class: "number" }, "time"), el("th", { scope: "col", class: "number" }, "share"), el("th", { scope: "col" }, "computation, communication"))), el("tbody", {}, rows)));
  const moves = collectiveOf(p);
  const layers = p.layers.filter((l) => l.computation + l.communication > 0);
  const most = Math.max(...layers.map((l) => l.computation + l.communication));
  const kinds = new Map();
  for (const i of indices) {
    const k = opKind(p, i), at = kinds.get(k) ?? { name: k, n: 0, computing: 0, moving: 0 };
    at.n += 1;
    at[moves.has(i) ? "moving" : "computing"] += p.ops.seconds[i];
    kinds.set(k, at);
  }
  const byKind = [...kinds.values()].sort((a, b) => b.computing + b.moving - a.computing - a.moving);
  const dearest = grouped(indices.map((i) => ({ i, name: opName(p, i), seconds: p.ops.seconds[i], exposed: p.ops.exposed[i], measured: measuredOf(p, i) })),
    (r) => [opKind(p, r.i), folded(r.name), moves.has(r.i) ? moves.get(r.i).over : "", p.ops.phases[r.i]].join(" "), ["seconds", "exposed", "measured"])
    .sort((a, b) => b.seconds - a.seconds).slice(0, 10);
  const folds = layers.filter((l) => l.count > 2);
  const bars = (l) => {
    const entries = Object.entries(l.each).sort((a, b) => Number(a[0]) - Number(b[0]));
    const top = Math.max(...entries.map(([, s]) => s)), w = 600 / entries.length;
    return el("svg", { viewBox: "0 0 600 60", width: "100%", height: "60", preserveAspectRatio: "none", role: "img", "aria-label": `Time of each of the ${l.count} layers ${l.name}` },
      entries.map(([n, s], i) => hint(el("rect", { x: i * w + 0.5, y: 60 - 56 * s / top, width: Math.max(w - 1.5, 1), height: 56 * s / top, fill: "var(--computation)" }), l.name.replace("*", n), time(s))));
  };
  return { id: "parts", title: "Layers, kinds, the dearest ops", short: "Parts", nodes: [
    el("div", { class: "two" },
      el("div", { class: "card" }, el("h2", {}, "By layer"), el("p", { class: "note" }, "Equal layers together, by the names of values."),
        table("", "layer", layers.slice(0, 12).map((l) => row(l.name, l.count, l.computation, l.communication, most))),
        folds.map((l) => el("figure", { style: "margin:14px 0 0" }, bars(l), el("figcaption", { class: "note", style: "margin:2px 0 0" }, `Each of ${l.name}: ${time((l.computation + l.communication) / l.count)} on average`)))),
      el("div", { class: "card" }, el("h2", {}, "By kind"), el("p", { class: "note" }, "Seconds one after the other, so that hidden communication counts too."),
        table("", "kind", byKind.slice(0, 12).map((k) => row(k.name, k.n, k.computing, k.moving, byKind[0].computing + byKind[0].moving))))),
    el("div", { class: "card" }, el("h2", {}, "The ten dearest"), el("p", { class: "note" }, "Ops of equal layers together."),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "the ten dearest ops" }, el("table", {},
        el("thead", {}, el("tr", {}, ["op", "line", "part"].map((n) => el("th", { scope: "col" }, n)), ["time", p.measured && "measured", "exposed"].filter(Boolean).map((n) => el("th", { scope: "col", class: "number" }, n)), el("th", { scope: "col", class: "number" }, "share"), el("th", { scope: "col" }, "computation, communication"))),
        el("tbody", {}, dearest.map((r) => el("tr", {},
          el("td", { class: "mono" }, el("strong", {}, opKind(p, r.i)), " ", r.n > 1 ? folded(r.name) : r.name, timesOf(r), moves.has(r.i) ? ` over ${moves.get(r.i).over}` : ""),
          el("td", { class: "mono place" }, shortPlace(opPlace(p, r.i)), r.n > 1 ? " …" : ""), el("td", {}, p.strings.phases[p.ops.phases[r.i]]),
          el("td", { class: "number" }, time(r.seconds)), p.measured ? el("td", { class: "number" }, time(r.measured)) : null, el("td", { class: "number" }, moves.has(r.i) ? time(r.exposed) : "-"),
          el("td", { class: "number" }, share(r.seconds / work)),
          el("td", { style: "width:22%" }, meter([{ name: opKind(p, r.i), text: share(r.seconds / work), value: r.seconds, colour: moves.has(r.i) ? "hidden" : "computation" }], dearest[0].seconds)))))))) ] };
}

function meshSection(p) {
  const m = p.mesh, size = Math.min(m.size, 512);
  const holder = el("div");
  const strides = {};
  let below = 1;
  for (const [name, n] of [...m.axes].reverse()) { strides[name] = below; below *= n; }
  function groupOf(rank, axis) {
    const n = m.axes.find(([name]) => name === axis)[1];
    return rank - (Math.floor(rank / strides[axis]) % n) * strides[axis];
  }
  function draw(axis) {
    const units = m.levels.map((l) => l.count);
    const inner = Math.min(units[0], size), cell = size > 128 ? 16 : 34, gap = 4, pad = 12;
    const columns = inner <= 8 ? Math.min(inner, 4) : Math.min(8, Math.ceil(Math.sqrt(inner)));
    const rowsIn = Math.ceil(inner / columns), boxW = columns * (cell + gap) - gap + 2 * pad, boxH = rowsIn * (cell + gap) - gap + 2 * pad + 16;
    const boxes = Math.ceil(size / inner), perRow = Math.max(1, Math.min(boxes, Math.floor(1120 / (boxW + 12))));
    const svg = el("svg", { role: "img", "aria-label": `${count(m.size, "rank")} in units of ${inner}${axis ? `; ranks of one colour communicate over ${axis}` : ""}`, width: perRow * (boxW + 12), height: Math.ceil(boxes / perRow) * (boxH + 12), style: "max-width:100%;height:auto", viewBox: `0 0 ${perRow * (boxW + 12)} ${Math.ceil(boxes / perRow) * (boxH + 12)}` });
    const groups = axis ? [...new Set(Array.from({ length: size }, (_, r) => groupOf(r, axis)))] : [];
    for (let b = 0; b < boxes; b++) {
      const x = (b % perRow) * (boxW + 12), y = Math.floor(b / perRow) * (boxH + 12);
      svg.append(el("rect", { x: x + 1, y: y + 1, width: boxW, height: boxH, rx: 8, fill: "var(--inset)", stroke: "var(--strong-line)" }),
        el("text", { x: x + pad, y: y + 16, "font-size": 12, class: "soft" }, `${m.levels[0].name} ${b}`));
      for (let i = 0; i < inner && b * inner + i < size; i++) {
        const rank = b * inner + i, cx = x + pad + (i % columns) * (cell + gap), cy = y + pad + 14 + Math.floor(i / columns) * (cell + gap);
        const mine = axis ? groups.indexOf(groupOf(rank, axis)) : -1;
        const first = axis && groupOf(rank, axis) === groupOf(0, axis);
        const coordinates = m.axes.map(([n, s]) => `${n} ${Math.floor(rank / strides[n]) % s}`).join(", ");
        svg.append(hint(el("g", {}, el("rect", { x: cx, y: cy, width: cell, height: cell, rx: 4, fill: first ? "var(--shade-b)" : "var(--shade-a)", stroke: "var(--line)" }),
          cell > 20 ? el("text", { x: cx + cell / 2, y: cy + cell / 2 + 4, "text-anchor": "middle", "font-size": 12, style: first ? "fill:var(--card);font-weight:600" : null }, `${rank}`) : null), `rank ${rank}`, coordinates, axis ? `group ${mine} along ${axis}` : null));
      }
    }
    holder.replaceChildren(svg);
  }
  const named = m.axes.filter(([, n]) => n > 1).map(([n]) => n);
  draw(named.at(-1));
  const pick = named.length > 0 && el("div", { class: "controls" }, el("label", { for: "axis" }, "Show the group of rank 0 along "), el("select", { id: "axis", onchange: (e) => draw(e.target.value) }, named.map((n) => el("option", { selected: n === named.at(-1) }, n))));
  return { id: "mesh", title: "Mesh", short: "Mesh", nodes: el("div", { class: "card" },
    el("h2", {}, "Mesh"),
    el("p", { class: "note" }, `@${m.name} has ${count(m.size, "rank")}: ${meshText(m)}, major to minor. Neighbours share a ${m.levels[0].name}.${m.size > size ? ` The first ${size} are drawn.` : ""}`),
    pick, holder,
    el("h3", {}, "Links"),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "links" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "level"), ...["units", "bandwidth", "latency"].map((n) => el("th", { scope: "col", class: "number" }, n)), el("th", { scope: "col" }, "axes that cross it"))),
      el("tbody", {}, m.levels.map((l, i) => el("tr", {}, el("td", {}, l.name), el("td", { class: "number" }, `${l.count} ${i ? `${m.levels[i - 1].name}s` : "devices"}`), el("td", { class: "number" }, rate(l.bandwidth, "B/s")), el("td", { class: "number" }, time(l.latency)),
        el("td", {}, Object.entries(m.level_of_axis).filter(([, at]) => at === l.name).map(([n]) => n).join(", ") || "-"))))))) };
}

function layoutSection(p) {
  const rows = grouped(p.arguments.map((a) => ({ ...a, where: p.layouts[a.layout] })),
    (a) => [folded(a.name), a.role, a.dtype, a.shape.join("x"), a.layout].join(" "), []);
  const roles = { parameter: 0, state: 1, input: 2 };
  rows.sort((a, b) => roles[a.role] - roles[b.role] || b.bytes - a.bytes);
  const holder = el("div");
  function picture(a) {
    const { shards, axes, ranks } = a.where, split = shards.map((n, d) => [n, d]).filter(([n]) => n > 1).map(([, d]) => d);
    const vertical = split.length > 1 || (split.length === 1 && split[0] < Math.max(a.shape.length - 1, 1)) ? split[0] : undefined;
    const horizontal = split.find((d) => d !== vertical);
    const nv = vertical === undefined ? 1 : shards[vertical], nh = horizontal === undefined ? 1 : shards[horizontal];
    const W = 440, H = 300, left = 96, top = 34;
    const svg = el("svg", { viewBox: `0 0 ${W + left + 10} ${H + top + 10}`, width: W + left + 10, style: "max-width:100%;height:auto", role: "img", "aria-label": `${a.name} of ${a.shape.join(" x ")}, ${count(nv * nh, "shard")}` });
    const dim = (d) => `dimension ${d} of ${a.shape[d]}${shards[d] > 1 ? ` over ${axes[d]}` : ""}`;
    svg.append(el("text", { x: left + W / 2, y: 20, "text-anchor": "middle", "font-size": 13, class: "soft" }, horizontal !== undefined ? dim(horizontal) : a.shape.length > 1 ? dim(a.shape.length - 1) : ""),
      el("text", { x: 0, y: 0, transform: `translate(${left - 12} ${top + H / 2}) rotate(-90)`, "text-anchor": "middle", "font-size": 13, class: "soft" }, vertical !== undefined ? dim(vertical) : a.shape.length ? dim(0) : ""));
    for (let i = 0; i < nv; i++) for (let j = 0; j < nh; j++) {
      const holders = ranks.flatMap((r, k) => (vertical === undefined || r[vertical] === i) && (horizontal === undefined || r[horizontal] === j) ? [k] : []);
      const x = left + W * j / nh, y = top + H * i / nv, w = W / nh, h = H / nv;
      const fits = Math.floor((w - 8) / 7.2);
      const list = holders.join(" ");
      const text = list.length <= fits ? list : `${holders[0]} …`;
      const mine = holders.includes(0);
      svg.append(hint(el("g", {}, el("rect", { x: x + 1, y: y + 1, width: Math.max(w - 2, 1), height: Math.max(h - 2, 1), rx: 3, fill: mine ? "var(--shade-b)" : "var(--shade-a)", stroke: "var(--line)" }),
        h > 13 && w > 18 ? el("text", { x: x + w / 2, y: y + h / 2 + 4, "text-anchor": "middle", "font-size": 12, style: mine ? "fill:var(--card);font-weight:600" : null }, text) : null),
      `shard ${[i, j].slice(0, split.length || 1).join(", ")}`, `held by ${count(holders.length, "rank")}: ${holders.slice(0, 40).join(" ")}${holders.length > 40 ? " …" : ""}`));
    }
    const whole = a.bytes * shards.reduce((x, y) => x * y, 1);
    const copies = p.mesh.size / shards.reduce((x, y) => x * y, 1);
    holder.replaceChildren(el("h3", {}, el("code", {}, a.n > 1 ? folded(a.name) : a.name), timesOf(a)),
      el("p", { class: "note" }, `${a.role} ${a.dtype} ${a.shape.join(" × ") || "scalar"}, layout `, el("code", {}, a.where.text), `: each rank holds ${a.local.join(" × ") || "all"}, ${bytes(a.bytes)} of ${bytes(whole)}${copies > 1 ? `, in ${copies} copies` : ""}. Numbers are ranks; the shard of rank 0 stands out.${split.length > 2 ? " The first two split dimensions are drawn." : ""}`), svg);
  }
  const cuts = (a) => a.where.shards.filter((n) => n > 1).length;
  const first = rows.filter((a) => a.role === "parameter").sort((a, b) => Math.min(cuts(b), 2) - Math.min(cuts(a), 2))[0] ?? rows[0];
  if (!first) return null;
  picture(first);
  return { id: "layouts", title: "Layouts", short: "Layouts", nodes: el("div", { class: "card" },
    el("h2", {}, "Layouts: who holds which part"),
    el("p", { class: "note" }, "Choose an argument to see its shards. Equal layers are folded."),
    el("div", { class: "figure" },
      el("div", { style: "flex:1.25 1 460px" }, sortedTable({
        label: "arguments", rows, sort: "", most: 12, select: picture,
        columns: [
          { name: "argument", get: (a) => a.name, text: (a) => (a.n > 1 ? folded(a.name) : a.name), node: (a) => el("span", {}, a.n > 1 ? folded(a.name) : a.name, timesOf(a)) },
          { name: "role", get: (a) => a.role }, { name: "shape", get: (a) => a.shape.reduce((x, y) => x * y, 1), text: (a) => `${a.dtype} ${a.shape.join("×")}` },
          { name: "layout", get: (a) => a.where.text, mono: true },
          { name: "on a rank", number: true, get: (a) => a.bytes, text: (a) => bytes(a.bytes) },
        ],
      })),
      el("div", { "aria-live": "polite" }, holder))) };
}

function roofline(p) {
  const rates = Object.entries(p.mesh.rates);
  const moves = collectiveOf(p);
  const ops = p.ops.names.map((_, i) => i).filter((i) => !moves.has(i) && p.ops.flops[i] > 0 && p.ops.bytes[i] > 0);
  if (!ops.length || !rates.length) return null;
  const work = sum(ops.map((i) => p.ops.seconds[i]));
  const points = grouped(ops.map((i) => ({ i, name: opName(p, i), x: p.ops.flops[i] / p.ops.bytes[i], flops: p.ops.flops[i], seconds: p.ops.seconds[i], measured: measuredOf(p, i) })),
    (r) => [opKind(p, r.i), folded(r.name), r.flops, p.ops.bytes[r.i]].join(" "), ["flops", "seconds", "measured"])
    .map((r) => ({ ...r, y: r.flops / r.seconds, size: 3 + 14 * Math.sqrt(r.seconds / work), colour: "computation", title: `${opKind(p, r.i)} ${r.n > 1 ? folded(r.name) : r.name}${r.n > 1 ? ` × ${r.n}` : ""}`,
      lines: [`${digits(r.x)} flops per byte`, `${rate(r.flops / r.seconds, "flop/s")} predicted`, r.measured ? `${rate(r.flops / r.measured, "flop/s")} measured` : null, `${time(r.seconds)}, ${share(r.seconds / work)} of computation`, shortPlace(opPlace(p, r.i))] }));
  const measured = points.filter((r) => r.measured > 0).map((r) => ({ ...r, y: r.flops / r.measured, colour: "exposed" }));
  const used = new Set(p.arguments.map((a) => a.dtype).concat(p.narrowest));
  const ceilings = rates.filter(([n]) => used.has(n)).map(([name, r]) => ({ name, rate: r }));
  return { id: "roofline", title: "Roofline", short: "Roofline", nodes: el("div", { class: "card" },
    el("h2", {}, "Roofline of the ops"),
    el("p", { class: "note" }, `Left of the bend memory limits an op${p.mesh.memory_bandwidth ? ` (${rate(p.mesh.memory_bandwidth, "B/s")})` : ""}, right of it the flops. The area of a point is its share of the time. Predicted ops lie on a line, less the overhead of a call${measured.length ? "; measured ones are orange" : ""}.`),
    rooflineChart([...points, ...measured], ceilings.length ? ceilings : rates.map(([name, r]) => ({ name, rate: r })), p.mesh.memory_bandwidth, `Roofline of ${count(points.length, "group")} of ops; the table of ops has their flops, bytes and times`)) };
}

function searchSection(p) {
  const s = p.search;
  const number = (name, value) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "number" }, value));
  return { id: "search", title: "Search", short: "Search", nodes: el("div", { class: "card" },
    el("h2", {}, "Search"),
    el("p", { class: "note" }, "Objective: the plan's program, one op after the other. No plan of the candidates takes less than the bound."),
    el("div", { class: "figure" },
      el("div", { style: "flex:0 1 320px" }, el("table", {}, el("tbody", {},
        s.objective === undefined ? null : number("objective", time(s.objective)), s.bound === undefined ? null : number("bound", time(s.bound)),
        s.gap === undefined ? null : number("gap", share(s.gap)), s.presets ? number("plan of presets", s.presets) : null, s.smallest ? number("smallest objective", time(s.smallest)) : null, s.memory ? number("budget of memory", bytes(s.memory)) : null)),
      s.objective && s.bound ? el("div", { style: "margin-top:10px" }, stack([{ name: "bound", value: s.bound, text: time(s.bound), colour: "computation" }, { name: "gap", value: s.objective - s.bound, text: time(s.objective - s.bound), colour: "late" }], s.objective)) : null),
      el("div", { style: "flex:2 1 420px" }, p.candidates.length
        ? [el("p", { style: "margin:0 0 4px" }, `${count(p.candidates.length, "report")} of the search, in order`), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "candidates", style: "max-height:300px" }, el("pre", {}, p.candidates.join("\n")))]
        : el("p", { class: "note" }, "The search reported no candidate: the first plan was proven to be near enough.")))) };
}

function opsSection(p) {
  const moves = collectiveOf(p);
  const rows = p.ops.names.map((name, i) => ({ i, name: opName(p, i), kind: opKind(p, i), place: shortPlace(opPlace(p, i)), phase: p.strings.phases[p.ops.phases[i]], layer: p.strings.layers[p.ops.layers[i]], flops: p.ops.flops[i], bytes: p.ops.bytes[i], seconds: p.ops.seconds[i], measured: measuredOf(p, i), exposed: moves.has(i) ? p.ops.exposed[i] : null, again: p.ops.again[i] }));
  const holder = el("div");
  const check = el("input", { type: "checkbox", id: "fold-ops", checked: true, onchange: draw });
  function draw() {
    const shown = check.checked ? grouped(rows, (r) => [r.kind, folded(r.name), folded(r.layer), r.phase, r.again].join(" "), ["flops", "bytes", "seconds", "measured", "exposed"]) : rows;
    holder.replaceChildren(sortedTable({
      label: "ops", rows: shown, sort: "predicted", most: 25, tools: el("label", {}, check, " Fold equal layers"),
      columns: [
        { name: "op", get: (r) => r.kind, text: (r) => `${r.kind} ${r.name}`, node: (r) => el("span", { class: "mono" }, el("strong", {}, r.kind), " ", r.n > 1 ? folded(r.name) : r.name, timesOf(r), r.again ? el("span", { class: "times" }, " again") : null) },
        { name: "line", get: (r) => r.place, mono: true }, { name: "layer", get: (r) => r.layer, text: (r) => r.n > 1 ? folded(r.layer) : r.layer }, { name: "part", get: (r) => r.phase },
        { name: "flops", number: true, get: (r) => r.flops, text: (r) => r.flops ? rate(r.flops, "flop") : "-" },
        { name: "bytes", number: true, get: (r) => r.bytes, text: (r) => bytes(r.bytes) },
        { name: "predicted", number: true, get: (r) => r.seconds, text: (r) => time(r.seconds) },
        p.measured && { name: "measured", number: true, get: (r) => r.measured, text: (r) => time(r.measured) },
        p.measured && { name: "difference", number: true, get: (r) => r.measured === null ? null : r.measured - r.seconds, text: (r) => r.measured === null ? "-" : time(r.measured - r.seconds) },
        { name: "exposed", number: true, get: (r) => r.exposed, text: (r) => r.exposed === null ? "-" : time(r.exposed) },
      ],
    }));
  }
  draw();
  return { id: "ops", title: "All ops", short: "Ops", nodes: el("div", { class: "card" }, el("h2", {}, "All ops"),
    el("p", { class: "note" }, "Of a computation the bytes that it touches, of a collective those that a device receives; in all runs of a step."), holder) };
}
