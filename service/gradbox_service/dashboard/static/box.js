// The box as the service sends it over one event stream: whole, whenever something changed.

import { rough } from "/static/format.js";

export const box = {
  ready: false,
  connected: false,
  pictures: 0, // how many came
  you: null,
  version: "",
  clockAhead: 0, // seconds that the box's clock is ahead of ours
  jobs: new Map(), // by key
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
  return [...box.jobs.values()].filter((job) => job.position !== null).sort((a, b) => a.position - b.position);
}

/** How long a job has waited, and what for: "since 25 s, begins in about 50 s". */
export function waits(job) {
  const since = `since ${rough(Math.max(0, now() - job.created_s))}`;
  if (box.operation.mode !== "running") return `${since}, the box is ${box.operation.mode}`;
  const begins_s = box.jobs.get(job.key)?.begins_s;
  if (!begins_s) return since;
  const left = begins_s - now();
  return `${since}, begins ${left < 1 ? "soon" : `in about ${rough(left)}`}`;
}

/** Open the stream; `refused` is called when the session is over. */
export function connect(refused) {
  disconnect();
  stream = new EventSource("/v1/box/events");
  stream.addEventListener("box", (event) => show(JSON.parse(event.data)));
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

function show(view) {
  // Somebody else logged in in another window of this browser: nothing of the one before may stay.
  if (box.you && (box.you.name !== view.you.name || box.you.admin !== view.you.admin)) location.reload();
  const before = box.jobs;
  box.pictures += 1;
  box.ready = box.connected = true;
  box.you = view.you;
  box.version = view.gradbox;
  box.clockAhead = view.now_s - Date.now() / 1000;
  box.jobs = new Map(view.jobs.map((job) => [job.key, job]));
  box.devices = new Map(view.devices.map((device) => [device.worker, device]));
  box.models = new Map(view.models.map((model) => [model.name, model]));
  box.numRunning = view.num_running;
  box.numQueued = view.num_queued;
  box.operation = view.operation;
  for (const [key, job] of before) if (!box.jobs.has(key)) ended(job);
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
