// One job in a dialog: where its time went, its receipt, or why it failed.

import { get } from "/static/api.js";
import { box, now, onChange, waits } from "/static/box.js";
import { cancelButton } from "/static/cancel.js";
import { stack } from "/static/charts.js";
import { copyButton, h, say } from "/static/dom.js";
import { bytes, duration, moment, ticking, words } from "/static/format.js";
import { problemBlock } from "/static/problem.js";

// A job that waits behind those that the box shows is asked for by itself.
const LOOK_AGAIN_MS = 1000;
// Those that are no part of a run or a store, and as what each is written.
const ALONE = [
  "gradient", "forward", "per_sample_gradient", "jacobian", "mixed_gradient", "hessian_product", "inverse_hessian",
];
const FORMS = [["python", "Python"], ["toml", "TOML"], ["curl", "curl"]];
const PHASES = ["queued", "load", "forward", "cotangents", "replay", "samples", "products"];

/** Fill the dialog with a job and show it; follows the job until the dialog is closed. */
export function showJob(id) {
  const dialog = document.getElementById("job");
  let job = null;
  let said = "";
  let asking = false;
  let askedAt = 0;
  dialog.replaceChildren(frame("Job", [h("div", { class: "skeletons", "aria-hidden": "true" }, h("i"), h("i"))]));
  if (!dialog.open) dialog.showModal();

  async function look() {
    asking = true;
    askedAt = Date.now();
    const before = job;
    try {
      job = await get(`/v1/jobs/${id}`);
      const line = dialog.querySelector(".doing");
      // Nothing is drawn anew for another place: who is about to click or to type stays where they are.
      if (line && stage(before) === stage(job)) say(line, doing(job));
      else await draw();
    } catch (problem) {
      dialog.replaceChildren(frame("Job", [problemBlock(problem)]));
      leave();
    } finally {
      asking = false;
    }
  }

  async function draw() {
    const parts = [facts(job)];
    if (job.error) parts.push(h("h3", { text: "Why it failed" }), problemBlock(job.error, { role: "note" }));
    if (job.result) parts.push(...(await receiptParts(job)));
    if (ALONE.includes(job.computation)) parts.push(again(job));
    const actions = h("div", { class: "actions" });
    if (job.state === "queued" || job.state === "running") actions.append(cancelButton(id, job.name || words(job.computation)));
    if (job.result) actions.append(h("a", { class: "button", href: `/v1/jobs/${id}/result`, download: `${id}.safetensors` }, `Download ${bytes(job.result.size_bytes)}`));
    dialog.replaceChildren(frame(job.name || words(job.computation), [...parts, actions], job.state));
  }

  function follow() {
    if (!job || asking || ["done", "failed", "cancelled"].includes(job.state)) return;
    const live = [...box.jobs.values()].find((other) => other.id === id);
    const saying = JSON.stringify([live?.state, live?.cancel_requested]);
    const line = dialog.querySelector(".doing");
    if (line && live) say(line, doing(live));
    const runs = dialog.querySelector(".runs");
    if (runs) say(runs, ticking(now() - job.started_s));
    if (saying !== said || (!live && Date.now() - askedAt >= LOOK_AGAIN_MS)) {
      said = saying;
      look();
    }
  }

  const stop = onChange(follow);
  const leave = () => stop();
  look();
  return leave;
}

function frame(title, parts, state) {
  return h("article", {},
    h("header", {},
      h("h2", { id: "job-title", text: title }),
      state && h("span", { class: "state", "data-state": state, text: state }),
      h("form", { method: "dialog" }, h("button", { class: "quiet", "aria-label": "Close", text: "✕" }))),
    ...parts);
}

function stage(job) {
  return JSON.stringify([job?.state, job?.attempts, job?.cancel_requested]);
}

function doing(job) {
  const progress = job.progress;
  if (job.state === "queued") {
    const place = job.queue_position ?? job.position;
    return `waits${place ? `, number ${place} in the queue` : ""}, ${waits(job)}`;
  }
  if (!progress) return "begins";
  const left = progress.seconds_left ? `, ${duration(Math.ceil(progress.seconds_left))} left` : "";
  return `${progress.phase} ${progress.done} / ${progress.total}${left}`;
}

function facts(job) {
  const over = Boolean(job.finished_s);
  return table([
    ["Computation", words(job.computation)],
    ["Model", job.model],
    ["Id", h("code", { text: job.id })],
    ["Owner", job.owner],
    ["Submitted", moment(job.created_s)],
    !over && ["Now", h("span", { class: "doing", text: doing(job) })],
    job.started_s && over && ["Took", duration(job.finished_s - job.started_s)],
    job.started_s && !over && ["Runs for", h("span", { class: "runs", text: ticking(now() - job.started_s) })],
    job.worker && ["Worker", job.worker],
    job.attempts > 1 && ["Attempts", String(job.attempts)],
    job.priority && ["Priority", String(job.priority)],
  ]);
}

async function receiptParts(job) {
  let receipt;
  try {
    receipt = await get(`/v1/jobs/${job.id}/receipt`);
  } catch (problem) {
    return [h("h3", { text: "Receipt" }), problemBlock(problem, { role: "note" })];
  }
  const spent = PHASES.map((phase) => ({ name: phase, bytes: receipt.seconds[phase], kind: `phase-${phase}` })).filter((part) => part.bytes > 0);
  const total = spent.reduce((sum, part) => sum + part.bytes, 0);
  const said = spent.map((part) => `${part.name} ${duration(part.bytes)}`).join(", ");
  return [
    h("h3", { text: "Where the time went" }),
    total > 0 && stack(spent, total, said),
    h("ul", { class: "legend" }, ...spent.map((part) => h("li", { class: part.kind }, h("i"), h("span", { class: "name", text: part.name }), " ", h("b", { text: duration(part.bytes) })))),
    h("h3", { text: "Receipt" }),
    table([
      receipt.loss !== null && ["Loss", h("span", { title: String(receipt.loss), text: String(Number(receipt.loss.toPrecision(6))) })],
      ["Shards", Object.entries(receipt.shards).map(([group, number]) => `${group} ${number}`).join(", ")],
      receipt.shards_replayed !== null && ["Kept, replayed", `${receipt.shards_retained ?? 0}, ${receipt.shards_replayed}`],
      receipt.shards_recomputed > 0 && ["Recomputed", `${receipt.recomputed_blocks.length} blocks of ${receipt.shards_recomputed} shards`],
      receipt.replay_difference !== null && ["Replay difference", receipt.replay_difference === 0 ? "0, bit for bit" : receipt.replay_difference.toExponential(1)],
      receipt.samples !== null && ["Samples", String(receipt.samples)],
      receipt.reduce && ["Reduction", receipt.reduce],
      receipt.form && ["Form", receipt.form],
      ["Gradients", receipt.names.length ? `${receipt.names.length} tensors` : "none"],
      receipt.unreached.length > 0 && ["Not reached", `${receipt.unreached.length} parameters`],
      ["Mode, seed", `${receipt.mode}, ${receipt.seed}`],
      ["Precision", receipt.precision],
      receipt.transfer && ["Rounded to", `${receipt.transfer}, by ${receipt.transfer_error.toExponential(1)} at most`],
      ["Device", receipt.device],
      ["Peak memory", bytes(receipt.peak_memory_bytes)],
      ["Model version", h("code", { text: receipt.model_version.slice(0, 16) })],
      ["Versions", `torch ${receipt.torch}, gradbox ${receipt.gradbox}`],
    ]),
  ].filter(Boolean);
}

/** The job as code that runs it once more, asked for when it is opened. */
function again(job) {
  const code = h("pre", { tabindex: 0, "aria-label": "Code" });
  const choice = h("div", { class: "choice", role: "group", "aria-label": "Copy as" }, ...FORMS.map(([form, text]) =>
    h("button", { type: "button", text, on: { click: (event) => choose(event.currentTarget, form) } })));

  async function choose(button, form) {
    for (const other of choice.children) other.setAttribute("aria-pressed", String(other === button));
    try {
      code.replaceChildren(h("code", { text: await get(`/v1/jobs/${job.id}/spec?form=${form}`) }));
    } catch (problem) {
      code.replaceChildren(problemBlock(problem, { role: "note" }));
    }
  }
  const opened = (event) => event.currentTarget.open && choose(choice.firstChild, FORMS[0][0]);
  return h("details", { class: "program", on: { toggle: opened } }, h("summary", { text: "Run it again" }), choice, code, copyButton(code));
}

function table(pairs) {
  return h("dl", { class: "facts" }, ...pairs.filter(Boolean).flatMap(([name, value]) => [h("dt", { text: name }), h("dd", {}, value)]));
}
