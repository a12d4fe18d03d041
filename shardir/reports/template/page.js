// The page: the choice of a program, the sections, the colours, printing.

const report = JSON.parse(document.getElementById("data").textContent);
const themes = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";

function applyTheme(print = false) {
  const dark = !print && (theme === "dark" || (theme === "auto" && system.matches));
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.documentElement.classList.toggle("printing", print); // charts need a width before paper has one
  const button = document.getElementById("theme");
  button.textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[theme];
  button.title = theme === "auto" ? "The colours are those of the system" : `The colours are ${theme}`;
  redraws.forEach((redraw) => redraw());
}

function draw(index) {
  redraws.clear();
  const program = report.programs[index];
  const found = sections(report, program, index, (i) => { draw(i); document.getElementById("overview").scrollIntoView(); });
  const main = document.getElementById("main");
  main.replaceChildren(...found.map(({ id, title, nodes }) => el("section", { id, "aria-label": title }, nodes)));
  document.getElementById("nav").replaceChildren(...found.filter((s) => s.short).map((s) => el("a", { href: `#${s.id}` }, s.short)));
}

document.getElementById("title").textContent = shortPlace(report.title);
document.getElementById("footer").textContent =
  `Estimates of shardir ${report.version} by its cost model, one for each thing: the same as of shard-opt --cost, --trace and --explain. Zoom timelines by dragging, with ctrl and the wheel, or with + and - when they have the focus.`;
document.getElementById("theme").addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  applyTheme();
});
system.addEventListener("change", () => applyTheme());
addEventListener("beforeprint", () => applyTheme(true));
addEventListener("afterprint", () => applyTheme());
addEventListener("scroll", tip.hide, { passive: true });
applyTheme();
draw(0);
document.documentElement.dataset.ready = "true";
