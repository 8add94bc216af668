"use strict";
// Everything here adds to a page that is complete without it.
const kept = { pairs: new Map(), details: false, step: null };
const make = (tag, values = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), values);
  element.append(...children);
  return element;
};
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// larger images in a dialog
const large = make("img", { alt: "" });
const words = make("p");
const dialog = make("dialog", { ariaLabel: "larger image" });
const button = (text, label, action) => {
  const made = make("button", { type: "button", textContent: text, ariaLabel: label });
  made.addEventListener("click", action);
  return made;
};
let rows = [], row = 0, column = 0;
const show = () => {
  const link = rows[row][column], small = link.querySelector("img");
  const name = link.parentElement.querySelector("figcaption").textContent;
  large.onerror = () => { large.onerror = null; large.src = small.src; };
  large.src = link.href;
  large.alt = small.alt;
  large.style.aspectRatio = small.style.aspectRatio;
  words.textContent = `${name} · ${column + 1} of ${rows[row].length} · ${small.alt}`;
};
const move = (down, right) => {
  row = Math.min(Math.max(row + down, 0), rows.length - 1);
  column = Math.min(Math.max(column + right, 0), rows[row].length - 1);
  show();
};
dialog.append(
  make("div", { className: "stage" }, large),
  make("div", { className: "bar" },
    button("‹", "newer", () => move(0, -1)), button("›", "older", () => move(0, 1)),
    words, button("×", "close", () => dialog.close())),
);
document.body.append(dialog);
const keys = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
dialog.addEventListener("keydown", (event) => {
  if (!keys[event.key]) return;
  event.preventDefault();
  move(...keys[event.key]);
});
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
let touched = null;
dialog.addEventListener("touchstart", (event) => { touched = event.touches[0].clientX; }, { passive: true });
dialog.addEventListener("touchend", (event) => {
  const way = event.changedTouches[0].clientX - touched;
  if (Math.abs(way) > 40) move(0, way < 0 ? 1 : -1);
});
const open = (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  rows = all(".strip").map((strip) => all("a", strip));
  row = rows.findIndex((links) => links.includes(event.currentTarget));
  column = rows[row].indexOf(event.currentTarget);
  show();
  dialog.showModal();
};

// before and after: two pictures of a prompt, one above the other
const compare = (article, index) => {
  const figures = all("figure", article);
  if (figures.length < 2) return;
  const key = `${index} ${article.dataset.prompt}`;
  const pair = kept.pairs.get(key) ?? { at: 50 };
  kept.pairs.set(key, pair);
  const names = figures.map((figure) => figure.querySelector("figcaption").textContent);
  const box = make("div", { className: "compare" });
  const images = ["after", "before"].map((side) => make("img", { className: side, alt: "" }));
  const slider = make("input", { type: "range", min: 0, max: 100, value: pair.at });
  const choices = ["before", "after"].map((side) => {
    const options = names.map((name) => make("option", { textContent: name }));
    const select = make("select", { ariaLabel: side }, ...options);
    // without a choice the newest stays the newest while training goes on
    const wanted = names.indexOf(pair[side]);
    const oldest = names.findLastIndex((name) => name !== "original");
    select.selectedIndex = wanted >= 0 ? wanted : side === "after" ? 0 : oldest || names.length - 1;
    select.addEventListener("change", () => { pair[side] = select.value; draw(); select.blur(); });
    return select;
  });
  const draw = () => {
    const [before, after] = choices.map((select) => figures[select.selectedIndex].querySelector("img"));
    [images[0].src, images[1].src] = [after.src, before.src];
    box.style.aspectRatio = after.style.aspectRatio;
    slider.ariaLabel = `${choices[0].value} on the left, ${choices[1].value} on the right`;
    box.style.setProperty("--at", `${slider.value}%`);
  };
  slider.addEventListener("input", () => { pair.at = slider.value; draw(); });
  box.append(...images, make("i"), slider);
  draw();
  const legend = make("div", { className: "choices" }, choices[0], choices[1]);
  article.querySelector(".row").prepend(make("div", { className: "pair" }, box, legend));
};

// values under the pointer, the same step in all charts
const number = (value) => value === 0 || Math.abs(value) >= 1e-3
  ? Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 })
  : value.toExponential(2).replace(/\.?0+e/, "e");
const nearest = (steps, step) => {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
};
const charts = () => all(".chart").map((figure) => ({
  figure, last: Math.max(Number(figure.dataset.last), 1), series: JSON.parse(figure.dataset.series),
}));
let drawn = [];
const point = (step) => {
  kept.step = step;
  for (const { figure, last, series } of drawn) {
    const output = figure.querySelector("output"), cursor = figure.querySelector(".cursor");
    cursor.hidden = step === null;
    output.replaceChildren();
    if (step === null) continue;
    cursor.style.left = `${100 * Math.min(step / last, 1)}%`;
    output.append(make("span", { textContent: `step ${step.toLocaleString("en")}` }));
    for (const [name, kind, steps, values] of series) {
      const at = nearest(steps, step);
      const far = steps.length > 1 ? (steps.at(-1) - steps[0]) / (steps.length - 1) : last;
      if (Math.abs(steps[at] - step) > 1.5 * far) continue;
      const beside = steps[at] === step ? "" : ` (${steps[at].toLocaleString("en")})`;
      output.append(make("span", { className: kind, textContent: `${name} ${number(values[at])}${beside}` }));
    }
  }
};
const watch = (chart) => {
  const plot = chart.figure.querySelector(".plot"), steps = chart.series[0][2];
  const at = (event) => {
    const { left, width } = plot.getBoundingClientRect();
    const step = (event.clientX - left) / width * chart.last;
    point(steps[nearest(steps, step)]);
  };
  plot.addEventListener("pointermove", at);
  plot.addEventListener("pointerdown", at);
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(null); });
  plot.addEventListener("blur", () => point(null));
  plot.addEventListener("keydown", (event) => {
    const now = kept.step === null ? steps.length : nearest(steps, kept.step);
    const wide = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: now - wide, ArrowRight: now + wide, Home: 0, End: steps.length }[event.key];
    if (event.key === "Escape") point(null);
    if (to === undefined) return;
    event.preventDefault();
    point(steps[Math.min(Math.max(to, 0), steps.length - 1)]);
  });
};

const begin = () => {
  all("article").forEach(compare);
  all(".strip a").forEach((link) => link.addEventListener("click", open));
  drawn = charts();
  drawn.forEach(watch);
  point(kept.step);
  const details = document.querySelector("details");
  if (!details) return;
  details.open = kept.details;
  details.addEventListener("toggle", () => { kept.details = details.open; });
};
begin();

// a run that goes on: the page takes over what has changed, and waits while someone uses it
let held = false, used = -Infinity;
const use = () => { used = performance.now(); };
addEventListener("pointerdown", () => { held = true; });
for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { held = false; });
for (const name of ["pointerdown", "keydown", "input"]) addEventListener(name, use);
const isUsed = () => held || dialog.open || performance.now() - used < 3000
  || document.activeElement?.tagName === "SELECT" || !getSelection().isCollapsed;
const focusable = () => all("input[type=range], .plot, summary");
const renew = async () => {
  const { seconds } = document.querySelector("main").dataset;
  if (!seconds) return;
  if (!isUsed() && !document.hidden) {
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      if (answer.ok && fresh && !isUsed()) {
        const places = all(".strip").map((strip) => strip.scrollLeft);
        const focused = focusable().indexOf(document.activeElement);
        const step = kept.step;
        document.querySelector("main").replaceWith(fresh);
        kept.step = step;
        begin();
        focusable()[focused]?.focus({ preventScroll: true });
        all(".strip").forEach((strip, index) => { strip.scrollLeft = places[index] ?? 0; });
      }
    } catch { /* the run has ended or is out of reach: what is here stays */ }
  }
  setTimeout(renew, 1000 * seconds);
};
setTimeout(renew, 1000 * (document.querySelector("main").dataset.seconds ?? 0));
