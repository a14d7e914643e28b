// Curves over the steps of a run, as inline SVG.

import { h, say, svg } from "/static/dom.js";

const HEIGHT = 200;
const LEFT = 62;
const FLOOR = HEIGHT - 22;
const INSIDE = 6; // from the axis to the first step
const RIGHT = 20;

/**
 * A picture whose `update` draws the curves anew: `series` are {name, kind, values}, a value for each
 * of `numbers`, the steps, or null. Pointing at a step, or the arrow keys, read it out beside the
 * title; else that is the last one.
 */
export function curves({ title, format, fromZero = false }) {
  const reading = h("p", { class: "reading", "aria-live": "off" });
  const drawing = svg("svg", { height: HEIGHT, role: "img", tabindex: 0 });
  const legend = h("ul", { class: "legend" });
  const element = h("section", { "aria-label": title }, h("header", {}, h("h2", { text: title }), reading), h("div", { class: "columns curves" }, drawing, legend));
  let shown = null;
  let chosen = null; // an index into the steps; null is the last one

  function update({ numbers, series, width, logarithmic = false }) {
    const values = series.flatMap((line) => line.values).filter((value) => value !== null && (!logarithmic || value > 0));
    const y = logarithmic && values.length ? powers(values) : even(values, fromZero);
    const across = ends(numbers);
    shown = { numbers, series, width, y, across };
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.setAttribute("width", width);
    drawing.setAttribute("aria-label", `${title}: ${said(numbers.length - 1)}. Left and right arrow keys read single steps.`);
    drawing.replaceChildren(
      ...y.ticks.flatMap((value, index) => {
        const at = place(value, y) + 0.5;
        return [svg("line", { class: index ? "grid" : "axis", x1: LEFT, x2: width, y1: at, y2: at }), svg("text", { class: "tick", x: LEFT - 8, y: at + 4, "text-anchor": "end" }, value ? format(value) : "0")];
      }),
      ...stepTicks(across, width).map((number) => svg("text", { class: "tick", x: along(number), y: HEIGHT - 5, "text-anchor": "middle" }, String(number))),
      svg("line", { class: "axis", visibility: "hidden", y1: 6, y2: FLOOR }),
      ...series.map((line) => svg("path", { class: line.kind, d: path(line.values) })),
      ...series.map((line) => svg("circle", { class: line.kind, r: 3.2 })));
    legend.replaceChildren(...(series.length > 1 ? series : []).map((line) => h("li", { class: line.kind }, h("i"), h("span", { class: "name", text: line.name }))));
    mark();
  }

  const inner = () => shown.width - LEFT - INSIDE - RIGHT;
  const along = (number) => LEFT + INSIDE + (inner() * (number - shown.across[0])) / Math.max(1, shown.across[1] - shown.across[0]);

  /** A line through all points, of which each pixel's lowest and highest are enough. */
  function path(values) {
    const points = [];
    let pixel = null;
    values.forEach((value, index) => {
      const at = value === null ? null : place(value, shown.y);
      if (at === null || !Number.isFinite(at)) {
        points.push(null);
        return;
      }
      const x = along(shown.numbers[index]);
      if (pixel && points.at(-1) && Math.round(x) === pixel.x) {
        if (at < pixel.low[1]) pixel.low = [x, at];
        if (at > pixel.high[1]) pixel.high = [x, at];
        points.splice(pixel.index, points.length, ...[pixel.low, pixel.high].sort((a, b) => a[0] - b[0]));
      } else {
        pixel = { x: Math.round(x), index: points.length, low: [x, at], high: [x, at] };
        points.push([x, at]);
      }
    });
    return points.map((point, index) => point && `${points[index - 1] ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`).filter(Boolean).join("");
  }

  function said(index) {
    const parts = shown.series.map((line) => `${line.name && `${line.name} `}${line.values[index] === null ? "none" : format(line.values[index])}`);
    return `${parts.join(", ")} at step ${shown.numbers[index]}`;
  }

  /** Mark the step that is read out. */
  function mark() {
    const index = Math.min(chosen ?? Infinity, shown.numbers.length - 1);
    const x = along(shown.numbers[index]);
    const line = drawing.querySelector("line[visibility]");
    line.setAttribute("visibility", chosen === null ? "hidden" : "visible");
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    drawing.querySelectorAll("circle").forEach((circle, which) => {
      const at = shown.series[which].values[index];
      const y = at === null ? NaN : place(at, shown.y);
      circle.setAttribute("visibility", Number.isFinite(y) ? "visible" : "hidden");
      circle.setAttribute("cx", x);
      if (Number.isFinite(y)) circle.setAttribute("cy", y);
    });
    say(reading, said(index));
  }

  function choose(index) {
    chosen = index === null ? null : Math.max(0, Math.min(shown.numbers.length - 1, index));
    mark();
  }

  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) * shown.width) / box.width;
    const number = shown.across[0] + ((x - LEFT - INSIDE) / inner()) * (shown.across[1] - shown.across[0]);
    choose(nearest(shown.numbers, number));
  });
  drawing.addEventListener("pointerleave", () => choose(null));
  drawing.addEventListener("blur", () => {
    reading.setAttribute("aria-live", "off");
    choose(null);
  });
  drawing.addEventListener("keydown", (event) => {
    const last = shown.numbers.length - 1;
    const to = { ArrowLeft: (chosen ?? last) - 1, ArrowRight: (chosen ?? last) + 1, Home: 0, End: null, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    reading.setAttribute("aria-live", "polite");
    choose(to);
  });
  return { element, update };
}

/** Where a value is, from the top of the picture. */
function place(value, { low, high, of }) {
  return FLOOR - ((FLOOR - 10) * (of(value) - of(low))) / (of(high) - of(low));
}

function ends(numbers) {
  return [numbers[0], numbers.at(-1)];
}

/** A linear scale with round ticks. */
function even(values, fromZero) {
  let low = Math.min(...minmax(values), fromZero ? 0 : Infinity);
  let high = Math.max(...minmax(values), fromZero ? 0 : -Infinity);
  if (high - low < 1e-9 * Math.max(Math.abs(low), Math.abs(high))) [low, high] = [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  if (low === high) high = low + 1;
  const step = roundStep((high - low) / 3);
  low = Math.floor(low / step + 1e-9) * step;
  high = Math.ceil(high / step - 1e-9) * step;
  const ticks = Array.from({ length: Math.round((high - low) / step) + 1 }, (_, index) => Number((low + index * step).toPrecision(12)));
  return { low, high, ticks, of: (value) => value };
}

/** A logarithmic one, with ticks at 1, 2 and 5 times a power of ten, as many as there is room for. */
function powers(values) {
  const [least, most] = minmax(values);
  const low = 10 ** Math.floor(Math.log10(least));
  const high = 10 ** Math.max(Math.floor(Math.log10(least)) + 1, Math.ceil(Math.log10(most)));
  const decades = Math.round(Math.log10(high / low));
  const every = Math.ceil(decades / 4);
  const ticks = [];
  for (let decade = 0; decade <= decades; decade += every) {
    for (const times of decades < 3 && decade < decades ? [1, 2, 5] : [1]) ticks.push(Number((low * 10 ** decade * times).toPrecision(12)));
  }
  return { low, high, ticks, of: Math.log10 };
}

function minmax(values) {
  return values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [0, 1];
}

/** The smallest of 1, 2 or 5 times a power of ten that is as large. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= least * (1 - 1e-9));
}

function stepTicks([first, last], width) {
  const step = Math.max(1, roundStep((last - first) / Math.max(2, Math.floor(width / 80)) || 1));
  const ticks = [];
  for (let number = Math.ceil(first / step) * step; number <= last; number += step) ticks.push(number);
  return ticks.length > 1 || first === last ? ticks : [first, last];
}

/** The index of the number that is nearest; numbers are in order. */
function nearest(numbers, wanted) {
  let low = 0;
  let high = numbers.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - numbers[low - 1] < numbers[low] - wanted ? low - 1 : low;
}
