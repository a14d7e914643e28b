// Who used how much of the box, over a day, a week or a month.

import { get } from "/static/api.js";
import { box } from "/static/box.js";
import { BYTES, SECONDS, columns, hue } from "/static/charts.js";
import { h } from "/static/dom.js";
import { bytes, duration, percent } from "/static/format.js";
import { problemBlock } from "/static/problem.js";

const SPANS = [["day", "Day"], ["week", "Week"], ["month", "Month"]];
const AGAIN_MS = 60_000;

export function use() {
  let span = "day";
  let found = null;
  const body = h("div", { class: "charts" }, h("div", { class: "skeletons", "aria-hidden": "true" }, h("i"), h("i")));
  const choice = h("div", { class: "choice", role: "group", "aria-label": "Span of time" }, ...SPANS.map(([value, text]) =>
    h("button", { type: "button", text, "aria-pressed": String(value === span), on: { click: (event) => choose(event.currentTarget, value) } })));
  const element = h("div", { class: "view" }, h("div", { class: "head" }, h("h1", { tabindex: -1, text: "Use" }), choice), body);

  async function load() {
    try {
      found = await get(`/v1/usage?span=${span}`);
      draw();
    } catch (problem) {
      body.replaceChildren(problemBlock(problem, { again: load }));
    }
  }

  function choose(button, value) {
    span = value;
    for (const other of choice.children) other.setAttribute("aria-pressed", String(other === button));
    load();
  }

  function draw() {
    if (!found || !element.isConnected) return;
    if (body.querySelector(".columns svg:focus")) {
      // Whoever reads a picture by keyboard keeps it, and their place in it, until they leave it.
      body.addEventListener("focusout", draw, { once: true });
      return;
    }
    if (!found.owners.length) {
      body.replaceChildren(h("div", { class: "empty" }, h("p", { text: "Nobody used the box in this time." }), h("p", { text: "Device seconds count from when a worker takes a job to its end, and show up here at once." })));
      return;
    }
    const labels = found.owners[0].device_s_by_bucket.map((_, index) => label(found, index));
    const width = Math.max(280, element.clientWidth - 30);
    const lines = found.owners.map((line, index) => ({ ...line, name: line.owner ?? "everybody else", kind: hue(index, line.owner) }));
    const pictures = [
      ["Device time", "device_s_by_bucket", duration, SECONDS],
      ["Results", "result_bytes_by_bucket", bytes, BYTES],
    ].map(([title, field, format, steps]) =>
      columns({ title, labels, format, steps, width, series: lines.map((line) => ({ name: line.name, kind: line.kind, values: line[field] })) }));
    body.replaceChildren(...pictures, totals(lines));
  }

  const timer = setInterval(load, AGAIN_MS);
  const observer = new ResizeObserver(draw);
  observer.observe(element);
  load();
  return { element, update() {}, title: "Use", leave: () => { clearInterval(timer); observer.disconnect(); } };
}

function totals(lines) {
  const sum = lines.reduce((total, line) => total + line.device_s, 0);
  return h("section", { "aria-labelledby": "people" },
    h("h2", { id: "people", text: box.you.admin ? "By person" : "Yours, and all the rest" }),
    h("table", { class: "people" },
      h("thead", {}, h("tr", {}, ...["Person", "Share of device time", "Device time", "Results", "Jobs", "Kept now"].map((name, index) => h("th", { scope: "col", class: index > 1 ? "number" : null, text: name })))),
      h("tbody", {}, ...lines.map((line) => h("tr", {},
        h("th", { scope: "row", class: line.kind }, h("i"), line.name),
        h("td", { class: "share" }, h("span", { class: `measure ${line.kind}`, style: { "--share": sum ? line.device_s / sum : 0 } }), h("span", { text: sum ? percent(line.device_s / sum) : "–" })),
        h("td", { class: "number", "data-label": "Device time", text: duration(line.device_s) }),
        h("td", { class: "number", "data-label": "Results", text: bytes(line.result_bytes) }),
        h("td", { class: "number", "data-label": "Jobs", text: String(line.num_jobs) }),
        h("td", { class: "number", "data-label": "Kept now", text: bytes(line.kept_bytes) }))))));
}

/** What a bucket is called: the hour it begins in, or its day. */
function label(view, index) {
  const begin = new Date((view.begins_s + index * view.bucket_s) * 1000);
  if (view.span === "day") return begin.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
  if (view.span === "week") return begin.toLocaleString(undefined, { weekday: "short", hour: "2-digit" });
  return begin.toLocaleDateString(undefined, { day: "numeric", month: "short" });
}
