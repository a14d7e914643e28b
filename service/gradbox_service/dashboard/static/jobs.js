// Jobs of the caller, or of everybody for the box's owner: those that run or wait live, the others
// as the service lists them.

import { box, now } from "/static/box.js";
import { cancelButton } from "/static/cancel.js";
import { announce, h, keyed, say, set } from "/static/dom.js";
import { ago, bytes, duration, moment, ticking, words } from "/static/format.js";
import { listing } from "/static/listing.js";

const FILTERS = [["", "All"], ["running", "Running"], ["queued", "Waiting"], ["done", "Done"], ["failed", "Failed"], ["cancelled", "Cancelled"]];

export function jobs() {
  const list = listing("jobs", update, "gradbox jobs list --limit N");
  let state = "";
  const rows = h("tbody");
  const owner = h("th", { scope: "col", text: "Owner" });
  const table = h("table", { class: "jobs" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col", text: "Job" }), owner,
      ...["Model", "State", "Submitted", "Took", "Result"].map((name) => h("th", { scope: "col", text: name })), h("th", { scope: "col" }, h("span", { class: "unseen", text: "Actions" })))),
    rows);
  const empty = h("div", { class: "empty" });
  const waits = h("div", { class: "skeletons", "aria-hidden": "true" }, h("i"), h("i"));
  const filters = h("div", { class: "choice", role: "group", "aria-label": "State" }, ...FILTERS.map(([value, text]) =>
    h("button", { type: "button", text, "aria-pressed": String(value === state), on: { click: (event) => filter(event.currentTarget, value) } })));
  const element = h("div", { class: "view" },
    h("div", { class: "head" }, h("h1", { tabindex: -1, text: "Jobs" }), filters, list.check),
    list.trouble, waits, table, list.behind, empty);

  function filter(button, value) {
    state = value;
    list.query = state ? { state } : {};
    for (const other of filters.children) other.setAttribute("aria-pressed", String(other === button));
    list.load();
  }

  function update() {
    const known = new Set(list.items.map((job) => job.id));
    const live = new Map();
    const oldest_s = list.more ? list.items.at(-1).created_s : -Infinity;
    for (const job of box.jobs.values()) {
      if (!job.id || !(list.everybodys || job.owner === box.you.name)) continue;
      live.set(job.id, job);
      if (list.loaded && !known.has(job.id) && job.created_s >= oldest_s && (!state || state === job.state)) list.soon();
    }
    const shown = list.items.map((job) => ({ ...job, ...live.get(job.id) })).filter((job) => !state || job.state === state);
    keyed(rows, shown, { key: (job) => job.id, make: row, update: updateRow });
    for (const cell of [owner, ...rows.querySelectorAll(".owner")]) cell.hidden = !list.everybodys;
    waits.hidden = list.loaded || list.trouble.childElementCount > 0;
    table.hidden = shown.length === 0;
    list.behind.hidden = !list.more || table.hidden;
    empty.hidden = !list.loaded || shown.length > 0;
    if (!empty.hidden) empty.replaceChildren(...nothing(state));
  }

  list.load();
  return { element, update, title: "Jobs", leave: list.leave };
}

function nothing(state) {
  if (state) return [h("p", { text: `No job of yours is ${state === "queued" ? "waiting" : state}.` })];
  return [
    h("p", { text: "You have no jobs yet." }),
    h("p", {}, "On your laptop: ", h("code", { text: "pip install -c constraints.txt '.[torch]'" }), " in a clone of gradbox, then ", h("code", { text: `gradbox login --url ${location.origin}` }), " with the token that you logged in with here. What you submit then shows up by itself."),
  ];
}

function row(job) {
  const element = h("tr", {},
    h("th", { scope: "row" }, h("a", { class: "job-name", href: `#/jobs/${job.id}` }), h("span", { class: "kind" })),
    h("td", { class: "owner", "data-label": "Owner" }),
    h("td", { class: "model", "data-label": "Model" }),
    h("td", {}, h("span", { class: "state" }), h("span", { class: "phase" })),
    h("td", { class: "when", "data-label": "Submitted" }),
    h("td", { class: "time", "data-label": "Took" }),
    h("td", { class: "size", "data-label": "Result" }),
    h("td", { class: "act" }));
  return element;
}

function updateRow(element, job) {
  const part = (name) => element.querySelector(name);
  const over = ["done", "failed", "cancelled"].includes(job.state);
  const before = element.dataset.state;
  if (over && before && before !== job.state) announce(`${job.name || words(job.computation)} is ${job.state}`);
  element.dataset.state = job.state;
  say(part(".job-name"), job.name || words(job.computation));
  say(part(".kind"), job.name ? words(job.computation) : job.id.slice(0, 8));
  say(part(".owner"), job.owner);
  say(part(".model"), job.model);
  say(part(".state"), job.state);
  set(part(".state"), "data-state", job.state);
  const progress = job.progress;
  say(part(".phase"), job.state === "failed" && job.error ? job.error.title : job.state === "running" && progress ? `${progress.phase} ${progress.done} / ${progress.total}` : "");
  say(part(".when"), ago(now() - job.created_s));
  set(part(".when"), "title", moment(job.created_s));
  const took = job.started_s ? (job.finished_s ?? now()) - job.started_s : null;
  say(part(".time"), took === null ? "–" : over ? duration(took) : ticking(took));
  set(part(".time"), "data-none", took === null ? "" : null);
  set(part(".size"), "data-none", job.result ? null : "");
  say(part(".size"), job.result ? bytes(job.result.size_bytes) : "–");
  const act = part(".act");
  if (over) act.replaceChildren();
  else if (!act.firstChild) act.append(cancelButton(job.id, job.name || words(job.computation)));
  const button = act.querySelector("button");
  if (button) button.disabled = Boolean(job.cancel_requested);
}
