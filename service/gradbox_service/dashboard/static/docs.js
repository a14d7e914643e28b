// The reference: every call of /openapi.json with its parameters, its body and its answers.

import { get } from "/static/api.js";
import { h, prose } from "/static/dom.js";
import { problemBlock } from "/static/problem.js";

const calls = document.getElementById("calls");

async function show() {
  let document_;
  try {
    document_ = await get("/openapi.json");
  } catch (problem) {
    calls.replaceChildren(problemBlock(problem, { again: show }));
    return;
  }
  document.getElementById("about").textContent = `${document_.info.title} ${document_.info.version}. ${document_.info.description ?? ""}`;
  const found = operations(document_);
  document.getElementById("index").replaceChildren(...index(found));
  calls.replaceChildren(...found.map((operation) => section(operation, document_.components.schemas)), schemas(document_.components.schemas));
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

function operations(document_) {
  return Object.entries(document_.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, operation]) => ({
    path, verb: verb.toUpperCase(), operation, id: `${verb}${path.replaceAll(/[^a-z0-9]+/gi, "-")}`, tag: operation.tags?.[0] ?? "",
  })));
}

function index(found) {
  const tags = [...new Set(found.map((item) => item.tag))];
  return tags.flatMap((tag) => [h("h2", { text: tag }), ...found.filter((item) => item.tag === tag).map((item) =>
    h("a", { href: `#${item.id}` }, `${item.verb} ${item.path.replace("/v1", "")}`))]);
}

function section({ path, verb, operation, id }, all) {
  const parameters = operation.parameters ?? [];
  const body = operation.requestBody?.content ?? {};
  return h("section", { id },
    h("h2", {}, h("span", { class: "verb", "data-verb": verb, text: verb }), path),
    ...(operation.description ?? operation.summary ?? "").split("\n\n").map((text) => h("p", {}, ...prose(text))),
    parameters.length > 0 && rows("Parameter", parameters.map((parameter) => [
      parameter.name, `${parameter.in}, ${type(parameter.schema)}${parameter.required ? ", required" : ""}`, parameter.description ?? parameter.schema?.description ?? "",
    ])),
    ...Object.entries(body).map(([kind, { schema }]) => h("p", {}, "Body: ", h("code", { text: kind }), ", ", ...linked(schema, all))),
    rows("Answer", Object.entries(operation.responses).filter(([status]) => !status.endsWith("XX") && status !== "422").map(([status, answer]) => {
      const content = Object.entries(answer.content ?? {})[0];
      return [status, content ? [h("code", { text: content[0] }), " ", ...linked(content[1].schema, all)] : "no body", answer.description ?? ""];
    })));
}

function schemas(all) {
  return h("section", { id: "schemas" }, h("h2", { text: "Schemas" }), h("p", { text: "Errors of all calls are a Problem, as application/problem+json." }),
    ...Object.entries(all).sort(([a], [b]) => a.localeCompare(b)).map(([name, schema]) =>
      h("details", { id: `schema-${name}` }, h("summary", {}, h("code", { text: name })),
        schema.description && h("p", {}, ...prose(schema.description.replaceAll(/\s*\n\s*/g, " "))),
        schema.properties && rows("Field", Object.entries(schema.properties).map(([field, inner]) => [
          field, [...linked(inner, all), schema.required?.includes(field) ? ", required" : ""], inner.description ?? (inner.default !== undefined && inner.default !== null ? `default ${JSON.stringify(inner.default)}` : ""),
        ])))));
}

function rows(name, lines) {
  return h("table", {}, h("thead", {}, h("tr", {}, ...[name, "Type", "Meaning"].map((text) => h("th", { scope: "col", text })))),
    h("tbody", {}, ...lines.map(([first, second, third]) => h("tr", {}, h("th", { scope: "row" }, h("code", { text: first })), h("td", { class: "type" }, ...[second].flat()), h("td", { text: third })))));
}

/** A type in words, with links to the schemas that it names. */
function linked(schema, all) {
  const parts = type(schema).split(/(\b[A-Z]\w+\b)/);
  return parts.filter(Boolean).map((part) => (Object.hasOwn(all, part) ? h("a", { href: `#schema-${part}`, text: part, on: { click: () => open(part) } }) : part));
}

function open(name) {
  document.getElementById(`schema-${name}`).open = true;
}

function type(schema = {}) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return several.map(type).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `array of ${schema.items ? type(schema.items) : "anything"}`;
  if (schema.additionalProperties && schema.type === "object") return `object of ${type(schema.additionalProperties)}`;
  return schema.format ? `${schema.type} (${schema.format})` : schema.type ?? "anything";
}

addEventListener("hashchange", () => location.hash.startsWith("#schema-") && open(location.hash.slice("#schema-".length)));
show();
