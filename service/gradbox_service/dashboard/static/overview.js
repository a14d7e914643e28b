// The overview: what the devices do, and who runs and waits.

import { box, now, running, waiting, waits } from "/static/box.js";
import { minutes, stack } from "/static/charts.js";
import { cancelButton } from "/static/cancel.js";
import { h, keyed, say, set } from "/static/dom.js";
import { bytes, duration, percent, plural, ticking, words } from "/static/format.js";
import { orders } from "/static/operation.js";

// Of those that wait, so many are shown before somebody asks for all.
const FIRST_WAITING = 15;

export function overview() {
  const figures = ["running", "waiting", "busy in the last hour", "device memory in use"].map((name) => {
    const value = h("span");
    const rest = h("small");
    return { value, rest, element: h("div", {}, h("dt", { text: name }), h("dd", {}, value, rest)) };
  });
  const devices = h("ul", { class: "devices", "aria-label": "Devices" });
  const noDevice = h("div", { class: "empty" },
    h("p", { text: "No worker is connected, so jobs wait." }),
    h("p", {}, "On the box's machine, ", h("code", { text: "gradbox up" }), " starts one for each device; its log is in ", h("code", { text: "DATA/logs/" }), "."));
  const rows = h("tbody");
  const table = h("table", { class: "queue" },
    h("thead", {}, h("tr", {}, ...["", "Job", "Owner", "Model", "Progress", "Time left", ""].map((name, index) =>
      h("th", { scope: "col" }, name || h("span", { class: "unseen", text: index ? "Actions" : "Place" }))))),
    rows);
  const noJob = h("div", { class: "empty" },
    h("p", { text: "Nothing runs and nobody waits. A job that is submitted shows up here at once." }),
    h("p", {}, h("a", { href: "#/models", text: "Models" }), " has a program to begin with for each of them."));
  const owners = box.you.admin ? orders() : null;
  let showAll = false;
  const more = h("div", { class: "more" }, h("button", { type: "button", on: { click: () => { showAll = true; update(); } } }), h("p"));
  const element = h("div", { class: "view" },
    h("h1", { class: "unseen", tabindex: -1, text: "Overview" }),
    h("dl", { class: "figures" }, ...figures.map((figure) => figure.element)),
    h("section", { "aria-labelledby": "devices-title" },
      h("div", { class: "head" }, h("h2", { id: "devices-title", text: "Devices" }), owners?.element), devices, noDevice),
    h("section", { "aria-labelledby": "queue-title" }, h("h2", { id: "queue-title", text: "Queue" }), table, noJob, more));

  function update() {
    const all = [...box.devices.values()];
    owners?.update();
    const values = [
      [String(box.numRunning), ""],
      [String(box.numQueued), ""],
      [all.length ? percent(all.reduce((sum, device) => sum + device.busy_share, 0) / all.length) : "–", ""],
      memoryInUse(all),
    ];
    figures.forEach(({ value, rest }, index) => {
      say(value, values[index][0]);
      say(rest, values[index][1]);
    });
    keyed(devices, all, { key: (device) => device.worker, make: deviceCard, update: updateDevice });
    noDevice.hidden = all.length > 0;
    const queue = waiting();
    const jobs = [...running(), ...(showAll ? queue : queue.slice(0, FIRST_WAITING))];
    keyed(rows, jobs, { key: (job) => job.key, make: jobRow, update: updateJob });
    table.hidden = jobs.length === 0;
    noJob.hidden = jobs.length > 0;
    const folded = showAll ? 0 : Math.max(0, queue.length - FIRST_WAITING);
    const behind = box.numQueued - queue.length;
    more.firstChild.hidden = folded === 0;
    say(more.firstChild, `Show ${folded} more`);
    say(more.lastChild, behind > 0 ? `${plural(behind, "job")} behind ${folded ? "those" : "these"}` : "");
    more.hidden = folded === 0 && behind <= 0;
  }
  return { element, update, title: "Overview" };
}

function memoryInUse(devices) {
  const known = devices.filter((device) => device.memory);
  if (!known.length) return ["–", ""];
  const used = known.reduce((sum, device) => sum + device.memory.used_bytes, 0);
  // CPUs of one host share its memory.
  const totals = new Map(known.map((device) => [device.device === "cpu" ? `cpu of ${device.host}` : device.worker, device.memory.total_bytes]));
  return [bytes(used), ` of ${bytes([...totals.values()].reduce((sum, total) => sum + total, 0))}`];
}

function deviceCard() {
  const picture = minutes();
  const card = h("li", {},
    h("header", {}, h("h3"), h("span", { class: "state" })),
    h("p", { class: "hardware" }),
    h("div", { class: "hour" }, picture.element, h("p", { class: "caption" }, h("span", { text: "−60 min" }), h("span", { class: "share" }), h("span", { text: "now" }))),
    h("div", { class: "memory" }),
    h("p", { class: "holds" }));
  card.picture = picture;
  return card;
}

function updateDevice(card, device) {
  const part = (name) => card.querySelector(name);
  say(part("h3"), device.device || device.worker);
  const { mode } = box.operation;
  const state = mode !== "running" && device.state === "idle" ? mode : device.state;
  say(part(".state"), state);
  set(part(".state"), "data-state", state);
  say(part(".hardware"), device.hardware ? `${device.hardware} · ${device.worker}` : device.worker);
  const share = `${percent(device.busy_share)} busy`;
  say(part(".share"), share);
  card.picture.update(device.busy, `${share} in the last hour`);
  const said = JSON.stringify(device.memory);
  if (part(".memory").dataset.said !== said) {
    part(".memory").dataset.said = said;
    part(".memory").replaceChildren(...memory(device.memory));
  }
  const job = device.job && box.jobs.get(device.job);
  const nothing = mode !== "running" ? "gets no job" : "free for a job";
  const then = mode !== "running" ? `, then ${mode}` : "";
  const build = device.building && `builds ${device.building.model} for ${ticking(now() - device.building.since_s)}`;
  const doing = job ? `${words(job.computation)} of ${job.owner} on ${job.model}${then}` : device.state === "starting" ? (build ? "" : "loading its models") : nothing;
  say(part(".holds"), [doing, build].filter(Boolean).join(" · "));
}

function memory(found) {
  if (!found) return [h("p", { class: "caption", text: "Its memory has not been measured yet." })];
  const models = Object.entries(found.models).sort((a, b) => b[1] - a[1]);
  const modelBytes = models.reduce((sum, [, size]) => sum + size, 0);
  const rest = Math.max(0, found.used_bytes - modelBytes - found.job_bytes);
  const parts = [
    ...models.map(([name, size], index) => ({ name, bytes: size, kind: `model model-${index % 3}` })),
    { name: "this job", bytes: found.job_bytes, kind: "job" },
    { name: "process", bytes: rest, kind: "rest" },
  ].filter((part) => part.bytes > 0);
  const free = found.total_bytes - found.used_bytes;
  const shown = parts.length > 5 ? [...parts.slice(0, 4), { name: `${parts.length - 4} more`, bytes: parts.slice(4).reduce((sum, part) => sum + part.bytes, 0), kind: "rest" }] : parts;
  const label = `Memory: ${parts.map((part) => `${part.name} ${bytes(part.bytes)}`).join(", ")}, free ${bytes(free)}`;
  return [
    stack(shown, found.total_bytes, label),
    h("ul", { class: "legend", "aria-hidden": "true" },
      ...shown.map((part) => h("li", { class: part.kind }, h("i"), h("span", { class: "name", text: part.name }), " ", h("b", { text: bytes(part.bytes) }))),
      h("li", { class: "free" }, h("i"), h("span", { class: "name", text: "free" }), " ", h("b", { text: bytes(free) }))),
  ];
}

function jobRow(job) {
  const name = job.id ? h("a", { href: `#/jobs/${job.id}` }) : h("span", { class: "theirs" });
  name.classList.add("job-name");
  const row = h("tr", {},
    h("td", { class: "place" }),
    h("th", { scope: "row" }, name, h("span", { class: "kind" })),
    h("td", { class: "owner", "data-label": "Owner" }),
    h("td", { class: "model", "data-label": "Model" }),
    h("td", { class: "progress" }, h("progress", { max: 1, value: 0 }), h("span", { class: "phase" })),
    h("td", { class: "time" }),
    h("td", { class: "act" }));
  if (job.id) row.lastChild.append(cancelButton(job.id, job.name || words(job.computation)));
  return row;
}

function updateJob(row, job) {
  const part = (name) => row.querySelector(name);
  const runs = job.state === "running";
  row.className = runs ? "runs" : "waits";
  say(part(".place"), runs ? "▸" : String(job.position));
  set(part(".place"), "aria-label", runs ? "runs" : null);
  say(part(".job-name"), job.name || words(job.computation));
  say(part(".kind"), job.name ? words(job.computation) : "");
  say(part(".owner"), job.owner);
  set(part(".owner"), "data-mine", job.owner === box.you.name ? "" : null);
  say(part(".model"), job.model);
  const progress = job.progress;
  const bar = part("progress");
  bar.hidden = !runs;
  if (runs) {
    const share = progress && progress.total ? progress.done / progress.total : 0;
    if (bar.value !== share) bar.value = share;
    set(bar, "aria-label", `Progress of ${job.name || words(job.computation)}`);
  }
  const unit = ["samples", "products"].includes(progress?.phase) ? progress.phase : "shards";
  say(part(".phase"), job.cancel_requested && runs ? "stopping" : progress ? `${progress.phase} ${progress.done} / ${progress.total} ${unit}` : runs ? "begins" : `${job.attempts ? "for another attempt, " : ""}${waits(job)}`);
  const left = progress?.seconds_left;
  say(part(".time"), runs && left ? duration(Math.ceil(left)) : "");
  const button = part("button");
  if (button) button.disabled = Boolean(job.cancel_requested);
}
