// The models that jobs may name: what they take, and whether they can be used.

import { box } from "/static/box.js";
import { copyButton, h, keyed, prose, say, set } from "/static/dom.js";
import { count, plural } from "/static/format.js";

export function models() {
  const list = h("ul", { class: "models" });
  const empty = h("div", { class: "empty" },
    h("p", { text: "No worker offers a model." }),
    h("p", {}, "The box's owner names models in ", h("code", { text: "models.toml" }), "; ", h("code", { text: "gradbox models verify" }), " says whether each can be built."));
  const element = h("div", { class: "view" }, h("div", { class: "head" }, h("h1", { tabindex: -1, text: "Models" })), list, empty);

  function update() {
    const all = [...box.models.values()].sort((a, b) => Number(b.usable) - Number(a.usable) || a.name.localeCompare(b.name));
    keyed(list, all, { key: (model) => model.name, make: card, update: updateCard });
    empty.hidden = all.length > 0;
  }
  return { element, update, title: "Models" };
}

function card() {
  return h("li", {},
    h("header", {}, h("h2"), h("span", { class: "state" })),
    h("dl", { class: "facts" },
      h("dt", { text: "Parameters" }), h("dd", { class: "parameters" }),
      h("dt", { text: "Version" }), h("dd", {}, h("code", { class: "version" })),
      h("dt", { text: "On" }), h("dd", { class: "workers" })),
    h("div", { class: "methods" }),
    program(),
    h("p", { class: "detail" }));
}

function program() {
  const text = h("pre", { tabindex: 0, "aria-label": "Program" }, h("code"));
  return h("details", { class: "program" }, h("summary", { text: "A program to begin with" }), text, copyButton(text));
}

function updateCard(element, model) {
  const said = JSON.stringify(model);
  if (element.dataset.said === said) return;
  element.dataset.said = said;
  const part = (name) => element.querySelector(name);
  const loaded = model.loaded.length > 0;
  say(part("h2"), model.name);
  say(part(".state"), !model.usable ? "not usable" : loaded ? "in memory" : "loads with its next job");
  set(part(".state"), "data-state", !model.usable ? "failed" : loaded ? "done" : "queued");
  part("dl").hidden = !model.usable;
  say(part(".parameters"), count(model.num_parameters));
  say(part(".version"), model.version.slice(0, 12));
  set(part(".version"), "title", model.version);
  say(part(".workers"), `${plural(model.workers.length, "worker")}${loaded ? `, in memory of ${model.loaded.length}` : ""}`);
  part(".methods").replaceChildren(...Object.entries(model.methods).map(([name, method]) => signature(name, method)));
  part(".program").hidden = !model.program;
  say(part(".program code"), model.program);
  part(".detail").replaceChildren(...(model.usable ? [] : prose(model.reason)));
}

function signature(name, method) {
  const parts = method.arguments.map((argument) => h("span", { class: method.required.includes(argument) ? "required" : "optional", text: argument }));
  if (method.any_positional) parts.push(h("span", { class: "optional", text: "*args" }));
  if (method.any_keyword) parts.push(h("span", { class: "optional", text: "**kwargs" }));
  const separated = parts.flatMap((part, index) => (index ? [", ", part] : [part]));
  return h("code", { class: "signature" }, h("b", { text: name }), "(", ...separated, ")");
}
