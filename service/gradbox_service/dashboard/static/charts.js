// Pictures drawn from numbers, as inline SVG.

import { h, svg } from "/static/dom.js";

const NUM_HUES = 6;
const LABEL_WIDTH = 66;

/** The class of the n-th owner's colour; null, all others together, is grey. */
export function hue(index, owner) {
  return owner === null ? "hue-rest" : `hue-${index % NUM_HUES}`;
}

/** Sixty minutes as bars, each a percentage; returns the element and what updates it. */
export function minutes() {
  const bars = Array.from({ length: 60 }, (_, index) => svg("rect", { x: index * 4, width: 3, y: 40, height: 0 }));
  const element = svg("svg", { class: "minutes", viewBox: "0 0 239 41", preserveAspectRatio: "none", role: "img" },
    svg("line", { x1: 0, x2: 239, y1: 40.5, y2: 40.5 }), ...bars);
  return {
    element,
    update(busy, label) {
      element.setAttribute("aria-label", label);
      bars.forEach((bar, index) => {
        const height = busy[index] ? Math.max(1.5, 0.39 * busy[index]) : 0;
        bar.setAttribute("height", height);
        bar.setAttribute("y", 40 - height);
      });
    },
  };
}

/** A memory's parts side by side; `parts` are {name, bytes, kind}, what is left of `total` is free. */
export function stack(parts, total, label) {
  let x = 0;
  const element = svg("svg", { class: "stack", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": label });
  for (const part of parts) {
    const width = (1000 * part.bytes) / total;
    element.append(svg("rect", { class: part.kind, x, width: Math.max(width - 2, 1.5), height: 10 }));
    x += Math.max(width, 2);
  }
  return element;
}

/**
 * Stacked columns over time. `series` are {name, kind, values}; `labels` name the columns.
 * Pointing at a column, or the arrow keys, read it out beside the title. `steps` are round values
 * for the upper line.
 */
export function columns({ series, labels, format, steps, title, width }) {
  const height = 190;
  const left = 62;
  const floor = height - 22;
  const totals = labels.map((_, index) => series.reduce((sum, line) => sum + line.values[index], 0));
  const top = round(Math.max(...totals, 0), steps);
  const step = (width - left) / labels.length;
  const scale = (value) => (top ? ((floor - 10) * value) / top : 0);
  const reading = h("p", { class: "reading", "aria-live": "off" });
  const marker = svg("rect", { class: "marker", y: 10, height: floor - 10, width: step, visibility: "hidden" });
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": summary(title, totals, labels, format), tabindex: 0 });
  for (const share of [0, 0.5, 1]) {
    const y = floor - scale(top * share) + 0.5;
    drawing.append(svg("line", { class: share ? "grid" : "axis", x1: left, x2: width, y1: y, y2: y }));
    if (top) drawing.append(svg("text", { class: "tick", x: left - 8, y: y + 4, "text-anchor": "end" }, share ? format(top * share) : "0"));
  }
  drawing.append(marker);
  labels.forEach((label, index) => {
    let y = floor;
    for (const line of series) {
      const size = scale(line.values[index]);
      if (!size) continue;
      drawing.append(svg("rect", { class: line.kind, x: left + index * step + step * 0.14, width: step * 0.72, y: y - size, height: Math.max(size - 1, 0.8) }));
      y -= size;
    }
    const every = Math.ceil(labels.length / Math.max(2, Math.floor((width - left) / 90)));
    const fits = index * step + LABEL_WIDTH < width - left;
    if (index % every === 0 && fits) {
      drawing.append(svg("text", { class: "tick", x: left + index * step + step * 0.14, y: height - 5 }, label));
    }
  });
  let chosen = labels.length - 1;
  const choose = (index) => {
    chosen = Math.max(0, Math.min(labels.length - 1, index));
    marker.setAttribute("x", left + chosen * step);
    marker.setAttribute("visibility", "visible");
    const parts = series.filter((line) => line.values[chosen] > 0).map((line) => `${line.name} ${format(line.values[chosen])}`);
    reading.textContent = `${labels[chosen]}: ${parts.join(", ") || "nothing"}`;
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    choose(Math.floor((((event.clientX - box.left) * width) / box.width - left) / step));
  });
  drawing.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    reading.setAttribute("aria-live", "polite");
    choose(chosen + move);
  });
  return h("section", { "aria-label": title }, h("header", {}, h("h2", { text: title }), reading), h("div", { class: "columns" }, drawing));
}

function summary(title, totals, labels, format) {
  const sum = totals.reduce((a, b) => a + b, 0);
  const most = totals.indexOf(Math.max(...totals));
  return sum ? `${title}: ${format(sum)} in all, most in ${labels[most]}. Left and right arrow keys read single columns.` : `${title}: nothing yet`;
}

/** Round values whose halves are round, too: of seconds, and of bytes. */
export const SECONDS = [1, 2, 4, 10, 20, 60, 120, 240, 600, 1200, 3600, 7200, 14400, 28800, 43200, 86400].concat(
  Array.from({ length: 400 }, (_, index) => (index + 1) * 2 * 86400));
export const BYTES = Array.from({ length: 60 }, (_, power) => 2 ** power);

function round(value, steps) {
  return value > 0 ? steps.find((step) => step >= value) ?? value : 0;
}
