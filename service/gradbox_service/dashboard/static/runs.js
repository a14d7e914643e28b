// Runs: training on the box. The newest of the caller's, or of everybody's for the box's owner.

import { box, now } from "/static/box.js";
import { h, keyed, say, set } from "/static/dom.js";
import { ago, figure, moment } from "/static/format.js";
import { listing } from "/static/listing.js";

export function runs() {
  const list = listing("runs", update, "gradbox runs list --limit N");
  const rows = h("tbody");
  const owner = h("th", { scope: "col", text: "Owner" });
  const table = h("table", { class: "jobs runs-list" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col", text: "Run" }), owner,
      ...["Model", "Optimizer"].map((name) => h("th", { scope: "col", text: name })),
      ...["Steps", "Last loss"].map((name) => h("th", { scope: "col", class: "number", text: name })),
      h("th", { scope: "col", text: "Last step" }))),
    rows);
  const empty = h("div", { class: "empty" },
    h("p", { text: "You have no runs yet." }),
    h("p", {}, "A run trains a model on the box: ", h("code", { text: 'run = client.train(MODEL, optimizer=Optimizer("adamw", lr=1e-3))' }), ", then ", h("code", { text: "run.step(inputs=…, loss=…)" }), ". It shows up here by itself."));
  const waits = h("div", { class: "skeletons", "aria-hidden": "true" }, h("i"), h("i"));
  const element = h("div", { class: "view" },
    h("div", { class: "head" }, h("h1", { tabindex: -1, text: "Runs" }), list.check),
    list.trouble, waits, table, list.behind, empty);

  function update() {
    keyed(rows, list.items, { key: (run) => run.id, make: row, update: updateRow });
    for (const cell of [owner, ...rows.querySelectorAll(".owner")]) cell.hidden = !list.everybodys;
    waits.hidden = list.loaded || list.trouble.childElementCount > 0;
    table.hidden = list.items.length === 0;
    list.behind.hidden = !list.more;
    empty.hidden = !list.loaded || list.items.length > 0;
  }

  list.load();
  return { element, update, title: "Runs", leave: list.leave };
}

function row(run) {
  return h("tr", {},
    h("th", { scope: "row" }, h("a", { class: "job-name", href: `#/runs/${run.id}`, text: run.name || run.id.slice(0, 8) }), h("span", { class: "kind", text: run.name ? run.id.slice(0, 8) : "" })),
    h("td", { class: "owner", "data-label": "Owner", "data-mine": run.owner === box.you.name, text: run.owner }),
    h("td", { class: "model", "data-label": "Model", text: run.model }),
    h("td", { class: "optimizer", text: optimizer(run) }),
    h("td", { class: "number steps", "data-label": "Steps" }),
    h("td", { class: "number loss", "data-label": "Last loss" }),
    h("td", { class: "when", "data-label": "Last step" }));
}

function updateRow(element, run) {
  const part = (name) => element.querySelector(name);
  say(part(".steps"), String(run.num_steps));
  say(part(".loss"), run.loss === null ? "–" : figure(run.loss));
  const when = part(".when");
  say(when, run.under_way ? "now" : run.last_step_s === null ? "none yet" : ago(now() - run.last_step_s));
  set(when, "title", run.last_step_s === null ? null : moment(run.last_step_s));
}

/** "adamw, lr 2e-5", and an adapter where the run trains one. */
export function optimizer(run) {
  const rate = run.optimizer.options?.lr;
  const parts = [run.optimizer.name, rate !== undefined && `lr ${figure(rate)}`, run.adapter && `LoRA of rank ${run.adapter.rank}`];
  return parts.filter(Boolean).join(", ");
}
