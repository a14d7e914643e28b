// Gradient stores: those that the caller may read. A name opens one, where its owner grants reading.

import { call, get } from "/static/api.js";
import { box, now } from "/static/box.js";
import { announce, h, keyed, say, set } from "/static/dom.js";
import { ago, bytes, count, moment } from "/static/format.js";
import { problemBlock } from "/static/problem.js";

const EVERYBODY = "*";
const AGAIN_MS = 5000;

export function stores() {
  let found = null;
  const trouble = h("div");
  const rows = h("tbody");
  const table = h("table", { class: "jobs runs-list stores-list" },
    h("thead", {}, h("tr", {}, ...["Store", "Owner", "Model"].map((name) => h("th", { scope: "col", text: name })),
      ...["Rows", "Size"].map((name) => h("th", { scope: "col", class: "number", text: name })),
      ...["Curvature", "Read by", "Used"].map((name) => h("th", { scope: "col", text: name })))),
    rows);
  const waits = h("div", { class: "skeletons", "aria-hidden": "true" }, h("i"), h("i"));
  const empty = h("div", { class: "empty" },
    h("p", { text: "There is no store that you may read." }),
    h("p", {}, "A store keeps gradients on the box, to be queried: ", h("code", { text: "store = client.store(NAME, model=MODEL)" }), ", then ", h("code", { text: "store.add(inputs=…, loss=…, ids=…)" }), ". It shows up here by itself."));
  const element = h("div", { class: "view" }, h("div", { class: "head" }, h("h1", { tabindex: -1, text: "Stores" })), trouble, waits, table, empty);

  async function look() {
    try {
      found = (await get("/v1/stores")).stores;
      trouble.replaceChildren();
    } catch (problem) {
      trouble.replaceChildren(problemBlock(problem, { again: look }));
    }
    update();
  }

  function update() {
    keyed(rows, found ?? [], { key: (store) => store.id, make: row, update: updateRow });
    waits.hidden = found !== null || trouble.childElementCount > 0;
    table.hidden = !found?.length;
    empty.hidden = found === null || found.length > 0;
  }

  look();
  return { element, update, title: "Stores", leave: every(look) };
}

export function store(id) {
  let found = null;
  const title = h("h1", { tabindex: -1, text: "Store" });
  const trouble = h("div");
  const facts = h("dl", { class: "facts run-facts" });
  const people = h("ul", { class: "grants", "aria-label": "Read by" });
  const field = h("input", { id: "grantee", required: true, maxlength: 200, autocomplete: "off", spellcheck: "false", placeholder: "name of a token, or *" });
  const form = h("form", { class: "grant" },
    h("label", { for: "grantee", text: "Let somebody read and query it; * is everybody" }),
    h("div", { class: "actions" }, field, h("button", { type: "submit", text: "Grant" })));
  const refused = h("div");
  const grants = h("section", {}, h("h2", { text: "Read by" }), people, form, refused);
  const element = h("div", { class: "view" },
    h("div", { class: "head" }, h("a", { class: "back", href: "#/stores", text: "Stores" }), title), trouble, facts, grants);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const name = field.value.trim();
    if (await change((others) => [...others.filter((other) => other !== name), name], `${name} may read it now`)) field.value = "";
  });

  async function look() {
    try {
      found = await get(`/v1/stores/${id}`);
      trouble.replaceChildren();
    } catch (problem) {
      trouble.replaceChildren(problemBlock(problem, { again: look }));
      if (problem.status === 404) found = null;
    }
    update();
  }

  /** Put other grants in place of those that there are now. */
  async function change(to, said) {
    try {
      const current = await get(`/v1/stores/${id}`);
      found = await call("PUT", `/v1/stores/${id}/grants`, { grants: to(current.grants) });
      refused.replaceChildren();
      announce(said);
    } catch (problem) {
      refused.replaceChildren(problemBlock(problem));
      return false;
    }
    update();
    return true;
  }

  function granted(name) {
    const without = (others) => others.filter((other) => other !== name);
    const revoke = () => change(without, `${name} may not read it any more`);
    return h("li", {}, h("span", { text: name === EVERYBODY ? "everybody" : name }),
      h("button", { type: "button", class: "quiet", text: "Revoke", "aria-label": `Revoke ${name}`, on: { click: revoke } }));
  }

  function update() {
    facts.hidden = !found;
    grants.hidden = !found || found.owner !== box.you.name;
    if (!found) return;
    say(title, found.name);
    const left = found.curvature.flatMap((one) => one.left_out ?? []);
    const pairs = [
      ["Owner", found.owner],
      ["Model", `${found.model}, version ${found.model_version.slice(0, 12)}`],
      ["Rows", found.num_columns ? `${found.num_rows} of ${count(found.num_columns)} numbers in ${found.dtype}` : "none yet"],
      ["Size", bytes(found.size_bytes)],
      ["Projection", found.projection ? `${found.projection.kind}, ${found.projection.dim}` : "none: whole rows"],
      ["Parameters", found.wrt?.join(", ") ?? "all"],
      ["Mode, precision, seed", `${found.mode}, ${found.precision}, ${found.seed}`],
      ["Curvature", fitted(found)],
      ["Without curvature", left.length ? [...new Set(left)].join(", ") : "none of them"],
      ["Used", ago(now() - found.used_s)],
      ["Id", found.id],
    ];
    if (!facts.childElementCount) for (const [name] of pairs) facts.append(h("dt", { text: name }), h("dd"));
    pairs.forEach(([, value], index) => say(facts.children[2 * index + 1], value));
    keyed(people, found.grants, { key: (name) => name, make: granted, update: () => {} });
    people.hidden = !found.grants.length;
  }

  look();
  return { element, update, title: "Store", leave: every(look) };
}

function row(store) {
  return h("tr", {},
    h("th", { scope: "row" }, h("a", { class: "job-name", href: `#/stores/${store.id}`, text: store.name })),
    h("td", { class: "owner", "data-label": "Owner", "data-mine": store.owner === box.you.name, text: store.owner }),
    h("td", { class: "model", "data-label": "Model", text: store.model }),
    h("td", { class: "number rows", "data-label": "Rows" }),
    h("td", { class: "number size", "data-label": "Size" }),
    h("td", { class: "curvature" }),
    h("td", { class: "readers" }),
    h("td", { class: "when", "data-label": "Used" }));
}

function updateRow(element, store) {
  const part = (name) => element.querySelector(name);
  say(part(".rows"), String(store.num_rows));
  say(part(".size"), bytes(store.size_bytes));
  say(part(".curvature"), fitted(store));
  const readers = store.grants.map((name) => (name === EVERYBODY ? "everybody" : name)).join(", ");
  say(part(".readers"), store.owner === box.you.name ? readers || "nobody else" : "you");
  say(part(".when"), ago(now() - store.used_s));
  set(part(".when"), "title", moment(store.used_s));
}

function fitted(store) {
  return store.curvature.map((one) => one.kind).join(", ") || "none";
}

/** Ask again every few seconds; returns what ends it. */
function every(look) {
  const clock = setInterval(() => document.hidden || look(), AGAIN_MS);
  return () => clearInterval(clock);
}
