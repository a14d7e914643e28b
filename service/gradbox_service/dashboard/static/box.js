// The box as the service tells it: first whole, then change by change, over one event stream.

import { rough } from "/static/format.js";

export const box = {
  ready: false,
  connected: false,
  you: null,
  version: "",
  clockAhead: 0, // seconds that the box's clock is ahead of ours
  jobs: new Map(), // by key
  queue: [], // keys of those that wait, in order
  begins: [], // about when each of those begins, in seconds since 1970, or null
  devices: new Map(), // by worker
  models: new Map(), // by name
  numRunning: 0,
  numQueued: 0,
  operation: { mode: "running", reason: "", by: "", since_s: null }, // what its owner said last
};

const listeners = new Set();
const enders = new Set();
let stream = null;
let due = false;

/** Call `listener` after changes, at most once a frame. Returns what ends that. */
export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Call `listener` with each job that runs or waits no more. */
export function onEnd(listener) {
  enders.add(listener);
  return () => enders.delete(listener);
}

/** Seconds since 1970 by the box's clock. */
export function now() {
  return Date.now() / 1000 + box.clockAhead;
}

export function running() {
  return [...box.jobs.values()].filter((job) => job.state === "running").sort((a, b) => a.started_s - b.started_s);
}

export function waiting() {
  // A job's row may say that it runs a moment before the queue says that it waits no more.
  return box.queue.map((key) => box.jobs.get(key)).filter((job) => job?.state === "queued");
}

/** How long a job has waited, and what for: "since 25 s, begins in about 50 s". */
export function waits(job) {
  const since = `since ${rough(Math.max(0, now() - job.created_s))}`;
  if (box.operation.mode !== "running") return `${since}, the box is ${box.operation.mode}`;
  const begins_s = box.begins[box.queue.indexOf(job.key)];
  if (!begins_s) return since;
  const left = begins_s - now();
  return `${since}, begins ${left < 1 ? "soon" : `in about ${rough(left)}`}`;
}

/** Open the stream; `refused` is called when the session is over. */
export function connect(refused) {
  disconnect();
  stream = new EventSource("/v1/box/events");
  stream.addEventListener("box", (event) => begin(JSON.parse(event.data)));
  stream.addEventListener("change", (event) => apply(JSON.parse(event.data)));
  stream.addEventListener("error", () => {
    box.connected = false;
    changed();
    // The browser tries again by itself, unless it was refused.
    if (stream && stream.readyState === EventSource.CLOSED) refused();
  });
}

export function disconnect() {
  if (stream) stream.close();
  stream = null;
  box.ready = box.connected = false;
}

function begin(view) {
  // Somebody else logged in in another window of this browser: nothing of the one before may stay.
  if (box.you && (box.you.name !== view.you.name || box.you.admin !== view.you.admin)) location.reload();
  const before = box.jobs;
  box.ready = box.connected = true;
  box.you = view.you;
  box.version = view.gradbox;
  box.clockAhead = view.now_s - Date.now() / 1000;
  box.jobs = new Map(view.jobs.map((job) => [job.key, job]));
  const queued = view.jobs.filter((job) => job.position !== null);
  box.queue = queued.map((job) => job.key);
  box.begins = queued.map((job) => job.begins_s);
  box.devices = new Map(view.devices.map((device) => [device.worker, device]));
  box.models = new Map(view.models.map((model) => [model.name, model]));
  box.numRunning = view.num_running;
  box.numQueued = view.num_queued;
  box.operation = view.operation;
  for (const [key, job] of before) if (!box.jobs.has(key)) ended(job);
  changed();
}

function apply(change) {
  for (const job of change.jobs ?? []) box.jobs.set(job.key, job);
  for (const device of change.devices ?? []) box.devices.set(device.worker, device);
  for (const model of change.models ?? []) box.models.set(model.name, model);
  for (const key of change.gone_jobs ?? []) {
    const job = box.jobs.get(key);
    box.jobs.delete(key);
    if (job) ended(job);
  }
  for (const worker of change.gone_devices ?? []) box.devices.delete(worker);
  for (const name of change.gone_models ?? []) box.models.delete(name);
  box.queue = change.queue ?? box.queue;
  box.begins = change.begins_s ?? box.begins;
  box.numRunning = change.num_running ?? box.numRunning;
  box.numQueued = change.num_queued ?? box.numQueued;
  box.operation = change.operation ?? box.operation;
  changed();
}

function ended(job) {
  for (const ender of enders) ender(job);
}

function changed() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    for (const listener of listeners) listener();
  });
}

// What counts up or down is drawn anew each second.
setInterval(changed, 1000);
